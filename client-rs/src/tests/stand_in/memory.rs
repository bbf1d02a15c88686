//! The memory of the stand-in's device.

use std::{
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use flextensord_device::{
    cuda::{
        context::Context,
        driver::Driver,
        fake::{FakeDriver, FakeSettings},
        gpu,
        memory::DeviceMapping,
    },
    mapping::{Access, Mapping},
    memfd,
};

const BYTES: usize = 2 << 20;

/// One allocation, ring and residents in one.
#[derive(Debug)]
pub(super) enum StageMemory {
    Host(Mapping, OwnedFd),
    Gpu(DeviceMapping),
}

impl StageMemory {
    pub(super) fn host() -> Self {
        let descriptor = memfd::create("stand-in", BYTES as u64).unwrap();
        let mapping = Mapping::new(descriptor.as_fd(), BYTES, Access::ReadWrite).unwrap();
        Self::Host(mapping, descriptor)
    }

    pub(super) fn gpu() -> Self {
        let driver: Arc<dyn Driver> = FakeDriver::new(FakeSettings::default());
        let gpu = gpu::find(driver.as_ref(), "cuda:0").unwrap();
        let context = Context::open(&driver, &gpu).unwrap();
        Self::Gpu(DeviceMapping::create(&context, BYTES as u64).unwrap())
    }

    pub(super) fn gpu_uuid(&self) -> Option<String> {
        match self {
            Self::Host(..) => None,
            Self::Gpu(mapping) => Some(mapping.context().gpu().uuid.clone()),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        BYTES as u64
    }

    pub(super) fn export(&self) -> OwnedFd {
        match self {
            Self::Host(_, descriptor) => memfd::reopen(descriptor.as_fd(), false).unwrap(),
            Self::Gpu(mapping) => mapping.export().unwrap(),
        }
    }

    pub(super) fn write(&self, offset: u64, bytes: &[u8]) {
        match self {
            Self::Host(mapping, _) => {
                mapping
                    .write(usize::try_from(offset).unwrap(), bytes)
                    .unwrap();
            }
            Self::Gpu(mapping) => mapping.write(offset, bytes).unwrap(),
        }
    }
}
