//! Memory of a CPU device: a memfd.

use std::{
    os::fd::{AsFd as _, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
};

use flextensord_proto::layout::LABEL_BYTES;

use super::link::{Job, Link};
use crate::{
    device::{DeviceError, Label, Memory, Publish, Source, Ticket},
    mapping::{Access, Mapping, RangeError},
    memfd,
};

/// Bytes of the device that are spoken for until drop.
#[derive(Debug)]
pub(super) struct Claim {
    bytes: u64,
    used: Arc<AtomicU64>,
}

impl Claim {
    /// Takes over `bytes` bytes that were added to `used`.
    pub(super) fn new(bytes: u64, used: Arc<AtomicU64>) -> Self {
        Self { bytes, used }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, SeqCst);
    }
}

/// An allocation.
#[derive(Debug)]
pub(super) struct CpuMemory {
    descriptor: OwnedFd,
    mapping: Arc<Mapping>,
    link: Arc<Link>,
    claim: Claim,
}

impl CpuMemory {
    pub(super) fn new(claim: Claim, label: &Label, link: Arc<Link>) -> Result<Self, DeviceError> {
        let descriptor = memfd::create("flextensord-device", claim.bytes)?;
        // who has a descriptor could else truncate it under the daemon and its neighbours
        memfd::seal_size(descriptor.as_fd())?;
        let mapping = Mapping::new(descriptor.as_fd(), index(claim.bytes), Access::ReadWrite)?;
        mapping.write(0, &label.encode())?;
        Ok(Self {
            descriptor,
            mapping: Arc::new(mapping),
            link,
            claim,
        })
    }

    /// Memory of a predecessor, as [`crate::device::Device::take_back`].
    pub(super) fn take_back(
        claim: Claim,
        descriptor: &OwnedFd,
        label: &Label,
        link: Arc<Link>,
    ) -> Result<Self, DeviceError> {
        let descriptor = memfd::take_back(descriptor.as_fd(), claim.bytes)?;
        let mapping = Mapping::new(descriptor.as_fd(), index(claim.bytes), Access::ReadWrite)?;
        if !mapping.equals(0, &label.encode())? {
            return Err(DeviceError::Label {
                allocation: label.allocation,
                bytes: claim.bytes,
            });
        }
        Ok(Self {
            descriptor,
            mapping: Arc::new(mapping),
            link,
            claim,
        })
    }

    fn check(&self, offset: u64, bytes: u64) -> Result<(), RangeError> {
        let (start, length) = (index(offset), index(bytes));
        self.mapping.address(start, length)?;
        if offset < LABEL_BYTES {
            return Err(RangeError {
                offset: start,
                bytes: length,
                size: self.mapping.size(),
            });
        }
        Ok(())
    }
}

/// An offset or size of memory; what no address can hold lies outside of everything.
fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

impl Memory for CpuMemory {
    fn bytes(&self) -> u64 {
        self.claim.bytes
    }

    fn export(&self) -> Result<OwnedFd, DeviceError> {
        Ok(memfd::reopen(self.descriptor.as_fd(), false)?)
    }

    fn held_elsewhere(&self) -> Option<bool> {
        memfd::held_elsewhere(&self.descriptor)
    }

    fn fill(
        &self,
        offset: u64,
        source: Source,
        publishes: &[Publish],
    ) -> Result<Ticket, DeviceError> {
        self.check(offset, source.bytes)?;
        source
            .segment
            .address(index(source.offset), index(source.bytes))?;
        self.link.submit(Job {
            source: source.segment,
            source_offset: index(source.offset),
            target: Arc::clone(&self.mapping),
            target_offset: index(offset),
            bytes: index(source.bytes),
            publishes: publishes.to_vec(),
        })
    }

    fn poison(&self, offset: u64, bytes: u64, byte: u8) -> Result<(), DeviceError> {
        self.check(offset, bytes)?;
        Ok(self
            .mapping
            .write(index(offset), &vec![byte; index(bytes)])?)
    }
}
