//! Load figures, not timed: what many tensors take, and what many managers leave.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

use flextensord_client::{Budget, LayerSpec, LoadOptions, OpenOptions, blocking::Client};
use flextensord_tests::{
    checkpoint::{self, Tensor, layer_of, pattern},
    daemon::{Daemon, SOON},
    process::{binary, eventually},
};

/// Open-close cycles.
const CYCLES: u64 = 2000;
/// Cycles in which a model is registered and a layer held.
const EACH: u64 = 5;

/// 2,000 tensors of odd lengths in 50 layers.
fn odd_model() -> Vec<Tensor> {
    let sizes = (0..2000_usize).map(|at| 1 + (at * 7919) % 9973);
    let tensor = |(at, bytes): (usize, usize)| Tensor {
        name: format!("layers.{}.{}", at / 40, at % 40),
        dtype: "U8".into(),
        shape: vec![bytes as u64],
        data: pattern(at as u64 + 1, bytes),
    };
    sizes.enumerate().map(tensor).collect()
}

fn layers(model: &[Tensor]) -> Vec<LayerSpec> {
    let mut layers: Vec<LayerSpec> = Vec::new();
    for tensor in model {
        let name = layer_of(&tensor.name);
        match layers.last_mut() {
            Some(layer) if layer.name == name => layer.tensors.push(tensor.name.clone()),
            _ => layers.push(LayerSpec {
                name,
                tensors: vec![tensor.name.clone()],
            }),
        }
    }
    layers
}

#[test]
fn two_thousand_tensors_of_odd_lengths_take_256_byte_steps_and_one_page() {
    let shm = Path::new("/dev/shm");
    let daemon = Daemon::start_with(&binary("flextensord").unwrap(), shm, &[]).unwrap();
    let model = odd_model();
    let path = daemon.scratch().join("odd.safetensors");
    checkpoint::write(&path, &model).unwrap();
    let client = daemon.client().unwrap();
    let set = client
        .load(&path, "odd", &LoadOptions::default(), |_| ())
        .unwrap()
        .set;
    let lengths = || model.iter().map(|tensor| tensor.data.len() as u64);
    let most = lengths()
        .map(|bytes| bytes.next_multiple_of(256))
        .sum::<u64>()
        + 4096;
    assert_eq!(set.logical_bytes, lengths().sum::<u64>());
    assert!(set.segment_bytes <= most, "{set:?}");
    let segment = fs::metadata(shm.join(&daemon.segments()[0])).unwrap();
    assert!(segment.size() <= most && segment.blocks() * 512 <= most);
    // every byte, by way of a device that is smaller than the model
    let layers = layers(&model);
    let mut manager = client.open(OpenOptions::default()).unwrap();
    let budget = Budget::Bytes(set.logical_bytes / 2);
    let answer = manager.register("odd", &layers, budget).unwrap();
    assert!(answer.streamed_bytes > 0 && answer.parts == 2000);
    let mut rest = model.iter();
    for layer in &layers {
        let hold = manager
            .acquire(manager.layer(&layer.name).unwrap())
            .unwrap();
        for right in rest.by_ref().take(layer.tensors.len()) {
            assert!(
                hold.tensor(&right.name)
                    .unwrap()
                    .equals(&right.data)
                    .unwrap()
            );
        }
    }
    assert_eq!(rest.count(), 0);
}

fn cycle(client: &Client, layers: &[LayerSpec], number: u64) {
    let mut manager = client
        .open(OpenOptions {
            name: "cycled".into(),
            ..OpenOptions::default()
        })
        .unwrap();
    if number.is_multiple_of(EACH) {
        manager
            .register("m", layers, Budget::Bytes(700_000))
            .unwrap();
        let layer = manager.layer(&layers[0].name).unwrap();
        if number.is_multiple_of(2) {
            drop(manager.acquire(layer).unwrap());
        } else {
            let hold = manager.acquire_rpc(layer).unwrap();
            manager.release_rpc(hold).unwrap();
        }
    }
    manager.close().unwrap();
}

#[test]
fn two_thousand_open_close_cycles_of_a_manager_give_everything_back() {
    let daemon = Daemon::start(&["--log", "warn"]).unwrap();
    let model = checkpoint::layered(4, 1, 300_000);
    let path = daemon.scratch().join("m.safetensors");
    checkpoint::write(&path, &model).unwrap();
    let client = daemon.client().unwrap();
    client
        .load(&path, "m", &LoadOptions::default(), |_| ())
        .unwrap();
    let layers = layers(&model);
    // threads, allocator and the table of answered calls take what they take once
    (0..CYCLES / 10).for_each(|number| cycle(&client, &layers, number));
    let empty = || {
        let status = daemon.status().ok()?;
        let device = &status.devices[0];
        let idle = status.managers.is_empty()
            && device.allocated_bytes == 0
            && device.reserved_bytes == 0
            && device.reclaiming_bytes == 0
            && status.weight_sets[0].attached_by.is_empty();
        idle.then_some(())
    };
    eventually("the daemon is idle", SOON, empty).unwrap();
    let figures = || {
        (
            daemon.descriptors(),
            daemon.threads(),
            daemon.resident_bytes(),
            daemon.state().len(),
        )
    };
    let before = figures();
    (0..CYCLES).for_each(|number| cycle(&client, &layers, number));
    eventually("the daemon is idle", SOON, empty).unwrap();
    let mut after = figures();
    let back = eventually("descriptors and threads are back", SOON, || {
        after = figures();
        let allowed = (before.2 / 50).max(2 << 20);
        let back = after.0 <= before.0
            && after.1 <= before.1
            && after.2 <= before.2 + allowed
            && after.3 == before.3;
        back.then_some(())
    });
    println!("before {before:?}, after {after:?}");
    assert!(back.is_ok(), "{before:?} became {after:?}");
    assert_eq!(daemon.segments().len(), 1);
}

#[test]
fn a_header_of_millions_of_metadata_keys_leaves_no_memory_behind() {
    const KEYS: usize = 2_400_000;
    let daemon = Daemon::start(&["--log", "warn"]).unwrap();
    let keys: Vec<_> = (0..KEYS).map(|key| format!(r#""{key}":"""#)).collect();
    let tensor = r#""w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    let header = format!(r#"{{"__metadata__":{{{}}},{tensor}}}"#, keys.join(","));
    let length = (header.len() as u64).to_le_bytes();
    let path = daemon.scratch().join("m.safetensors");
    fs::write(&path, [&length[..], header.as_bytes(), b"x"].concat()).unwrap();
    let client = daemon.client().unwrap();
    let before = daemon.resident_bytes();
    for _ in 0..2 {
        client
            .load(&path, "m", &LoadOptions::default(), |_| ())
            .unwrap();
        client.drop_weight_set("m").unwrap();
    }
    let mut after = 0;
    let back = eventually("the memory is back", SOON, || {
        after = daemon.resident_bytes();
        (after <= before + (16 << 20)).then_some(())
    });
    assert!(back.is_ok(), "{before} became {after}");
}

#[test]
fn threads_of_a_burst_of_calls_are_gone_once_it_is_over() {
    let daemon = Daemon::start(&["--log", "warn"]).unwrap();
    let path = daemon.scratch().join("m.safetensors");
    checkpoint::write(&path, &checkpoint::layered(4, 1, 300_000)).unwrap();
    let before = daemon.threads();
    std::thread::scope(|scope| {
        for _ in 0..24 {
            scope.spawn(|| {
                let client = daemon.client().unwrap();
                let options = LoadOptions::default();
                client.load(&path, "m", &options, |_| ()).unwrap();
            });
        }
    });
    assert!(daemon.threads() > before, "the calls took no threads");
    // an idle thread of the pool waits ten seconds for work
    let gone = || (daemon.threads() <= before).then_some(());
    eventually("the threads are gone", 3 * SOON, gone).unwrap();
}
