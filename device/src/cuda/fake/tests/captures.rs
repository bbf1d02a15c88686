use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use super::{
    Capture, DeviceAccess, Driver as _, PAGE, StreamHandle, StreamOp, UNIT, at, batch, capture_of,
    code, copy_in, driver, host, is_done, mapped, passed, pin, read, record, settle, wait_event,
    wait_for,
};

#[test]
fn what_is_captured_runs_at_every_launch_and_not_before() {
    let (page, driver) = (host(PAGE), driver(""));
    let words = pin(&driver, &page);
    let (_, target) = mapped(&driver, UNIT, DeviceAccess::ReadWrite);
    let stream = driver.create_stream().unwrap();
    let runs = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&runs);
    assert_eq!(capture_of(&driver, stream), Capture::None);
    driver.begin_capture(stream).unwrap();
    assert!(matches!(capture_of(&driver, stream), Capture::Active(_)));
    let write = StreamOp::Write32 {
        address: words,
        value: 0,
    };
    batch(&driver, stream, &[wait_for(words, 1), write]).unwrap();
    copy_in(&driver, target, at(&page) + 8, 1, stream).unwrap();
    let count = move |_: &super::super::Kernel<'_>| {
        counted.fetch_add(1, SeqCst);
    };
    driver.run(stream, count).unwrap();
    let graph = driver.end_capture(stream).unwrap();
    assert_eq!(
        (graph.len(), capture_of(&driver, stream)),
        (3, Capture::None)
    );
    settle(&driver, stream);
    page.write(8, &[6]).unwrap();
    for launch in 1..=3 {
        driver.launch(&graph, stream).unwrap();
        thread::sleep(Duration::from_millis(2));
        assert_eq!(runs.load(SeqCst), launch - 1);
        page.word32(0).unwrap().store(1, SeqCst);
        settle(&driver, stream);
        assert_eq!((runs.load(SeqCst), page.load32(0)), (launch, Ok(0)));
    }
    assert_eq!(read(&driver, target, 1), [6]);
}

#[test]
fn an_event_from_outside_makes_a_capture_invalid() {
    let driver = driver("");
    let (stream, other) = (
        driver.create_stream().unwrap(),
        driver.create_stream().unwrap(),
    );
    let event = driver.create_event(false).unwrap();
    record(&driver, event, other).unwrap();
    driver.begin_capture(stream).unwrap();
    assert_eq!(code(wait_event(&driver, stream, event)), Some(905));
    assert_eq!(capture_of(&driver, stream), Capture::Invalidated);
    assert_eq!(code(record(&driver, event, stream)), Some(901));
    assert_eq!(code(driver.end_capture(stream)), Some(901));
    assert_eq!(capture_of(&driver, stream), Capture::None);
    settle(&driver, stream);
}

#[test]
fn another_stream_joins_through_an_event_and_must_be_waited_for() {
    let driver = driver("");
    let (stream, other) = (
        driver.create_stream().unwrap(),
        driver.create_stream().unwrap(),
    );
    let (fork, join) = (
        driver.create_event(false).unwrap(),
        driver.create_event(false).unwrap(),
    );
    for joined in [true, false] {
        driver.begin_capture(stream).unwrap();
        record(&driver, fork, stream).unwrap();
        wait_event(&driver, other, fork).unwrap();
        assert_eq!(capture_of(&driver, other), capture_of(&driver, stream));
        driver.run(other, |_| {}).unwrap();
        if joined {
            record(&driver, join, other).unwrap();
            wait_event(&driver, stream, join).unwrap();
            assert_eq!(driver.end_capture(stream).unwrap().len(), 1);
        } else {
            assert_eq!(code(driver.end_capture(stream)), Some(904));
        }
        assert_eq!(capture_of(&driver, other), Capture::None);
    }
    driver.begin_capture(stream).unwrap();
    record(&driver, fork, stream).unwrap();
    wait_event(&driver, other, fork).unwrap();
    assert_eq!(code(driver.end_capture(other)), Some(903));
    assert_eq!(code(driver.end_capture(stream)), Some(901));
}

#[test]
fn captures_do_not_merge() {
    let driver = driver("");
    let streams = [(); 2].map(|()| driver.create_stream().unwrap());
    let event = driver.create_event(false).unwrap();
    for stream in streams {
        driver.begin_capture(stream).unwrap();
    }
    record(&driver, event, streams[0]).unwrap();
    assert_eq!(code(wait_event(&driver, streams[1], event)), Some(902));
    driver.end_capture(streams[0]).unwrap();
    assert_eq!(code(driver.end_capture(streams[1])), Some(901));
}

#[test]
fn a_query_ends_a_capture() {
    let driver = driver("");
    let stream = driver.create_stream().unwrap();
    driver.begin_capture(stream).unwrap();
    assert_eq!(code(is_done(&driver, stream)), Some(900));
    assert_eq!(code(driver.end_capture(stream)), Some(901));
    let event = driver.create_event(false).unwrap();
    driver.begin_capture(stream).unwrap();
    record(&driver, event, stream).unwrap();
    assert_eq!(code(passed(&driver, event)), Some(907));
    assert_eq!(code(driver.end_capture(stream)), Some(901));
    // recorded outside again, it is an event like any other
    record(&driver, event, stream).unwrap();
    settle(&driver, stream);
    assert_eq!(passed(&driver, event), Ok(true));
}

#[test]
fn what_cannot_be_captured_says_so() {
    let driver = driver("");
    let stream = driver.create_stream().unwrap();
    assert_eq!(code(driver.begin_capture(StreamHandle(0))), Some(900));
    assert_eq!(code(driver.end_capture(stream)), Some(401));
    driver.begin_capture(stream).unwrap();
    assert_eq!(code(driver.begin_capture(stream)), Some(401));
    assert_eq!(code(driver.run_once(stream, |_| {})), Some(900));
    assert_eq!(code(driver.end_capture(stream)), Some(901));
}
