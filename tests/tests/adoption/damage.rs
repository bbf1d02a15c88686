//! What a successor makes of files that are not as they were left.

use std::{fs, os::unix::fs::PermissionsExt as _};

use flextensord_client::LoadOptions;
use flextensord_tests::{checkpoint, daemon::SOON, process::eventually, reader::Reader};
use nix::{sys::stat::Mode, unistd::mkfifo};

use super::{KEEP, open, plan, reap, setting};

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
