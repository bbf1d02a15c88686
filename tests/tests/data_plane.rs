//! Several client processes on one daemon: any order, skips, repeats, sudden ends; every
//! byte compared.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{path::PathBuf, time::Duration};

use flextensord_client::LoadOptions;
use flextensord_tests::{
    checkpoint,
    daemon::{Daemon, SOON},
    process::eventually,
    reader::{Reader, ReaderPlan},
};

/// A daemon with a model of eight layers of three tensors of about 300 kB.
fn setting(flags: &[&str]) -> (Daemon, PathBuf) {
    let daemon = Daemon::start(flags).unwrap();
    let path = daemon.scratch().join("model.safetensors");
    checkpoint::write(&path, &checkpoint::layered(8, 3, 300_000)).unwrap();
    let loaded = daemon
        .client()
        .unwrap()
        .load(&path, "model", &LoadOptions::default(), |_| ())
        .unwrap();
    assert!(!loaded.attached);
    (daemon, path)
}

fn plan(path: &std::path::Path) -> ReaderPlan<'_> {
    // two of the largest layers and a little more: most of the model streams
    ReaderPlan::new("model", path).with("--budget", 2_400_000)
}

#[test]
fn random_orders_of_several_processes_deliver_right_bytes_over_poisoned_ranges() {
    let (daemon, path) = setting(&["--poison-released", "true", "--cpu-link", "1GB/s"]);
    let readers: Vec<Reader> = (1..=4)
        .map(|seed| {
            let via = ["fast", "mixed", "rpc", "fast"][seed - 1];
            let plan = plan(&path)
                .with("--order", "random")
                .with("--seed", seed)
                .with("--passes", 12)
                .with("--via", via);
            Reader::start(&daemon, &plan).unwrap()
        })
        .collect();
    for reader in readers {
        let registered = reader.expect("registered").unwrap();
        assert!(
            registered["streamed_bytes"].as_u64().unwrap() > 0,
            "{registered}"
        );
        reader.finish().unwrap();
    }
    let status = daemon.status().unwrap();
    let moved = status.devices[0].transfer.unwrap();
    assert!(
        moved.parts_filled > 0 && moved.parts_revoked > 0,
        "{moved:?}"
    );
    assert_eq!(moved.protocol_violations, 0);
}

#[test]
fn passes_in_order_move_the_planned_bytes_and_at_most_one_ring_more() {
    let (daemon, path) = setting(&[]);
    let reader = Reader::start(&daemon, &plan(&path).with("--passes", 10)).unwrap();
    let registered = reader.expect("registered").unwrap();
    let figure = |name: &str| registered[name].as_u64().unwrap();
    reader.finish().unwrap();
    let moved = daemon.status().unwrap().devices[0].transfer.unwrap();
    let planned = 10 * figure("streamed_bytes");
    assert!(planned > 0);
    assert!(moved.streamed_bytes >= planned, "{moved:?}");
    assert!(
        moved.streamed_bytes <= planned + figure("ring_bytes"),
        "{moved:?}"
    );
    assert_eq!(
        (moved.parts_revoked, moved.parts_out_of_order),
        (0, 0),
        "{moved:?}"
    );
}

#[test]
fn a_model_that_fits_is_resident_and_nothing_streams() {
    let (daemon, path) = setting(&[]);
    let plan = ReaderPlan::new("model", &path)
        .with("--fraction", 0.5)
        .with("--passes", 3);
    let reader = Reader::start(&daemon, &plan).unwrap();
    let registered = reader.expect("registered").unwrap();
    assert_eq!(registered["streamed_bytes"], 0);
    assert_eq!(registered["ring_bytes"], 0);
    reader.finish().unwrap();
}

#[test]
fn a_client_killed_while_it_holds_a_layer_costs_its_neighbour_nothing() {
    let (daemon, path) = setting(&["--poison-released", "true"]);
    let victim = Reader::start(
        &daemon,
        &plan(&path).with("--hold-in-pass", 2).with("--passes", 9),
    )
    .unwrap();
    let mut neighbour = Reader::start(
        &daemon,
        &plan(&path).with("--hold-in-pass", 1).with("--passes", 20),
    )
    .unwrap();
    for reader in [&victim, &neighbour] {
        reader.expect("registered").unwrap();
        reader.expect("holding").unwrap();
    }
    let both = daemon.status().unwrap();
    assert_eq!(both.managers.len(), 2);
    assert!(both.managers.iter().all(|manager| manager.parts_in_use > 0));
    victim.kill().unwrap();
    eventually(
        "the dead one is gone with its memory",
        Duration::from_secs(1),
        || {
            let status = daemon.status().ok()?;
            let (device, [alone]) = (&status.devices[0], &status.managers[..]) else {
                return None;
            };
            let own = alone.ring_bytes + device.resident_bytes;
            (device.allocated_bytes == own && device.reclaiming_bytes == 0).then_some(())
        },
    )
    .unwrap();
    neighbour.go_on();
    neighbour.finish().unwrap();
    eventually("all memory is back", Duration::from_secs(1), || {
        let status = daemon.status().ok()?;
        (status.managers.is_empty() && status.devices[0].allocated_bytes == 0).then_some(())
    })
    .unwrap();
    assert_eq!(
        daemon
            .state()
            .iter()
            .filter(|name| name.starts_with("manager-"))
            .count(),
        0
    );
}

#[test]
fn clients_killed_at_any_moment_leave_nothing_behind() {
    let (daemon, path) = setting(&["--cpu-link", "300MB/s"]);
    let before = daemon.descriptors();
    for round in 0..12u64 {
        let plan = plan(&path).with("--passes", 1000).with("--order", "random");
        let victim = Reader::start(&daemon, &plan.with("--seed", round)).unwrap();
        if round % 3 > 0 {
            victim.expect("registered").unwrap();
        }
        std::thread::sleep(Duration::from_millis(round * 7));
        victim.kill().unwrap();
    }
    eventually("everything came back", SOON, || {
        let status = daemon.status().ok()?;
        let device = &status.devices[0];
        let empty = status.managers.is_empty()
            && device.allocated_bytes == 0
            && device.reserved_bytes == 0
            && status.weight_sets[0].attached_by.is_empty();
        // the connection that asks is one more
        (empty && daemon.descriptors() <= before + 2).then_some(())
    })
    .unwrap_or_else(|error| {
        panic!(
            "{error}: {:?}, {} descriptors, {before} before",
            daemon.status().unwrap(),
            daemon.descriptors()
        )
    });
    Reader::start(&daemon, &plan(&path))
        .unwrap()
        .expect("registered")
        .unwrap();
}

#[test]
fn managers_of_one_plan_share_their_residents() {
    let (daemon, path) = setting(&["--cpu-memory", "7MiB"]);
    let plan = ReaderPlan::new("model", &path)
        .with("--budget", 5_000_000)
        .with("--passes", 6)
        .with("--hold-in-pass", 1);
    let mut readers = [(); 2].map(|()| Reader::start(&daemon, &plan).unwrap());
    let registered: Vec<_> = readers
        .iter()
        .map(|reader| reader.expect("registered").unwrap())
        .collect();
    readers
        .iter()
        .for_each(|reader| drop(reader.expect("holding").unwrap()));
    let shared: u64 = registered
        .iter()
        .map(|r| r["shared_bytes"].as_u64().unwrap())
        .sum();
    assert!(shared > 2_000_000, "{registered:?}");
    let device = daemon.status().unwrap().devices.remove(0);
    let rings: u64 = registered
        .iter()
        .map(|r| r["ring_bytes"].as_u64().unwrap())
        .sum();
    let residents: u64 = registered
        .iter()
        .map(|r| r["resident_bytes"].as_u64().unwrap())
        .sum();
    assert_eq!(device.resident_bytes, residents - shared);
    assert_eq!(device.allocated_bytes, device.resident_bytes + rings);
    readers.iter_mut().for_each(Reader::go_on);
    readers
        .into_iter()
        .for_each(|reader| drop(reader.finish().unwrap()));
}

#[test]
fn each_virtual_device_has_memory_and_a_link_of_its_own() {
    let (daemon, path) = setting(&["--cpu-devices", "2", "--cpu-memory", "4MiB"]);
    let readers = ["cpu:0", "cpu:1"].map(|device| {
        let plan = plan(&path).with("--device", device).with("--passes", 5);
        Reader::start(&daemon, &plan.with("--hold-in-pass", 2)).unwrap()
    });
    for reader in &readers {
        reader.expect("registered").unwrap();
        reader.expect("holding").unwrap();
    }
    for device in daemon.status().unwrap().devices {
        assert!(device.allocated_bytes > 0 && device.transfer.unwrap().streamed_bytes > 0);
    }
    for mut reader in readers {
        reader.go_on();
        reader.finish().unwrap();
    }
}

#[test]
fn a_budget_under_the_least_names_it_and_the_next_try_may_succeed() {
    let (daemon, _path) = setting(&[]);
    let client = daemon.client().unwrap();
    let mut manager = client
        .open(flextensord_client::OpenOptions::default())
        .unwrap();
    let layers = [flextensord_client::LayerSpec {
        name: "l".into(),
        tensors: vec!["layers.0.0".into(), "layers.0.1".into()],
    }];
    let refused = manager
        .register("model", &layers, flextensord_client::Budget::Bytes(1000))
        .unwrap_err();
    let flextensord_client::ClientError::Refused(failure) = refused else {
        panic!("{refused}")
    };
    assert_eq!(failure.kind.as_str(), "BUDGET_INFEASIBLE");
    let least: u64 = failure.details["wanted"].parse().unwrap();
    let answer = manager
        .register("model", &layers, flextensord_client::Budget::Bytes(least))
        .unwrap();
    assert_eq!(answer.least_feasible_bytes, least);
    let layer = manager.layer("l").unwrap();
    let hold = manager.acquire(layer).unwrap();
    assert_eq!(hold.tensors().count(), 2);
    drop(hold);
}
