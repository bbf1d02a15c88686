//! One owner a name.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{sync::Barrier, thread, time::Duration};

use flextensord_client::{ClientError, LoadOptions, OpenOptions, kind::Kind};
use flextensord_tests::{
    checkpoint,
    daemon::{Daemon, SOON},
    process::eventually,
    reader::{Reader, ReaderPlan},
};

fn named(name: &str) -> OpenOptions {
    OpenOptions {
        name: name.into(),
        ..OpenOptions::default()
    }
}

fn kind(error: &ClientError) -> Option<Kind> {
    match error {
        ClientError::Refused(failure) => Some(failure.kind),
        _ => None,
    }
}

#[test]
fn of_32_simultaneous_opens_one_wins_and_the_others_get_the_holder() {
    let daemon = Daemon::start(&[]).unwrap();
    let barrier = Barrier::new(32);
    let outcomes: Vec<_> = thread::scope(|scope| {
        let open = || {
            let client = daemon.client().unwrap();
            barrier.wait();
            let outcome = client.open(named("one"));
            // the winner keeps it until all have tried
            barrier.wait();
            outcome.map(|manager| manager.close().unwrap())
        };
        let threads: Vec<_> = (0..32).map(|_| scope.spawn(open)).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    let losers: Vec<_> = outcomes
        .iter()
        .filter_map(|outcome| outcome.as_ref().err())
        .collect();
    assert_eq!(losers.len(), 31);
    for error in losers {
        let ClientError::Refused(failure) = error else {
            panic!("{error}")
        };
        assert_eq!(failure.kind, Kind::ManagerTaken);
        assert_eq!(
            failure.details["holder_pid"],
            std::process::id().to_string()
        );
    }
    daemon.client().unwrap().open(named("one")).unwrap();
}

#[test]
fn without_a_name_each_gets_the_next_default_one() {
    let daemon = Daemon::start(&[]).unwrap();
    let client = daemon.client().unwrap();
    let managers: Vec<_> = (0..3)
        .map(|_| client.open(OpenOptions::default()).unwrap())
        .collect();
    let names: Vec<_> = managers
        .iter()
        .map(|manager| manager.name().to_owned())
        .collect();
    assert_eq!(names, ["default", "default-2", "default-3"]);
    let status = client.status().unwrap();
    assert_eq!(status.managers.len(), 3);
    assert!(
        status
            .managers
            .iter()
            .all(|manager| manager.owner_pid == std::process::id())
    );
    let epochs: Vec<_> = status
        .managers
        .iter()
        .map(|manager| manager.lease_epoch)
        .collect();
    assert!(
        epochs.windows(2).all(|pair| pair[0] < pair[1]),
        "{epochs:?}"
    );
}

#[test]
fn a_killed_owner_frees_its_name_at_once() {
    let daemon = Daemon::start(&[]).unwrap();
    let path = daemon.scratch().join("m.safetensors");
    checkpoint::write(&path, &checkpoint::layered(2, 1, 1000)).unwrap();
    let client = daemon.client().unwrap();
    client
        .load(&path, "m", &LoadOptions::default(), |_| ())
        .unwrap();
    let plan = ReaderPlan::new("m", &path)
        .with("--manager", "mine")
        .with("--hold-in-pass", 0);
    for _ in 0..3 {
        let reader = Reader::start(&daemon, &plan).unwrap();
        reader.expect("registered").unwrap();
        assert_eq!(
            kind(&client.open(named("mine")).unwrap_err()),
            Some(Kind::ManagerTaken)
        );
        reader.kill().unwrap();
        eventually("the name is free", Duration::from_secs(1), || {
            client.open(named("mine")).ok()?.close().ok()
        })
        .unwrap();
    }
}

#[test]
fn a_terminated_manager_is_over_for_its_owner_and_its_name_free() {
    let daemon = Daemon::start(&[]).unwrap();
    let client = daemon.client().unwrap();
    let manager = client.open(named("m")).unwrap();
    client.terminate("m", None).unwrap();
    eventually("the owner learns it", SOON, || {
        let told = manager.report_pass(1).unwrap_err();
        matches!(told, ClientError::LeaseLost { .. }).then_some(())
    })
    .unwrap();
    client.open(named("m")).unwrap();
    let unknown = client.terminate("nobody", None).unwrap_err();
    assert_eq!(kind(&unknown), Some(Kind::NotFound));
}

#[test]
fn a_stopped_owner_keeps_its_manager() {
    use nix::{
        sys::signal::{Signal, kill},
        unistd::Pid,
    };
    let daemon = Daemon::start(&["--resume-grace", "1s"]).unwrap();
    let path = daemon.scratch().join("m.safetensors");
    checkpoint::write(&path, &checkpoint::layered(4, 1, 300_000)).unwrap();
    let client = daemon.client().unwrap();
    client
        .load(&path, "m", &LoadOptions::default(), |_| ())
        .unwrap();
    let plan = ReaderPlan::new("m", &path)
        .with("--budget", 700_000)
        .with("--passes", 4)
        .with("--hold-in-pass", 1);
    let mut reader = Reader::start(&daemon, &plan).unwrap();
    reader.expect("registered").unwrap();
    reader.expect("holding").unwrap();
    let pid = Pid::from_raw(i32::try_from(reader.pid()).unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    thread::sleep(Duration::from_secs(3));
    assert_eq!(client.status().unwrap().managers.len(), 1);
    kill(pid, Signal::SIGCONT).unwrap();
    reader.go_on();
    reader.finish().unwrap();
}

#[test]
fn a_draining_daemon_takes_nothing_new_and_ends_when_the_last_one_has() {
    let mut daemon = Daemon::start(&[]).unwrap();
    let client = daemon.client().unwrap();
    let manager = client.open(named("last")).unwrap();
    assert_eq!(client.drain(Some(Duration::from_secs(60))).unwrap(), 1);
    let refused = client.open(named("new")).unwrap_err();
    assert_eq!(kind(&refused), Some(Kind::Draining));
    assert_eq!(client.status().unwrap().phase, "draining");
    manager.close().unwrap();
    assert!(daemon.wait().unwrap().success());
    assert!(daemon.segments().is_empty());
}

#[test]
fn another_user_sees_neither_managers_nor_unshared_weights() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: needs root to become another user");
        return;
    }
    let daemon = Daemon::start(&[]).unwrap();
    let path = daemon.scratch().join("m.safetensors");
    checkpoint::write(&path, &checkpoint::layered(2, 1, 1000)).unwrap();
    let client = daemon.client().unwrap();
    client
        .load(&path, "private", &LoadOptions::default(), |_| ())
        .unwrap();
    let share = LoadOptions {
        share: true,
        ..LoadOptions::default()
    };
    client.load(&path, "public", &share, |_| ()).unwrap();
    daemon.open_to_all().unwrap();
    let other = |set| ReaderPlan {
        uid: Some(65_534),
        ..ReaderPlan::new(set, &path)
    };
    Reader::start(&daemon, &other("public"))
        .unwrap()
        .expect("registered")
        .unwrap();
    assert!(
        Reader::start(&daemon, &other("private"))
            .unwrap()
            .expect("registered")
            .is_err()
    );
    assert!(
        Reader::start(&daemon, &other("absent"))
            .unwrap()
            .expect("registered")
            .is_err()
    );
}

#[test]
fn one_user_cannot_take_all_managers() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIPPED: needs root to become another user");
        return;
    }
    let daemon = Daemon::start(&["--max-managers", "4"]).unwrap();
    let path = daemon.scratch().join("m.safetensors");
    checkpoint::write(&path, &checkpoint::layered(2, 1, 1000)).unwrap();
    let client = daemon.client().unwrap();
    let share = LoadOptions {
        share: true,
        ..LoadOptions::default()
    };
    client.load(&path, "m", &share, |_| ()).unwrap();
    daemon.open_to_all().unwrap();
    let greedy = ReaderPlan {
        uid: Some(65_534),
        ..ReaderPlan::new("m", &path).with("--hold-in-pass", 0)
    };
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let reader = Reader::start(&daemon, &greedy).unwrap();
            reader.expect("registered").unwrap();
            reader
        })
        .collect();
    let third = Reader::start(&daemon, &greedy).unwrap();
    assert!(third.expect("registered").is_err());
    // the other half is there for others, and an administrator may take all of it
    let managers = [named("a"), named("b")].map(|options| client.open(options).unwrap());
    let ClientError::Refused(failure) = client.open(named("c")).unwrap_err() else {
        panic!("not refused");
    };
    assert_eq!(failure.kind, Kind::TooMany);
    assert_eq!(failure.details["whose"], "all users");
    drop((managers, readers));
}
