use std::{
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use super::{
    Access, DeviceAccess, Driver as _, FakeDriver, Mapping, Outcome, PAGE, Pinning, UNIT, at, code,
    copy_in, driver, host, mapped, memfd, read, settle,
};

fn register(driver: &FakeDriver, address: usize, bytes: usize) -> Outcome<()> {
    // SAFETY: every test keeps its memory until the driver has ended.
    unsafe { driver.register(address, bytes, true) }
}

fn unregister(driver: &FakeDriver, address: usize) -> Outcome<()> {
    // SAFETY: nothing uses the range in these tests.
    unsafe { driver.unregister(address) }
}

#[test]
fn pages_are_registered_once() {
    let (memory, driver) = (host(4 * PAGE), driver(""));
    let start = at(&memory);
    register(&driver, start + 8, PAGE - 8).unwrap();
    assert_eq!(code(register(&driver, start, 8)), Some(712));
    assert_eq!(code(register(&driver, start, 2 * PAGE)), Some(712));
    register(&driver, start + PAGE, 1).unwrap();
    assert_eq!(code(register(&driver, start + 2 * PAGE - 1, 2)), Some(712));
    assert_eq!(driver.counts().registered_bytes, PAGE - 8 + 1);
}

#[test]
fn nothing_and_what_is_not_writable_are_not_registered() {
    let driver = driver("");
    let file = memfd::create("fake-test", PAGE as u64).unwrap();
    let memory = Mapping::new(file.as_fd(), PAGE, Access::Read).unwrap();
    let start = memory.address(0, PAGE).unwrap();
    assert_eq!(code(register(&driver, start, PAGE)), Some(1));
    assert_eq!(code(register(&driver, start, 0)), Some(1));
    assert_eq!(code(register(&driver, usize::MAX - 1, 1)), Some(1));
    assert_eq!(code(register(&driver, PAGE, PAGE)), Some(1));
}

#[test]
fn only_the_beginning_of_a_registration_takes_it_back() {
    let (memory, driver) = (host(2 * PAGE), driver(""));
    let start = at(&memory);
    register(&driver, start, 2 * PAGE).unwrap();
    assert_eq!(code(unregister(&driver, start + 8)), Some(713));
    assert_eq!(code(unregister(&driver, start + PAGE)), Some(713));
    unregister(&driver, start).unwrap();
    assert_eq!(code(unregister(&driver, start)), Some(713));
    let both = [
        (start, 2 * PAGE, Pinning::Register),
        (start, 2 * PAGE, Pinning::Unregister),
    ];
    assert_eq!(driver.counts().pinnings, both);
}

#[test]
fn only_registered_memory_has_a_device_address() {
    let (memory, driver) = (host(2 * PAGE), driver(""));
    let start = at(&memory);
    assert_eq!(code(driver.device_address(start)), Some(1));
    register(&driver, start, PAGE).unwrap();
    assert_eq!(driver.device_address(start + 8), Ok(start as u64 + 8));
    assert_eq!(code(driver.device_address(start + PAGE)), Some(1));
    unregister(&driver, start).unwrap();
    // SAFETY: the memory outlives the driver.
    unsafe { driver.register(start, PAGE, false).unwrap() };
    assert_eq!(code(driver.device_address(start)), Some(1));
}

#[test]
fn the_same_size_is_registered_two_hundred_times() {
    let (memory, driver) = (host(4 * PAGE), driver(""));
    for _ in 0..200 {
        register(&driver, at(&memory), 4 * PAGE).unwrap();
        unregister(&driver, at(&memory)).unwrap();
    }
    let counts = driver.counts();
    assert_eq!((counts.register_calls, counts.registered_bytes), (200, 0));
}

#[test]
fn a_copy_across_registrations_is_refused_and_one_from_plain_memory_works() {
    let (memory, driver) = (host(3 * PAGE), driver(""));
    let (_, target) = mapped(&driver, UNIT, DeviceAccess::ReadWrite);
    let stream = driver.create_stream().unwrap();
    let start = at(&memory);
    memory.write(PAGE - 2, &[1, 2, 3, 4]).unwrap();
    copy_in(&driver, target, start + PAGE - 2, 4, stream).unwrap();
    settle(&driver, stream);
    assert_eq!(read(&driver, target, 4), [1, 2, 3, 4]);
    register(&driver, start, PAGE).unwrap();
    // one in a registration, the other in none
    let straddling = copy_in(&driver, target, start + PAGE - 2, 4, stream);
    assert_eq!(code(straddling), Some(1));
    register(&driver, start + PAGE, PAGE).unwrap();
    let straddling = copy_in(&driver, target, start + PAGE - 2, 4, stream);
    assert_eq!(code(straddling), Some(1));
    // SAFETY: refused, or done before the memory goes.
    let out = unsafe { driver.copy_out(start + PAGE - 2, target, 4, stream) };
    assert_eq!(code(out), Some(1));
    copy_in(&driver, target, start + PAGE, 4, stream).unwrap();
    settle(&driver, stream);
    assert_eq!(read(&driver, target, 2), [3, 4]);
}

#[test]
fn a_call_for_more_than_the_limit_is_out_of_memory() {
    let (memory, driver) = (host(3 * PAGE), driver("register_limit=8KiB"));
    assert_eq!(code(register(&driver, at(&memory), 3 * PAGE)), Some(2));
    register(&driver, at(&memory), 2 * PAGE).unwrap();
    driver.faults().limit_register(None);
    register(&driver, at(&memory) + 2 * PAGE, PAGE).unwrap();
    assert_eq!(driver.counts().register_calls, 3);
}

#[test]
fn the_nth_call_from_now_fails_once() {
    let (memory, driver) = (host(4 * PAGE), driver("register_fail=2:304"));
    let page = |index: usize| at(&memory) + index * PAGE;
    register(&driver, page(0), PAGE).unwrap();
    assert_eq!(code(register(&driver, page(1), PAGE)), Some(304));
    register(&driver, page(1), PAGE).unwrap();
    driver.faults().fail_register(1, 999);
    assert_eq!(code(register(&driver, page(2), PAGE)), Some(999));
    driver.faults().fail_unregister(2, 999);
    unregister(&driver, page(0)).unwrap();
    assert_eq!(code(unregister(&driver, page(1))), Some(999));
    assert_eq!(driver.counts().registered_bytes, PAGE);
    unregister(&driver, page(1)).unwrap();
    driver.faults().refuse_register(Some(1));
    assert_eq!(code(register(&driver, page(0), PAGE)), Some(1));
}

#[test]
fn a_slow_register_takes_its_time() {
    let (memory, driver) = (host(PAGE), driver("register_ms=30"));
    let begun = Instant::now();
    register(&driver, at(&memory), PAGE).unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(30));
}

#[test]
fn a_gpu_that_registers_nothing_says_so() {
    let (memory, driver) = (host(PAGE), driver("attribute.HostRegister=0"));
    assert_eq!(code(register(&driver, at(&memory), PAGE)), Some(801));
}
