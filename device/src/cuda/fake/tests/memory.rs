use std::{
    os::fd::{AsFd as _, OwnedFd},
    time::{Duration, Instant},
};

use super::{
    AllocationHandle, DeviceAccess, Driver as _, FakeDriver, GPU, Ordinal, Outcome, UNIT, broken,
    code, copy_in, driver, map, mapped, read, settle, unmap,
};

fn export(driver: &FakeDriver, handle: AllocationHandle) -> Outcome<OwnedFd> {
    // SAFETY: every test exports live handles.
    unsafe { driver.export(handle) }
}

fn release(driver: &FakeDriver, handle: AllocationHandle) {
    // SAFETY: not used again.
    unsafe { driver.release(handle).unwrap() }
}

fn used(driver: &FakeDriver) -> u64 {
    let info = driver.memory_info().unwrap();
    info.total - info.free
}

#[test]
fn what_one_process_writes_another_reads_and_may_not_write() {
    let (daemon, client) = (driver("seed=x"), driver("gpus=2,seed=x,visible=1,0"));
    let (handle, ours) = mapped(&daemon, UNIT, DeviceAccess::ReadWrite);
    let given = export(&daemon, handle).unwrap();
    let imported = client.import(given.as_fd()).unwrap();
    let theirs = client.reserve(UNIT).unwrap();
    // SAFETY: just reserved; a live handle.
    unsafe {
        client.map(theirs, UNIT, imported).unwrap();
        let one = Ordinal(1);
        client
            .set_access(theirs, UNIT, one, DeviceAccess::Read)
            .unwrap();
        client.push(client.retain_primary(one).unwrap()).unwrap();
    }
    let stream = daemon.create_stream().unwrap();
    let bytes = [7_u8; 16];
    copy_in(&daemon, ours, bytes.as_ptr().addr(), 16, stream).unwrap();
    settle(&daemon, stream);
    assert_eq!(read(&client, theirs, 16), bytes);
    let stream = client.create_stream().unwrap();
    copy_in(&client, theirs, bytes.as_ptr().addr(), 16, stream).unwrap();
    assert_eq!(broken(&client, stream), Some(700));
    settle(&daemon, daemon.create_stream().unwrap());
}

#[test]
fn memory_counts_until_its_last_holder_in_any_process_is_gone() {
    let (daemon, client) = (driver("memory=8MiB,seed=x"), driver("memory=8MiB,seed=x"));
    let (handle, ours) = mapped(&daemon, UNIT, DeviceAccess::ReadWrite);
    let given = export(&daemon, handle).unwrap();
    assert_eq!(used(&daemon), UNIT);
    let imported = client.import(given.as_fd()).unwrap();
    assert_eq!(used(&client), UNIT);
    let theirs = map(&client, imported, UNIT, DeviceAccess::Read);
    release(&client, imported);
    release(&daemon, handle);
    assert_eq!(daemon.counts().live_allocations, 1);
    unmap(&daemon, ours, UNIT);
    assert_eq!(daemon.counts().live_allocations, 0);
    drop(given);
    assert_eq!(used(&daemon), UNIT);
    assert_eq!(code(daemon.create(GPU, 4 * UNIT)), Some(2));
    unmap(&client, theirs, UNIT);
    assert_eq!((used(&daemon), used(&client)), (0, 0));
    daemon.create(GPU, 4 * UNIT).unwrap();
}

#[test]
fn a_descriptor_alone_keeps_memory_and_brings_it_back() {
    let driver = driver("memory=8MiB");
    let (handle, address) = mapped(&driver, UNIT, DeviceAccess::ReadWrite);
    let stream = driver.create_stream().unwrap();
    // SAFETY: the range is mapped until the fill is done.
    unsafe { driver.fill(address, 9, 64, stream).unwrap() };
    settle(&driver, stream);
    let given = export(&driver, handle).unwrap();
    release(&driver, handle);
    unmap(&driver, address, UNIT);
    assert_eq!(used(&driver), UNIT);
    let again = driver.import(given.as_fd()).unwrap();
    let address = map(&driver, again, UNIT, DeviceAccess::Read);
    assert_eq!(read(&driver, address, 64), [9; 64]);
    drop(given);
    assert_eq!(used(&driver), UNIT);
}

#[test]
fn a_successor_counts_what_it_takes_over() {
    let daemon = driver("memory=8MiB,seed=x");
    let handle = daemon.create(GPU, UNIT).unwrap();
    let given = export(&daemon, handle).unwrap();
    drop(daemon);
    let successor = driver("memory=8MiB,seed=x");
    assert_eq!(used(&successor), 0);
    successor.import(given.as_fd()).unwrap();
    assert_eq!(used(&successor), UNIT);
}

#[test]
fn import_is_refused_twice_and_to_the_maker_where_asked() {
    let daemon = driver("seed=x,import_own=refuse");
    let client = driver("seed=x,import_twice=refuse");
    let handle = daemon.create(GPU, UNIT).unwrap();
    let given = export(&daemon, handle).unwrap();
    assert_eq!(code(daemon.import(given.as_fd())), Some(201));
    let first = client.import(given.as_fd()).unwrap();
    assert_eq!(code(client.import(given.as_fd())), Some(1));
    release(&client, first);
    client.import(given.as_fd()).unwrap();
    client.faults().refuse_import_twice(None);
    client.import(given.as_fd()).unwrap();
    client.faults().refuse_import(Some(999));
    assert_eq!(code(client.import(given.as_fd())), Some(999));
    daemon.faults().refuse_export(Some(801));
    assert_eq!(code(export(&daemon, handle)), Some(801));
}

#[test]
fn a_descriptor_of_something_else_is_not_imported() {
    let (one, other) = (driver("seed=a"), driver("seed=b"));
    let foreign = crate::memfd::create("foreign", UNIT).unwrap();
    assert_eq!(code(one.import(foreign.as_fd())), Some(1));
    let handle = other.create(GPU, UNIT).unwrap();
    let given = export(&other, handle).unwrap();
    assert_eq!(code(one.import(given.as_fd())), Some(101));
    assert_eq!(one.counts().live_allocations, 0);
}

#[test]
fn sizes_and_ranges_must_fit() {
    let driver = driver("memory=8MiB");
    assert_eq!(driver.granularity(GPU), Ok(UNIT));
    for bytes in [0, 1, UNIT + 1] {
        assert_eq!(code(driver.create(GPU, bytes)), Some(1));
        assert_eq!(code(driver.reserve(bytes)), Some(1));
    }
    assert_eq!(code(driver.create(GPU, 5 * UNIT)), Some(2));
    let handle = driver.create(GPU, UNIT).unwrap();
    let address = driver.reserve(2 * UNIT).unwrap();
    assert_eq!(address % UNIT, 0);
    // SAFETY: what is not as the contract says is refused, which is the point.
    unsafe {
        assert_eq!(code(driver.map(address, 2 * UNIT, handle)), Some(1));
        assert_eq!(code(driver.map(address + 2 * UNIT, UNIT, handle)), Some(1));
        driver.map(address, UNIT, handle).unwrap();
        assert_eq!(code(driver.map(address, UNIT, handle)), Some(1));
        driver.map(address + UNIT, UNIT, handle).unwrap();
        assert_eq!(code(driver.unreserve(address, 2 * UNIT)), Some(1));
        assert_eq!(code(driver.unmap(address, UNIT / 2)), Some(1));
        let half = driver.set_access(address, UNIT / 2, GPU, DeviceAccess::Read);
        assert_eq!(code(half), Some(1));
        driver.unmap(address, 2 * UNIT).unwrap();
        driver.unreserve(address, 2 * UNIT).unwrap();
        assert_eq!(code(driver.unreserve(address, 2 * UNIT)), Some(1));
        driver.release(handle).unwrap();
        assert_eq!(code(driver.release(handle)), Some(400));
    }
}

#[test]
fn a_kernel_that_reads_without_access_breaks_the_context_for_good() {
    let driver = driver("");
    let (handle, address) = mapped(&driver, UNIT, DeviceAccess::Read);
    let stream = driver.create_stream().unwrap();
    // SAFETY: mapped, and nothing runs.
    unsafe {
        driver
            .set_access(address, UNIT, GPU, DeviceAccess::None)
            .unwrap()
    };
    let work = move |kernel: &super::super::Kernel<'_>| {
        assert!(kernel.read(address, &mut [0; 4]).is_err());
    };
    driver.run(stream, work).unwrap();
    assert_eq!(broken(&driver, stream), Some(700));
    assert_eq!(code(driver.memory_info()), Some(700));
    assert_eq!(code(driver.create(GPU, UNIT)), Some(700));
    assert_eq!(code(driver.create_stream()), Some(700));
    assert_eq!(code(driver.create_event(true)), Some(700));
    assert_eq!(code(driver.retain_primary(GPU)), Some(700));
    assert_eq!(code(export(&driver, handle)), Some(700));
    // SAFETY: refused.
    unsafe {
        assert_eq!(code(driver.register(0, 1, true)), Some(700));
        assert_eq!(code(driver.unregister(0)), Some(700));
        assert_eq!(code(driver.unmap(address, UNIT)), Some(700));
    }
    assert_eq!(driver.count(), Ok(1));
}

#[test]
fn the_nth_creation_is_out_of_memory_and_the_next_is_not() {
    let driver = driver("out_of_memory_at_create=2");
    driver.create(GPU, UNIT).unwrap();
    let refused = driver.create(GPU, UNIT).unwrap_err();
    assert!(refused.is_out_of_memory() && !refused.is_sticky());
    driver.create(GPU, UNIT).unwrap();
}

#[test]
fn a_slow_release_takes_its_time() {
    let driver = driver("release_ms=30");
    let handle = driver.create(GPU, UNIT).unwrap();
    let begun = Instant::now();
    release(&driver, handle);
    assert!(begun.elapsed() >= Duration::from_millis(30));
}

#[test]
fn a_gpu_without_descriptors_makes_no_memory() {
    let driver = driver("attribute.PosixDescriptors=0");
    assert_eq!(code(driver.create(GPU, UNIT)), Some(801));
}
