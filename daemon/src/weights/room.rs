//! Room for a segment: its budget, its memory, its name while it is being built, and the
//! sets that go for it.

use std::{
    collections::BTreeSet,
    fs, io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use flextensord_device::segment::{self, SegmentBuilder, SegmentError};
use nix::unistd::geteuid;

use super::{
    budget::Reservation, error::WeightError, leftovers, loader::Watch, manifest::Manifest,
    registry::WeightStore,
};

/// A segment under construction with its budget and the id of its set.
#[derive(Debug)]
pub(crate) struct Room {
    // before the reservation, so that bytes return to the kernel before the budget
    pub(crate) builder: SegmentBuilder,
    pub(crate) reservation: Reservation,
    pub(crate) building: Building,
}

impl WeightStore {
    /// A segment of `uid` for `manifest`, with its budget; evicts what it must and may.
    pub(crate) fn room(
        &self,
        uid: u32,
        manifest: &Manifest,
        watch: &dyn Watch,
    ) -> Result<Room, WeightError> {
        let bytes = manifest.segment_bytes();
        let id = random_id()?;
        let name = leftovers::segment_name(&self.settings().instance, &id);
        let building = self.builders.begin(id).ok_or_else(WeightError::stopping)?;
        let directory = &self.settings().shm_dir;
        let node = self.settings().pinner.numa_node();
        loop {
            let mut reservation = match self.budget.reserve(bytes) {
                Ok(reservation) => reservation,
                Err(WeightError::HostMemory { available, .. })
                    if self.make_room(uid, bytes, available) =>
                {
                    continue;
                }
                Err(e) => return Err(e),
            };
            let mut proceed = |taken| {
                reservation.allocated(taken);
                !(watch.is_cancelled() || self.builders.is_closed())
            };
            let built = SegmentBuilder::on_node(directory, &name, bytes, node, &mut proceed);
            match built {
                Ok(builder) => {
                    if let Some(error) = builder.misplaced() {
                        tracing::warn!(%error, "a segment lies where the kernel puts it");
                    }
                    return Ok(Room {
                        builder,
                        reservation,
                        building,
                    });
                }
                Err(SegmentError::GivenUp { .. }) => return Err(WeightError::gone("load")),
                Err(full @ SegmentError::Full { .. }) => {
                    drop(reservation);
                    if !self.make_room(uid, bytes, u64::MAX) {
                        return Err(full.into());
                    }
                }
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Evicts for a segment of `bytes` bytes of `uid`, for which the budget has
    /// `available`, if that leaves room for it in the budget and in the file system.
    /// Whether anything was evicted.
    fn make_room(&self, uid: u32, bytes: u64, available: u64) -> bool {
        let free = segment::free_bytes(&self.settings().shm_dir).unwrap_or(0);
        // others are about to take what they have reserved
        let in_files = bytes.saturating_add(self.budget.pending());
        let missing = bytes
            .saturating_sub(available)
            .max(in_files.saturating_sub(free));
        self.evict(uid, missing.max(1)) > 0
    }

    /// Removes sets that nobody is attached to, least recently used first, until
    /// `bytes` bytes of segments are gone; none when there are not that many. Only sets
    /// of `uid`, unless that is an administrator, whose own go first. Returns the bytes
    /// of the segments removed.
    pub fn evict(&self, uid: u32, bytes: u64) -> u64 {
        let mut sets = self.sets();
        let mut idle: Vec<_> = sets
            .live
            .values()
            .filter(|set| set.owner_uid() == uid || is_administrator(uid))
            // whoever else holds it keeps its memory
            .filter(|set| set.attachments() == 0 && Arc::strong_count(set) == 1)
            .cloned()
            .collect();
        idle.sort_by_key(|set| (set.owner_uid() != uid, set.last_use()));
        let possible: u64 = idle.iter().map(|set| set.segment().bytes()).sum();
        let mut freed = 0;
        if possible < bytes {
            return freed;
        }
        for set in &idle {
            if freed >= bytes {
                break;
            }
            match self.take_out(&mut sets, set) {
                Ok(()) => {
                    let (id, name, owner) = (set.id(), set.name(), set.owner_uid());
                    tracing::info!(set = id, name, owner, uid, "weight set evicted");
                    freed += set.segment().bytes();
                }
                Err(e) => tracing::warn!(set = set.id(), "weight set not evicted: {e}"),
            }
        }
        // unmapping comes after the lock is given back
        drop(sets);
        freed
    }
}

/// Root and the daemon's own user.
fn is_administrator(uid: u32) -> bool {
    uid == 0 || uid == geteuid().as_raw()
}

fn random_id() -> Result<String, WeightError> {
    let mut id = [0_u8; leftovers::ID_DIGITS / 2];
    getrandom::fill(&mut id).map_err(|_| WeightError::Internal("no random numbers"))?;
    Ok(id.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Ids of all segments that are being built. A thread that hangs in the read of a file
/// cannot clean up after itself, so that the end of the daemon has to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Builders(Arc<Mutex<UnderWay>>);

#[derive(Debug, Default)]
struct UnderWay {
    ids: BTreeSet<String>,
    is_closed: bool,
}

impl Builders {
    /// Notes that the segment with that id is being built; `None` once the store is
    /// closed.
    fn begin(&self, id: String) -> Option<Building> {
        let mut under_way = self.lock();
        if under_way.is_closed {
            return None;
        }
        under_way.ids.insert(id.clone());
        let builders = self.clone();
        Some(Building { builders, id })
    }

    fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    /// Removes the names of all segments that are still being built, and lets none begin.
    /// Their memory goes with the process. Returns the ids.
    pub(super) fn close(&self, directory: &Path, instance: &str) -> Vec<String> {
        let mut under_way = self.lock();
        under_way.is_closed = true;
        for id in &under_way.ids {
            let name = leftovers::segment_name(instance, id);
            // the second is there if it has been published and is not yet a set's
            for path in [
                segment::building_path(directory, &name),
                directory.join(&name),
            ] {
                match fs::remove_file(&path) {
                    Ok(()) => tracing::warn!(
                        segment = %path.display(),
                        "removed a segment whose load has not ended"
                    ),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => {
                        tracing::warn!(segment = %path.display(), %error, "segment left behind");
                    }
                }
            }
        }
        under_way.ids.iter().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, UnderWay> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A segment is being built, until this is dropped.
#[derive(Debug)]
pub(crate) struct Building {
    builders: Builders,
    id: String,
}

impl Building {
    /// The id of the segment and of its set.
    pub(crate) fn id(&self) -> &str {
        &self.id
    }
}

impl Drop for Building {
    fn drop(&mut self) {
        self.builders.lock().ids.remove(&self.id);
    }
}
