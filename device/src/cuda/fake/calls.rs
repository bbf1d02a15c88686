//! The calls of the driver, each with what it checks.
//!
//! Sticky errors: calls that need the context of a GPU answer with its sticky error, and
//! so do those on physical memory of that GPU and, where no GPU is named, those on
//! ranges of addresses while any context is broken. The latter two, and that nothing is
//! undone then, is not known of the real driver. Pushing and popping always work.
//!
//! Calls that name a stream or an event use its context; others need a current one.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::{
    super::driver::{
        AllocationHandle, Attribute, Capture, ContextHandle, DeviceAccess, DeviceAddress, Driver,
        EventHandle, MemoryInfo, Ordinal, Outcome, StreamHandle, StreamOp,
    },
    FakeDriver,
    codes::{CAPTURE_UNSUPPORTED, INVALID_HANDLE, INVALID_VALUE, named},
    engine::host,
    event::Event,
    lock,
    stream::{Direction, Step},
};

impl Driver for FakeDriver {
    fn version(&self) -> Outcome<i32> {
        Ok(self.shared.version)
    }

    fn count(&self) -> Outcome<i32> {
        let count = i32::try_from(self.shared.seen.len());
        named("cuDeviceGetCount", count.map_err(|_| INVALID_VALUE))
    }

    fn name(&self, gpu: Ordinal) -> Outcome<String> {
        let index = named("cuDeviceGetName", self.shared.index(gpu))?;
        Ok(format!("Fake GPU {index}"))
    }

    fn uuid(&self, gpu: Ordinal) -> Outcome<[u8; 16]> {
        let index = named("cuDeviceGetUuid", self.shared.index(gpu))?;
        Ok(self.shared.gpus[index].uuid)
    }

    fn total_bytes(&self, gpu: Ordinal) -> Outcome<u64> {
        named("cuDeviceTotalMem", self.shared.index(gpu))?;
        Ok(self.shared.total)
    }

    fn attribute(&self, gpu: Ordinal, attribute: Attribute) -> Outcome<i32> {
        let index = named("cuDeviceGetAttribute", self.shared.index(gpu))?;
        Ok(self.attribute_of(index, attribute))
    }

    fn retain_primary(&self, gpu: Ordinal) -> Outcome<ContextHandle> {
        named("cuDevicePrimaryCtxRetain", self.retain(gpu))
    }

    unsafe fn release_primary(&self, gpu: Ordinal) -> Outcome<()> {
        named("cuDevicePrimaryCtxRelease", self.give_back(gpu))
    }

    unsafe fn push(&self, context: ContextHandle) -> Outcome<()> {
        named("cuCtxPushCurrent", self.push_context(context))
    }

    fn is_current(&self, context: ContextHandle) -> bool {
        self.current()
            .is_ok_and(|gpu| super::current::handle(gpu) == context)
    }

    fn pop(&self) -> Outcome<()> {
        named("cuCtxPopCurrent", self.pop_context())
    }

    fn memory_info(&self) -> Outcome<MemoryInfo> {
        let gpu = named("cuMemGetInfo", self.current_sound())?;
        let used = self.shared.memory_mut().physical.used(gpu);
        let total = self.shared.total;
        let free = total.saturating_sub(used);
        Ok(MemoryInfo { free, total })
    }

    unsafe fn register(&self, address: usize, bytes: usize, mapped: bool) -> Outcome<()> {
        named("cuMemHostRegister", self.pin(address, bytes, mapped))
    }

    unsafe fn unregister(&self, address: usize) -> Outcome<()> {
        named("cuMemHostUnregister", self.unpin(address))
    }

    fn device_address(&self, address: usize) -> Outcome<DeviceAddress> {
        let found = self.current_sound().and_then(|_| {
            let known = self.shared.memory().pages.allows(address, 1);
            known.then_some(address as u64).ok_or(INVALID_VALUE)
        });
        named("cuMemHostGetDevicePointer", found)
    }

    fn granularity(&self, gpu: Ordinal) -> Outcome<u64> {
        named("cuMemGetAllocationGranularity", self.shared.index(gpu))?;
        Ok(self.shared.granularity)
    }

    fn create(&self, gpu: Ordinal, bytes: u64) -> Outcome<AllocationHandle> {
        named("cuMemCreate", self.allocate(gpu, bytes))
    }

    unsafe fn release(&self, handle: AllocationHandle) -> Outcome<()> {
        named("cuMemRelease", self.let_go(handle))
    }

    unsafe fn export(&self, handle: AllocationHandle) -> Outcome<OwnedFd> {
        named("cuMemExportToShareableHandle", self.give_away(handle))
    }

    fn import(&self, descriptor: BorrowedFd<'_>) -> Outcome<AllocationHandle> {
        named("cuMemImportFromShareableHandle", self.take_in(descriptor))
    }

    fn reserve(&self, bytes: u64) -> Outcome<DeviceAddress> {
        let reserved = host(self.shared.granularity).and_then(|unit| {
            let space = &mut self.shared.memory_mut().space;
            space.reserve(host(bytes)?, unit)
        });
        named("cuMemAddressReserve", reserved).map(|address| address as u64)
    }

    unsafe fn unreserve(&self, address: DeviceAddress, bytes: u64) -> Outcome<()> {
        let gone = host(address).and_then(|address| {
            let space = &mut self.shared.memory_mut().space;
            space.unreserve(address, host(bytes)?)
        });
        named("cuMemAddressFree", gone)
    }

    unsafe fn map(
        &self,
        address: DeviceAddress,
        bytes: u64,
        handle: AllocationHandle,
    ) -> Outcome<()> {
        named("cuMemMap", self.map_at(address, bytes, handle))
    }

    unsafe fn unmap(&self, address: DeviceAddress, bytes: u64) -> Outcome<()> {
        named("cuMemUnmap", self.unmap_at(address, bytes))
    }

    unsafe fn set_access(
        &self,
        address: DeviceAddress,
        bytes: u64,
        gpu: Ordinal,
        access: DeviceAccess,
    ) -> Outcome<()> {
        let set = self.shared.index(gpu).and_then(|index| {
            self.shared.sound(index)?;
            let space = &mut self.shared.memory_mut().space;
            space.set_access(host(address)?, host(bytes)?, index, access)
        });
        named("cuMemSetAccess", set)
    }

    unsafe fn copy_in(
        &self,
        target: DeviceAddress,
        source: usize,
        bytes: usize,
        stream: StreamHandle,
    ) -> Outcome<()> {
        let queued = host(target)
            .and_then(|target| self.copy((target, source, bytes), Direction::In, stream));
        named("cuMemcpyHtoDAsync", queued)
    }

    unsafe fn copy_out(
        &self,
        target: usize,
        source: DeviceAddress,
        bytes: usize,
        stream: StreamHandle,
    ) -> Outcome<()> {
        let queued = host(source)
            .and_then(|source| self.copy((target, source, bytes), Direction::Out, stream));
        named("cuMemcpyDtoHAsync", queued)
    }

    unsafe fn fill(
        &self,
        target: DeviceAddress,
        byte: u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> Outcome<()> {
        let queued = self.current_sound().and_then(|_| {
            let target = host(target)?;
            let memory = self.shared.memory();
            let known = memory.space.is_mapped(target) || memory.pages.allows(target, bytes);
            drop(memory);
            if !known {
                return Err(INVALID_VALUE);
            }
            let step = Step::Fill {
                target,
                byte,
                bytes,
            };
            self.submit(stream, [step])
        });
        named("cuMemsetD8Async", queued)
    }

    fn create_stream(&self) -> Outcome<StreamHandle> {
        let made = self.current_sound().and_then(|gpu| {
            let handle = StreamHandle(host(self.shared.number())?);
            self.shared.add_stream(&self.start(handle, gpu)?);
            Ok(handle)
        });
        named("cuStreamCreate", made)
    }

    unsafe fn destroy_stream(&self, stream: StreamHandle) -> Outcome<()> {
        let gone = self.shared.remove_stream(stream).and_then(|stream| {
            lock(&self.shared.captures).forget(stream.handle);
            stream.close();
            self.shared.sound(stream.gpu)
        });
        named("cuStreamDestroy", gone)
    }

    unsafe fn is_done(&self, stream: StreamHandle) -> Outcome<bool> {
        let done = self.stream(stream).and_then(|stream| {
            lock(&self.shared.captures).forbid(stream.handle, CAPTURE_UNSUPPORTED)?;
            let done = stream.is_done();
            // an error of what ran last must not be missed
            self.shared.sound(stream.gpu).map(|()| done)
        });
        named("cuStreamQuery", done)
    }

    unsafe fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Outcome<()> {
        let queued = self.stream(stream).and_then(|stream| {
            let event = self.shared.event(event)?;
            lock(&self.shared.captures).wait(&stream, &event)
        });
        named("cuStreamWaitEvent", queued)
    }

    unsafe fn batch(&self, stream: StreamHandle, ops: &[StreamOp]) -> Outcome<()> {
        named("cuStreamBatchMemOp", self.words(stream, ops))
    }

    unsafe fn capture(&self, stream: StreamHandle) -> Outcome<Capture> {
        let state = self
            .stream(stream)
            .map(|stream| lock(&self.shared.captures).state(stream.handle));
        named("cuStreamGetCaptureInfo", state)
    }

    fn create_event(&self, timing: bool) -> Outcome<EventHandle> {
        let made = self.current_sound().and_then(|gpu| {
            let handle = EventHandle(host(self.shared.number())?);
            self.shared.add_event(handle, Event::new(gpu, timing));
            Ok(handle)
        });
        named("cuEventCreate", made)
    }

    unsafe fn destroy_event(&self, event: EventHandle) -> Outcome<()> {
        let gone = self.shared.remove_event(event);
        let gone = gone.and_then(|event| self.shared.sound(event.gpu));
        named("cuEventDestroy", gone)
    }

    unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> Outcome<()> {
        let queued = self.stream(stream).and_then(|stream| {
            let event = self.shared.event(event)?;
            if event.gpu != stream.gpu {
                return Err(INVALID_HANDLE);
            }
            lock(&self.shared.captures).record(&stream, &event)
        });
        named("cuEventRecord", queued)
    }

    unsafe fn has_passed(&self, event: EventHandle) -> Outcome<bool> {
        let passed = self.shared.event(event).and_then(|event| {
            lock(&self.shared.captures).forbid_event(&event)?;
            let passed = event.has_passed();
            self.shared.sound(event.gpu).map(|()| passed)
        });
        named("cuEventQuery", passed)
    }

    unsafe fn elapsed_ms(&self, begin: EventHandle, end: EventHandle) -> Outcome<f32> {
        named("cuEventElapsedTime", self.between(begin, end))
    }
}
