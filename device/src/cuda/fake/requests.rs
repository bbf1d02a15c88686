//! What the calls of the driver check and do.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::atomic::Ordering::SeqCst,
    thread,
};

use super::{
    super::driver::{
        AllocationHandle, Attribute, BATCH_LIMIT, ContextHandle, EventHandle, Ordinal,
        StreamHandle, StreamOp,
    },
    FakeDriver,
    codes::{
        DEVICE_UNAVAILABLE, INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, NOT_READY,
        NOT_SUPPORTED, OUT_OF_MEMORY, Refusable,
    },
    current,
    engine::host,
    lock,
    shared::Pinning,
    stream::{Direction, Step},
};

impl FakeDriver {
    pub(super) fn attribute_of(&self, index: usize, attribute: Attribute) -> i32 {
        let usual = match attribute {
            Attribute::StreamMemoryOps64
            | Attribute::PosixDescriptors
            | Attribute::VirtualMemory
            | Attribute::HostRegister => 1,
            Attribute::ComputeMode
            | Attribute::Integrated
            | Attribute::ComputeMinor
            | Attribute::PciDevice
            | Attribute::PciDomain => 0,
            Attribute::HostNumaNode => -1,
            Attribute::AsyncEngines => 3,
            Attribute::ComputeMajor => 9,
            Attribute::PciBus => i32::try_from(index + 1).unwrap_or(i32::MAX),
        };
        self.shared.faults.attribute(attribute).unwrap_or(usual)
    }

    fn supports(&self, gpu: usize, attribute: Attribute) -> Refusable<()> {
        match self.attribute_of(gpu, attribute) {
            0 => Err(NOT_SUPPORTED),
            _ => Ok(()),
        }
    }

    /// Refuses with the sticky error of any GPU.
    fn all_sound(&self) -> Refusable<()> {
        (0..self.shared.gpus.len()).try_for_each(|gpu| self.shared.sound(gpu))
    }

    pub(super) fn retain(&self, gpu: Ordinal) -> Refusable<ContextHandle> {
        let index = self.shared.index(gpu)?;
        self.shared.sound(index)?;
        // 2: no context may be made; that others have one (3) cannot be known here
        if self.attribute_of(index, Attribute::ComputeMode) == 2 {
            return Err(DEVICE_UNAVAILABLE);
        }
        self.shared.gpus[index].retained.fetch_add(1, SeqCst);
        Ok(current::handle(index))
    }

    pub(super) fn give_back(&self, gpu: Ordinal) -> Refusable<()> {
        let index = self.shared.index(gpu)?;
        let retained = &self.shared.gpus[index].retained;
        let before = retained
            .fetch_update(SeqCst, SeqCst, |count| count.checked_sub(1))
            .map_err(|_| INVALID_CONTEXT)?;
        if before == 1 {
            self.shared.end_context(index);
        }
        Ok(())
    }

    pub(super) fn pin(&self, address: usize, bytes: usize, mapped: bool) -> Refusable<()> {
        let gpu = self.current_sound()?;
        thread::sleep(self.shared.faults.register_takes());
        lock(&self.shared.counts).register_calls += 1;
        if let Some(code) = self.shared.faults.at_register(bytes) {
            return Err(code);
        }
        self.supports(gpu, Attribute::HostRegister)?;
        let mut memory = self.shared.memory_mut();
        memory.pages.register(address, bytes, mapped, gpu)?;
        let mut counts = lock(&self.shared.counts);
        counts.registered_bytes += bytes;
        counts.pinnings.push((address, bytes, Pinning::Register));
        Ok(())
    }

    pub(super) fn unpin(&self, address: usize) -> Refusable<()> {
        self.current_sound()?;
        if let Some(code) = self.shared.faults.at_unregister() {
            return Err(code);
        }
        let mut memory = self.shared.memory_mut();
        let bytes = memory.pages.unregister(address)?;
        let mut counts = lock(&self.shared.counts);
        counts.registered_bytes = counts.registered_bytes.saturating_sub(bytes);
        counts.pinnings.push((address, bytes, Pinning::Unregister));
        Ok(())
    }

    pub(super) fn allocate(&self, gpu: Ordinal, bytes: u64) -> Refusable<AllocationHandle> {
        let index = self.shared.index(gpu)?;
        self.shared.sound(index)?;
        self.supports(index, Attribute::VirtualMemory)?;
        self.supports(index, Attribute::PosixDescriptors)?;
        if bytes == 0 || !bytes.is_multiple_of(self.shared.granularity) {
            return Err(INVALID_VALUE);
        }
        if let Some(code) = self.shared.faults.at_create() {
            return Err(code);
        }
        let mut memory = self.shared.memory_mut();
        let free = self.shared.total.checked_sub(memory.physical.used(index));
        if free.is_none_or(|free| free < bytes) {
            return Err(OUT_OF_MEMORY);
        }
        let handle = self.shared.number();
        let uuid = self.shared.gpus[index].uuid;
        memory.physical.create(handle, index, uuid, bytes)?;
        Ok(AllocationHandle(handle))
    }

    pub(super) fn let_go(&self, handle: AllocationHandle) -> Refusable<()> {
        thread::sleep(self.shared.faults.release_takes());
        let mut memory = self.shared.memory_mut();
        self.shared.sound(memory.physical.gpu(handle.0)?)?;
        memory.physical.release(handle.0)
    }

    pub(super) fn give_away(&self, handle: AllocationHandle) -> Refusable<OwnedFd> {
        let memory = self.shared.memory();
        self.shared.sound(memory.physical.gpu(handle.0)?)?;
        match self.shared.faults.at_export() {
            Some(code) => Err(code),
            None => memory.physical.export(handle.0),
        }
    }

    pub(super) fn take_in(&self, descriptor: BorrowedFd<'_>) -> Refusable<AllocationHandle> {
        self.all_sound()?;
        let mut memory = self.shared.memory_mut();
        let (own, again) = memory.physical.recognise(descriptor)?;
        if let Some(code) = self.shared.faults.at_import(own, again) {
            return Err(code);
        }
        let handle = self.shared.number();
        memory.physical.import(handle, descriptor, |uuid| {
            let mut seen = self.shared.seen.iter().copied();
            seen.find(|index| self.shared.gpus[*index].uuid == uuid)
        })?;
        Ok(AllocationHandle(handle))
    }

    pub(super) fn map_at(
        &self,
        address: u64,
        bytes: u64,
        handle: AllocationHandle,
    ) -> Refusable<()> {
        let mut memory = self.shared.memory_mut();
        let memory = &mut *memory;
        let (object, whole, file) = memory.physical.file(handle.0)?;
        self.shared.sound(memory.physical.gpu(handle.0)?)?;
        // whether the real driver maps a part is not known
        if whole != bytes {
            return Err(INVALID_VALUE);
        }
        let space = &mut memory.space;
        space.map(host(address)?, host(bytes)?, object, file)?;
        memory.physical.mapped(object);
        Ok(())
    }

    pub(super) fn unmap_at(&self, address: u64, bytes: u64) -> Refusable<()> {
        self.all_sound()?;
        let mut memory = self.shared.memory_mut();
        for object in memory.space.unmap(host(address)?, host(bytes)?)? {
            memory.physical.unmapped(object);
        }
        Ok(())
    }

    pub(super) fn copy(
        &self,
        (target, source, bytes): (usize, usize, usize),
        direction: Direction,
        stream: StreamHandle,
    ) -> Refusable<()> {
        self.current_sound()?;
        let (device, plain) = match direction {
            Direction::In => (target, source),
            Direction::Out => (source, target),
        };
        let memory = self.shared.memory();
        // what is at an address is looked up at once, what it allows when the copy runs
        let known = memory.space.is_mapped(device) || memory.pages.allows(device, bytes);
        if bytes > 0 && (!known || !memory.pages.holds_or_spares(plain, bytes)) {
            return Err(INVALID_VALUE);
        }
        drop(memory);
        let step = Step::Copy {
            target,
            source,
            bytes,
            direction,
        };
        self.submit(stream, [step])
    }

    pub(super) fn words(&self, stream: StreamHandle, ops: &[StreamOp]) -> Refusable<()> {
        let gpu = self.stream(stream)?.gpu;
        // that none is refused too is not known of the real driver
        if ops.is_empty() || ops.len() > BATCH_LIMIT {
            return Err(INVALID_VALUE);
        }
        let memory = self.shared.memory();
        for op in ops {
            let (address, bytes) = match op {
                StreamOp::WaitEqual32 { address, .. } | StreamOp::Write32 { address, .. } => {
                    (host(*address)?, 4)
                }
                StreamOp::Write64 { address, .. } => {
                    self.supports(gpu, Attribute::StreamMemoryOps64)?;
                    (host(*address)?, 8)
                }
            };
            let known = memory.space.is_mapped(address) || memory.pages.allows(address, bytes);
            if !known || !address.is_multiple_of(bytes) {
                return Err(INVALID_VALUE);
            }
        }
        drop(memory);
        self.submit(stream, [Step::Words(ops.to_vec())])
    }

    pub(super) fn between(&self, begin: EventHandle, end: EventHandle) -> Refusable<f32> {
        let (begin, end) = (self.shared.event(begin)?, self.shared.event(end)?);
        self.shared.sound(begin.gpu)?;
        let recorded = begin.last() > 0 && end.last() > 0;
        if begin.gpu != end.gpu || !begin.timing || !end.timing || !recorded {
            return Err(INVALID_HANDLE);
        }
        if !begin.has_passed() || !end.has_passed() {
            return Err(NOT_READY);
        }
        let (from, to) = begin.passed_at().zip(end.passed_at()).ok_or(NOT_READY)?;
        let forth = to.saturating_duration_since(from).as_secs_f32();
        let back = from.saturating_duration_since(to).as_secs_f32();
        Ok((forth - back) * 1000.0)
    }
}
