//! Room for a segment: its budget, its memory, and its name while it is being built.

use std::{
    collections::BTreeSet,
    fs, io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use flextensord_device::segment::{self, SegmentBuilder, SegmentError};

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
    /// A segment for `manifest`, with its budget; evicts what it must.
    pub(crate) fn room(
        &self,
        manifest: &Manifest,
        watch: &dyn Watch,
    ) -> Result<Room, WeightError> {
        let bytes = manifest.segment_bytes();
        let id = random_id()?;
        let name = leftovers::segment_name(&self.settings().instance, &id);
        let building = self.builders.begin(id).ok_or_else(WeightError::stopping)?;
        loop {
            let mut reservation = self.reserve(bytes)?;
            let node = self.settings().pinner.numa_node();
            let directory = &self.settings().shm_dir;
            let mut proceed = |taken| {
                reservation.allocated(taken);
                !(watch.is_cancelled() || self.builders.is_closed())
            };
            match SegmentBuilder::on_node(directory, &name, bytes, node, &mut proceed) {
                Ok(builder) => {
                    return Ok(Room {
                        builder,
                        reservation,
                        building,
                    });
                }
                Err(SegmentError::GivenUp { .. }) => return Err(WeightError::gone("load")),
                Err(SegmentError::Full { wanted, free, .. })
                    if self.evict(wanted.saturating_sub(free).max(1)) > 0 => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    fn reserve(&self, bytes: u64) -> Result<Reservation, WeightError> {
        loop {
            match self.budget.reserve(bytes) {
                Err(WeightError::HostMemory { available, .. })
                    if self.evict(bytes.saturating_sub(available).max(1)) > 0 => {}
                other => return other,
            }
        }
    }
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
