//! The calls of the CUDA driver that this project makes, and nothing else of it.
//!
//! [`Driver`] is the fence: [`super::libcuda`] is the real one, `super::fake` one in host
//! memory with faults on demand. Both are used only through the owning types of this
//! room ([`super::context::Context`] and what it makes), which prove what the calls
//! demand. Semantics are those of the CUDA driver API reference; where a call here does
//! more than one of the driver, its comment says so.

use std::{
    fmt,
    os::fd::{BorrowedFd, OwnedFd},
};

use super::error::CudaError;

/// Result of a driver call.
pub type Outcome<T> = Result<T, CudaError>;

/// A GPU as the driver numbers it in this process (`CUdevice`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ordinal(pub i32);

/// `CUcontext`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ContextHandle(pub usize);

/// `CUstream`; 0 is the legacy default stream, 1 the same by its own name, 2 the default
/// stream of the thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamHandle(pub usize);

/// `CUevent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EventHandle(pub usize);

/// `CUmemGenericAllocationHandle`: physical memory of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AllocationHandle(pub u64);

/// `CUdeviceptr`: an address as kernels and the copy engine see it.
pub type DeviceAddress = u64;

/// What a mapping of device memory allows the GPU to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceAccess {
    /// Nothing: a kernel that touches it faults.
    None,
    /// Loads.
    Read,
    /// Loads and stores.
    ReadWrite,
}

/// A step of a stream that waits for, or writes, a word in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamOp {
    /// Waits until the 32-bit word equals `value`.
    WaitEqual32 {
        /// Of the word, 4-aligned.
        address: DeviceAddress,
        /// What to wait for.
        value: u32,
    },
    /// Writes the 32-bit word, after all that the stream did before.
    Write32 {
        /// Of the word, 4-aligned.
        address: DeviceAddress,
        /// What to write.
        value: u32,
    },
    /// Writes the 64-bit word, after all that the stream did before.
    Write64 {
        /// Of the word, 8-aligned.
        address: DeviceAddress,
        /// What to write.
        value: u64,
    },
}

/// Most steps of one [`Driver::batch`]: a limit of `cuStreamBatchMemOp`.
pub const BATCH_LIMIT: usize = 255;

/// Whether a stream is being captured into a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capture {
    /// It is not.
    None,
    /// It is; the number tells captures of a process apart.
    Active(u64),
    /// A capture was made unusable by an earlier error.
    Invalidated,
}

/// Properties of a GPU that the data plane rests on (`CUdevice_attribute`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Attribute {
    /// 64-bit waits and writes in streams.
    StreamMemoryOps64,
    /// Physical memory can be exported as file descriptors.
    PosixDescriptors,
    /// Virtual address management.
    VirtualMemory,
    /// `cuMemHostRegister`.
    HostRegister,
    /// 0 default, 2 prohibited, 3 exclusive process.
    ComputeMode,
    /// NUMA node of the host memory that is nearest; -1 when there is one node only.
    HostNumaNode,
    /// Copy engines.
    AsyncEngines,
    /// Whether the GPU shares its memory with the host (1) or has its own (0).
    Integrated,
    /// Major number of the compute capability.
    ComputeMajor,
    /// Minor number of the compute capability.
    ComputeMinor,
    /// Number of the bus, for sysfs.
    PciBus,
    /// Number of the device on its bus.
    PciDevice,
    /// Number of the bus's domain.
    PciDomain,
}

/// Bytes of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free for this process now.
    pub free: u64,
    /// In all.
    pub total: u64,
}

/// The driver. Calls marked unsafe trust their handles and addresses.
pub trait Driver: Send + Sync + fmt::Debug {
    /// Version of the CUDA API that the driver speaks: 13000 for 13.0.
    ///
    /// # Errors
    /// What the driver says.
    fn version(&self) -> Outcome<i32>;

    /// Number of GPUs that this process may use.
    ///
    /// # Errors
    /// What the driver says.
    fn count(&self) -> Outcome<i32>;

    /// The product's name.
    ///
    /// # Errors
    /// What the driver says.
    fn name(&self, gpu: Ordinal) -> Outcome<String>;

    /// Its UUID, 16 bytes; that of the MIG device where it is one.
    ///
    /// # Errors
    /// What the driver says.
    fn uuid(&self, gpu: Ordinal) -> Outcome<[u8; 16]>;

    /// Bytes of its memory.
    ///
    /// # Errors
    /// What the driver says.
    fn total_bytes(&self, gpu: Ordinal) -> Outcome<u64>;

    /// An attribute.
    ///
    /// # Errors
    /// What the driver says.
    fn attribute(&self, gpu: Ordinal, attribute: Attribute) -> Outcome<i32>;

    /// Retains the primary context of a GPU: the one that the CUDA runtime, and so
    /// PyTorch, uses too.
    ///
    /// # Errors
    /// What the driver says.
    fn retain_primary(&self, gpu: Ordinal) -> Outcome<ContextHandle>;

    /// Gives a retained primary context back.
    ///
    /// # Safety
    /// It was retained once more than released, and nothing made in it is used again.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn release_primary(&self, gpu: Ordinal) -> Outcome<()>;

    /// Makes a context that of the calling thread, on top of a stack.
    ///
    /// # Safety
    /// The context is retained until [`Driver::pop`].
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn push(&self, context: ContextHandle) -> Outcome<()>;

    /// Whether a context is that of the calling thread already.
    fn is_current(&self, context: ContextHandle) -> bool;

    /// Takes the top off the calling thread's stack of contexts.
    ///
    /// # Errors
    /// What the driver says.
    fn pop(&self) -> Outcome<()>;

    /// Memory of the current context's GPU.
    ///
    /// # Errors
    /// What the driver says.
    fn memory_info(&self) -> Outcome<MemoryInfo>;

    /// Pins host memory for the copy engines of all GPUs, and maps it for kernels where
    /// `mapped` (`cuMemHostRegister` with PORTABLE and DEVICEMAP).
    ///
    /// # Safety
    /// The range is mapped and stays so until it is unregistered.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn register(&self, address: usize, bytes: usize, mapped: bool) -> Outcome<()>;

    /// Takes a registration back; `address` is where it began.
    ///
    /// # Safety
    /// No copy and no stream operation that uses the range is under way.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn unregister(&self, address: usize) -> Outcome<()>;

    /// The address by which the GPU sees registered host memory.
    ///
    /// # Errors
    /// What the driver says.
    fn device_address(&self, address: usize) -> Outcome<DeviceAddress>;

    /// The unit in which physical memory of a GPU is made.
    ///
    /// # Errors
    /// What the driver says.
    fn granularity(&self, gpu: Ordinal) -> Outcome<u64>;

    /// Makes physical memory that can be exported as a descriptor. `bytes` is a multiple
    /// of the granularity.
    ///
    /// # Errors
    /// Out of memory, or what the driver says.
    fn create(&self, gpu: Ordinal, bytes: u64) -> Outcome<AllocationHandle>;

    /// Lets physical memory go; the driver frees it when no mapping, handle or descriptor
    /// of any process is left.
    ///
    /// # Safety
    /// The handle is not used again.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn release(&self, handle: AllocationHandle) -> Outcome<()>;

    /// A descriptor of physical memory, close-on-exec.
    ///
    /// # Safety
    /// The handle is live.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn export(&self, handle: AllocationHandle) -> Outcome<OwnedFd>;

    /// The physical memory behind a descriptor.
    ///
    /// # Errors
    /// What the driver says.
    fn import(&self, descriptor: BorrowedFd<'_>) -> Outcome<AllocationHandle>;

    /// Reserves a range of addresses.
    ///
    /// # Errors
    /// What the driver says.
    fn reserve(&self, bytes: u64) -> Outcome<DeviceAddress>;

    /// Gives a reserved range back.
    ///
    /// # Safety
    /// It was reserved with these bytes and nothing is mapped there.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn unreserve(&self, address: DeviceAddress, bytes: u64) -> Outcome<()>;

    /// Maps physical memory at a reserved range, with no access yet.
    ///
    /// # Safety
    /// The range is reserved, free and as large; the handle is live.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn map(
        &self,
        address: DeviceAddress,
        bytes: u64,
        handle: AllocationHandle,
    ) -> Outcome<()>;

    /// Takes a mapping away.
    ///
    /// # Safety
    /// It is mapped whole, and nothing that the GPU does needs it.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn unmap(&self, address: DeviceAddress, bytes: u64) -> Outcome<()>;

    /// Sets what a GPU may do with a mapped range.
    ///
    /// # Safety
    /// The range is mapped.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn set_access(
        &self,
        address: DeviceAddress,
        bytes: u64,
        gpu: Ordinal,
        access: DeviceAccess,
    ) -> Outcome<()>;

    /// Queues a copy from host memory into device memory on a stream.
    ///
    /// # Safety
    /// Both ranges live until the copy is done, the target is writable, and the source
    /// lies in one registration or in none.
    ///
    /// # Errors
    /// What the driver says; nothing is queued then.
    unsafe fn copy_in(
        &self,
        target: DeviceAddress,
        source: usize,
        bytes: usize,
        stream: StreamHandle,
    ) -> Outcome<()>;

    /// Queues a copy from device memory into host memory on a stream.
    ///
    /// # Safety
    /// Both ranges live until the copy is done; the host range is exclusive to it.
    ///
    /// # Errors
    /// What the driver says; nothing is queued then.
    unsafe fn copy_out(
        &self,
        target: usize,
        source: DeviceAddress,
        bytes: usize,
        stream: StreamHandle,
    ) -> Outcome<()>;

    /// Queues the filling of device memory with a byte.
    ///
    /// # Safety
    /// The range is mapped for writing until it is done.
    ///
    /// # Errors
    /// What the driver says; nothing is queued then.
    unsafe fn fill(
        &self,
        target: DeviceAddress,
        byte: u8,
        bytes: usize,
        stream: StreamHandle,
    ) -> Outcome<()>;

    /// Makes a stream that does not wait for the legacy default stream.
    ///
    /// # Errors
    /// What the driver says.
    fn create_stream(&self) -> Outcome<StreamHandle>;

    /// Destroys a stream; what is queued on it still runs.
    ///
    /// # Safety
    /// The stream is live and not used again.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn destroy_stream(&self, stream: StreamHandle) -> Outcome<()>;

    /// Whether all that was queued on a stream is done. Also reports an error of what ran
    /// earlier in the context.
    ///
    /// # Safety
    /// The stream is live.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn is_done(&self, stream: StreamHandle) -> Outcome<bool>;

    /// Makes what is queued on a stream from here on wait for an event's last recording.
    ///
    /// # Safety
    /// Both are live.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Outcome<()>;

    /// Queues waits and writes in order, all or nothing; at most [`BATCH_LIMIT`].
    ///
    /// # Safety
    /// The stream is live, and the words stay mapped and registered until it is done.
    ///
    /// # Errors
    /// What the driver says; nothing is queued then.
    unsafe fn batch(&self, stream: StreamHandle, ops: &[StreamOp]) -> Outcome<()>;

    /// Whether a stream is being captured.
    ///
    /// # Safety
    /// The stream is live.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn capture(&self, stream: StreamHandle) -> Outcome<Capture>;

    /// Makes an event, with a clock where `timing`.
    ///
    /// # Errors
    /// What the driver says.
    fn create_event(&self, timing: bool) -> Outcome<EventHandle>;

    /// Destroys an event; what waits for it still does.
    ///
    /// # Safety
    /// The event is live and not used again.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn destroy_event(&self, event: EventHandle) -> Outcome<()>;

    /// Records an event on a stream.
    ///
    /// # Safety
    /// Both are live.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> Outcome<()>;

    /// Whether an event's last recording is done (never recorded counts as done).
    ///
    /// # Safety
    /// The event is live.
    ///
    /// # Errors
    /// What the driver says.
    unsafe fn has_passed(&self, event: EventHandle) -> Outcome<bool>;

    /// Milliseconds between the recordings of two events with a clock.
    ///
    /// # Safety
    /// Both are live.
    ///
    /// # Errors
    /// What the driver says, also when one has not passed.
    unsafe fn elapsed_ms(&self, begin: EventHandle, end: EventHandle) -> Outcome<f32>;
}
