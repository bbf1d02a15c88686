use flextensord_device::cuda::driver::StreamHandle;

use super::{Bench, handle};
use crate::ClientError;

fn begin(bench: &Bench) -> StreamHandle {
    let stream = handle(bench.one());
    bench.driver.begin_capture(stream).unwrap();
    stream
}

fn edge(error: ClientError, layer: &str) {
    match error {
        ClientError::CaptureEdge { held, .. } if held == layer => {}
        other => panic!("{other}"),
    }
}

#[test]
fn a_captured_pass_reads_right_bytes_in_every_replay() {
    let bench = Bench::new(&[&[0, 8], &[1], &[2, 3], &[4], &[5], &[6, 7]]);
    let parts: [&[u32]; 6] = [&[0, 8], &[1], &[2, 3], &[4], &[5], &[6, 7]];
    let ids: Vec<_> = bench.manager.plan().unwrap().layer_ids().collect();
    // an eager pass first, as everyone warms up
    drop(bench.manager.acquire_on(ids[0], bench.one()).unwrap());
    bench.settle();
    let stream = begin(&bench);
    for (id, parts) in ids.iter().zip(parts) {
        let _hold = bench.manager.acquire_on(*id, bench.one()).unwrap();
        parts.iter().for_each(|part| bench.read(bench.one(), *part));
    }
    let graph = bench.driver.end_capture(stream).unwrap();
    bench.settle();
    assert_eq!(bench.stand_in.parts_in_use(), 0, "nothing ran");
    for _ in 0..20 {
        bench.driver.launch(&graph, stream).unwrap();
    }
    bench.settle();
    let said = bench.said();
    assert_eq!(said.len(), 20 * 9);
    assert!(said.iter().all(|word| word.ends_with("right")), "{said:?}");
    assert_eq!(bench.stand_in.parts_in_use(), 0);
    // and eager again
    drop(bench.manager.acquire_on(ids[1], bench.two()).unwrap());
    bench.settle();
}

#[test]
fn streams_that_join_a_capture_keep_its_order() {
    let bench = Bench::new(&[&[0], &[2]]);
    // eager work before must not be waited for by the graph
    drop(
        bench
            .manager
            .acquire_on(bench.layer("l0"), bench.two())
            .unwrap(),
    );
    bench.settle();
    let stream = begin(&bench);
    let hold = bench
        .manager
        .acquire_on(bench.layer("l0"), bench.one())
        .unwrap();
    bench.read(bench.one(), 0);
    let fork = flextensord_device::cuda::event::Event::new(bench.two.context()).unwrap();
    fork.record(bench.one()).unwrap();
    fork.hold_up(bench.two()).unwrap();
    hold.release_on(bench.two()).unwrap();
    let other = bench
        .manager
        .acquire_on(bench.layer("l1"), bench.two())
        .unwrap();
    bench.read(bench.two(), 2);
    // back to where it began, which joins the other stream too
    other.release_on(bench.one()).unwrap();
    let graph = bench.driver.end_capture(stream).unwrap();
    for _ in 0..5 {
        bench.driver.launch(&graph, stream).unwrap();
    }
    bench.settle();
    assert_eq!(bench.said(), ["t0 right", "t2 right"].repeat(5));
}

#[test]
fn a_hold_from_outside_is_refused_inside() {
    let bench = Bench::new(&[&[0], &[1]]);
    let [outside, inside] = ["l0", "l1"].map(|name| bench.layer(name));
    bench.manager.hold_on(outside, bench.one()).unwrap();
    let held = bench.manager.acquire_on(inside, bench.one()).unwrap();
    bench.settle();
    let stream = begin(&bench);
    let refused = bench.manager.acquire_on(inside, bench.one());
    edge(refused.unwrap_err(), "l0, l1");
    edge(
        bench.manager.release_on(outside, bench.one()).unwrap_err(),
        "l0, l1",
    );
    edge(held.release().unwrap_err(), "l0, l1");
    let graph = bench.driver.end_capture(stream).unwrap();
    assert!(graph.is_empty());
    bench.settle();
    assert_eq!(bench.stand_in.parts_in_use(), 2, "both are held as before");
    // with the next call the dropped hold is given back
    bench.manager.release_on(outside, bench.one()).unwrap();
    bench.settle();
    assert_eq!(bench.stand_in.parts_in_use(), 0);
}

#[test]
fn a_hold_that_outlives_its_capture_is_refused_once_and_forgotten() {
    let bench = Bench::new(&[&[0], &[1]]);
    let [first, second] = ["l0", "l1"].map(|name| bench.layer(name));
    let stream = begin(&bench);
    let stale = bench.manager.acquire_on(first, bench.one()).unwrap();
    bench.driver.end_capture(stream).unwrap();
    let refused = bench.manager.acquire_on(second, bench.two());
    edge(refused.unwrap_err(), "l0");
    let hold = bench.manager.acquire_on(first, bench.one()).unwrap();
    bench.read(bench.one(), 0);
    // its count is gone: it takes nothing from the one that is held now
    stale.release().unwrap();
    bench.settle();
    assert_eq!(bench.stand_in.parts_in_use(), 1);
    drop(hold);
    bench.settle();
    assert_eq!(bench.said(), ["t0 right"]);
    assert_eq!(bench.stand_in.parts_in_use(), 0);
    // one capture after the other, with the hold's own end as the first call
    begin(&bench);
    let stale = bench.manager.acquire_on(first, bench.one()).unwrap();
    bench.driver.end_capture(stream).unwrap();
    begin(&bench);
    edge(stale.release().unwrap_err(), "l0");
    drop(bench.manager.acquire_on(second, bench.one()).unwrap());
    assert_eq!(bench.driver.end_capture(stream).unwrap().len(), 2);
}

#[test]
fn a_capture_that_was_made_invalid_takes_its_holds_with_it() {
    let bench = Bench::new(&[&[0], &[1]]);
    let stream = begin(&bench);
    let stale = bench
        .manager
        .acquire_on(bench.layer("l0"), bench.one())
        .unwrap();
    assert!(bench.driver.run_once(stream, |_| ()).is_err());
    let refused = bench.manager.acquire_on(bench.layer("l1"), bench.one());
    assert!(refused.unwrap_err().to_string().contains("made invalid"));
    assert!(bench.driver.end_capture(stream).is_err());
    drop(stale);
    drop(
        bench
            .manager
            .acquire_on(bench.layer("l0"), bench.one())
            .unwrap(),
    );
    bench.settle();
    assert_eq!(bench.stand_in.parts_in_use(), 0);
    assert!(
        bench
            .manager
            .asynchronous()
            .unwrap()
            .held_parts()
            .unwrap()
            .is_empty()
    );
}

#[test]
fn the_host_cannot_read_what_a_capture_holds() {
    let bench = Bench::new(&[&[0]]);
    let stream = begin(&bench);
    let hold = bench
        .manager
        .acquire_on(bench.layer("l0"), bench.one())
        .unwrap();
    let error = hold.tensor("t0").unwrap().to_vec().unwrap_err();
    assert!(matches!(error, ClientError::State(_)), "{error}");
    drop(hold);
    assert_eq!(bench.driver.end_capture(stream).unwrap().len(), 2);
}
