//! The operator's tool against the real daemon: what it prints, and how it exits.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{fs, path::Path, process::Output};

use flextensord_client::OpenOptions;
use flextensord_tests::{
    checkpoint::{self, Tensor},
    daemon::Daemon,
    reader::{Reader, ReaderPlan},
};
use serde_json::{Value, json};

fn ctl(daemon: &Daemon, arguments: &[&str]) -> Output {
    daemon.ctl(arguments).unwrap().output().unwrap()
}

fn documents(daemon: &Daemon, arguments: &[&str]) -> Value {
    let output = ctl(daemon, arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn code(output: &Output) -> Option<i32> {
    output.status.code()
}

/// Two shards and their index, in a directory of their own.
fn sharded(directory: &Path, tensors: &[Tensor]) {
    let (one, two) = tensors.split_at(tensors.len() / 2);
    let mut map = serde_json::Map::new();
    for (file, shard) in [("a-00001.safetensors", one), ("a-00002.safetensors", two)] {
        checkpoint::write(&directory.join(file), shard).unwrap();
        map.extend(
            shard
                .iter()
                .map(|tensor| (tensor.name.clone(), json!(file))),
        );
    }
    let index = json!({ "metadata": {}, "weight_map": map });
    fs::write(
        directory.join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
}

#[test]
fn a_checkpoint_is_loaded_listed_shown_and_dropped() {
    let daemon = Daemon::start(&[]).unwrap();
    let tensors = checkpoint::layered(3, 2, 5000);
    let single = daemon.scratch().join("one.safetensors");
    checkpoint::write(&single, &tensors).unwrap();
    let directory = daemon.scratch().join("two");
    fs::create_dir(&directory).unwrap();
    sharded(&directory, &tensors);

    let loaded = documents(
        &daemon,
        &["--json", "load", "one", single.to_str().unwrap()],
    );
    assert_eq!(loaded["attached"], false, "{loaded}");
    let again = ctl(&daemon, &["load", "one", single.to_str().unwrap()]);
    assert!(text(&again).contains("attached"), "{again:?}");
    let shards = documents(
        &daemon,
        &["--json", "load", "two", directory.to_str().unwrap()],
    );
    assert_eq!(
        shards["set"]["digest"], loaded["set"]["digest"],
        "sharding changes no digest"
    );
    let listed = documents(&daemon, &["--json", "weights"]);
    let names: Vec<_> = listed["weight_sets"]
        .as_array()
        .unwrap()
        .iter()
        .map(|set| &set["name"])
        .collect();
    assert_eq!(names, ["one", "two"], "{listed}");
    assert_eq!(daemon.segments().len(), 2);

    let other = daemon.scratch().join("other.safetensors");
    checkpoint::write(&other, &checkpoint::layered(3, 2, 5001)).unwrap();
    let differs = ctl(&daemon, &["load", "one", other.to_str().unwrap()]);
    assert_eq!(code(&differs), Some(1), "{differs:?}");
    assert!(
        String::from_utf8_lossy(&differs.stderr).contains("layers.0.0"),
        "{differs:?}"
    );

    for name in ["one", "two"] {
        assert!(ctl(&daemon, &["drop", name]).status.success());
    }
    assert!(daemon.segments().is_empty());
    assert_eq!(code(&ctl(&daemon, &["drop", "one"])), Some(1));
}

#[test]
fn managers_and_their_layers_are_told() {
    let daemon = Daemon::start(&[]).unwrap();
    let path = daemon.scratch().join("model.safetensors");
    checkpoint::write(&path, &checkpoint::layered(6, 2, 300_000)).unwrap();
    assert!(
        ctl(&daemon, &["load", "model", path.to_str().unwrap()])
            .status
            .success()
    );
    let plan = ReaderPlan::new("model", &path)
        .with("--manager", "mine")
        .with("--budget", 2_000_000)
        .with("--hold-in-pass", 0);
    let mut reader = Reader::start(&daemon, &plan).unwrap();
    reader.expect("registered").unwrap();
    reader.expect("holding").unwrap();

    let managers = documents(&daemon, &["--json", "managers"]);
    assert_eq!(managers["managers"][0]["name"], "mine", "{managers}");
    assert_eq!(managers["managers"][0]["owner_pid"], reader.pid());
    let layers = documents(&daemon, &["--json", "layers", "mine"]);
    assert_eq!(layers["layers"].as_array().unwrap().len(), 6, "{layers}");
    assert!(text(&ctl(&daemon, &["layers", "mine"])).contains("layers.5"));
    let status = documents(&daemon, &["--json", "status"]);
    assert_eq!(status["phase"], "serving", "{status}");
    assert!(text(&ctl(&daemon, &["status"])).contains("serving"));
    let dump = ctl(&daemon, &["dump"]);
    assert!(
        dump.status.success() && text(&dump).contains("layers.5.1"),
        "{dump:?}"
    );
    assert_eq!(code(&ctl(&daemon, &["layers", "nobody"])), Some(1));
    // attached: it cannot be dropped now, but later
    assert_eq!(code(&ctl(&daemon, &["drop", "model"])), Some(75));

    let ended = ctl(&daemon, &["terminate", "mine"]);
    assert!(ended.status.success(), "{ended:?}");
    assert_eq!(
        documents(&daemon, &["--json", "managers"]),
        json!({ "managers": [] })
    );
    reader.go_on();
    assert!(
        reader.finish().is_err(),
        "a terminated manager is over for its owner"
    );
}

#[test]
fn a_drain_waits_for_the_daemon_to_be_gone() {
    let mut daemon = Daemon::start(&[]).unwrap();
    let manager = daemon
        .client()
        .unwrap()
        .open(OpenOptions::default())
        .unwrap();
    let drained = ctl(&daemon, &["drain", "--deadline", "300ms"]);
    assert!(drained.status.success(), "{drained:?}");
    assert!(daemon.wait().unwrap().success());
    drop(manager);
    let gone = ctl(&daemon, &["status"]);
    assert_eq!(code(&gone), Some(69), "{gone:?}");
    assert!(
        String::from_utf8_lossy(&gone.stderr).contains("flextensord.sock"),
        "{gone:?}"
    );
}

#[test]
fn a_wrong_command_line_exits_with_the_status_of_usage() {
    let daemon = Daemon::start(&[]).unwrap();
    let huge = ["--timeout", "99999999999h", "status"];
    for arguments in [
        &huge[..],
        &["no-such-command"],
        &["load"],
        &["status", "--no-such-flag"],
    ] {
        assert_eq!(code(&ctl(&daemon, arguments)), Some(64), "{arguments:?}");
    }
}
