//! What a device must do for the daemon: own memory that clients can map, and copy
//! segments' bytes into it in order.

use std::{fmt, os::fd::OwnedFd, sync::Arc, time::Duration};

use flextensord_proto::layout::LABEL_SIZE;

use crate::{
    control::ControlPage,
    cuda::{
        error::CudaError,
        registration::{Registration, RegistrationError},
    },
    doorbell::Doorbell,
    kernel::KernelError,
    mapping::{Mapping, RangeError},
};

/// What went wrong on a device.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The device has too little memory left.
    #[error("device {device} has {free} of {total} bytes free, {wanted} are wanted")]
    Exhausted {
        /// The device's name.
        device: String,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes free.
        free: u64,
        /// Bytes in all.
        total: u64,
    },
    /// The driver has no memory for it, whatever it counts as free: what is free may lie in
    /// pieces, or go to another process in between.
    #[error(
        "device {device} refuses {wanted} bytes: {source}; it counts {free} of {total} bytes free"
    )]
    Refused {
        /// The device's name.
        device: String,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes free by the driver's count.
        free: u64,
        /// Bytes in all.
        total: u64,
        /// What the driver said.
        source: CudaError,
    },
    /// The memory is of another device.
    #[error("a copy into memory of another device")]
    ForeignMemory,
    /// The queue has ended: the device is being closed.
    #[error("the copy queue of device {device} has ended")]
    Ended {
        /// The device's name.
        device: String,
    },
    /// Memory that was handed back is not what it should be.
    #[error(
        "memory of {bytes} bytes that was handed back does not carry the label of allocation {allocation}"
    )]
    Label {
        /// The id of the allocation.
        allocation: u64,
        /// Its bytes.
        bytes: u64,
    },
    /// A range does not lie where it should.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// A system call failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The CUDA driver refused.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Host memory is not pinned.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
}

impl DeviceError {
    /// The driver's error, where it was the driver who refused.
    #[must_use]
    pub fn driver(&self) -> Option<&CudaError> {
        match self {
            Self::Cuda(error) | Self::Refused { source: error, .. } => Some(error),
            Self::Registration(error) => error.driver(),
            _ => None,
        }
    }
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// "cpu:0" for example.
    pub name: String,
    /// Names the device on every machine and in every process.
    pub uuid: String,
    /// "cpu" or "cuda".
    pub kind: &'static str,
    /// Memory that may be allocated, in bytes.
    pub total_bytes: u64,
    /// Bandwidth that copies are held to, in bytes per second; `None` when it is the
    /// hardware's own.
    pub link_limit: Option<u64>,
    /// Whether a client that changes a slot word can ring the doorbell. Where the GPU
    /// changes it, it cannot, and the engine must look often.
    pub clients_can_ring: bool,
    /// The NUMA node of the host memory next to it, where there are several.
    pub numa_node: Option<u32>,
}

/// Names an allocation: stands at its begin, so that a successor knows what it maps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    /// The daemon's instance.
    pub instance: String,
    /// Unique within the instance.
    pub allocation: u64,
    /// Unguessable.
    pub random: [u8; 16],
}

/// First bytes of a label.
const LABEL_MAGIC: &[u8; 8] = b"FTLABEL1";

impl Label {
    /// The label's 256 bytes: magic, allocation id (8), random value (16), length of
    /// the instance's name (1), the name, zeros.
    #[must_use]
    pub fn encode(&self) -> [u8; LABEL_SIZE] {
        let mut bytes = [0; LABEL_SIZE];
        bytes[..8].copy_from_slice(LABEL_MAGIC);
        bytes[8..16].copy_from_slice(&self.allocation.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.random);
        let name = self.instance.as_bytes();
        // instance names have at most 128 bytes; a longer one would be cut here
        let length = name.len().min(bytes.len() - 33);
        bytes[32] = u8::try_from(length).unwrap_or(u8::MAX);
        bytes[33..33 + length].copy_from_slice(&name[..length]);
        bytes
    }
}

/// A range of a segment, to copy from.
#[derive(Debug, Clone)]
pub struct Source {
    /// The segment's mapping, kept alive by the copy.
    pub segment: Arc<Mapping>,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// What to write into a slot word once a copy has arrived.
#[derive(Debug, Clone)]
pub struct Publish {
    /// The page that holds the word, kept alive by the copy.
    pub control: Arc<ControlPage>,
    /// The part.
    pub part: u32,
    /// The sequence of the copy.
    pub sequence: u32,
}

/// Keeps a segment pinned for the copies of all devices of its kind; dropped, it is not.
#[derive(Debug, Default)]
pub struct Pins {
    registrations: Vec<Registration>,
}

impl Pins {
    /// For a device that needs none.
    #[must_use]
    pub fn none() -> Self {
        Self::default()
    }

    /// A registration with the driver.
    #[must_use]
    pub fn of(registration: Registration) -> Self {
        Self {
            registrations: vec![registration],
        }
    }

    /// Bytes that are pinned.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.registrations.iter().map(Registration::bytes).sum()
    }

    /// Adds others, of other ranges.
    pub fn add(&mut self, others: Self) {
        self.registrations.extend(others.registrations);
    }
}

/// Counts copies of a device's queue in the order of their submission; the first is 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Ticket(pub u64);

/// Memory of a device, freed on drop (of the last clone, by the kernel or driver when
/// the last process has closed it).
pub trait Memory: Send + Sync + fmt::Debug {
    /// Bytes allocated, label included.
    fn bytes(&self) -> u64;

    /// A descriptor that lets another process map the memory read-only.
    ///
    /// # Errors
    /// When the kernel or driver refuses.
    fn export(&self) -> Result<OwnedFd, DeviceError>;

    /// Whether it must be kept because another process still has a descriptor or mapping
    /// of it; `None` when that cannot be told. Never where the driver itself keeps memory
    /// for its last holder and gives it to nobody else meanwhile.
    fn held_elsewhere(&self) -> Option<bool>;

    /// Whether the driver itself keeps it for its last holder, so that it may be dropped
    /// here while others map it.
    fn is_kept_by_driver(&self) -> bool {
        false
    }

    /// Queues a copy to `offset` behind all copies that were queued before, and then the
    /// publications, in order. Does not wait.
    ///
    /// # Errors
    /// When a range is wrong or the device has ended; nothing is queued then.
    fn fill(
        &self,
        offset: u64,
        source: Source,
        publishes: &[Publish],
    ) -> Result<Ticket, DeviceError>;

    /// Overwrites a range with `byte`, now. For tests that prove that nobody reads what
    /// was given back.
    ///
    /// # Errors
    /// When the range is wrong.
    fn poison(&self, offset: u64, bytes: u64, byte: u8) -> Result<(), DeviceError>;
}

/// A device: its memory and its one queue of copies.
pub trait Device: Send + Sync + fmt::Debug {
    /// What it is.
    fn info(&self) -> &DeviceInfo;

    /// Takes it into use, where that costs something; repeated calls do nothing.
    ///
    /// # Errors
    /// When the driver refuses.
    fn start(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Bytes that can be allocated now, by the device's own count: all of them before it
    /// was started.
    fn free_bytes(&self) -> u64;

    /// Bytes allocated here and not yet given back.
    fn allocated_bytes(&self) -> u64;

    /// Allocations are made of whole multiples of this.
    fn granularity(&self) -> u64 {
        1
    }

    /// Allocates `bytes` bytes and writes the label at their begin.
    ///
    /// # Errors
    /// [`DeviceError::Exhausted`] when there is too little, [`DeviceError::Refused`] when a
    /// driver says so.
    fn allocate(&self, bytes: u64, label: &Label) -> Result<Arc<dyn Memory>, DeviceError>;

    /// Takes memory of a dead predecessor back from a client, of `bytes` bytes and labelled
    /// so: nothing of it is used before the label was read.
    ///
    /// # Errors
    /// [`DeviceError::Label`], and what the kernel or driver says of what it is instead.
    fn take_back(
        &self,
        descriptor: OwnedFd,
        bytes: u64,
        label: &Label,
    ) -> Result<Arc<dyn Memory>, DeviceError>;

    /// Pins whole pages of a segment, from `offset` on (a multiple of the page's size), for
    /// the copies of all devices of this kind.
    ///
    /// # Errors
    /// When the driver refuses.
    fn pin_range(
        &self,
        _segment: &Arc<Mapping>,
        _offset: u64,
        _bytes: u64,
    ) -> Result<Pins, DeviceError> {
        Ok(Pins::none())
    }

    /// Pins a segment for the copies of all devices of this kind. `cuts` are offsets at
    /// which tensors begin; `progress` is told the bytes done, and says whether to go on.
    ///
    /// # Errors
    /// When the driver refuses or `progress` does; nothing stays pinned.
    fn pin_segment(
        &self,
        _segment: &Arc<Mapping>,
        _cuts: &[u64],
        _progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Pins, DeviceError> {
        Ok(Pins::none())
    }

    /// The last copy that has arrived and is published; all before it have too. Where no
    /// thread of the device does it, this publishes what has arrived since the last call.
    fn completed(&self) -> Ticket;

    /// In what time the next copy will probably arrive, where somebody must ask for
    /// [`Device::completed`] then; `None` when nothing is under way.
    fn next_arrival(&self) -> Option<Duration> {
        None
    }

    /// Bytes queued and not yet copied.
    fn queued_bytes(&self) -> u64;

    /// Copies that could not be published since the device was made: a client had
    /// changed the slot word against the protocol.
    fn failed_publications(&self) -> u64;

    /// Rings whenever a copy has completed, where a thread of ours does the copies.
    fn completion_bell(&self) -> &Arc<Doorbell>;

    /// What made the device unusable for this process, if something did.
    fn failure(&self) -> Option<CudaError> {
        None
    }

    /// How many of its resources could not be given back, and what was said of the first
    /// of them.
    fn failed_drops(&self) -> (u64, Vec<String>) {
        (0, Vec::new())
    }

    /// Bytes of host memory that it could not let go of: they stay mapped for good.
    fn stuck_bytes(&self) -> u64 {
        0
    }
}
