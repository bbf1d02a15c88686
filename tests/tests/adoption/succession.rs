//! A successor goes on where its predecessor was.

use std::{thread, time::Duration};

use flextensord_client::{Budget, OpenOptions};
use flextensord_tests::{checkpoint, daemon::SOON, process::eventually, reader::Reader};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{KEEP, layers, open, plan, setting, until_live};

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
