//! The calls of the driver, one by one.

use std::{
    ffi::{CStr, c_int},
    mem::MaybeUninit,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr,
};

use cudarc::driver::sys::{
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CUdevice, CUevent_flags,
    CUmemAllocationGranularity_flags, CUstream_flags, CUstreamBatchMemOpParams,
    CUstreamCaptureStatus,
};
use rustix::io::{FdFlags, fcntl_setfd};

use super::{
    super::{
        driver::{
            AllocationHandle, Attribute, BATCH_LIMIT, Capture, ContextHandle, DeviceAccess,
            DeviceAddress, Driver, EventHandle, MemoryInfo, Ordinal, Outcome, StreamHandle,
            StreamOp,
        },
        error::CudaError,
        symbols::Found,
    },
    Libcuda, answer, check, parameters,
};

/// Calls a function of the table and names it where it fails.
macro_rules! call {
    ($driver:ident.$field:ident($($argument:expr),* $(,)?)) => {{
        let Found { name, function } = $driver.functions.$field;
        check(name, function($($argument),*))
    }};
}

impl Libcuda {
    fn device(&self, gpu: Ordinal) -> Outcome<CUdevice> {
        let mut device = 0;
        // SAFETY: the driver writes one number before it returns.
        unsafe { call!(self.device_get(&raw mut device, gpu.0)) }?;
        Ok(device)
    }
}

fn length(bytes: u64) -> Outcome<usize> {
    usize::try_from(bytes).map_err(|_| CudaError::State("more bytes than there are addresses"))
}

impl Driver for Libcuda {
    fn version(&self) -> Outcome<i32> {
        let mut version = 0;
        // SAFETY: the driver writes one number before it returns.
        unsafe { call!(self.driver_version(&raw mut version)) }?;
        Ok(version)
    }

    fn count(&self) -> Outcome<i32> {
        let mut count = 0;
        // SAFETY: the driver writes one number before it returns.
        unsafe { call!(self.device_count(&raw mut count)) }?;
        Ok(count)
    }

    fn name(&self, gpu: Ordinal) -> Outcome<String> {
        const ROOM: c_int = 256;
        let device = self.device(gpu)?;
        let mut name = [0_u8; ROOM.unsigned_abs() as usize];
        // SAFETY: the driver writes at most as many bytes as it is told there are, and
        // before it returns.
        unsafe { call!(self.device_name(name.as_mut_ptr().cast(), ROOM, device)) }?;
        let name = CStr::from_bytes_until_nul(&name).map_or(&name[..], CStr::to_bytes);
        Ok(String::from_utf8_lossy(name).into_owned())
    }

    fn uuid(&self, gpu: Ordinal) -> Outcome<[u8; 16]> {
        let device = self.device(gpu)?;
        let mut uuid = [0; 16];
        // SAFETY: `CUuuid` is 16 bytes, which the driver writes before it returns.
        unsafe { call!(self.device_uuid(&raw mut uuid, device)) }?;
        Ok(uuid)
    }

    fn total_bytes(&self, gpu: Ordinal) -> Outcome<u64> {
        let device = self.device(gpu)?;
        let mut bytes = 0;
        // SAFETY: the driver writes one number before it returns.
        unsafe { call!(self.device_total_memory(&raw mut bytes, device)) }?;
        Ok(bytes as u64)
    }

    fn attribute(&self, gpu: Ordinal, attribute: Attribute) -> Outcome<i32> {
        let device = self.device(gpu)?;
        let number = parameters::number(attribute);
        let mut value = 0;
        // SAFETY: the driver writes one number before it returns; an attribute that it
        // does not know is an error to it.
        unsafe { call!(self.device_attribute(&raw mut value, number, device)) }?;
        Ok(value)
    }

    fn retain_primary(&self, gpu: Ordinal) -> Outcome<ContextHandle> {
        let device = self.device(gpu)?;
        let mut context = 0;
        // SAFETY: the driver writes one handle before it returns.
        unsafe { call!(self.primary_retain(&raw mut context, device)) }?;
        Ok(ContextHandle(context))
    }

    unsafe fn release_primary(&self, gpu: Ordinal) -> Outcome<()> {
        let device = self.device(gpu)?;
        // SAFETY: the caller has retained it and uses nothing of it from here on.
        unsafe { call!(self.primary_release(device)) }
    }

    unsafe fn push(&self, context: ContextHandle) -> Outcome<()> {
        // SAFETY: the caller keeps the context until it is popped; the stack is the
        // calling thread's own.
        unsafe { call!(self.context_push(context.0)) }
    }

    fn is_current(&self, context: ContextHandle) -> bool {
        let mut current = 0;
        // SAFETY: the driver writes one handle before it returns.
        let asked = unsafe { call!(self.context_current(&raw mut current)) };
        asked.is_ok() && current == context.0
    }

    fn pop(&self) -> Outcome<()> {
        let mut former = 0;
        // SAFETY: the driver writes one handle before it returns; an empty stack is an
        // error to it.
        unsafe { call!(self.context_pop(&raw mut former)) }
    }

    fn memory_info(&self) -> Outcome<MemoryInfo> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two numbers before it returns; no current context is
        // an error to it.
        unsafe { call!(self.memory_info(&raw mut free, &raw mut total)) }?;
        Ok(MemoryInfo {
            free: free as u64,
            total: total as u64,
        })
    }

    unsafe fn register(&self, address: usize, bytes: usize, mapped: bool) -> Outcome<()> {
        let flags = if mapped {
            CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
        } else {
            CU_MEMHOSTREGISTER_PORTABLE
        };
        let start = ptr::with_exposed_provenance_mut(address);
        // SAFETY: the caller keeps the range mapped until it is unregistered. The call
        // pins pages and does not touch what is in them.
        unsafe { call!(self.host_register(start, bytes, flags)) }
    }

    unsafe fn unregister(&self, address: usize) -> Outcome<()> {
        let start = ptr::with_exposed_provenance_mut(address);
        // SAFETY: nothing uses the range, as the caller says; an address where no
        // registration begins is an error to the driver.
        unsafe { call!(self.host_unregister(start)) }
    }

    fn device_address(&self, address: usize) -> Outcome<DeviceAddress> {
        let start = ptr::with_exposed_provenance_mut(address);
        let mut seen = 0;
        // SAFETY: the driver writes one address before it returns; it looks the host
        // address up and does not follow it. Flags must be 0.
        unsafe { call!(self.host_device_pointer(&raw mut seen, start, 0)) }?;
        Ok(seen)
    }

    fn granularity(&self, gpu: Ordinal) -> Outcome<u64> {
        // a size must be a multiple of the least one; the recommended one is for speed
        // and may waste memory on small parts
        let least = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let memory = parameters::shareable(gpu);
        let mut bytes = 0;
        // SAFETY: the driver reads the description and writes one number before it
        // returns.
        unsafe { call!(self.granularity(&raw mut bytes, &raw const memory, least)) }?;
        Ok(bytes as u64)
    }

    fn create(&self, gpu: Ordinal, bytes: u64) -> Outcome<AllocationHandle> {
        let bytes = length(bytes)?;
        let memory = parameters::shareable(gpu);
        let mut handle = 0;
        // SAFETY: the driver reads the description and writes one handle before it
        // returns. Flags must be 0.
        unsafe { call!(self.memory_create(&raw mut handle, bytes, &raw const memory, 0)) }?;
        Ok(AllocationHandle(handle))
    }

    unsafe fn release(&self, handle: AllocationHandle) -> Outcome<()> {
        // SAFETY: the caller uses the handle no more; mappings keep the memory.
        unsafe { call!(self.memory_release(handle.0)) }
    }

    unsafe fn export(&self, handle: AllocationHandle) -> Outcome<OwnedFd> {
        let mut descriptor: c_int = -1;
        let to = (&raw mut descriptor).cast();
        // SAFETY: for this type of handle the driver writes an `int` before it returns;
        // the allocation lives, as the caller says. Flags must be 0.
        unsafe { call!(self.memory_export(to, handle.0, parameters::SHARED_AS, 0)) }?;
        if descriptor < 0 {
            return Err(CudaError::State("the driver has exported no descriptor"));
        }
        // SAFETY: the driver has made it for the caller, who is to close it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        // whether the driver has done so is nowhere promised, and a program that this
        // process starts must not keep the memory
        fcntl_setfd(&descriptor, FdFlags::CLOEXEC)
            .map_err(|_| CudaError::State("an exported descriptor cannot be closed on exec"))?;
        Ok(descriptor)
    }

    fn import(&self, descriptor: BorrowedFd<'_>) -> Outcome<AllocationHandle> {
        let number = usize::try_from(descriptor.as_raw_fd())
            .map_err(|_| CudaError::State("a descriptor with a negative number"))?;
        // for this type of handle the pointer is the number itself
        let from = ptr::without_provenance_mut(number);
        let mut handle = 0;
        // SAFETY: the descriptor is open during the call; the driver follows no pointer
        // but the one where it writes a handle before it returns. A descriptor of
        // something else is an error to it.
        unsafe { call!(self.memory_import(&raw mut handle, from, parameters::SHARED_AS)) }?;
        Ok(AllocationHandle(handle))
    }

    fn reserve(&self, bytes: u64) -> Outcome<DeviceAddress> {
        let bytes = length(bytes)?;
        let mut address = 0;
        // SAFETY: the driver writes one address before it returns. Alignment and wanted
        // address are left to it; flags must be 0.
        unsafe { call!(self.address_reserve(&raw mut address, bytes, 0, 0, 0)) }?;
        Ok(address)
    }

    unsafe fn unreserve(&self, address: DeviceAddress, bytes: u64) -> Outcome<()> {
        let bytes = length(bytes)?;
        // SAFETY: the caller has reserved just this, and nothing is mapped there.
        unsafe { call!(self.address_free(address, bytes)) }
    }

    unsafe fn map(
        &self,
        address: DeviceAddress,
        bytes: u64,
        handle: AllocationHandle,
    ) -> Outcome<()> {
        let bytes = length(bytes)?;
        // SAFETY: the caller says that the range is reserved and free and the handle is
        // live. The offset into the memory and flags must be 0.
        unsafe { call!(self.memory_map(address, bytes, 0, handle.0, 0)) }
    }

    unsafe fn unmap(&self, address: DeviceAddress, bytes: u64) -> Outcome<()> {
        let bytes = length(bytes)?;
        // SAFETY: the caller says that it is mapped and the GPU does not need it.
        unsafe { call!(self.memory_unmap(address, bytes)) }
    }

    unsafe fn set_access(
        &self,
        address: DeviceAddress,
        bytes: u64,
        gpu: Ordinal,
        access: DeviceAccess,
    ) -> Outcome<()> {
        let bytes = length(bytes)?;
        let access = parameters::access(gpu, access);
        // SAFETY: the range is mapped, as the caller says; the driver reads one
        // description before it returns.
        unsafe { call!(self.set_access(address, bytes, &raw const access, 1)) }
    }

    unsafe fn copy_in(
        &self,
        target: DeviceAddress,
        source: usize,
        bytes: usize,
        stream: StreamHandle,
    ) -> Outcome<()> {
        let source = ptr::with_exposed_provenance(source);
        // SAFETY: the caller keeps both ranges until the copy is done, and the stream
        // lives.
        unsafe { call!(self.copy_in(target, source, bytes, stream.0)) }
    }

    unsafe fn copy_out(
        &self,
        target: usize,
        source: DeviceAddress,
        bytes: usize,
        stream: StreamHandle,
    ) -> Outcome<()> {
        let target = ptr::with_exposed_provenance_mut(target);
        // SAFETY: the caller keeps both ranges until the copy is done, nobody else
        // touches the host's, and the stream lives.
        unsafe { call!(self.copy_out(target, source, bytes, stream.0)) }
    }

    unsafe fn fill(
        &self,
        target: DeviceAddress,
        byte: u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> Outcome<()> {
        // SAFETY: the caller keeps the range mapped for writing until it is done, and
        // the stream lives.
        unsafe { call!(self.fill(target, byte, bytes, stream.0)) }
    }

    fn create_stream(&self) -> Outcome<StreamHandle> {
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut stream = 0;
        // SAFETY: the driver writes one handle before it returns; no current context is
        // an error to it.
        unsafe { call!(self.stream_create(&raw mut stream, flags)) }?;
        Ok(StreamHandle(stream))
    }

    unsafe fn destroy_stream(&self, stream: StreamHandle) -> Outcome<()> {
        // SAFETY: the stream lives, and the caller uses it no more.
        unsafe { call!(self.stream_destroy(stream.0)) }
    }

    unsafe fn is_done(&self, stream: StreamHandle) -> Outcome<bool> {
        let Found { name, function } = self.functions.stream_query;
        // SAFETY: the stream lives, as the caller says.
        answer(name, unsafe { function(stream.0) })
    }

    unsafe fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Outcome<()> {
        // SAFETY: both live, as the caller says. 0 is the default behaviour, also under
        // capture.
        unsafe { call!(self.stream_wait_event(stream.0, event.0, 0)) }
    }

    unsafe fn batch(&self, stream: StreamHandle, ops: &[StreamOp]) -> Outcome<()> {
        if ops.is_empty() {
            return Ok(());
        }
        let count = u32::try_from(ops.len())
            .ok()
            .filter(|_| ops.len() <= BATCH_LIMIT)
            .ok_or(CudaError::State("too many steps for one batch"))?;
        // on the stack, and only what is used is written: this is a client's hot path
        let mut steps = [const { MaybeUninit::<CUstreamBatchMemOpParams>::uninit() }; BATCH_LIMIT];
        for (step, op) in steps.iter_mut().zip(ops) {
            step.write(parameters::step(*op));
        }
        let steps = steps.as_mut_ptr().cast();
        // SAFETY: the first `count` steps are written, and the driver copies them before
        // it returns. The caller keeps the stream, and the words until it is done. Flags
        // must be 0.
        unsafe { call!(self.stream_batch(stream.0, count, steps, 0)) }
    }

    unsafe fn capture(&self, stream: StreamHandle) -> Outcome<Capture> {
        const NONE: u32 = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE as u32;
        const ACTIVE: u32 = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32;
        let mut status = 0;
        // the cheap question first: it is asked for each layer
        // SAFETY: the stream lives, as the caller says; the driver writes one number.
        unsafe { call!(self.stream_is_capturing(stream.0, &raw mut status)) }?;
        if status == NONE {
            return Ok(Capture::None);
        }
        let mut id = 0;
        let (mut graph, mut count) = (0, 0);
        let (mut nodes, mut edges) = (ptr::null(), ptr::null());
        if let Some(Found { name, function }) = self.functions.capture_info_v3 {
            // graph, nodes and edges are of no interest, but without a place for edges
            // the driver may refuse to answer (CUDA_ERROR_LOSSY_QUERY)
            // SAFETY: the stream lives, as the caller says; the driver writes each of
            // the six before it returns, and the arrays stay its own.
            check(name, unsafe {
                function(
                    stream.0,
                    &raw mut status,
                    &raw mut id,
                    &raw mut graph,
                    &raw mut nodes,
                    &raw mut edges,
                    &raw mut count,
                )
            })?;
        } else if let Some(Found { name, function }) = self.functions.capture_info_v2 {
            // SAFETY: as above, with five.
            check(name, unsafe {
                function(
                    stream.0,
                    &raw mut status,
                    &raw mut id,
                    &raw mut graph,
                    &raw mut nodes,
                    &raw mut count,
                )
            })?;
        }
        Ok(match status {
            NONE => Capture::None,
            ACTIVE => Capture::Active(id),
            // what is not known to be sound is not recorded into
            _ => Capture::Invalidated,
        })
    }

    fn create_event(&self, timing: bool) -> Outcome<EventHandle> {
        let flags = if timing {
            CUevent_flags::CU_EVENT_DEFAULT
        } else {
            CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        let mut event = 0;
        // SAFETY: the driver writes one handle before it returns; no current context is
        // an error to it.
        unsafe { call!(self.event_create(&raw mut event, flags as u32)) }?;
        Ok(EventHandle(event))
    }

    unsafe fn destroy_event(&self, event: EventHandle) -> Outcome<()> {
        // SAFETY: the event lives, and the caller uses it no more.
        unsafe { call!(self.event_destroy(event.0)) }
    }

    unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> Outcome<()> {
        // SAFETY: both live, as the caller says.
        unsafe { call!(self.event_record(event.0, stream.0)) }
    }

    unsafe fn has_passed(&self, event: EventHandle) -> Outcome<bool> {
        let Found { name, function } = self.functions.event_query;
        // SAFETY: the event lives, as the caller says.
        answer(name, unsafe { function(event.0) })
    }

    unsafe fn elapsed_ms(&self, begin: EventHandle, end: EventHandle) -> Outcome<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: both live, as the caller says; the driver writes one number before it
        // returns.
        unsafe { call!(self.event_elapsed(&raw mut milliseconds, begin.0, end.0)) }?;
        Ok(milliseconds)
    }
}
