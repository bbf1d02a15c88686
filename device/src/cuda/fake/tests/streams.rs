use std::{
    sync::atomic::Ordering::SeqCst,
    thread,
    time::{Duration, Instant},
};

use super::{
    DeviceAccess, Driver as _, GPU, PAGE, SOON, StreamHandle, StreamOp, UNIT, at, batch, broken,
    code, copy_in, driver, host, is_done, mapped, passed, pin, read, record, settle, wait_event,
    wait_for,
};

#[test]
fn steps_run_in_order_and_a_wait_holds_those_behind_it() {
    let (page, driver) = (host(PAGE), driver(""));
    let words = pin(&driver, &page);
    let stream = driver.create_stream().unwrap();
    let ops = [
        wait_for(words, 1),
        StreamOp::Write32 {
            address: words,
            value: 2,
        },
        StreamOp::Write64 {
            address: words + 8,
            value: (5 << 32) | 1,
        },
    ];
    batch(&driver, stream, &ops).unwrap();
    thread::sleep(Duration::from_millis(20));
    assert_eq!(is_done(&driver, stream), Ok(false));
    assert_eq!(page.load64(8), Ok(0));
    page.word32(0).unwrap().store(1, SeqCst);
    settle(&driver, stream);
    assert_eq!(page.load32(0), Ok(2));
    assert_eq!(page.load64(8), Ok((5 << 32) | 1));
}

#[test]
fn words_that_no_gpu_could_reach_are_refused_and_nothing_is_queued() {
    let (page, driver) = (host(PAGE), driver(""));
    let stream = driver.create_stream().unwrap();
    assert_eq!(
        code(batch(&driver, stream, &[wait_for(at(&page) as u64, 0)])),
        Some(1)
    );
    let words = pin(&driver, &page);
    assert_eq!(
        code(batch(&driver, stream, &[wait_for(words + 2, 0)])),
        Some(1)
    );
    assert_eq!(code(batch(&driver, stream, &[])), Some(1));
    assert_eq!(
        code(batch(&driver, stream, &[wait_for(words, 0); 256])),
        Some(1)
    );
    let write = StreamOp::Write32 {
        address: words,
        value: 1,
    };
    assert_eq!(
        code(batch(&driver, stream, &[write, wait_for(0, 0)])),
        Some(1)
    );
    settle(&driver, stream);
    assert_eq!(page.load32(0), Ok(0));
    batch(&driver, stream, &[write; 255]).unwrap();
    driver
        .faults()
        .set("attribute.StreamMemoryOps64", "0")
        .unwrap();
    let wide = StreamOp::Write64 {
        address: words,
        value: 1,
    };
    assert_eq!(code(batch(&driver, stream, &[wide])), Some(801));
}

#[test]
fn access_that_is_taken_while_a_stream_waits_breaks_the_kernel_behind_the_wait() {
    let (page, driver) = (host(PAGE), driver(""));
    let words = pin(&driver, &page);
    let (_, ring) = mapped(&driver, UNIT, DeviceAccess::Read);
    let stream = driver.create_stream().unwrap();
    batch(&driver, stream, &[wait_for(words, 1)]).unwrap();
    let kernel = move |kernel: &super::super::Kernel<'_>| {
        let _ = kernel.read(ring, &mut [0; 8]);
    };
    driver.run(stream, kernel).unwrap();
    // SAFETY: mapped; that a kernel needs it is the point.
    unsafe {
        driver
            .set_access(ring, UNIT, GPU, DeviceAccess::None)
            .unwrap()
    };
    assert_eq!(is_done(&driver, stream), Ok(false));
    page.word32(0).unwrap().store(1, SeqCst);
    assert_eq!(broken(&driver, stream), Some(700));
}

#[test]
fn a_broken_context_ends_waits_and_writes_nothing_more() {
    let (page, driver) = (host(PAGE), driver(""));
    let words = pin(&driver, &page);
    let stream = driver.create_stream().unwrap();
    let write = StreamOp::Write32 {
        address: words + 4,
        value: 1,
    };
    batch(&driver, stream, &[wait_for(words, 1)]).unwrap();
    batch(&driver, stream, &[write]).unwrap();
    driver.break_context(GPU, 719).unwrap();
    driver.break_context(GPU, 700).unwrap();
    assert_eq!(code(is_done(&driver, stream)), Some(719));
    assert_eq!(code(batch(&driver, stream, &[write])), Some(719));
    drop(driver);
    assert_eq!(page.load32(4), Ok(0));
}

#[test]
fn an_event_orders_streams_and_passes_when_reached() {
    let (page, driver) = (host(PAGE), driver(""));
    let words = pin(&driver, &page);
    let (first, second) = (
        driver.create_stream().unwrap(),
        driver.create_stream().unwrap(),
    );
    let (begin, end) = (
        driver.create_event(true).unwrap(),
        driver.create_event(true).unwrap(),
    );
    assert_eq!(passed(&driver, end), Ok(true));
    wait_event(&driver, second, end).unwrap();
    settle(&driver, second);
    record(&driver, begin, first).unwrap();
    batch(&driver, first, &[wait_for(words, 1)]).unwrap();
    record(&driver, end, first).unwrap();
    wait_event(&driver, second, end).unwrap();
    let write = StreamOp::Write32 {
        address: words + 4,
        value: 1,
    };
    batch(&driver, second, &[write]).unwrap();
    thread::sleep(Duration::from_millis(20));
    assert_eq!(passed(&driver, end), Ok(false));
    assert_eq!(page.load32(4), Ok(0));
    // SAFETY: both are live.
    unsafe { assert_eq!(code(driver.elapsed_ms(begin, end)), Some(600)) };
    page.word32(0).unwrap().store(1, SeqCst);
    settle(&driver, second);
    assert_eq!(page.load32(4), Ok(1));
    // SAFETY: all are live until destroyed.
    unsafe {
        assert!(driver.elapsed_ms(begin, end).unwrap() >= 19.0);
        let plain = driver.create_event(false).unwrap();
        assert_eq!(code(driver.elapsed_ms(begin, plain)), Some(400));
        driver.destroy_event(begin).unwrap();
        assert_eq!(code(driver.has_passed(begin)), Some(400));
    }
}

#[test]
fn what_a_destroyed_stream_has_queued_still_runs() {
    let (page, driver) = (host(PAGE), driver(""));
    let words = pin(&driver, &page);
    let stream = driver.create_stream().unwrap();
    let write = StreamOp::Write32 {
        address: words,
        value: 2,
    };
    batch(&driver, stream, &[wait_for(words, 1), write]).unwrap();
    // SAFETY: used again only to see that it is refused.
    unsafe { driver.destroy_stream(stream).unwrap() };
    assert_eq!(code(is_done(&driver, stream)), Some(400));
    page.word32(0).unwrap().store(1, SeqCst);
    let begun = Instant::now();
    while page.load32(0) != Ok(2) {
        assert!(begun.elapsed() < SOON);
        thread::yield_now();
    }
}

#[test]
fn the_implicit_stream_has_three_names() {
    let (page, driver) = (host(PAGE), driver(""));
    let words = pin(&driver, &page);
    batch(&driver, StreamHandle(0), &[wait_for(words, 1)]).unwrap();
    assert_eq!(is_done(&driver, StreamHandle(2)), Ok(false));
    page.word32(0).unwrap().store(1, SeqCst);
    settle(&driver, StreamHandle(1));
}

#[test]
fn held_copies_move_when_told() {
    let (source, driver) = (host(PAGE), driver(""));
    let (_, target) = mapped(&driver, UNIT, DeviceAccess::ReadWrite);
    let stream = driver.create_stream().unwrap();
    source.write(0, &[1, 2]).unwrap();
    driver.hold_copies();
    for byte in 0..2 {
        copy_in(
            &driver,
            target + byte,
            at(&source) + 1 - usize::from(byte == 0),
            1,
            stream,
        )
        .unwrap();
    }
    thread::sleep(Duration::from_millis(10));
    assert_eq!(driver.counts().copies_done, 0);
    assert_eq!(read(&driver, target, 2), [0, 0]);
    driver.let_copies_pass(1);
    let begun = Instant::now();
    while driver.counts().copies_done < 1 {
        assert!(begun.elapsed() < SOON);
    }
    assert_eq!(is_done(&driver, stream), Ok(false));
    assert_eq!(read(&driver, target, 2), [1, 0]);
    driver.stop_holding_copies();
    settle(&driver, stream);
    assert_eq!(read(&driver, target, 2), [1, 2]);
}

#[test]
fn copies_go_both_ways_over_many_strides() {
    let bytes = 3 << 20;
    let (source, back) = (host(bytes), host(bytes));
    let driver = driver("");
    let (_, device) = mapped(&driver, 2 * UNIT, DeviceAccess::ReadWrite);
    let pattern: Vec<u8> = (0..=250).cycle().take(bytes - 5).collect();
    source.write(5, &pattern).unwrap();
    let stream = driver.create_stream().unwrap();
    copy_in(&driver, device + 3, at(&source), bytes, stream).unwrap();
    // SAFETY: both sides outlive the driver's work.
    unsafe {
        driver
            .copy_out(at(&back), device + 3, bytes, stream)
            .unwrap()
    };
    settle(&driver, stream);
    assert_eq!(back.equals(5, &pattern), Ok(true));
    assert_eq!(code(copy_in(&driver, 64, at(&source), 8, stream)), Some(1));
}

#[test]
fn copies_keep_to_the_bandwidth_together() {
    let (source, driver) = (host(1 << 20), driver("bandwidth=16MiB"));
    let (_, target) = mapped(&driver, UNIT, DeviceAccess::ReadWrite);
    let streams = [(); 2].map(|()| driver.create_stream().unwrap());
    let begun = Instant::now();
    for stream in streams {
        copy_in(&driver, target, at(&source), 1 << 20, stream).unwrap();
    }
    for stream in streams {
        settle(&driver, stream);
    }
    assert!(begun.elapsed() >= Duration::from_millis(120));
}

#[test]
fn the_nth_copy_breaks_the_context() {
    let (source, driver) = (host(PAGE), driver("break_at_copy=3:700"));
    let (_, target) = mapped(&driver, UNIT, DeviceAccess::ReadWrite);
    let stream = driver.create_stream().unwrap();
    for _ in 0..2 {
        copy_in(&driver, target, at(&source), PAGE, stream).unwrap();
        settle(&driver, stream);
    }
    copy_in(&driver, target, at(&source), PAGE, stream).unwrap();
    assert_eq!(broken(&driver, stream), Some(700));
    assert_eq!(driver.counts().copies_done, 2);
    assert_eq!(
        code(copy_in(&driver, target, at(&source), PAGE, stream)),
        Some(700)
    );
}

#[test]
fn a_panic_in_a_kernel_is_a_failed_launch() {
    let driver = driver("");
    let stream = driver.create_stream().unwrap();
    driver
        .run(stream, |_| panic!("asked for by the test"))
        .unwrap();
    assert_eq!(broken(&driver, stream), Some(719));
}

#[test]
fn a_kernel_writes_what_a_copy_reads_back() {
    let (back, driver) = (host(PAGE), driver(""));
    let (_, device) = mapped(&driver, UNIT, DeviceAccess::ReadWrite);
    let stream = driver.create_stream().unwrap();
    let work = move |kernel: &super::super::Kernel<'_>| kernel.write(device, &[4, 5]).unwrap();
    driver.run(stream, work).unwrap();
    // SAFETY: both sides outlive the driver's work.
    unsafe { driver.copy_out(at(&back), device, 2, stream).unwrap() };
    settle(&driver, stream);
    assert_eq!(back.equals(0, &[4, 5]), Ok(true));
}

#[test]
fn dropping_the_driver_ends_whatever_its_threads_wait_for() {
    let (page, driver) = (host(PAGE), driver("bandwidth=1KiB"));
    let words = pin(&driver, &page);
    let (_, target) = mapped(&driver, UNIT, DeviceAccess::ReadWrite);
    let streams = [(); 4].map(|()| driver.create_stream().unwrap());
    let event = driver.create_event(false).unwrap();
    batch(&driver, streams[0], &[wait_for(words, 1)]).unwrap();
    record(&driver, event, streams[0]).unwrap();
    wait_event(&driver, streams[1], event).unwrap();
    copy_in(&driver, target, at(&page), PAGE, streams[2]).unwrap();
    thread::sleep(Duration::from_millis(10));
    driver.hold_copies();
    copy_in(&driver, target, at(&page), PAGE, streams[3]).unwrap();
    // SAFETY: not used again.
    unsafe { driver.destroy_stream(streams[0]).unwrap() };
    thread::sleep(Duration::from_millis(10));
    let state = std::sync::Arc::downgrade(&driver.shared);
    let begun = Instant::now();
    drop(driver);
    // the bound is 100 ms; a machine under load adds its own
    assert!(begun.elapsed() < Duration::from_millis(250));
    assert_eq!(state.strong_count(), 0);
}
