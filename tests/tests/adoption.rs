//! A daemon dies, and a successor goes on where it was.

use std::time::{Duration, Instant};

use flextensord_client::{
    Budget, ClientError, LayerSpec, LeaseState, LoadOptions, OpenOptions,
    blocking::{Client, Manager},
};
use flextensord_tests::{
    checkpoint,
    daemon::{Daemon, SOON},
    process::eventually,
};
use nix::sys::signal::Signal;

const KEEP: [&str; 4] = ["--on-stop", "keep", "--client-patience", "20s"];
const FAKE: &str = "gpus=1,memory=256MiB";
const LAYERS: usize = 8;

/// A model of some layers with a ring, and the bytes that each layer should have.
struct Scene {
    manager: Manager,
    expected: Vec<(String, Vec<u8>)>,
}

fn scene(daemon: &Daemon, client: &Client, name: &str) -> Scene {
    let file = daemon.scratch().join("m.safetensors");
    let tensors = checkpoint::layered(LAYERS, 2, 300_000);
    checkpoint::write(&file, &tensors).unwrap();
    client
        .load(&file, "m", &LoadOptions::default(), |_| ())
        .unwrap();
    let mut manager = client
        .open_manager(OpenOptions {
            name: name.to_owned(),
            ..OpenOptions::default()
        })
        .unwrap();
    let layers: Vec<LayerSpec> = tensors
        .iter()
        .map(|tensor| LayerSpec {
            name: tensor.name.clone(),
            tensors: vec![tensor.name.clone()],
        })
        .collect();
    manager
        .register("m", &layers, Budget::Bytes(1_500_000))
        .unwrap();
    let expected = tensors
        .into_iter()
        .map(|tensor| (tensor.name, tensor.bytes))
        .collect();
    Scene { manager, expected }
}

impl Scene {
    /// Acquires every layer once and compares its bytes.
    fn pass(&self) {
        for (name, bytes) in &self.expected {
            let layer = self.manager.layer(name).unwrap();
            let hold = self.manager.acquire(layer).unwrap();
            assert!(hold.equals(name, bytes).unwrap(), "{name}");
            hold.release().unwrap();
        }
    }
}
