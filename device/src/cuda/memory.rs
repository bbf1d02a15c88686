//! Memory of a GPU: made or imported as a descriptor, mapped at an address, given back on
//! drop. The driver frees it when no process has a handle, mapping or descriptor left.

use std::{
    os::fd::{AsFd as _, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

use super::{
    context::Context,
    driver::{AllocationHandle, DeviceAccess, DeviceAddress, Driver},
    error::CudaError,
    event::Event,
    stream::Stream,
};

/// Mapped memory of a GPU.
#[derive(Debug)]
pub struct DeviceMapping {
    context: Arc<Context>,
    handle: AllocationHandle,
    address: DeviceAddress,
    bytes: u64,
    descriptor: OwnedFd,
    forbidden: AtomicBool,
}

impl DeviceMapping {
    /// Makes memory of `bytes` bytes, a multiple of the granularity, mapped for reading
    /// and writing.
    ///
    /// # Errors
    /// Out of memory, or what the driver says; nothing is left behind then.
    pub fn create(context: &Arc<Context>, bytes: u64) -> Result<Self, CudaError> {
        let handle = context.with(|driver| driver.create(context.gpu().ordinal, bytes))?;
        let handle = Physical { context, handle };
        // SAFETY: the handle was made above and is live.
        let descriptor = context.with(|driver| unsafe { driver.export(handle.handle) })?;
        Self::map(handle, bytes, descriptor, DeviceAccess::ReadWrite)
    }

    /// Maps memory that another process made, for reading. The descriptor is kept for
    /// the life of the mapping, so that a successor of its maker can have it.
    ///
    /// # Errors
    /// What the driver says; nothing is left behind then.
    pub fn import(
        context: &Arc<Context>,
        descriptor: OwnedFd,
        bytes: u64,
    ) -> Result<Self, CudaError> {
        Self::open(context, descriptor, bytes, DeviceAccess::Read)
    }

    /// As [`DeviceMapping::import`], for writing too: for the successor.
    ///
    /// # Errors
    /// What the driver says; nothing is left behind then.
    pub fn adopt(
        context: &Arc<Context>,
        descriptor: OwnedFd,
        bytes: u64,
    ) -> Result<Self, CudaError> {
        Self::open(context, descriptor, bytes, DeviceAccess::ReadWrite)
    }

    fn open(
        context: &Arc<Context>,
        descriptor: OwnedFd,
        bytes: u64,
        access: DeviceAccess,
    ) -> Result<Self, CudaError> {
        let handle = context.with(|driver| driver.import(descriptor.as_fd()))?;
        Self::map(Physical { context, handle }, bytes, descriptor, access)
    }

    fn map(
        physical: Physical<'_>,
        bytes: u64,
        descriptor: OwnedFd,
        access: DeviceAccess,
    ) -> Result<Self, CudaError> {
        let context = physical.context;
        let range = Reserved::new(context, bytes)?;
        // SAFETY: the range was reserved above with these bytes and is free; the handle
        // is live; what is mapped is unmapped before either goes.
        context.with(|driver| unsafe { driver.map(range.address, bytes, physical.handle) })?;
        let mapping = Self {
            context: Arc::clone(context),
            handle: physical.keep(),
            address: range.keep(),
            bytes,
            descriptor,
            forbidden: AtomicBool::new(false),
        };
        mapping.set_access(access)?;
        Ok(mapping)
    }

    /// Where it begins.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The context that it is mapped in.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// A descriptor of its own for another process.
    ///
    /// # Errors
    /// When the kernel has no descriptors.
    pub fn export(&self) -> std::io::Result<OwnedFd> {
        self.descriptor.try_clone()
    }

    /// Takes all access away from this process: a queued kernel that reads it faults
    /// instead of reading what it should not. There is no way back.
    ///
    /// # Errors
    /// What the driver says.
    pub fn forbid(&self) -> Result<(), CudaError> {
        self.forbidden.store(true, SeqCst);
        self.set_access(DeviceAccess::None)
    }

    /// Whether [`DeviceMapping::forbid`] was called.
    #[must_use]
    pub fn is_forbidden(&self) -> bool {
        self.forbidden.load(SeqCst)
    }

    /// Copies bytes in and waits for it: for small things such as labels.
    ///
    /// # Errors
    /// When the range does not lie in it, or what the driver says.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), CudaError> {
        let target = self.at(offset, bytes.len() as u64)?;
        let stream = Stream::new(&self.context)?;
        let (source, length) = (bytes.as_ptr().expose_provenance(), bytes.len());
        let context = &self.context;
        // SAFETY: target has `length` bytes; both ranges are borrowed until the copy is
        // done, which is waited for below.
        let copy = |driver: &dyn Driver| unsafe {
            driver.copy_in(target, source, length, stream.handle())
        };
        context.with(copy)?;
        Self::finish(&stream)
    }

    /// Copies bytes out and waits for it.
    ///
    /// # Errors
    /// As [`DeviceMapping::write`].
    pub fn read(&self, offset: u64, target: &mut [u8]) -> Result<(), CudaError> {
        let source = self.at(offset, target.len() as u64)?;
        let stream = Stream::new(&self.context)?;
        let (address, length) = (target.as_mut_ptr().expose_provenance(), target.len());
        let context = &self.context;
        // SAFETY: as in `write`; target is borrowed exclusively.
        let copy = |driver: &dyn Driver| unsafe {
            driver.copy_out(address, source, length, stream.handle())
        };
        context.with(copy)?;
        Self::finish(&stream)
    }

    /// The address of a range in it.
    ///
    /// # Errors
    /// [`CudaError::State`] when it does not lie in the memory.
    pub fn at(&self, offset: u64, bytes: u64) -> Result<DeviceAddress, CudaError> {
        offset
            .checked_add(bytes)
            .filter(|end| *end <= self.bytes)
            .map(|_| self.address + offset)
            .ok_or(CudaError::State(
                "a range does not lie in its device memory",
            ))
    }

    fn finish(stream: &Stream) -> Result<(), CudaError> {
        let done = Event::new(stream.context())?;
        done.record(stream.into())?;
        done.wait()
    }

    fn set_access(&self, access: DeviceAccess) -> Result<(), CudaError> {
        let gpu = self.context.gpu().ordinal;
        // SAFETY: the whole range is mapped for as long as self lives.
        self.context
            .with(|driver| unsafe { driver.set_access(self.address, self.bytes, gpu, access) })
    }
}

impl Drop for DeviceMapping {
    fn drop(&mut self) {
        let (address, bytes) = (self.address, self.bytes);
        // SAFETY: mapped whole by `map`; copies under way hold an Arc of self, and a
        // client drops it only once its stream has let go or can never read again.
        let unmapped = self
            .context
            .give_back("unmap device memory", |driver| unsafe {
                driver.unmap(address, bytes)
            });
        if unmapped {
            // SAFETY: reserved with these bytes by `map`, and empty now.
            self.context
                .give_back("give back device addresses", |driver| unsafe {
                    driver.unreserve(address, bytes)
                });
        }
        // SAFETY: the handle is self's own and not used again.
        self.context
            .give_back("release device memory", |driver| unsafe {
                driver.release(self.handle)
            });
    }
}

/// A handle until it is part of a mapping.
struct Physical<'a> {
    context: &'a Arc<Context>,
    handle: AllocationHandle,
}

impl Physical<'_> {
    fn keep(self) -> AllocationHandle {
        let handle = self.handle;
        std::mem::forget(self);
        handle
    }
}

impl Drop for Physical<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle is self's own and not used again.
        self.context
            .give_back("release device memory", |driver| unsafe {
                driver.release(self.handle)
            });
    }
}

/// Addresses until something is mapped there.
struct Reserved<'a> {
    context: &'a Arc<Context>,
    address: DeviceAddress,
    bytes: u64,
}

impl<'a> Reserved<'a> {
    fn new(context: &'a Arc<Context>, bytes: u64) -> Result<Self, CudaError> {
        let address = context.with(|driver| driver.reserve(bytes))?;
        Ok(Self {
            context,
            address,
            bytes,
        })
    }

    fn keep(self) -> DeviceAddress {
        let address = self.address;
        std::mem::forget(self);
        address
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        // SAFETY: reserved with these bytes, and nothing was mapped there.
        self.context
            .give_back("give back device addresses", |driver| unsafe {
                driver.unreserve(self.address, self.bytes)
            });
    }
}
