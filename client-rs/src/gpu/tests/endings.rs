use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use super::{Bench, block};
use crate::{
    Budget, ClientError, LayerSpec, OpenOptions, blocking,
    tests::stand_in::{StandIn, eventually},
};

#[test]
fn a_lost_lease_ends_queued_waits_and_kernels_fault_instead_of_reading() {
    let bench = Bench::new(&[&[0], &[2]]);
    bench.stand_in.withhold(&[2]);
    let hold = bench
        .manager
        .acquire_on(bench.layer("l0"), bench.one())
        .unwrap();
    bench.read(bench.one(), 0);
    drop(hold);
    bench.settle();
    let layer = bench.layer("l1");
    let hold = bench.manager.acquire_on(layer, bench.one()).unwrap();
    bench.read(bench.one(), 2);
    bench.stand_in.terminate();
    eventually("the fault", || bench.said().len() == 2);
    assert_eq!(bench.said(), ["t0 right", "t2 fault"]);
    let error = bench.manager.acquire_on(layer, bench.one()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("an operator terminated it"), "{text}");
    assert!(text.contains("restart the process"), "{text}");
    let error = hold.tensor("t2").unwrap().to_vec().unwrap_err();
    assert!(matches!(error, ClientError::LeaseLost { .. }), "{error}");
    drop(hold);
    bench.manager.close().unwrap();
}

#[test]
fn waits_with_nothing_behind_them_are_let_go_one_after_the_other() {
    let bench = Bench::new(&[&[0], &[2]]);
    bench.stand_in.withhold(&[0, 1, 2, 3, 4, 5, 6, 7]);
    for _ in 0..20 {
        for layer in ["l0", "l1"] {
            let layer = bench.layer(layer);
            drop(bench.manager.acquire_on(layer, bench.one()).unwrap());
        }
    }
    bench.stand_in.terminate();
    bench.settle();
    // nobody read the ring, so nothing faulted
    let text = || {
        let error = bench.manager.acquire_on(bench.layer("l0"), bench.one());
        error.unwrap_err().to_string()
    };
    eventually("the end", || text().contains("open it again"));
}

#[test]
fn a_lease_that_is_lost_at_rest_leaves_the_context_alone() {
    let bench = Bench::new(&[&[0, 8]]);
    drop(
        bench
            .manager
            .acquire_on(bench.layer("l0"), bench.one())
            .unwrap(),
    );
    bench.settle();
    bench.stand_in.terminate();
    let text = || {
        let error = bench.manager.acquire_on(bench.layer("l0"), bench.one());
        error.err().map_or(String::new(), |error| error.to_string())
    };
    eventually("the end", || text().contains("open it again"));
    bench.say(bench.one(), "alive");
    bench.settle();
    assert_eq!(bench.said(), ["alive"]);
}

#[test]
fn the_end_of_patience_ends_queued_waits_too() {
    let mut bench = Bench::new(&[&[0], &[2]]);
    bench.stand_in.withhold(&[2]);
    drop(
        bench
            .manager
            .acquire_on(bench.layer("l0"), bench.one())
            .unwrap(),
    );
    let begin = Instant::now();
    let hold = bench
        .manager
        .acquire_on(bench.layer("l1"), bench.one())
        .unwrap();
    bench.read(bench.one(), 2);
    bench.stand_in.kill();
    eventually("the fault", || !bench.said().is_empty());
    assert!(begin.elapsed() >= Duration::from_secs(2));
    assert_eq!(bench.said(), ["t2 fault"]);
    drop(hold);
    let error = bench.manager.acquire_on(bench.layer("l0"), bench.one());
    let error = error.unwrap_err();
    assert!(
        matches!(
            error,
            ClientError::DaemonLost {
                context_lost: true,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_close_waits_for_what_is_queued_and_unmaps_before_it_tells_the_daemon() {
    let bench = Bench::new(&[&[0]]);
    let hold = bench
        .manager
        .acquire_on(bench.layer("l0"), bench.one())
        .unwrap();
    let go = block(&bench, bench.one());
    bench.read(bench.one(), 0);
    hold.release().unwrap();
    let Bench {
        manager,
        one,
        driver,
        stand_in,
        log,
        ..
    } = bench;
    assert_eq!(driver.counts().live_allocations, 1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(200));
            assert!(!stand_in.stage.state().closed);
            go.store(true, Ordering::SeqCst);
        });
        manager.close().unwrap();
    });
    assert!(stand_in.stage.state().closed);
    assert_eq!(*log.lock().unwrap(), ["t0 right"]);
    assert_eq!(driver.counts().live_allocations, 0);
    assert_eq!(driver.counts().registered_bytes, 0);
    assert!(one.is_done().unwrap());
}

#[test]
fn a_close_that_waits_in_vain_ends_the_work_and_says_so() {
    let stand_in = StandIn::start_on_gpu(&super::parts());
    let mut options = stand_in.options();
    options.call_timeout = Duration::from_secs(3);
    let client = blocking::Client::connect(options).unwrap();
    let mut manager = client.open(OpenOptions::default()).unwrap();
    let layers = [LayerSpec {
        name: "l0".to_owned(),
        tensors: vec!["t0".to_owned()],
    }];
    manager
        .register("w", &layers, Budget::Bytes(1 << 20))
        .unwrap();
    let context = super::context(stand_in.driver.as_ref().unwrap());
    let stream = flextensord_device::cuda::stream::Stream::new(&context).unwrap();
    let layer = manager.layer("l0").unwrap();
    stand_in.withhold(&[0]);
    // it may have come before it was withheld: then the second wait is in vain
    for _ in 0..2 {
        manager.hold_on(layer, (&stream).into()).unwrap();
        manager.release_on(layer, (&stream).into()).unwrap();
    }
    let error = manager.close().unwrap_err();
    assert!(error.to_string().contains("restart the process"), "{error}");
    assert!(stand_in.stage.state().closed);
    eventually("the end of the waits", || stream.is_done().unwrap_or(true));
}

#[test]
fn a_dropped_manager_unmaps_when_its_work_is_done() {
    let bench = Bench::new(&[&[0]]);
    drop(
        bench
            .manager
            .acquire_on(bench.layer("l0"), bench.one())
            .unwrap(),
    );
    bench.read(bench.one(), 8);
    let Bench {
        manager,
        driver,
        stand_in,
        log,
        ..
    } = bench;
    drop(manager);
    assert!(stand_in.stage.state().closed);
    assert_eq!(*log.lock().unwrap(), ["t8 right"]);
    assert_eq!(driver.counts().live_allocations, 0);
}

#[test]
fn replays_after_a_lost_lease_fault_instead_of_waiting() {
    let bench = Bench::new(&[&[0]]);
    let stream = super::handle(bench.one());
    bench.driver.begin_capture(stream).unwrap();
    let hold = bench
        .manager
        .acquire_on(bench.layer("l0"), bench.one())
        .unwrap();
    bench.read(bench.one(), 0);
    drop(hold);
    let graph = bench.driver.end_capture(stream).unwrap();
    bench.driver.launch(&graph, stream).unwrap();
    bench.settle();
    bench.stand_in.withhold(&[0]);
    bench.stand_in.terminate();
    eventually("the loss", || {
        bench.manager.lease_state() == crate::LeaseState::Ended
    });
    std::thread::sleep(Duration::from_millis(50));
    bench.driver.launch(&graph, stream).unwrap();
    eventually("the fault", || bench.said().len() == 2);
    assert_eq!(bench.said(), ["t0 right", "t0 fault"]);
}
