//! One device's memory: reserved before it is allocated, retired when its lease ends,
//! and given back only when its last holder is gone.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, Weak,
    atomic::{AtomicU64, Ordering::SeqCst},
};

use flextensord_device::{
    control::ControlPage,
    device::{Device, DeviceError, Label, Memory},
    process::Process,
};
use tokio::sync::Notify;

/// Why device memory is refused.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// Too little is free.
    #[error(
        "device {device} has {available} of {total} bytes free, {wanted} are wanted; \
         {reclaiming} bytes of ended leases are still held by their processes"
    )]
    Exhausted {
        /// The device.
        device: String,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes free and not reserved.
        available: u64,
        /// Bytes in all.
        total: u64,
        /// Bytes that return when the last process that maps them is gone.
        reclaiming: u64,
    },
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The system has no random numbers.
    #[error("no random numbers for the label of an allocation")]
    Random,
}

/// Memory or a control page whose lease has ended.
#[derive(Debug)]
enum Remains {
    Memory(Arc<dyn Memory>),
    Control(Arc<ControlPage>),
}

impl Remains {
    fn bytes(&self) -> u64 {
        match self {
            Self::Memory(memory) => memory.bytes(),
            Self::Control(_) => 0,
        }
    }

    fn held_elsewhere(&self) -> Option<bool> {
        match self {
            Self::Memory(memory) => memory.held_elsewhere(),
            Self::Control(control) => control.held_elsewhere(),
        }
    }
}

#[derive(Debug)]
struct Retired {
    remains: Remains,
    owner: Option<Process>,
}

impl Retired {
    /// Whether no process can still read it. Where the kernel cannot tell, the owner's
    /// end must do; an owner that cannot be watched was gone when this was retired.
    fn is_free(&self) -> bool {
        match self.remains.held_elsewhere() {
            Some(held) => !held,
            None => self.owner.as_ref().is_none_or(Process::has_exited),
        }
    }
}

/// Memory of ended leases that is given back here, and that the driver keeps while their
/// owners hold it. Nothing tells who does: what is used and not ours grows when we let go
/// of memory that somebody else holds, and that is at most what the owners had.
#[derive(Debug, Default)]
struct Outside {
    /// Bytes in use that were not ours before the first of `left` was retired.
    before: u64,
    left: Vec<Left>,
}

/// An allocation that owners of ended leases may hold.
#[derive(Debug)]
struct Left {
    memory: Weak<dyn Memory>,
    bytes: u64,
    owners: Vec<Process>,
}

impl Left {
    /// Whether it is given back here, and so can only be used by others.
    fn is_given_back(&self) -> bool {
        self.memory.strong_count() == 0
    }
}

/// The memory of one device.
#[derive(Debug)]
pub struct DeviceMemory {
    instance: String,
    device: Arc<dyn Device>,
    reserved: Mutex<u64>,
    retired: Mutex<Vec<Retired>>,
    outside: Mutex<Outside>,
    /// Told when something is retired.
    to_reclaim: Arc<Notify>,
    next_allocation: AtomicU64,
}

impl DeviceMemory {
    /// The memory of `device`; `instance` goes into the labels, `generation` keeps the
    /// ids of allocations apart over restarts, and `to_reclaim` is told when something
    /// waits for its last holder.
    #[must_use]
    pub fn new(
        instance: &str,
        generation: u64,
        device: Arc<dyn Device>,
        to_reclaim: Arc<Notify>,
    ) -> Arc<Self> {
        Arc::new(Self {
            instance: instance.to_owned(),
            device,
            reserved: Mutex::new(0),
            retired: Mutex::default(),
            outside: Mutex::default(),
            to_reclaim,
            next_allocation: AtomicU64::new(generation << 32 | 1),
        })
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// The instance that stands in labels.
    #[must_use]
    pub fn instance(&self) -> &str {
        &self.instance
    }

    /// Bytes that are neither allocated nor reserved.
    #[must_use]
    pub fn available(&self) -> u64 {
        self.device.free_bytes().saturating_sub(*self.reserved())
    }

    /// `bytes` as an allocation takes them.
    #[must_use]
    pub fn whole(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.device.granularity())
    }

    /// Bytes reserved and not yet allocated.
    #[must_use]
    pub fn reserved_bytes(&self) -> u64 {
        *self.reserved()
    }

    /// Bytes of ended leases that some process still holds.
    #[must_use]
    pub fn reclaiming_bytes(&self) -> u64 {
        let retired = self.retired();
        let kept: u64 = retired.iter().map(|retired| retired.remains.bytes()).sum();
        drop(retired);
        kept.saturating_add(self.held_outside())
    }

    /// Bytes of ended leases that are given back here and that their owners still hold.
    fn held_outside(&self) -> u64 {
        let outside = self.outside();
        if outside.left.is_empty() {
            return 0;
        }
        let gone = outside.left.iter().filter(|left| left.is_given_back());
        let most = gone.map(|left| left.bytes).sum();
        self.used_by_others()
            .saturating_sub(outside.before)
            .min(most)
    }

    /// Bytes in use that this daemon has not allocated.
    fn used_by_others(&self) -> u64 {
        // an allocation in the middle of being made would count as another's
        let _reserved = self.reserved();
        let used = self
            .device
            .info()
            .total_bytes
            .saturating_sub(self.device.free_bytes());
        used.saturating_sub(self.device.allocated_bytes())
    }

    /// Reserves `bytes`: nobody else is granted them until the reservation is dropped.
    ///
    /// # Errors
    /// [`MemoryError::Exhausted`] with all figures.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Reservation, MemoryError> {
        self.sweep();
        let mut reserved = self.reserved();
        let available = self.device.free_bytes().saturating_sub(*reserved);
        if bytes > available {
            drop(reserved);
            return Err(MemoryError::Exhausted {
                device: self.device.info().name.clone(),
                wanted: bytes,
                available,
                total: self.device.info().total_bytes,
                reclaiming: self.reclaiming_bytes(),
            });
        }
        *reserved += bytes;
        Ok(Reservation {
            memory: Arc::clone(self),
            bytes,
        })
    }

    /// Takes memory of ended leases: it is freed once no process can read it. Where the
    /// driver sees to that, it is freed now, and counted while `owners` may hold it.
    pub fn retire_memory(&self, memory: Arc<dyn Memory>, mut owners: Vec<Process>) {
        if memory.is_kept_by_driver() {
            owners.retain(|owner| !owner.has_exited());
            if !owners.is_empty() {
                self.leave(&memory, owners);
            }
            return;
        }
        self.retire(Retired {
            remains: Remains::Memory(memory),
            owner: owners.pop(),
        });
    }

    /// Counts memory that `owners` may hold when it is given back here.
    fn leave(&self, memory: &Arc<dyn Memory>, owners: Vec<Process>) {
        let mut outside = self.outside();
        if outside.left.is_empty() {
            outside.before = self.used_by_others();
        }
        outside.left.push(Left {
            memory: Arc::downgrade(memory),
            bytes: memory.bytes(),
            owners,
        });
        drop(outside);
        self.to_reclaim.notify_one();
    }

    /// Forgets memory whose owners are gone, or that has come back.
    fn forget_returned(&self) {
        let mut outside = self.outside();
        outside
            .left
            .retain(|left| !left.owners.iter().all(Process::has_exited));
        if !outside.left.is_empty()
            && outside.left.iter().all(Left::is_given_back)
            && self.used_by_others() <= outside.before
        {
            outside.left.clear();
        }
    }

    /// Takes the control page of an ended lease, as [`DeviceMemory::retire_memory`].
    pub fn retire_control(&self, control: Arc<ControlPage>, owner: Option<Process>) {
        self.retire(Retired {
            remains: Remains::Control(control),
            owner,
        });
    }

    /// Whether memory or pages of ended leases wait for their last holder.
    #[must_use]
    pub fn reclaiming(&self) -> bool {
        !self.retired().is_empty() || !self.outside().left.is_empty()
    }

    /// Frees what no process holds any more.
    pub fn sweep(&self) {
        self.forget_returned();
        let mut retired = self.retired();
        let (free, held) = retired.drain(..).partition(Retired::is_free);
        *retired = held;
        drop(retired);
        // freed outside the lock: it may take long
        let free: Vec<Retired> = free;
        drop(free);
    }

    fn retire(&self, retired: Retired) {
        if !retired.is_free() {
            self.retired().push(retired);
            self.to_reclaim.notify_one();
        }
    }

    fn reserved(&self) -> MutexGuard<'_, u64> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outside(&self) -> MutexGuard<'_, Outside> {
        self.outside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn retired(&self) -> MutexGuard<'_, Vec<Retired>> {
        self.retired.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An allocation with the label that a successor will look for.
#[derive(Debug, Clone)]
pub struct Allocation {
    /// The memory.
    pub memory: Arc<dyn Memory>,
    /// What stands at its begin.
    pub label: Label,
}

/// Bytes of a device that are granted and not yet allocated.
#[derive(Debug)]
pub struct Reservation {
    memory: Arc<DeviceMemory>,
    bytes: u64,
}

impl Reservation {
    /// Allocates out of the reservation.
    ///
    /// # Errors
    /// When the device refuses, or the reservation is too small.
    pub fn allocate(&mut self, bytes: u64) -> Result<Allocation, MemoryError> {
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(|_| MemoryError::Random)?;
        let label = Label {
            instance: self.memory.instance.clone(),
            allocation: self.memory.next_allocation.fetch_add(1, SeqCst),
            random,
        };
        // held over both steps, so that no other reservation counts the bytes twice or
        // not at all
        let mut reserved = self.memory.reserved();
        let left = self
            .bytes
            .checked_sub(bytes)
            .ok_or_else(|| MemoryError::Exhausted {
                device: self.memory.device.info().name.clone(),
                wanted: bytes,
                available: self.bytes,
                total: self.memory.device.info().total_bytes,
                reclaiming: 0,
            })?;
        let memory = self.memory.device.allocate(bytes, &label)?;
        *reserved = reserved.saturating_sub(bytes);
        drop(reserved);
        self.bytes = left;
        Ok(Allocation { memory, label })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut reserved = self.memory.reserved();
        *reserved = reserved.saturating_sub(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use flextensord_device::cpu::CpuDevice;

    use super::*;

    fn memory(bytes: u64) -> Arc<DeviceMemory> {
        DeviceMemory::new(
            "t",
            1,
            Arc::new(CpuDevice::new("t", 0, bytes, None).unwrap()),
            Arc::default(),
        )
    }

    #[test]
    fn reservations_never_exceed_the_device() {
        let memory = memory(100_000);
        let mut one = memory.reserve(60_000).unwrap();
        let error = memory.reserve(50_000).unwrap_err();
        assert!(matches!(
            error,
            MemoryError::Exhausted {
                wanted: 50_000,
                available: 40_000,
                ..
            }
        ));
        let allocation = one.allocate(20_000).unwrap();
        assert_eq!(
            (memory.available(), memory.reserved_bytes()),
            (40_000, 40_000)
        );
        assert!(one.allocate(50_000).is_err());
        drop(one);
        assert_eq!(memory.available(), 80_000);
        drop(allocation);
        assert_eq!(memory.available(), 100_000);
    }

    #[test]
    fn memory_of_an_ended_lease_is_not_granted_while_a_process_holds_it() {
        let memory = memory(100_000);
        let allocation = memory.reserve(60_000).unwrap().allocate(60_000).unwrap();
        let held = allocation.memory.export().unwrap();
        memory.retire_memory(allocation.memory, Vec::new());
        assert_eq!(memory.reclaiming_bytes(), 60_000);
        let error = memory.reserve(50_000).unwrap_err();
        assert!(matches!(
            error,
            MemoryError::Exhausted {
                reclaiming: 60_000,
                ..
            }
        ));
        drop(held);
        assert!(memory.reserve(100_000).is_ok());
    }
}
