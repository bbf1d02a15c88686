//! Faults that users of such services have met, each as a scenario on the real binary:
//! tied weights, budgets, order of use, element types.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{collections::HashMap, time::Duration};

use flextensord_client::{
    Budget, ClientError, Hold, LayerId, LayerSpec, LoadOptions, OpenOptions,
    blocking::{Client, Manager},
    kind::Kind,
    upload::{Source, UploadTensor},
};
use flextensord_tests::{
    checkpoint::{self, Tensor, pattern},
    daemon::Daemon,
};

const POISON: [&str; 2] = ["--poison-released", "true"];

fn layer(name: &str, tensors: &[&str]) -> LayerSpec {
    LayerSpec {
        name: name.into(),
        tensors: tensors.iter().map(|&name| name.into()).collect(),
    }
}

/// The least budget in which the layers can run.
fn least(client: &Client, set: &str, layers: &[LayerSpec]) -> u64 {
    let mut manager = client.open(OpenOptions::default()).unwrap();
    let error = manager.register(set, layers, Budget::Bytes(1)).unwrap_err();
    let ClientError::Refused(failure) = error else {
        panic!("{error}")
    };
    assert_eq!(failure.kind, Kind::BudgetInfeasible);
    failure.details["wanted"].parse().unwrap()
}

fn hold(manager: &Manager, layer: &str, rpc: bool) -> Hold {
    let layer = manager.layer(layer).unwrap();
    if rpc {
        manager.acquire_rpc(layer).unwrap()
    } else {
        manager.acquire(layer).unwrap()
    }
}

fn give_back(manager: &Manager, hold: Hold) {
    if hold.is_rpc() {
        manager.release_rpc(hold).unwrap();
    } else {
        hold.release().unwrap();
    }
}

/// Case 22: tied weights in two layers are one copy, there while either layer is held.
#[test]
fn tied_weights_are_stored_once_and_stay_while_any_layer_holds_them() {
    let daemon = Daemon::start(&POISON).unwrap();
    let client = daemon.client().unwrap();
    let (rows, columns) = (64_u64, 4096_u64);
    let row = usize::try_from(columns * 4).unwrap();
    let emb = pattern(1, usize::try_from(rows).unwrap() * row);
    let fillers: Vec<Vec<u8>> = (2..6).map(|seed| pattern(seed, 300_001)).collect();
    let tensor = |name: &str, shape: [u64; 2], stride: &[i64], source| UploadTensor {
        name: name.into(),
        dtype: "F32".into(),
        shape: shape.into(),
        stride: stride.into(),
        source,
    };
    let alias = |offset| Source::Alias {
        of: "emb".into(),
        offset,
    };
    let mut tensors = vec![
        tensor("emb", [rows, columns], &[], Source::Bytes(&emb)),
        tensor("head", [rows, columns], &[], alias(0)),
        tensor("slice", [8, columns], &[], alias(16 * row as u64)),
        tensor("transposed", [columns, rows], &[1, 4096], alias(0)),
    ];
    let names = ["f0", "f1", "f2", "f3"];
    for (name, bytes) in names.iter().zip(&fillers) {
        tensors.push(UploadTensor {
            name: (*name).into(),
            dtype: "U8".into(),
            shape: vec![bytes.len() as u64],
            stride: Vec::new(),
            source: Source::Bytes(bytes),
        });
    }
    let set = client
        .put("tied", &tensors, &LoadOptions::default())
        .unwrap()
        .set;
    let once = (emb.len() + fillers.iter().map(Vec::len).sum::<usize>()) as u64;
    assert_eq!((set.tensors, set.storages), (8, 5));
    assert_eq!(set.logical_bytes, once);
    assert!(set.segment_bytes <= once + 5 * 256 + 4096);
    let mut layers = vec![layer("L0", &["emb"])];
    layers.extend(names.iter().map(|name| layer(name, &[name])));
    layers.push(layer("L9", &["head", "slice", "transposed"]));
    let least = least(&client, "tied", &layers);
    for budget in [Budget::Bytes(least), Budget::Fraction(1.0)] {
        let mut manager = client.open(OpenOptions::default()).unwrap();
        let answer = *manager.register("tied", &layers, budget).unwrap();
        assert_eq!(answer.parts, 5);
        let streams = answer.streamed_bytes > 0;
        assert_eq!(streams, matches!(budget, Budget::Bytes(_)));
        // what streams counts each time that it crosses the link in a pass
        assert!(answer.resident_bytes <= once + 5 * 256);
        for (rpc, other) in [(false, false), (true, true), (false, true), (true, false)] {
            let first = hold(&manager, "L0", rpc);
            let last = hold(&manager, "L9", other);
            give_back(&manager, first);
            check_tied(&last, &emb, row);
            give_back(&manager, last);
            // the other way round
            let last = hold(&manager, "L9", other);
            let first = hold(&manager, "L0", rpc);
            give_back(&manager, last);
            assert!(first.tensor("emb").unwrap().equals(&emb).unwrap());
            give_back(&manager, first);
            for (name, bytes) in names.iter().zip(&fillers) {
                let hold = hold(&manager, name, rpc);
                assert!(hold.tensor(name).unwrap().equals(bytes).unwrap());
                give_back(&manager, hold);
            }
        }
        let device = client.status().unwrap().devices.remove(0);
        assert!(
            device.allocated_bytes <= once + 5 * 256 + 4096,
            "{device:?}"
        );
        assert_eq!(device.transfer.unwrap().protocol_violations, 0);
        manager.close().unwrap();
    }
}

fn check_tied(hold: &Hold, emb: &[u8], row: usize) {
    assert!(hold.tensor("head").unwrap().equals(emb).unwrap());
    let slice = hold.tensor("slice").unwrap();
    assert!(slice.equals(&emb[16 * row..24 * row]).unwrap());
    let transposed = hold.tensor("transposed").unwrap();
    assert_eq!(transposed.stride(), [1, 4096]);
    assert_eq!(transposed.shape(), [4096, 64]);
    // element [c][r] of the view is element [r][c] of the matrix
    let bytes = transposed.to_vec().unwrap();
    let at = |c: usize, r: usize| (c + r * 4096) * 4;
    for (c, r) in [(0, 0), (17, 3), (4095, 63)] {
        let place = (r * row) + c * 4;
        assert_eq!(bytes[at(c, r)..at(c, r) + 4], emb[place..place + 4]);
    }
}

/// Case 24, budgets: one that is larger than the model streams nothing and says so.
#[test]
fn a_budget_larger_than_the_model_streams_nothing_and_the_least_one_is_named() {
    let daemon = Daemon::start(&[]).unwrap();
    let client = daemon.client().unwrap();
    let model = checkpoint::layered(4, 1, 300_000);
    let path = daemon.scratch().join("m.safetensors");
    checkpoint::write(&path, &model).unwrap();
    client
        .load(&path, "m", &LoadOptions::default(), |_| ())
        .unwrap();
    let layers: Vec<LayerSpec> = model
        .iter()
        .map(|tensor| layer(&tensor.name, &[&tensor.name]))
        .collect();
    let least = least(&client, "m", &layers);
    let total: u64 = model.iter().map(|tensor| tensor.data.len() as u64).sum();
    for (budget, streams) in [
        (Budget::Bytes(64 << 20), false),
        (Budget::Fraction(1.0), false),
        (Budget::Bytes(least), true),
    ] {
        let mut manager = client
            .open(OpenOptions {
                name: "mine".into(),
                ..OpenOptions::default()
            })
            .unwrap();
        let answer = *manager.register("m", &layers, budget).unwrap();
        assert_eq!(answer.least_feasible_bytes, least);
        assert_eq!(answer.streamed_bytes > 0, streams, "{answer:?}");
        assert_eq!(answer.ring_bytes > 0, streams, "{answer:?}");
        let status = client.status().unwrap().managers.remove(0);
        assert_eq!(status.planned_stream_bytes, answer.streamed_bytes);
        assert_eq!(status.parts_streamed > 0, streams);
        assert_eq!(status.granted_bytes, answer.granted_bytes);
        if !streams {
            assert!(answer.resident_bytes >= total);
        }
        // what an operator sees of it
        let output = daemon
            .ctl(&["--json", "managers"])
            .unwrap()
            .output()
            .unwrap();
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let text = told.to_string();
        let figure = format!("\"planned_stream_bytes\":{}", answer.streamed_bytes);
        assert!(text.contains(&figure), "{text}");
        manager.close().unwrap();
    }
    let mut manager = client.open(OpenOptions::default()).unwrap();
    let error = manager
        .register("m", &layers, Budget::Bytes(least - 1))
        .unwrap_err();
    assert!(error.to_string().contains(&least.to_string()), "{error}");
}

/// Case 25: no place is filled again before its reader is done, whatever the order.
#[test]
fn a_held_layer_keeps_its_bytes_until_it_is_released_in_any_order_of_use() {
    let daemon = Daemon::start(&POISON).unwrap();
    let client = daemon.client().unwrap();
    let model = checkpoint::layered(4, 1, 300_000);
    let path = daemon.scratch().join("m.safetensors");
    checkpoint::write(&path, &model).unwrap();
    client
        .load(&path, "m", &LoadOptions::default(), |_| ())
        .unwrap();
    let layers: Vec<LayerSpec> = model
        .iter()
        .map(|tensor| layer(&tensor.name, &[&tensor.name]))
        .collect();
    let least = least(&client, "m", &layers);
    for budget in [least, 2 * least] {
        let mut manager = client.open(OpenOptions::default()).unwrap();
        let answer = *manager
            .register("m", &layers, Budget::Bytes(budget))
            .unwrap();
        assert!(answer.streamed_bytes > 0, "{answer:?}");
        let ids: Vec<LayerId> = manager.plan().unwrap().layer_ids().collect();
        let right = |hold: &Hold, at: usize| {
            let view = hold.tensors().next().unwrap();
            assert!(view.equals(&model[at].data).unwrap(), "layer {at}");
        };
        for (at, taker) in conflicts(&manager) {
            let held = manager.acquire(ids[at]).unwrap();
            for rpc in [false, true] {
                let refused = if rpc {
                    manager.acquire_rpc(ids[taker])
                } else {
                    manager.acquire_within(ids[taker], Duration::from_millis(300))
                };
                let error = refused.unwrap_err();
                let conflict = matches!(error, ClientError::HoldConflict { .. })
                    || error.kind() == Some(Kind::HoldConflict);
                assert!(conflict, "{error}");
                right(&held, at);
            }
            std::thread::sleep(Duration::from_millis(50));
            right(&held, at);
            held.release().unwrap();
            let next = manager.acquire(ids[taker]).unwrap();
            right(&next, taker);
            next.release().unwrap();
        }
        for round in 0..6 {
            for at in [0, 2, 1, 3].into_iter().chain([3, 1, 2, 0]) {
                let hold = if round % 3 == 2 {
                    manager.acquire_rpc(ids[at]).unwrap()
                } else {
                    manager.acquire(ids[at]).unwrap()
                };
                right(&hold, at);
                give_back(&manager, hold);
            }
            manager.report_pass(2).unwrap();
        }
        let status = client.status().unwrap().managers.remove(0);
        assert_eq!(status.transfer.unwrap().protocol_violations, 0);
        assert_eq!((status.rpc_holds, status.parts_in_use), (0, 0));
        manager.close().unwrap();
    }
}

/// Pairs of layers whose parts lie in the same place of the ring.
fn conflicts(manager: &Manager) -> Vec<(usize, usize)> {
    let plan = manager.plan().unwrap();
    let streamed: Vec<_> = plan.parts().iter().filter(|part| part.streamed).collect();
    let mut pairs = Vec::new();
    for one in &streamed {
        for two in &streamed {
            let meet = one.offset < two.offset + two.bytes && two.offset < one.offset + one.bytes;
            if one.index != two.index && meet {
                let of = |part: u32| {
                    let with = |layer: &flextensord_client::plan::Layer| layer.parts == [part];
                    plan.layers().iter().position(with).unwrap()
                };
                pairs.push((of(one.index), of(two.index)));
            }
        }
    }
    assert!(!pairs.is_empty());
    pairs
}

/// Case 27: bytes are opaque, offsets in a file need no alignment, those on a device have
/// it.
#[test]
fn odd_types_at_odd_offsets_come_back_byte_for_byte_at_aligned_places() {
    let daemon = Daemon::start(&POISON).unwrap();
    let client = daemon.client().unwrap();
    let model: Vec<Tensor> = [
        ("a.u8", "U8", vec![3], 3),
        ("b.f32", "F32", vec![2], 8),
        ("c.f8", "F8_E4M3", vec![5], 5),
        ("d.scale", "F8_E8M0", vec![1], 1),
        ("e.f4", "F4", vec![6], 3),
        ("f.bool", "BOOL", vec![1], 1),
        ("g.scalar", "I64", vec![], 8),
        ("h.none", "BF16", vec![7, 0], 0),
        ("i.f6", "F6_E2M3", vec![4], 3),
        ("j.unknown", "MX9", vec![8], 9),
        ("k.big", "U8", vec![300_001], 300_001),
        ("l.big", "F16", vec![150_001], 300_002),
        ("m.big", "F32", vec![75_003], 300_012),
    ]
    .into_iter()
    .enumerate()
    .map(|(at, (name, dtype, shape, bytes))| Tensor {
        name: name.into(),
        dtype: dtype.into(),
        shape,
        data: pattern(at as u64 + 1, bytes),
    })
    .collect();
    let path = daemon.scratch().join("odd.safetensors");
    checkpoint::write(&path, &model).unwrap();
    client
        .load(&path, "odd", &LoadOptions::default(), |_| ())
        .unwrap();
    let detail = client.weight_set("odd").unwrap();
    assert_eq!(detail.tensors.len(), model.len());
    assert!(
        detail
            .storage_segment_offsets
            .iter()
            .all(|at| at % 256 == 0)
    );
    let expected: HashMap<&str, &Tensor> = model
        .iter()
        .map(|tensor| (tensor.name.as_str(), tensor))
        .collect();
    let small: Vec<&str> = model[..10].iter().map(|t| t.name.as_str()).collect();
    let mut layers = vec![layer("small", &small)];
    layers.extend(
        model
            .iter()
            .map(|tensor| layer(&tensor.name, &[&tensor.name])),
    );
    let least = least(&client, "odd", &layers);
    for budget in [least, 64 << 20] {
        let mut manager = client.open(OpenOptions::default()).unwrap();
        manager
            .register("odd", &layers, Budget::Bytes(budget))
            .unwrap();
        for part in manager.plan().unwrap().parts() {
            assert_eq!(part.offset % 256, 0, "{part:?}");
        }
        for spec in layers.iter().chain(&layers) {
            for rpc in [false, true] {
                let hold = hold(&manager, &spec.name, rpc);
                assert_eq!(hold.tensors().count(), spec.tensors.len());
                for view in hold.tensors() {
                    let right = expected[view.name()];
                    assert_eq!(
                        (view.dtype(), view.shape()),
                        (right.dtype.as_str(), &right.shape[..])
                    );
                    assert_eq!(view.to_vec().unwrap(), right.data, "{view:?}");
                    assert_eq!(view.place().offset % 256, 0);
                    // where a program on the device would read it
                    let address = view.address().unwrap();
                    assert!(
                        address.is_none_or(|address| address.is_multiple_of(256)),
                        "{view:?}"
                    );
                }
                give_back(&manager, hold);
            }
        }
        manager.close().unwrap();
    }
}
