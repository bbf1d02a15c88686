//! The CPU device: device memory is a memfd of its own, copies are made by a thread
//! that can be held to a bandwidth. For machines without a GPU, and for tests: the
//! daemon and the clients do everything else as they do on a GPU.

mod link;
mod memory;

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
};

use crate::{
    device::{Device, DeviceError, DeviceInfo, Label, Memory, Ticket},
    doorbell::Doorbell,
};
use link::Link;
use memory::CpuMemory;

/// A virtual device with memory and a link of its own.
#[derive(Debug)]
pub struct CpuDevice {
    info: DeviceInfo,
    used: Arc<AtomicU64>,
    link: Arc<Link>,
}

impl CpuDevice {
    /// Device number `index` with `total_bytes` of memory, its copies held to
    /// `link_limit` bytes per second if one is given. `owner` tells the devices of
    /// different daemons apart.
    ///
    /// # Errors
    /// When the copy thread cannot be started.
    pub fn new(
        owner: &str,
        index: usize,
        total_bytes: u64,
        link_limit: Option<u64>,
    ) -> Result<Self, DeviceError> {
        let name = format!("cpu:{index}");
        let info = DeviceInfo {
            uuid: format!("CPU-{owner}-{index}"),
            kind: "cpu",
            total_bytes,
            link_limit,
            clients_can_ring: true,
            numa_node: None,
            name: name.clone(),
        };
        let link = Link::start(&name, link_limit)?;
        Ok(Self {
            info,
            used: Arc::new(AtomicU64::new(0)),
            link: Arc::new(link),
        })
    }

    /// Speaks for `bytes` of the device's memory.
    fn claim(&self, bytes: u64) -> Result<memory::Claim, DeviceError> {
        let claimed = self.used.fetch_update(SeqCst, SeqCst, |used| {
            used.checked_add(bytes)
                .filter(|sum| *sum <= self.info.total_bytes)
        });
        if claimed.is_err() {
            return Err(DeviceError::Exhausted {
                device: self.info.name.clone(),
                wanted: bytes,
                free: self.free_bytes(),
                total: self.info.total_bytes,
            });
        }
        Ok(memory::Claim::new(bytes, Arc::clone(&self.used)))
    }
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn free_bytes(&self) -> u64 {
        self.info.total_bytes.saturating_sub(self.used.load(SeqCst))
    }

    fn allocated_bytes(&self) -> u64 {
        self.used.load(SeqCst)
    }

    fn allocate(&self, bytes: u64, label: &Label) -> Result<Arc<dyn Memory>, DeviceError> {
        let claim = self.claim(bytes)?;
        Ok(Arc::new(CpuMemory::new(
            claim,
            label,
            Arc::clone(&self.link),
        )?))
    }

    fn take_back(
        &self,
        descriptor: OwnedFd,
        bytes: u64,
        label: &Label,
    ) -> Result<Arc<dyn Memory>, DeviceError> {
        let (claim, link) = (self.claim(bytes)?, Arc::clone(&self.link));
        let memory = CpuMemory::take_back(claim, &descriptor, label, link)?;
        Ok(Arc::new(memory))
    }

    fn completed(&self) -> Ticket {
        self.link.completed()
    }

    fn queued_bytes(&self) -> u64 {
        self.link.queued_bytes()
    }

    fn failed_publications(&self) -> u64 {
        self.link.failed_publications()
    }

    fn completion_bell(&self) -> &Arc<Doorbell> {
        self.link.bell()
    }
}

#[cfg(test)]
mod tests {
    use std::{os::fd::AsFd as _, time::Duration, time::Instant};

    use super::*;
    use crate::{
        control::{ControlIdentity, ControlPage},
        device::{Publish, Source},
        doorbell::wait_any,
        handover::{Cells as _, take},
        mapping::{Access, Mapping},
        memfd,
    };

    fn label() -> Label {
        Label {
            instance: "t".into(),
            allocation: 1,
            random: [5; 16],
        }
    }

    fn segment(bytes: &[u8]) -> Arc<Mapping> {
        let file = memfd::create("s", bytes.len() as u64).unwrap();
        let mapping = Mapping::new(file.as_fd(), bytes.len(), Access::ReadWrite).unwrap();
        mapping.write(0, bytes).unwrap();
        Arc::new(mapping)
    }

    fn wait_for(device: &CpuDevice, ticket: Ticket) {
        let begin = Instant::now();
        while device.completed() < ticket {
            assert!(
                begin.elapsed() < Duration::from_secs(10),
                "copy never completed"
            );
            wait_any(&[device.completion_bell()], Duration::from_millis(100));
            device.completion_bell().clear();
        }
    }

    #[test]
    fn memory_is_counted_until_it_is_dropped() {
        let device = CpuDevice::new("t", 0, 10_000, None).unwrap();
        let memory = device.allocate(8192, &label()).unwrap();
        assert_eq!(device.free_bytes(), 1808);
        let error = device.allocate(4096, &label()).unwrap_err();
        assert!(matches!(
            error,
            DeviceError::Exhausted {
                wanted: 4096,
                free: 1808,
                ..
            }
        ));
        drop(memory);
        assert_eq!(device.free_bytes(), 10_000);
    }

    #[test]
    fn memory_that_a_client_hands_back_is_taken_by_its_label_alone() {
        let first = CpuDevice::new("t", 0, 100_000, None).unwrap();
        let memory = first.allocate(8192, &label()).unwrap();
        let theirs = memory.export().unwrap();
        drop((memory, first));
        let second = CpuDevice::new("t", 0, 100_000, None).unwrap();
        let give = || theirs.try_clone().unwrap();
        let other = Label {
            allocation: 2,
            ..label()
        };
        let error = second.take_back(give(), 8192, &other).unwrap_err();
        assert!(matches!(error, DeviceError::Label { allocation: 2, .. }));
        assert!(second.take_back(give(), 4096, &label()).is_err());
        assert_eq!(second.free_bytes(), 100_000);
        let memory = second.take_back(give(), 8192, &label()).unwrap();
        assert_eq!(second.free_bytes(), 91_808);
        let source = Source {
            segment: segment(&[9; 4096]),
            offset: 0,
            bytes: 4096,
        };
        wait_for(&second, memory.fill(256, source, &[]).unwrap());
        let view = Mapping::new(theirs.as_fd(), 8192, Access::Read).unwrap();
        assert!(view.equals(256, &[9; 4096]).unwrap());
        drop(view);
        assert_eq!(memory.held_elsewhere(), Some(true));
        drop(theirs);
        assert_eq!(memory.held_elsewhere(), Some(false));
    }

    #[test]
    fn a_copy_arrives_before_its_publication() {
        let device = CpuDevice::new("t", 0, 1 << 20, None).unwrap();
        let memory = device.allocate(8192, &label()).unwrap();
        let identity = ControlIdentity {
            lease_epoch: 1,
            plan_version: 1,
            parts: 1,
        };
        let control = Arc::new(ControlPage::create(identity).unwrap());
        let source = Source {
            segment: segment(&[9; 4096]),
            offset: 1024,
            bytes: 2048,
        };
        let publish = Publish {
            control: Arc::clone(&control),
            part: 0,
            sequence: 1,
        };
        let ticket = memory.fill(256, source, &[publish]).unwrap();
        wait_for(&device, ticket);
        assert!(take(control.as_ref(), 0));
        assert_eq!(control.load(0).sequence(), 1);
        let theirs = memory.export().unwrap();
        assert_eq!(memory.held_elsewhere(), Some(true));
        let view = Mapping::new(theirs.as_fd(), 8192, Access::Read).unwrap();
        assert!(view.equals(0, &label().encode()).unwrap());
        assert!(view.equals(256, &[9; 2048]).unwrap());
        assert!(view.equals(2304, &[0; 64]).unwrap());
        assert_eq!(device.queued_bytes(), 0);
    }

    #[test]
    fn who_is_given_memory_cannot_change_its_size() {
        let device = CpuDevice::new("t", 0, 1 << 20, None).unwrap();
        let memory = device.allocate(8192, &label()).unwrap();
        let given = memory.export().unwrap();
        assert!(memfd::size_is_sealed(given.as_fd()).unwrap());
        let writable = memfd::reopen(given.as_fd(), true).unwrap();
        assert!(memfd::file(&writable).unwrap().set_len(0).is_err());
    }

    #[test]
    fn a_copy_outside_its_memory_or_over_its_label_is_refused() {
        let device = CpuDevice::new("t", 0, 1 << 20, None).unwrap();
        let memory = device.allocate(8192, &label()).unwrap();
        let source = |offset, bytes| Source {
            segment: segment(&[1; 4096]),
            offset,
            bytes,
        };
        assert!(memory.fill(8192 - 1024, source(0, 2048), &[]).is_err());
        assert!(memory.fill(0, source(0, 16), &[]).is_err());
        assert!(memory.fill(256, source(4000, 200), &[]).is_err());
        assert!(memory.fill(u64::MAX, source(0, 16), &[]).is_err());
        assert_eq!(device.completed(), Ticket(0));
    }

    #[test]
    fn copies_are_held_to_the_bandwidth_of_the_link() {
        // a loaded machine only makes it longer: the least time is all that is looked at
        let time = |limit| {
            let device = CpuDevice::new("t", 0, 1 << 24, limit).unwrap();
            let memory = device.allocate(1 << 23, &label()).unwrap();
            let source = Source {
                segment: segment(&vec![1; 4 << 20]),
                offset: 0,
                bytes: 4 << 20,
            };
            let begin = Instant::now();
            let ticket = memory.fill(256, source, &[]).unwrap();
            wait_for(&device, ticket);
            begin.elapsed()
        };
        assert!(time(Some(20 << 20)) >= Duration::from_millis(150));
    }
}
