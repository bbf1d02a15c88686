//! The rules of the fake, one test each.

mod captures;
mod memory;
mod pages;
mod settings;
mod streams;

use std::{sync::Arc, time::Duration};

use super::{
    super::driver::{
        AllocationHandle, Capture, DeviceAccess, DeviceAddress, Driver, EventHandle, Ordinal,
        Outcome, StreamHandle, StreamOp,
    },
    FakeDriver, FakeSettings, PAGE, Pinning,
};
use crate::{
    mapping::{Access, Mapping},
    memfd,
};

const UNIT: u64 = 2 << 20;
const GPU: Ordinal = Ordinal(0);
const SOON: Duration = Duration::from_secs(10);

/// A driver with the context of GPU 0 current on this thread.
fn driver(text: &str) -> Arc<FakeDriver> {
    let driver = FakeDriver::new(FakeSettings::from_text(text).unwrap());
    let context = driver.retain_primary(GPU).unwrap();
    // SAFETY: retained until the driver goes.
    unsafe { driver.push(context).unwrap() };
    driver
}

fn code<T: std::fmt::Debug>(outcome: Outcome<T>) -> Option<u32> {
    outcome.unwrap_err().code()
}

/// Host memory that others could share. It must be declared before the driver, whose
/// streams end when that is dropped.
fn host(bytes: usize) -> Mapping {
    use std::os::fd::AsFd as _;
    let file = memfd::create("fake-test", bytes as u64).unwrap();
    Mapping::new(file.as_fd(), bytes, Access::ReadWrite).unwrap()
}

fn at(mapping: &Mapping) -> usize {
    mapping.address(0, mapping.size()).unwrap()
}

fn pin(driver: &FakeDriver, mapping: &Mapping) -> DeviceAddress {
    // SAFETY: every test keeps its mapping longer than its streams run.
    unsafe { driver.register(at(mapping), mapping.size(), true).unwrap() };
    driver.device_address(at(mapping)).unwrap()
}

/// Memory that is mapped with an access.
fn mapped(
    driver: &FakeDriver,
    bytes: u64,
    access: DeviceAccess,
) -> (AllocationHandle, DeviceAddress) {
    let handle = driver.create(GPU, bytes).unwrap();
    (handle, map(driver, handle, bytes, access))
}

fn map(
    driver: &FakeDriver,
    handle: AllocationHandle,
    bytes: u64,
    access: DeviceAccess,
) -> DeviceAddress {
    let address = driver.reserve(bytes).unwrap();
    // SAFETY: just reserved with these bytes, and a live handle.
    unsafe {
        driver.map(address, bytes, handle).unwrap();
        driver.set_access(address, bytes, GPU, access).unwrap();
    }
    address
}

fn unmap(driver: &FakeDriver, address: DeviceAddress, bytes: u64) {
    // SAFETY: mapped by `map` with these bytes; no stream of the test uses it now.
    unsafe {
        driver.unmap(address, bytes).unwrap();
        driver.unreserve(address, bytes).unwrap();
    }
}

fn settle(driver: &FakeDriver, stream: StreamHandle) {
    assert!(driver.settle(stream, SOON).unwrap());
}

/// The sticky error that a stream ends in.
fn broken(driver: &FakeDriver, stream: StreamHandle) -> Option<u32> {
    code(driver.settle(stream, SOON))
}

fn read(driver: &FakeDriver, address: DeviceAddress, bytes: usize) -> Vec<u8> {
    let stream = driver.create_stream().unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let work = move |kernel: &super::Kernel<'_>| {
        let mut target = vec![0; bytes];
        kernel.read(address, &mut target).unwrap();
        tell.send(target).unwrap();
    };
    driver.run_once(stream, work).unwrap();
    told.recv_timeout(SOON).unwrap()
}

fn batch(driver: &FakeDriver, stream: StreamHandle, ops: &[StreamOp]) -> Outcome<()> {
    // SAFETY: a live stream; the words outlive it in every test.
    unsafe { driver.batch(stream, ops) }
}

fn is_done(driver: &FakeDriver, stream: StreamHandle) -> Outcome<bool> {
    // SAFETY: a live stream.
    unsafe { driver.is_done(stream) }
}

fn copy_in(
    driver: &FakeDriver,
    target: DeviceAddress,
    source: usize,
    bytes: usize,
    stream: StreamHandle,
) -> Outcome<()> {
    // SAFETY: every test keeps both sides until the driver has ended.
    unsafe { driver.copy_in(target, source, bytes, stream) }
}

fn record(driver: &FakeDriver, event: EventHandle, stream: StreamHandle) -> Outcome<()> {
    // SAFETY: both are live.
    unsafe { driver.record(event, stream) }
}

fn wait_event(driver: &FakeDriver, stream: StreamHandle, event: EventHandle) -> Outcome<()> {
    // SAFETY: both are live.
    unsafe { driver.wait_event(stream, event) }
}

fn passed(driver: &FakeDriver, event: EventHandle) -> Outcome<bool> {
    // SAFETY: it is live.
    unsafe { driver.has_passed(event) }
}

fn capture_of(driver: &FakeDriver, stream: StreamHandle) -> Capture {
    // SAFETY: it is live.
    unsafe { driver.capture(stream).unwrap() }
}

fn wait_for(address: DeviceAddress, value: u32) -> StreamOp {
    StreamOp::WaitEqual32 { address, value }
}
