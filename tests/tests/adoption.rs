//! A daemon dies in the middle of passes, and a successor goes on where it was: every byte
//! right, no error at its clients, nothing lost and nothing left.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{
    fs, os::unix::fs::PermissionsExt as _, path::PathBuf, process::Command, thread, time::Duration,
};

use flextensord_client::{Budget, LayerSpec, LeaseState, LoadOptions, OpenOptions, blocking};
use flextensord_tests::{
    checkpoint,
    daemon::{Daemon, SOON},
    process::{binary, eventually},
    reader::{Reader, ReaderPlan},
};
use nix::{
    sys::{
        signal::{Signal, kill},
        stat::Mode,
    },
    unistd::{Pid, mkfifo},
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

#[test]
fn readers_go_on_over_kills_of_the_daemon_and_read_right_bytes() {
    let (mut daemon, path) = setting(&KEEP);
    let readers: Vec<Reader> = ["fast", "rpc", "mixed"]
        .iter()
        .zip(1..)
        .map(|(via, seed)| {
            let plan = plan(&path)
                .with("--order", "random")
                .with("--seed", seed)
                .with("--passes", 60)
                .with("--via", via);
            Reader::start(&daemon, &plan).unwrap()
        })
        .collect();
    for reader in &readers {
        reader.expect("registered").unwrap();
    }
    for pause in [300, 40, 700] {
        thread::sleep(Duration::from_millis(pause));
        daemon.crash().unwrap();
        daemon.restart().unwrap();
    }
    for reader in readers {
        reader.finish().unwrap();
    }
    let status = daemon.status().unwrap();
    assert_eq!(status.daemon_generation, 4);
    assert_eq!(status.devices[0].transfer.unwrap().protocol_violations, 0);
    let empty = || {
        let status = daemon.status().ok()?;
        let gone = status.managers.is_empty() && status.devices[0].allocated_bytes == 0;
        gone.then_some(())
    };
    eventually("everything is back", SOON, empty).unwrap();
    assert_eq!(daemon.segments().len(), 1);
    let left: Vec<String> = daemon.state();
    assert!(
        !left.iter().any(|name| name.contains("manager")),
        "{left:?}"
    );
}

#[test]
fn a_stop_that_keeps_hands_over_and_one_that_removes_leaves_nothing() {
    let (mut daemon, path) = setting(&KEEP);
    let reader = Reader::start(&daemon, &plan(&path).with("--passes", 40)).unwrap();
    reader.expect("registered").unwrap();
    assert!(daemon.stop().unwrap().success());
    assert_eq!(daemon.segments().len(), 1);
    daemon.restart().unwrap();
    reader.finish().unwrap();
    drop(daemon);
    let (mut daemon, path) = setting(&[]);
    let reader = Reader::start(&daemon, &plan(&path).with("--passes", 4000)).unwrap();
    reader.expect("registered").unwrap();
    assert!(daemon.stop().unwrap().success());
    assert_eq!(daemon.segments(), Vec::<String>::new());
    assert!(!daemon.state().iter().any(|name| name.ends_with(".json")));
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

#[test]
fn a_manager_without_a_model_and_its_name_outlive_the_daemon() {
    let (mut daemon, path) = setting(&KEEP);
    let client = daemon.client().unwrap();
    let mut manager = open(&client, "early");
    let epoch = manager.asynchronous().unwrap().lease_epoch();
    daemon.crash().unwrap();
    daemon.restart().unwrap();
    // its name is not free, whether it was taken up by then or not
    let other = daemon.client().unwrap();
    let named = OpenOptions {
        name: "early".to_owned(),
        ..OpenOptions::default()
    };
    let taken = other.open(named).unwrap_err();
    assert!(taken.to_string().contains("early"), "{taken}");
    // a call that comes before the lease is taken up waits for it
    let tensors = checkpoint::read(&path).unwrap();
    let layers = layers(&tensors);
    manager
        .register("model", &layers, Budget::Bytes(2_400_000))
        .unwrap();
    assert_eq!(manager.asynchronous().unwrap().lease_epoch(), epoch);
    for tensor in &tensors {
        let hold = manager
            .acquire(manager.layer(&tensor.name).unwrap())
            .unwrap();
        let view = hold.tensor(&tensor.name).unwrap();
        assert!(view.equals(&tensor.data).unwrap());
    }
    manager.close().unwrap();
}

#[test]
fn holds_over_rpc_are_kept_for_their_client_and_no_others() {
    let (mut daemon, path) = setting(&KEEP);
    let client = daemon.client().unwrap();
    let mut manager = open(&client, "holder");
    let tensors = checkpoint::read(&path).unwrap();
    let layers = layers(&tensors);
    manager
        .register("model", &layers, Budget::Bytes(1_300_000))
        .unwrap();
    let streamed = manager.plan().unwrap().stream_order().to_vec();
    let of = |part: u32| {
        let plan = manager.plan().unwrap();
        let tensor = plan.parts()[part as usize].tensors[0];
        plan.tensors()[tensor as usize].name.clone()
    };
    let name = of(streamed[0]);
    let layer = manager.layer(&name).unwrap();
    let hold = manager.acquire_rpc(layer).unwrap();
    daemon.crash().unwrap();
    daemon.restart().unwrap();
    until_live(&manager);
    let bytes = |name: &str| {
        let found = tensors.iter().find(|tensor| tensor.name == name);
        found.unwrap().data.clone()
    };
    assert!(hold.tensor(&name).unwrap().equals(&bytes(&name)).unwrap());
    manager.release_rpc(hold).unwrap();
    let again = manager.acquire_rpc(layer).unwrap();
    assert!(again.tensor(&name).unwrap().equals(&bytes(&name)).unwrap());
    manager.release_rpc(again).unwrap();
    assert!(
        manager
            .asynchronous()
            .unwrap()
            .take_release_error()
            .is_none()
    );
    manager.close().unwrap();
}

#[test]
fn a_manager_whose_owner_died_with_the_daemon_is_free_at_once() {
    let (mut daemon, path) = setting(&KEEP);
    let plan = plan(&path)
        .with("--passes", 100_000)
        .with("--manager", "mortal");
    let reader = Reader::start(&daemon, &plan).unwrap();
    reader.expect("registered").unwrap();
    daemon.crash().unwrap();
    reader.kill().unwrap();
    daemon.restart().unwrap();
    let status = daemon.status().unwrap();
    assert_eq!(status.devices[0].free_bytes, status.devices[0].total_bytes);
    open(&daemon.client().unwrap(), "mortal").close().unwrap();
}

#[test]
fn what_does_not_match_is_discarded_and_never_served() {
    let (mut daemon, path) = setting(&KEEP);
    let client = daemon.client().unwrap();
    let other = daemon.scratch().join("other.safetensors");
    checkpoint::write(&other, &checkpoint::layered(2, 1, 5000)).unwrap();
    client
        .load(&other, "cut", &LoadOptions::default(), |_| ())
        .unwrap();
    let cut = client.weight_set("cut").unwrap().set;
    daemon.crash().unwrap();
    let file = daemon
        .segments()
        .into_iter()
        .find(|name| name.ends_with(&cut.id))
        .unwrap();
    let file = fs::File::options()
        .write(true)
        .open(daemon.shm().join(file));
    file.unwrap().set_len(4096).unwrap();
    daemon.restart().unwrap();
    let client = daemon.client().unwrap();
    let names: Vec<String> = client
        .weight_sets()
        .unwrap()
        .into_iter()
        .map(|s| s.name)
        .collect();
    assert_eq!(names, ["model"]);
    assert_eq!(daemon.segments().len(), 1);
    // its name may be used for anything
    client
        .load(&path, "cut", &LoadOptions::default(), |_| ())
        .unwrap();
}

#[test]
fn what_was_kept_is_removed_when_no_successor_is_to_come() {
    let (mut daemon, path) = setting(&KEEP);
    let reader = Reader::start(&daemon, &plan(&path).with("--passes", 100_000)).unwrap();
    reader.expect("registered").unwrap();
    // not under a daemon that serves
    let refused = reap(&daemon);
    assert_eq!(refused.status.code(), Some(73));
    let pid = format!("process {}", daemon.pid());
    assert!(
        String::from_utf8_lossy(&refused.stderr).contains(&pid),
        "{refused:?}"
    );
    assert_eq!(daemon.segments().len(), 1);
    daemon.crash().unwrap();
    reader.kill().unwrap();
    let done = reap(&daemon);
    assert_eq!(
        String::from_utf8_lossy(&done.stdout),
        "removed 1 segments and 1 managers\n"
    );
    assert!(done.status.success() && daemon.segments().is_empty());
    let left = daemon.state();
    assert!(
        !left
            .iter()
            .any(|name| name.ends_with(".json") || name.ends_with("journal")),
        "{left:?}"
    );
    let again = reap(&daemon);
    assert_eq!(
        String::from_utf8_lossy(&again.stdout),
        "removed 0 segments and 0 managers\n"
    );
}

#[test]
fn readers_over_rpc_go_on_over_orderly_restarts() {
    let (mut daemon, path) = setting(&KEEP);
    let readers: Vec<Reader> = (1..=4)
        .map(|seed| {
            let plan = plan(&path)
                .with("--order", "random")
                .with("--seed", seed)
                .with("--passes", 60)
                .with("--via", "rpc");
            Reader::start(&daemon, &plan).unwrap()
        })
        .collect();
    for reader in &readers {
        reader.expect("registered").unwrap();
    }
    for _ in 0..6 {
        assert!(daemon.stop().unwrap().success());
        daemon.restart().unwrap();
    }
    for reader in readers {
        reader.finish().unwrap();
    }
}

#[test]
fn a_lock_file_that_was_removed_lets_nobody_reap_under_a_living_daemon() {
    let (daemon, _) = setting(&KEEP);
    fs::remove_file(daemon.instance_dir().join("lock")).unwrap();
    let refused = reap(&daemon);
    assert_eq!(refused.status.code(), Some(73), "{refused:?}");
    assert_eq!(daemon.segments().len(), 1);
    assert!(daemon.state().iter().any(|name| name.ends_with(".json")));
}

/// Files of another type, where a daemon looks for its own.
#[test]
fn a_pipe_in_the_place_of_a_file_holds_no_start_up() {
    let (mut daemon, _) = setting(&KEEP);
    let client = daemon.client().unwrap();
    let manager = open(&client, "piped");
    daemon.crash().unwrap();
    let state = daemon.instance_dir().join("state");
    let record = daemon
        .state()
        .into_iter()
        .find(|name| name.starts_with("manager-"))
        .unwrap();
    for name in [record.as_str(), "set-0.json"] {
        let _ = fs::remove_file(state.join(name));
        mkfifo(&state.join(name), Mode::S_IRWXU).unwrap();
    }
    daemon.restart().unwrap();
    assert_eq!(daemon.segments().len(), 1);
    drop(manager);
    for place in ["state/generation", "lock"] {
        daemon.crash().unwrap();
        let path = daemon.instance_dir().join(place);
        fs::remove_file(&path).unwrap();
        mkfifo(&path, Mode::S_IRWXU).unwrap();
        // it does not wait for who never writes
        let error = daemon.restart().unwrap_err();
        assert!(daemon.wait().is_ok(), "{place}: {error}");
        fs::remove_file(&path).unwrap();
        daemon.restart().unwrap();
    }
}

#[test]
fn a_generation_that_is_gone_is_had_from_the_managers() {
    let (mut daemon, path) = setting(&KEEP);
    let reader = Reader::start(&daemon, &plan(&path).with("--passes", 40)).unwrap();
    reader.expect("registered").unwrap();
    daemon.crash().unwrap();
    fs::remove_file(daemon.instance_dir().join("state/generation")).unwrap();
    daemon.restart().unwrap();
    assert_eq!(daemon.status().unwrap().daemon_generation, 2);
    let other = open(&daemon.client().unwrap(), "other");
    reader.finish().unwrap();
    other.close().unwrap();
}

#[test]
fn a_record_with_a_wrong_plan_ends_that_manager_and_not_the_daemon() {
    let (mut daemon, path) = setting(&KEEP);
    let damages: [fn(&mut serde_json::Value); 4] = [
        |plan| plan["stream_order"] = serde_json::json!([4_000_000_000_u32]),
        |plan| plan["ring_bytes"] = serde_json::json!(1_u64 << 62),
        |plan| plan["blocks"][0]["parts"] = serde_json::json!([4_000_000_000_u32]),
        |plan| plan["places"].as_array_mut().unwrap().clear(),
    ];
    for damage in damages {
        let mut reader = Reader::start(&daemon, &plan(&path).with("--passes", 100_000)).unwrap();
        reader.expect("registered").unwrap();
        daemon.crash().unwrap();
        let state = daemon.instance_dir().join("state");
        let records = daemon.state().into_iter();
        let name = records
            .filter(|name| name.starts_with("manager-") && name.ends_with(".json"))
            .max()
            .unwrap();
        let mut record: serde_json::Value =
            serde_json::from_slice(&fs::read(state.join(&name)).unwrap()).unwrap();
        damage(&mut record["plans"][0]["plan"]);
        fs::write(state.join(&name), record.to_string()).unwrap();
        daemon.restart().unwrap();
        eventually("its reader is told", SOON, || {
            reader.has_failed().unwrap().then_some(())
        })
        .unwrap();
        assert_eq!(daemon.status().unwrap().phase, "serving");
    }
}

#[test]
fn a_manager_that_waits_is_seen_and_may_be_terminated() {
    let (mut daemon, path) = setting(&KEEP);
    let plan = plan(&path)
        .with("--passes", 100_000)
        .with("--manager", "absent");
    let reader = Reader::start(&daemon, &plan).unwrap();
    reader.expect("registered").unwrap();
    let pid = Pid::from_raw(i32::try_from(reader.pid()).unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    daemon.crash().unwrap();
    daemon.restart().unwrap();
    let seen = daemon.status().unwrap().managers;
    assert_eq!(
        (seen.len(), seen[0].lease.as_str()),
        (1, "waiting"),
        "{seen:?}"
    );
    let client = daemon.client().unwrap();
    assert!(client.terminate("absent", None).unwrap() > 0);
    assert!(daemon.status().unwrap().managers.is_empty());
    open(&client, "absent").close().unwrap();
    client.drop_weight_set("model").unwrap();
    kill(pid, Signal::SIGCONT).unwrap();
    drop(reader);
}

#[test]
fn a_stop_for_good_leaves_nothing_of_managers_that_wait() {
    let (mut daemon, path) = setting(&KEEP);
    let reader = Reader::start(&daemon, &plan(&path).with("--passes", 100_000)).unwrap();
    reader.expect("registered").unwrap();
    let pid = Pid::from_raw(i32::try_from(reader.pid()).unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    daemon.crash().unwrap();
    daemon.restart_with("--on-stop", "remove").unwrap();
    assert!(daemon.stop().unwrap().success());
    let left = daemon.state();
    assert_eq!(left, ["generation"]);
    assert!(daemon.segments().is_empty());
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

#[test]
fn altered_bytes_are_found_where_that_is_asked_for() {
    let flags = [&KEEP[..], &["--verify-adopted", "true"]].concat();
    let (mut daemon, _) = setting(&flags);
    daemon.crash().unwrap();
    daemon.restart().unwrap();
    assert_eq!(daemon.segments().len(), 1);
    daemon.crash().unwrap();
    let path = daemon.shm().join(&daemon.segments()[0]);
    let mut bytes = fs::read(&path).unwrap();
    bytes[70_000] ^= 1;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&path, bytes).unwrap();
    daemon.restart().unwrap();
    assert!(daemon.client().unwrap().weight_sets().unwrap().is_empty());
    assert_eq!(daemon.segments(), Vec::<String>::new());
}

#[test]
fn a_manager_that_is_late_is_given_up_and_its_client_told() {
    let (mut daemon, path) = setting(&["--on-stop", "keep", "--client-patience", "1s"]);
    let plan = plan(&path)
        .with("--passes", 100_000)
        .with("--manager", "late");
    let reader = Reader::start(&daemon, &plan).unwrap();
    reader.expect("registered").unwrap();
    let pid = Pid::from_raw(i32::try_from(reader.pid()).unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    daemon.crash().unwrap();
    daemon.restart().unwrap();
    let gone = || {
        let left = daemon.state();
        (!left.iter().any(|name| name.contains("manager"))).then_some(())
    };
    eventually("the late manager is given up", SOON, gone).unwrap();
    // it wakes up too late, and is told so instead of reading on
    kill(pid, Signal::SIGCONT).unwrap();
    let mut reader = reader;
    eventually("the late reader fails", SOON, || {
        reader.has_failed().unwrap().then_some(())
    })
    .unwrap();
}
