use std::{sync::atomic::Ordering, time::Duration};

use super::{Bench, block};
use crate::{
    ClientError,
    fastpath::tests::open,
    tests::stand_in::{StagePart, StandIn, bytes_of},
};

#[test]
fn kernels_behind_an_acquire_read_every_layer_of_every_pass() {
    let bench = Bench::new(&[&[0, 8], &[1], &[2, 3], &[4], &[5], &[6, 7]]);
    let parts: [&[u32]; 6] = [&[0, 8], &[1], &[2, 3], &[4], &[5], &[6, 7]];
    let ids: Vec<_> = bench.manager.plan().unwrap().layer_ids().collect();
    for _ in 0..20 {
        for (id, parts) in ids.iter().zip(parts) {
            let hold = bench.manager.acquire_on(*id, bench.one()).unwrap();
            parts.iter().for_each(|part| bench.read(bench.one(), *part));
            hold.release().unwrap();
        }
    }
    bench.settle();
    let said = bench.said();
    assert_eq!(said.len(), 20 * 9);
    assert!(said.iter().all(|word| word.ends_with("right")), "{said:?}");
    assert_eq!(bench.stand_in.parts_in_use(), 0);
}

#[test]
fn any_order_over_two_streams_is_served() {
    let bench = Bench::new(&[&[0], &[1], &[2], &[3], &[4], &[5], &[6], &[7], &[8]]);
    let ids: Vec<_> = bench.manager.plan().unwrap().layer_ids().collect();
    let mut at: usize = 1;
    for step in 0..150 {
        at = (at * 5 + step * step + 3) % ids.len();
        let stream = if step % 3 == 0 {
            bench.two()
        } else {
            bench.one()
        };
        bench.manager.hold_on(ids[at], stream).unwrap();
        bench.read(stream, u32::try_from(at).unwrap());
        bench.manager.release_on(ids[at], stream).unwrap();
    }
    bench.settle();
    let said = bench.said();
    assert!(said.iter().all(|word| word.ends_with("right")), "{said:?}");
    assert_eq!(bench.stand_in.parts_in_use(), 0);
}

#[test]
fn a_change_of_streams_waits_for_the_work_on_the_one_before() {
    let bench = Bench::new(&[&[0], &[1]]);
    let hold = bench
        .manager
        .acquire_on(bench.layer("l0"), bench.one())
        .unwrap();
    bench.read_after(bench.one(), 0, Duration::from_millis(50));
    // queued on the other stream, but behind the kernel
    hold.release_on(bench.two()).unwrap();
    bench.say(bench.two(), "released");
    bench.settle();
    assert_eq!(bench.said(), ["t0 right", "released"]);
    assert_eq!(bench.stand_in.parts_in_use(), 0);
}

#[test]
fn a_nested_hold_on_another_stream_finds_the_bytes_and_keeps_them() {
    let bench = Bench::new(&[&[0, 1], &[1], &[3]]);
    let outer = bench
        .manager
        .acquire_on(bench.layer("l0"), bench.one())
        .unwrap();
    let inner = bench
        .manager
        .acquire_on(bench.layer("l1"), bench.two())
        .unwrap();
    bench.read(bench.two(), 1);
    bench.settle();
    assert_eq!(bench.said(), ["t1 right"]);
    assert_eq!(bench.stand_in.parts_in_use(), 2);
    outer.release().unwrap();
    bench.settle();
    assert_eq!(
        bench.stand_in.parts_in_use(),
        1,
        "the inner hold keeps its part"
    );
    let go = block(&bench, bench.two());
    bench.read(bench.two(), 1);
    inner.release_on(bench.one()).unwrap();
    // the part that overlaps it comes after the last reader
    let other = bench
        .manager
        .acquire_on(bench.layer("l2"), bench.one())
        .unwrap();
    bench.read(bench.one(), 3);
    go.store(true, Ordering::SeqCst);
    bench.settle();
    assert_eq!(bench.said(), ["t1 right", "t1 right", "t3 right"]);
    drop(other);
    bench.settle();
    assert_eq!(bench.stand_in.parts_in_use(), 0);
}

#[test]
fn a_conflict_is_named_before_anything_is_queued() {
    let bench = Bench::new(&[&[0], &[1, 2]]);
    let hold = bench
        .manager
        .acquire_on(bench.layer("l0"), bench.one())
        .unwrap();
    bench.settle();
    let error = bench.manager.acquire_on(bench.layer("l1"), bench.one());
    let error = error.unwrap_err();
    assert!(
        matches!(
            error,
            ClientError::HoldConflict {
                part: 2,
                held: 0,
                ..
            }
        ),
        "{error}"
    );
    assert!(bench.is_done(bench.one()));
    assert_eq!(bench.stand_in.parts_in_use(), 1);
    drop(hold);
    bench
        .manager
        .hold_on(bench.layer("l1"), bench.one())
        .unwrap();
    bench.read(bench.one(), 2);
    bench
        .manager
        .release_on(bench.layer("l1"), bench.one())
        .unwrap();
    bench.settle();
    assert_eq!(bench.said(), ["t2 right"]);
}

#[test]
fn what_is_not_held_cannot_be_released_and_is_named() {
    let bench = Bench::new(&[&[0], &[8]]);
    for layer in ["l0", "l1"] {
        let id = bench.layer(layer);
        let error = bench.manager.release_on(id, bench.one()).unwrap_err();
        assert!(
            matches!(&error, ClientError::NotHeld { layer: named } if named == layer),
            "{error}"
        );
        bench.manager.hold_on(id, bench.one()).unwrap();
        bench.manager.release_on(id, bench.one()).unwrap();
        assert!(bench.manager.release_on(id, bench.one()).is_err());
    }
}

#[test]
fn each_kind_of_device_names_the_call_that_fits_it() {
    let bench = Bench::new(&[&[0]]);
    let error = bench
        .manager
        .acquire(bench.layer("l0"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("acquire_on"), "{error}");
    let stand_in = StandIn::start(&super::parts());
    let manager = open(&stand_in, &[&[0]]);
    let layer = manager.layer("l0").unwrap();
    let error = manager.acquire_on(layer, bench.one()).unwrap_err();
    assert!(matches!(error, ClientError::WrongDevice { .. }), "{error}");
    let error = manager
        .acquire(layer)
        .unwrap()
        .release_on(bench.one())
        .unwrap_err();
    assert!(error.to_string().contains("call release"), "{error}");
    assert_eq!(stand_in.parts_in_use(), 0);
}

#[test]
fn a_layer_of_more_parts_than_a_batch_holds_is_taken_whole() {
    let parts: Vec<_> = (0..200)
        .map(|n| StagePart {
            streamed: true,
            place: 4 + n,
            bytes: 200,
        })
        .collect();
    let all: Vec<u32> = (0..200).collect();
    let bench = Bench::with(&parts, &[&all]);
    let hold = bench
        .manager
        .acquire_on(bench.layer("l0"), bench.one())
        .unwrap();
    bench.read(bench.one(), 0);
    bench.read(bench.one(), 199);
    bench.settle();
    assert_eq!(bench.said(), ["t0 right", "t199 right"]);
    assert_eq!(bench.stand_in.parts_in_use(), 200);
    drop(hold);
    bench.settle();
    assert_eq!(bench.stand_in.parts_in_use(), 0);
}

#[test]
fn the_host_reads_a_held_tensor_once_the_stream_has_come_so_far() {
    let bench = Bench::new(&[&[0, 8]]);
    bench.stand_in.withhold(&[0]);
    let hold = bench
        .manager
        .acquire_on(bench.layer("l0"), bench.one())
        .unwrap();
    let resident = hold.tensor("t8").unwrap();
    assert!(
        resident.equals(&bytes_of(8, 300)).unwrap(),
        "it waits for nothing"
    );
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            bench.stand_in.withhold(&[]);
        });
        let tensor = hold.tensor("t0").unwrap();
        assert_eq!(tensor.to_vec().unwrap(), bytes_of(0, 1000));
        let place = tensor.place();
        assert_eq!(
            tensor.address().unwrap(),
            bench.manager.tensor_address(place).unwrap()
        );
    });
}

#[test]
fn a_release_over_rpc_is_made_when_the_kernels_before_it_are_done() {
    let bench = Bench::new(&[&[0], &[1]]);
    // something must be queued for the order to have a stream
    drop(
        bench
            .manager
            .acquire_on(bench.layer("l1"), bench.one())
            .unwrap(),
    );
    let rpc = bench.manager.acquire_rpc(bench.layer("l0")).unwrap();
    let fast = bench
        .manager
        .acquire_on(bench.layer("l0"), bench.one())
        .unwrap();
    let go = block(&bench, bench.one());
    bench.read(bench.one(), 0);
    fast.release().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(200));
            assert!(bench.said().is_empty());
            assert_eq!(bench.stand_in.parts_in_use(), 1);
            go.store(true, Ordering::SeqCst);
        });
        bench.manager.release_rpc(rpc).unwrap();
        assert_eq!(bench.said(), ["t0 right"]);
    });
    assert_eq!(bench.stand_in.parts_in_use(), 0);
}

#[test]
fn what_another_thread_drops_is_given_back_on_its_stream_by_the_owner() {
    let bench = Bench::new(&[&[0], &[1]]);
    let hold = bench
        .manager
        .acquire_on(bench.layer("l0"), bench.one())
        .unwrap();
    bench.read(bench.one(), 0);
    std::thread::scope(|scope| {
        scope.spawn(|| drop(hold));
    });
    bench.settle();
    assert_eq!(bench.stand_in.parts_in_use(), 1);
    drop(
        bench
            .manager
            .acquire_on(bench.layer("l1"), bench.one())
            .unwrap(),
    );
    bench.settle();
    assert_eq!(bench.stand_in.parts_in_use(), 0);
}
