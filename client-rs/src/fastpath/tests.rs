use std::time::{Duration, Instant};

use crate::{
    Budget, ClientError, Hold, LayerSpec, OpenOptions, blocking,
    tests::stand_in::{StagePart, StandIn, bytes_of},
};

/// Eight streamed parts of 1000 bytes in a ring with room for two, and a resident one.
fn parts() -> Vec<StagePart> {
    let streamed = (0..8).map(|n| StagePart {
        streamed: true,
        place: 4 + (n % 2) * 4,
        bytes: 1000,
    });
    let resident = StagePart {
        streamed: false,
        place: 100,
        bytes: 300,
    };
    streamed.chain([resident]).collect()
}

fn layers(lists: &[&[u32]]) -> Vec<LayerSpec> {
    let layer = |(n, parts): (usize, &&[u32])| LayerSpec {
        name: format!("l{n}"),
        tensors: parts.iter().map(|part| format!("t{part}")).collect(),
    };
    lists.iter().enumerate().map(layer).collect()
}

pub(crate) fn open(stand_in: &StandIn, lists: &[&[u32]]) -> blocking::Manager {
    let client = blocking::Client::connect(stand_in.options()).unwrap();
    let options = OpenOptions {
        name: "m".to_owned(),
        ..OpenOptions::default()
    };
    let mut manager = client.open(options).unwrap();
    manager
        .register("w", &layers(lists), Budget::Bytes(1 << 20))
        .unwrap();
    manager.set_acquire_limit(Duration::from_secs(5));
    manager
}

fn check(hold: &Hold) {
    for tensor in hold.tensors() {
        let part: u32 = tensor.name()[1..].parse().unwrap();
        let expected = bytes_of(part, tensor.bytes());
        assert!(tensor.equals(&expected).unwrap(), "{}", tensor.name());
    }
}

#[test]
fn every_pass_sees_the_bytes_of_every_layer() {
    let stand_in = StandIn::start(&parts());
    let manager = open(&stand_in, &[&[0, 8], &[1], &[2, 3], &[4], &[5], &[6, 7]]);
    let ids: Vec<_> = manager.plan().unwrap().layer_ids().collect();
    for _ in 0..50 {
        for &id in &ids {
            check(&manager.acquire(id).unwrap());
        }
    }
    assert_eq!(stand_in.parts_in_use(), 0);
    assert!(
        manager
            .asynchronous()
            .unwrap()
            .take_release_error()
            .is_none()
    );
}

#[test]
fn any_order_is_served_and_no_wake_up_is_lost() {
    let stand_in = StandIn::start(&parts());
    let manager = open(
        &stand_in,
        &[&[0], &[1], &[2], &[3], &[4], &[5], &[6], &[7], &[8]],
    );
    let ids: Vec<_> = manager.plan().unwrap().layer_ids().collect();
    let mut at: usize = 1;
    for step in 0..600 {
        at = (at * 5 + step * step + 3) % ids.len();
        let hold = manager.acquire(ids[at]).unwrap();
        check(&hold);
        if step % 3 == 0 {
            let beside = (at / 2 * 2 + (at + 1) % 2) % 8;
            if at < 8 {
                check(&manager.acquire(ids[beside]).unwrap());
            }
        }
    }
}

#[test]
fn a_conflict_is_named_before_anything_is_touched() {
    let stand_in = StandIn::start(&parts());
    let manager = open(&stand_in, &[&[0], &[1, 2], &[3]]);
    let [first, both, third] = ["l0", "l1", "l2"].map(|name| manager.layer(name).unwrap());
    let hold = manager.acquire(first).unwrap();
    let error = manager.acquire(both).unwrap_err();
    assert!(
        matches!(&error, ClientError::HoldConflict { part: 2, held: 0, tensor } if tensor == "t2"),
        "{error}"
    );
    assert_eq!(stand_in.parts_in_use(), 1);
    drop(manager.acquire(third).unwrap());
    hold.release().unwrap();
    check(&manager.acquire(both).unwrap());
}

#[test]
fn nested_holds_touch_a_word_once_and_a_panic_gives_back() {
    let stand_in = StandIn::start(&parts());
    let manager = open(&stand_in, &[&[0, 1], &[1]]);
    let [outer, inner] = ["l0", "l1"].map(|name| manager.layer(name).unwrap());
    let hold = manager.acquire(outer).unwrap();
    let nested = manager.acquire(inner).unwrap();
    drop(hold);
    assert_eq!(stand_in.parts_in_use(), 1);
    check(&nested);
    drop(nested);
    assert_eq!(stand_in.parts_in_use(), 0);
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _hold = manager.acquire(outer).unwrap();
        panic!("in the middle of a layer");
    }));
    assert!(unwound.is_err());
    assert_eq!(stand_in.parts_in_use(), 0);
}

#[test]
fn a_wait_that_is_too_long_gives_back_what_it_took() {
    let stand_in = StandIn::start(&parts());
    let manager = open(&stand_in, &[&[0, 1]]);
    let layer = manager.layer("l0").unwrap();
    drop(manager.acquire(layer).unwrap());
    stand_in.withhold(&[1]);
    // what is full already may still be taken
    while let Ok(hold) = manager.acquire_within(layer, Duration::from_millis(100)) {
        drop(hold);
    }
    let begin = Instant::now();
    let error = manager
        .acquire_within(layer, Duration::from_millis(200))
        .unwrap_err();
    assert!(matches!(error, ClientError::Deadline { .. }), "{error}");
    assert!(error.to_string().contains("part 1 (t1)"), "{error}");
    assert!(begin.elapsed() >= Duration::from_millis(200));
    assert_eq!(stand_in.parts_in_use(), 0);
    assert!(manager.waited() >= Duration::from_millis(200));
    stand_in.withhold(&[]);
    check(&manager.acquire(layer).unwrap());
}

#[test]
fn another_thread_is_refused_and_what_it_drops_comes_back() {
    let stand_in = StandIn::start(&parts());
    let manager = open(&stand_in, &[&[0], &[1]]);
    let [first, second] = ["l0", "l1"].map(|name| manager.layer(name).unwrap());
    let hold = manager.acquire(first).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let error = manager.acquire(second).unwrap_err();
            assert!(matches!(error, ClientError::WrongThread { .. }), "{error}");
            let error = hold.release().unwrap_err();
            assert!(matches!(error, ClientError::WrongThread { .. }), "{error}");
        });
    });
    assert_eq!(stand_in.parts_in_use(), 1, "not given back out of order");
    drop(manager.acquire(second).unwrap());
    assert_eq!(stand_in.parts_in_use(), 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            manager.rebind_thread().unwrap();
            check(&manager.acquire(first).unwrap());
        });
    });
    assert!(manager.acquire(first).is_err());
}

#[test]
fn tensors_are_found_by_name_and_read_whole() {
    let stand_in = StandIn::start(&parts());
    let manager = open(&stand_in, &[&[0, 8]]);
    let hold = manager.acquire(manager.layer("l0").unwrap()).unwrap();
    assert_eq!(hold.layer_name(), "l0");
    let tensor = hold.tensor("t0").unwrap();
    assert_eq!(
        (tensor.dtype(), tensor.shape(), tensor.bytes()),
        ("U8", &[1000][..], 1000)
    );
    assert_eq!(tensor.to_vec().unwrap(), bytes_of(0, 1000));
    assert!(!tensor.equals(&[0; 1000]).unwrap());
    assert!(!tensor.equals(&[0; 10]).unwrap());
    assert!(tensor.address().unwrap().is_some());
    let error = tensor.read(&mut [0; 10]).unwrap_err();
    assert!(matches!(error, ClientError::Range { .. }), "{error}");
    let error = hold.tensor("t1").unwrap_err();
    assert!(error.to_string().contains("layer l0"), "{error}");
}
