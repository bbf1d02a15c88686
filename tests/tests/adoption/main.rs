//! A daemon dies in the middle of passes, and a successor goes on where it was: every byte
//! right, no error at its clients, nothing lost and nothing left.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod damage;
mod succession;

use std::{path::PathBuf, process::Command};

use flextensord_client::{LayerSpec, LeaseState, LoadOptions, OpenOptions, blocking};
use flextensord_tests::{
    checkpoint,
    daemon::{Daemon, SOON},
    process::{binary, eventually},
    reader::ReaderPlan,
};

const KEEP: [&str; 6] = [
    "--on-stop",
    "keep",
    "--client-patience",
    "20s",
    "--cpu-link",
    "300MB/s",
];

fn setting(flags: &[&str]) -> (Daemon, PathBuf) {
    let daemon = Daemon::start(flags).unwrap();
    let path = daemon.scratch().join("model.safetensors");
    checkpoint::write(&path, &checkpoint::layered(8, 3, 300_000)).unwrap();
    let client = daemon.client().unwrap();
    client
        .load(&path, "model", &LoadOptions::default(), |_| ())
        .unwrap();
    (daemon, path)
}

fn plan(path: &std::path::Path) -> ReaderPlan<'_> {
    ReaderPlan::new("model", path).with("--budget", 2_400_000)
}

fn open(client: &blocking::Client, name: &str) -> blocking::Manager {
    let options = OpenOptions {
        name: name.to_owned(),
        ..OpenOptions::default()
    };
    client.open(options).unwrap()
}

/// A layer a tensor.
fn layers(tensors: &[checkpoint::Tensor]) -> Vec<LayerSpec> {
    let layer = |tensor: &checkpoint::Tensor| LayerSpec {
        name: tensor.name.clone(),
        tensors: vec![tensor.name.clone()],
    };
    tensors.iter().map(layer).collect()
}

fn until_live(manager: &blocking::Manager) {
    let live = || (manager.lease_state() == LeaseState::Live).then_some(());
    eventually("the lease is taken up", SOON, live).unwrap();
}

fn reap(daemon: &Daemon) -> std::process::Output {
    let mut command = Command::new(binary("flextensord").unwrap());
    command
        .arg("reap")
        .arg("--runtime-dir")
        .arg(daemon.runtime_dir());
    command.arg("--shm-dir").arg(daemon.shm());
    command
        .args(["--instance", daemon.instance()])
        .output()
        .unwrap()
}
