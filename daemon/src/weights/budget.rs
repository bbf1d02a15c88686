//! How many bytes weight sets may take on this host, reserved before they are taken.
//!
//! The budget is the least of the configured limit, the memory that the host has
//! available, and what the memory cgroups leave. Bytes of live segments are in use as
//! the kernel sees it; bytes that are reserved and not yet taken are not, and are
//! counted here.

use std::{
    fmt,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use sysinfo::{MemoryRefreshKind, RefreshKind, System};

use super::{cgroup, error::WeightError};

/// Where the host's figures come from.
pub struct HostMemory {
    /// Directory under which `proc` and the cgroup mounts are looked for.
    pub root: PathBuf,
    /// Bytes that the host has available; `None` when that is not known.
    pub available: Box<dyn Fn() -> Option<u64> + Send + Sync>,
}

impl HostMemory {
    /// This host.
    #[must_use]
    pub fn real() -> Self {
        Self {
            root: PathBuf::from("/"),
            available: Box::new(|| {
                let ram = MemoryRefreshKind::nothing().with_ram();
                System::new_with_specifics(RefreshKind::nothing().with_memory(ram))
                    .ok()
                    .map(|system| system.available_memory())
                    // a kernel that does not say is not one without memory
                    .filter(|bytes| *bytes > 0)
            }),
        }
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory")
            .field("root", &self.root)
            .finish_non_exhaustive()
    }
}

/// The host budget.
#[derive(Debug)]
pub struct Budget {
    configured: Option<u64>,
    host: HostMemory,
    taken: Mutex<Taken>,
    /// Bytes that stay taken although no set has them.
    stuck: Stuck,
    /// What the last question was answered, for questions that come at once again.
    last: Mutex<Option<(Instant, Figures)>>,
}

/// Tells the bytes of segments whose sets are gone and whose memory is not.
struct Stuck(Box<dyn Fn() -> u64 + Send + Sync>);

impl fmt::Debug for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stuck")
    }
}

#[derive(Debug, Default, Clone, Copy)]
struct Taken {
    /// Bytes of the segments of sets, which the kernel counts too.
    live: u64,
    /// Bytes of segments that are being built, reserved or taken.
    building: u64,
    /// Those of them that are not taken yet, which the kernel does not count.
    pending: u64,
}

/// How long figures of the host serve for questions that reserve nothing.
const FRESH: Duration = Duration::from_millis(250);

/// The budget at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Figures {
    /// Most bytes that all sets may take now.
    pub limit: u64,
    /// Bytes that are left of it.
    pub available: u64,
    /// What sets the limit.
    pub limited_by: String,
    /// Bytes of the segments of sets.
    pub live: u64,
    /// Bytes reserved for segments that are being built, until they are a set's or gone.
    pub building: u64,
    /// Those of them that are not taken from the kernel yet.
    pub pending: u64,
    /// Bytes of segments whose sets are gone, and which the driver does not let go of.
    pub stuck: u64,
}

impl Budget {
    /// A budget of at most `configured` bytes on `host`.
    #[must_use]
    pub fn new(configured: Option<u64>, host: HostMemory) -> Arc<Self> {
        Self::beside(configured, host, Box::new(|| 0))
    }

    /// As [`Budget::new`], beside the bytes that `stuck` tells of: they stay taken.
    #[must_use]
    pub fn beside(
        configured: Option<u64>,
        host: HostMemory,
        stuck: Box<dyn Fn() -> u64 + Send + Sync>,
    ) -> Arc<Self> {
        Arc::new(Self {
            configured,
            host,
            stuck: Stuck(stuck),
            taken: Mutex::default(),
            last: Mutex::default(),
        })
    }

    /// Reserves `bytes`, all or nothing.
    ///
    /// # Errors
    /// [`WeightError::HostMemory`] with the figures.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Reservation, WeightError> {
        let mut taken = self.taken();
        let figures = self.figures_of(*taken);
        if bytes > figures.available {
            return Err(WeightError::HostMemory {
                wanted: bytes,
                available: figures.available,
                limit: figures.limit,
                limited_by: figures.limited_by,
            });
        }
        taken.building = taken.building.saturating_add(bytes);
        taken.pending = taken.pending.saturating_add(bytes);
        Ok(Reservation {
            budget: Arc::clone(self),
            bytes,
            allocated: 0,
            is_live: false,
        })
    }

    /// Counts `bytes` of a set that a dead daemon left: they are taken already.
    pub fn adopt(self: &Arc<Self>, bytes: u64) -> Reservation {
        let mut taken = self.taken();
        taken.live = taken.live.saturating_add(bytes);
        Reservation {
            budget: Arc::clone(self),
            bytes,
            allocated: bytes,
            is_live: true,
        }
    }

    /// The budget now; what the host has free may be a quarter of a second old. Asking the
    /// host costs more than the rest of a Status call.
    #[must_use]
    pub fn figures(&self) -> Figures {
        let taken = *self.taken();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, figures)) = last.as_ref()
            && at.elapsed() < FRESH
            && (
                figures.live,
                figures.building,
                figures.pending,
                figures.stuck,
            ) == (taken.live, taken.building, taken.pending, (self.stuck.0)())
        {
            return figures.clone();
        }
        let figures = self.figures_of(taken);
        *last = Some((Instant::now(), figures.clone()));
        figures
    }

    /// Bytes reserved for segments that are not taken from the kernel yet.
    #[must_use]
    pub fn pending(&self) -> u64 {
        self.taken().pending
    }

    fn figures_of(&self, taken: Taken) -> Figures {
        let stuck = (self.stuck.0)();
        let ours = taken
            .live
            .saturating_add(taken.building)
            .saturating_add(stuck);
        let mut limits = vec![(
            u64::MAX - ours,
            "address space (no other limit is known)".to_owned(),
        )];
        if let Some(limit) = self.configured {
            limits.push((limit.saturating_sub(ours), "configured limit".to_owned()));
        }
        if let Some(free) = (self.host.available)() {
            let left = free.saturating_sub(taken.pending);
            limits.push((left, "memory available on the host".to_owned()));
        }
        if let Some(found) = cgroup::tightest(&self.host.root) {
            let left = found.bytes.saturating_sub(taken.pending);
            limits.push((left, format!("memory limit of cgroup {}", found.group)));
        }
        let (available, limited_by) = limits
            .into_iter()
            .min_by_key(|(available, _)| *available)
            .unwrap_or_default();
        Figures {
            limit: available.saturating_add(ours),
            available,
            limited_by,
            live: taken.live,
            building: taken.building,
            pending: taken.pending,
            stuck,
        }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of the budget, given back on drop.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Budget>,
    bytes: u64,
    allocated: u64,
    is_live: bool,
}

impl Reservation {
    /// Says that `allocated` of the bytes are taken from the kernel by now, so that its
    /// figures count them.
    pub fn allocated(&mut self, allocated: u64) {
        let more = allocated.min(self.bytes).saturating_sub(self.allocated);
        self.allocated += more;
        let mut taken = self.budget.taken();
        taken.pending = taken.pending.saturating_sub(more);
    }

    /// Says that the bytes are a set's from now on.
    pub fn mark_live(&mut self) {
        self.allocated(self.bytes);
        if !self.is_live {
            self.is_live = true;
            let mut taken = self.budget.taken();
            taken.building = taken.building.saturating_sub(self.bytes);
            taken.live = taken.live.saturating_add(self.bytes);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut taken = self.budget.taken();
        let pending = self.bytes.saturating_sub(self.allocated);
        taken.pending = taken.pending.saturating_sub(pending);
        let counter = if self.is_live {
            &mut taken.live
        } else {
            &mut taken.building
        };
        *counter = counter.saturating_sub(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::{super::cgroup::fixture, *};

    fn host(root: &std::path::Path, available: u64) -> HostMemory {
        HostMemory {
            root: root.to_owned(),
            available: Box::new(move || Some(available)),
        }
    }

    #[test]
    fn eight_at_once_for_20_of_64_mib_get_three_reservations() {
        const MIB: u64 = 1 << 20;
        let root = tempfile::tempdir().unwrap();
        let budget = Budget::new(Some(64 * MIB), host(root.path(), 1 << 40));
        let barrier = Barrier::new(8);
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        barrier.wait();
                        budget.reserve(20 * MIB)
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(results.iter().filter(|r| r.is_ok()).count(), 3);
        for error in results.iter().filter_map(|r| r.as_ref().err()) {
            assert!(matches!(
                error,
                WeightError::HostMemory { wanted, available, limit, .. }
                    if (*wanted, *available, *limit) == (20 * MIB, 4 * MIB, 64 * MIB)
            ));
        }
        drop(results);
        assert_eq!(budget.figures().available, 64 * MIB);
    }

    #[test]
    fn the_least_limit_wins_and_is_named() {
        let root = tempfile::tempdir().unwrap();
        let budget = Budget::new(Some(1000), host(root.path(), 700));
        let mut first = budget.reserve(100).unwrap();
        assert_eq!(budget.figures().available, 600);
        assert!(budget.figures().limited_by.contains("host"));
        // the host's figure would fall by as much, were it real
        first.mark_live();
        assert_eq!(
            (budget.figures().available, budget.figures().live),
            (700, 100)
        );
        fixture::write(
            root.path(),
            &[
                ("proc/self/cgroup", "0::/pod\n"),
                ("proc/self/mountinfo", fixture::MOUNT_V2),
                ("sys/fs/cgroup/pod/memory.max", "300\n"),
                ("sys/fs/cgroup/pod/memory.current", "250\n"),
            ],
        );
        let error = budget.reserve(51).unwrap_err().to_string();
        assert!(error.contains("cgroup /pod"), "{error}");
        assert!(budget.reserve(50).is_ok());
        drop(first);
        assert_eq!(budget.figures().live, 0);
    }

    #[test]
    fn a_reservation_counts_once_while_its_segment_is_being_allocated() {
        let root = tempfile::tempdir().unwrap();
        let free = Arc::new(Mutex::new(1000));
        let seen = Arc::clone(&free);
        let host = HostMemory {
            root: root.path().to_owned(),
            available: Box::new(move || Some(*seen.lock().unwrap())),
        };
        let budget = Budget::new(None, host);
        let mut large = budget.reserve(600).unwrap();
        for taken in [0, 200, 400, 600] {
            *free.lock().unwrap() = 1000 - taken;
            large.allocated(taken);
            drop(budget.reserve(400).unwrap());
            let figures = budget.figures();
            assert_eq!((figures.building, figures.pending), (600, 600 - taken));
        }
        drop(large);
        let figures = budget.figures();
        assert_eq!((figures.building, figures.pending), (0, 0));
    }

    #[test]
    fn this_host_has_memory() {
        let figures = Budget::new(None, HostMemory::real()).figures();
        assert!(figures.available > 0 && figures.available < u64::MAX / 2);
    }
}
