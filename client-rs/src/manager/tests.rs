use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use flextensord_proto::{
    kind::Kind,
    v1::{Draining, LeaseEnded, LeaseEvent, lease_ended::Reason, lease_event::Event},
};

use crate::{
    ClientError, LeaseState,
    fastpath::tests::open,
    tests::stand_in::{StagePart, StandIn, eventually},
};

fn parts() -> [StagePart; 3] {
    let part = |place| StagePart {
        streamed: true,
        place,
        bytes: 512,
    };
    [part(4), part(8), part(4)]
}

const LAYERS: &[&[u32]] = &[&[0, 1], &[1], &[2]];

#[test]
fn rpc_and_fast_path_share_one_table() {
    let stand_in = StandIn::start(&parts());
    let manager = open(&stand_in, LAYERS);
    let [both, one, other] = ["l0", "l1", "l2"].map(|name| manager.layer(name).unwrap());
    // the daemon took part 1, and leaves it while the fast path holds it
    let rpc = manager.acquire_rpc(one).unwrap();
    let fast = manager.acquire(both).unwrap();
    manager.release_rpc(rpc).unwrap();
    assert_eq!(stand_in.parts_in_use(), 2);
    // a second hold over RPC leaves part 1 to the fast path, and outlives that
    let rpc = manager.acquire_rpc(one).unwrap();
    drop(fast);
    assert_eq!(stand_in.parts_in_use(), 1);
    let fast = manager.acquire(both).unwrap();
    let error = manager.acquire_rpc(other).unwrap_err();
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
    drop(fast);
    drop(rpc);
    eventually("the release", || stand_in.parts_in_use() == 0);
    // two holds over RPC, the owner of the part released first
    let first = manager.acquire_rpc(one).unwrap();
    let second = manager.acquire_rpc(one).unwrap();
    manager.release_rpc(first).unwrap();
    assert_eq!(stand_in.parts_in_use(), 1);
    manager.release_rpc(second).unwrap();
    assert_eq!(stand_in.parts_in_use(), 0);
    assert!(
        manager
            .asynchronous()
            .unwrap()
            .held_parts()
            .unwrap()
            .is_empty()
    );
    assert!(
        manager
            .asynchronous()
            .unwrap()
            .take_release_error()
            .is_none()
    );
}

#[test]
fn a_refused_acquire_over_rpc_leaves_no_count_behind() {
    let stand_in = StandIn::start(&parts());
    let mut manager = open(&stand_in, LAYERS);
    let [both, one] = ["l0", "l1"].map(|name| manager.layer(name).unwrap());
    let held = manager.acquire(one).unwrap();
    stand_in.withhold(&[0]);
    manager.set_acquire_limit(Duration::from_millis(100));
    while let Ok(hold) = manager.acquire_rpc(both) {
        manager.release_rpc(hold).unwrap();
    }
    let error = manager.acquire_rpc(both).unwrap_err();
    assert_eq!(error.kind(), Some(Kind::DeadlineExceeded), "{error}");
    assert_eq!(manager.asynchronous().unwrap().held_parts().unwrap(), [1]);
    drop(held);
    assert_eq!(stand_in.parts_in_use(), 0);
}

#[test]
fn an_acquire_whose_connection_broke_is_undone_and_made_anew() {
    let stand_in = StandIn::start(&parts());
    let manager = open(&stand_in, LAYERS);
    let layer = manager.layer("l0").unwrap();
    stand_in.stage.acquires_failing.store(1, Ordering::SeqCst);
    stand_in.stage.state().request_ids.clear();
    manager
        .release_rpc(manager.acquire_rpc(layer).unwrap())
        .unwrap();
    {
        let state = stand_in.stage.state();
        // whoever answers may be another daemon: the same id would tell it nothing
        let [first, undone, again, release] = state.request_ids.as_slice() else {
            panic!("{:?}", state.request_ids);
        };
        let ids: std::collections::HashSet<_> = [first, undone, again, release].into();
        assert_eq!(ids.len(), 4);
    }
    // and that as long as the acquire may wait
    stand_in.stage.acquires_failing.store(3, Ordering::SeqCst);
    let hold = manager.acquire_rpc(layer).unwrap();
    manager.release_rpc(hold).unwrap();
    assert_eq!(stand_in.parts_in_use(), 0);
}

#[test]
fn a_lost_stream_is_taken_up_and_the_fast_path_goes_on() {
    let mut stand_in = StandIn::start(&parts());
    let manager = open(&stand_in, LAYERS);
    let layers = ["l0", "l2"].map(|name| manager.layer(name).unwrap());
    drop(manager.acquire(layers[0]).unwrap());
    stand_in.lease_event(None);
    eventually("the resumption", || stand_in.stage.state().resumed == 1);
    // the whole daemon dies; its successor has another notice page
    stand_in.kill();
    eventually("the loss", || manager.lease_state() == LeaseState::Detached);
    stand_in.renew_notice();
    stand_in.serve();
    eventually("the resumption", || {
        manager.lease_state() == LeaseState::Live
    });
    assert_eq!(stand_in.stage.state().resumed, 2);
    for _ in 0..20 {
        for layer in layers {
            drop(manager.acquire(layer).unwrap());
        }
    }
    assert_eq!(manager.report_pass(20).unwrap(), 20);
}

#[test]
fn a_lease_that_ends_ends_the_waits_with_its_reason() {
    let stand_in = StandIn::start(&parts());
    let manager = open(&stand_in, LAYERS);
    let layer = manager.layer("l2").unwrap();
    let hold = manager.acquire(manager.layer("l0").unwrap()).unwrap();
    let draining = Event::Draining(Draining { deadline_ms: 9 });
    stand_in.lease_event(Some(LeaseEvent {
        event: Some(draining),
    }));
    eventually("the drain", || {
        manager.asynchronous().unwrap().draining() == Some(9)
    });
    drop(hold);
    stand_in.withhold(&[2]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(150));
            let ended = LeaseEnded {
                reason: Reason::Terminated.into(),
            };
            let event = Some(Event::Ended(ended));
            stand_in.lease_event(Some(LeaseEvent { event }));
        });
        let begin = Instant::now();
        // part 2 may have come before it was withheld
        let error = loop {
            match manager.acquire(layer) {
                Ok(hold) => drop(hold),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, ClientError::LeaseLost { .. }), "{error}");
        assert!(
            error.to_string().contains("an operator terminated it"),
            "{error}"
        );
        assert!(begin.elapsed() < Duration::from_secs(3));
    });
}

#[test]
fn a_resumption_that_is_refused_is_a_lost_lease() {
    let stand_in = StandIn::start(&parts());
    let manager = open(&stand_in, LAYERS);
    stand_in.stage.resumes_refused.store(true, Ordering::SeqCst);
    stand_in.lease_event(None);
    eventually("the end", || manager.lease_state() == LeaseState::Ended);
    let error = manager.acquire(manager.layer("l0").unwrap()).unwrap_err();
    assert!(error.to_string().contains("its grace is over"), "{error}");
}

#[test]
fn a_daemon_that_is_gone_is_waited_for_as_long_as_the_patience() {
    let mut stand_in = StandIn::start(&parts());
    let manager = open(&stand_in, LAYERS);
    let layer = manager.layer("l2").unwrap();
    let begin = Instant::now();
    stand_in.kill();
    stand_in.withhold(&[0, 1, 2]);
    let error = loop {
        match manager.acquire(layer) {
            Ok(hold) => drop(hold),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, ClientError::DaemonLost { .. }), "{error}");
    assert!(begin.elapsed() >= Duration::from_secs(2));
}

#[test]
fn a_dropped_manager_is_closed() {
    let stand_in = StandIn::start(&parts());
    drop(open(&stand_in, LAYERS));
    assert!(stand_in.stage.state().closed);
    let stand_in = StandIn::start(&parts());
    open(&stand_in, LAYERS).close().unwrap();
    assert!(stand_in.stage.state().closed);
}
