//! The store of live weight sets: names, attachments, eviction.
//!
//! Names are per user. A name is looked for among the caller's own sets first, then
//! among those that other users share, lowest user id first; another user's unshared
//! set is as good as absent.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use flextensord_device::segment::{self, SegmentBuilder, SegmentError};

pub use super::set::{Attachment, Identity, WeightSet};
use super::{
    budget::{Budget, HostMemory, Reservation},
    error::WeightError,
    leftovers,
    loader::Watch,
    manifest::Manifest,
    record,
    set::Attacher,
};
use crate::state::StateDirectory;

/// Most live sets.
const SETS: usize = 1024;
/// Most loads and puts at a time, waiting ones included: of all users and of one.
const CALLS: usize = 64;
const CALLS_OF_USER: usize = 8;
/// How long a call waits for another one that loads the same name.
const BUILD_WAIT: Duration = Duration::from_secs(30 * 60);
/// How often a waiting call looks whether its caller is still there.
const WAIT_STEP: Duration = Duration::from_millis(50);

/// What the store is told at start.
#[derive(Debug, Clone)]
pub struct WeightSettings {
    /// Name of this instance, part of the segments' names.
    pub instance: String,
    /// Directory for segments, on tmpfs.
    pub shm_dir: PathBuf,
    /// Most bytes for all sets; `None` leaves it to the host's own limits.
    pub host_limit: Option<u64>,
    /// Threads that read one checkpoint; 0 counts as 1.
    pub load_threads: usize,
}

/// What weight sets take on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFigures {
    /// Most bytes that all sets may take now.
    pub budget_bytes: u64,
    /// What sets that limit.
    pub budget_limited_by: String,
    /// Bytes of live segments and of those that are being filled.
    pub segment_bytes: u64,
    /// Bytes reserved for segments that are not there yet.
    pub reserved_bytes: u64,
    /// Directory for segments.
    pub shm_dir: PathBuf,
    /// Bytes free there; 0 when that cannot be told.
    pub shm_free_bytes: u64,
}

/// User and name, or user and what stands for a name while that is not known.
pub(crate) type Key = (u32, String);

/// All live weight sets.
#[derive(Debug)]
pub struct WeightStore {
    settings: WeightSettings,
    state: StateDirectory,
    budget: Arc<Budget>,
    clock: Arc<AtomicU64>,
    sets: Mutex<Sets>,
    changed: Condvar,
    calls: Mutex<BTreeMap<u32, usize>>,
}

#[derive(Debug, Default)]
struct Sets {
    live: BTreeMap<Key, Arc<WeightSet>>,
    building: HashMap<Key, Arc<BuildProgress>>,
}

/// How far the call is that others wait for.
#[derive(Debug, Default)]
pub(crate) struct BuildProgress {
    pub(crate) done: AtomicU64,
    pub(crate) total: AtomicU64,
}

impl WeightStore {
    /// An empty store on this host.
    ///
    /// # Errors
    /// When the directory for segments cannot be looked at, or the instance's name is
    /// not legal.
    pub fn new(settings: WeightSettings, state: StateDirectory) -> Result<Arc<Self>, WeightError> {
        Self::on_host(settings, state, HostMemory::real())
    }

    /// As [`WeightStore::new`], with figures of the host from elsewhere.
    ///
    /// # Errors
    /// As [`WeightStore::new`].
    pub fn on_host(
        settings: WeightSettings,
        state: StateDirectory,
        host: HostMemory,
    ) -> Result<Arc<Self>, WeightError> {
        flextensord_proto::name::check(&settings.instance)
            .map_err(|e| WeightError::name("instance", &settings.instance, &e))?;
        segment::free_bytes(&settings.shm_dir)?;
        Ok(Arc::new(Self {
            budget: Budget::new(settings.host_limit, host),
            settings,
            state,
            clock: Arc::new(AtomicU64::new(1)),
            sets: Mutex::default(),
            changed: Condvar::new(),
            calls: Mutex::default(),
        }))
    }

    /// Removes what a dead daemon of this instance left; see [`leftovers::discard`].
    ///
    /// # Errors
    /// When a directory cannot be read or a file not be removed.
    pub fn discard_leftovers(
        shm_dir: &std::path::Path,
        instance: &str,
        state: &StateDirectory,
    ) -> Result<usize, WeightError> {
        leftovers::discard(shm_dir, instance, state)
    }

    /// Attaches a manager of `uid` to the set `name`, which stays until the attachment
    /// is dropped.
    ///
    /// # Errors
    /// [`WeightError::NotFound`] when there is none that the user may see,
    /// [`WeightError::Argument`] when the name is not legal.
    pub fn attach(&self, uid: u32, name: &str, manager: &str) -> Result<Attachment, WeightError> {
        let sets = self.sets();
        let set = find(&sets, uid, name)?;
        let manager = manager.to_owned();
        let attacher = Attacher { uid, manager };
        self.touch(set);
        Ok(Attachment::new(
            Arc::clone(set),
            attacher,
            Arc::clone(&self.clock),
        ))
    }

    /// The set `name` as `uid` sees it.
    ///
    /// # Errors
    /// [`WeightError::NotFound`].
    pub fn get(&self, uid: u32, name: &str) -> Result<Arc<WeightSet>, WeightError> {
        find(&self.sets(), uid, name).cloned()
    }

    /// All sets that `uid` may see, in order of name, then of owner.
    #[must_use]
    pub fn visible_to(&self, uid: u32) -> Vec<Arc<WeightSet>> {
        let mut sets = self.all();
        sets.retain(|set| set.is_visible_to(uid));
        sets
    }

    /// All sets, in order of name, then of owner.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<WeightSet>> {
        let mut sets: Vec<_> = self.sets().live.values().cloned().collect();
        sets.sort_by(|a, b| (a.name(), a.owner_uid()).cmp(&(b.name(), b.owner_uid())));
        sets
    }

    /// Removes the set `name` of `uid`, or, for an admin without such a set of its own,
    /// another user's. Returns the bytes of its segment.
    ///
    /// # Errors
    /// [`WeightError::NotFound`], [`WeightError::NotOwner`], [`WeightError::InUse`], or
    /// [`WeightError::State`]; the set stays then.
    pub fn remove(&self, uid: u32, is_admin: bool, name: &str) -> Result<u64, WeightError> {
        let mut sets = self.sets();
        let any = || sets.live.values().find(|set| set.name() == name);
        let set = match find(&sets, uid, name) {
            Ok(set) => set,
            Err(e @ WeightError::NotFound { .. }) if is_admin => any().ok_or(e)?,
            Err(e) => return Err(e),
        };
        let name = name.to_owned();
        if set.owner_uid() != uid && !is_admin {
            return Err(WeightError::NotOwner { name });
        }
        let managers = set.attachments();
        if managers > 0 {
            return Err(WeightError::InUse { name, managers });
        }
        let set = Arc::clone(set);
        self.take_out(&mut sets, &set)?;
        tracing::info!(set = set.id(), name, uid, "weight set dropped");
        Ok(set.segment().bytes())
    }

    /// Removes sets that nobody is attached to, least recently used first, until
    /// `bytes` bytes of segments are gone; none when there are not that many.
    /// Returns the bytes of the segments removed.
    pub fn evict(&self, bytes: u64) -> u64 {
        let mut sets = self.sets();
        let mut idle: Vec<_> = sets
            .live
            .values()
            // whoever else holds it keeps its memory
            .filter(|set| set.attachments() == 0 && Arc::strong_count(set) == 1)
            .cloned()
            .collect();
        idle.sort_by_key(|set| set.last_use());
        let possible: u64 = idle.iter().map(|set| set.segment().bytes()).sum();
        let mut freed = 0;
        if possible < bytes {
            return freed;
        }
        for set in idle {
            if freed >= bytes {
                break;
            }
            match self.take_out(&mut sets, &set) {
                Ok(()) => {
                    tracing::info!(set = set.id(), name = set.name(), "weight set evicted");
                    freed += set.segment().bytes();
                }
                Err(e) => tracing::warn!(set = set.id(), "weight set not evicted: {e}"),
            }
        }
        freed
    }

    /// Removes all sets: the daemon stops. Their memory goes with its last holder.
    pub fn close(&self) {
        let mut sets = self.sets();
        let all: Vec<_> = sets.live.values().cloned().collect();
        for set in all {
            if let Err(error) = self.take_out(&mut sets, &set) {
                tracing::warn!(set = set.id(), %error, "weight set left behind");
            }
        }
    }

    /// What weight sets take on this host.
    #[must_use]
    pub fn host(&self) -> HostFigures {
        let figures = self.budget.figures();
        HostFigures {
            budget_bytes: figures.limit,
            budget_limited_by: figures.limited_by,
            segment_bytes: figures.allocated,
            reserved_bytes: figures.pending,
            shm_dir: self.settings.shm_dir.clone(),
            shm_free_bytes: segment::free_bytes(&self.settings.shm_dir).unwrap_or(0),
        }
    }

    pub(crate) fn settings(&self) -> &WeightSettings {
        &self.settings
    }

    pub(crate) fn state(&self) -> &StateDirectory {
        &self.state
    }

    /// Counts a load or put of `uid` for as long as the answer lives.
    pub(crate) fn admit(self: &Arc<Self>, uid: u32) -> Result<Call, WeightError> {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let total: usize = calls.values().sum();
        let own = calls.entry(uid).or_default();
        for (count, limit, what) in [
            (*own, CALLS_OF_USER, "loads and puts of this user at a time"),
            (total, CALLS, "loads and puts at a time"),
        ] {
            if count >= limit {
                return Err(WeightError::TooMany { what, limit });
            }
        }
        *own += 1;
        drop(calls);
        let store = Arc::clone(self);
        Ok(Call { store, uid })
    }

    /// Takes `key` to build a set under it, or finds the live one. Waits while another
    /// call builds it.
    pub(crate) fn claim(
        self: &Arc<Self>,
        key: Key,
        watch: &dyn Watch,
    ) -> Result<Claim, WeightError> {
        let deadline = Instant::now() + BUILD_WAIT;
        let mut sets = self.sets();
        loop {
            if let Some(set) = sets.live.get(&key) {
                return Ok(Claim::Live(Arc::clone(set)));
            }
            let Some(progress) = sets.building.get(&key).cloned() else {
                if sets.live.len() + sets.building.len() >= SETS {
                    let what = "weight sets";
                    return Err(WeightError::TooMany { what, limit: SETS });
                }
                let progress = Arc::new(BuildProgress::default());
                sets.building.insert(key.clone(), Arc::clone(&progress));
                let store = Arc::clone(self);
                return Ok(Claim::Build(Build {
                    store,
                    key,
                    progress,
                }));
            };
            watch.progress(
                progress.done.load(Ordering::Relaxed),
                progress.total.load(Ordering::Relaxed),
            );
            if watch.is_cancelled() {
                return Err(WeightError::Aborted {
                    what: "wait for another load",
                    reason: "the caller is gone or has given up".to_owned(),
                });
            }
            if Instant::now() >= deadline {
                let (name, seconds) = (key.1, BUILD_WAIT.as_secs());
                return Err(WeightError::Timeout { name, seconds });
            }
            let waited = self.changed.wait_timeout(sets, WAIT_STEP);
            sets = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// A segment for `manifest`, with its budget; evicts what it must.
    pub(crate) fn room(&self, manifest: &Manifest) -> Result<Room, WeightError> {
        let bytes = manifest.segment_bytes();
        let id = random_id()?;
        let name = leftovers::segment_name(&self.settings.instance, &id);
        loop {
            let mut reservation = self.reserve(bytes)?;
            match SegmentBuilder::new(&self.settings.shm_dir, &name, bytes) {
                Ok(builder) => {
                    reservation.mark_allocated();
                    return Ok(Room {
                        id,
                        reservation,
                        builder,
                    });
                }
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

    /// Whether `set` is still live; it counts as used now. `share` opens it to others if
    /// `uid` owns it.
    pub(crate) fn confirm(
        &self,
        set: &Arc<WeightSet>,
        uid: u32,
        share: bool,
    ) -> Result<bool, WeightError> {
        let sets = self.sets();
        let is_live = sets
            .live
            .get(&(set.owner_uid(), set.name().to_owned()))
            .is_some_and(|live| Arc::ptr_eq(live, set));
        if is_live && share && set.owner_uid() == uid && !set.is_shared() {
            let mut record = record::SetRecord::of(set);
            record.shared = true;
            self.state.write(&record::file_name(set.id()), &record)?;
            set.share();
        }
        self.touch(set);
        Ok(is_live)
    }

    /// Makes a set live, unless one of its name has come in between, which is returned.
    pub(crate) fn insert(&self, set: Arc<WeightSet>) -> Result<(), Arc<WeightSet>> {
        let mut sets = self.sets();
        let key = (set.owner_uid(), set.name().to_owned());
        if let Some(other) = sets.live.get(&key) {
            return Err(Arc::clone(other));
        }
        self.touch(&set);
        sets.live.insert(key, set);
        Ok(())
    }

    fn take_out(&self, sets: &mut Sets, set: &WeightSet) -> Result<(), WeightError> {
        self.state.remove(&record::file_name(set.id()))?;
        sets.live.remove(&(set.owner_uid(), set.name().to_owned()));
        Ok(())
    }

    fn touch(&self, set: &WeightSet) {
        set.touch(self.clock.fetch_add(1, Ordering::Relaxed));
    }

    fn sets(&self) -> MutexGuard<'_, Sets> {
        self.sets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn find<'a>(sets: &'a Sets, uid: u32, name: &str) -> Result<&'a Arc<WeightSet>, WeightError> {
    flextensord_proto::name::check(name).map_err(|e| WeightError::name("name", name, &e))?;
    let own = sets.live.get(&(uid, name.to_owned()));
    let shared = || {
        let mut all = sets.live.values();
        all.find(|set| set.name() == name && set.is_visible_to(uid))
    };
    own.or_else(shared).ok_or_else(|| WeightError::NotFound {
        name: name
            .chars()
            .take(flextensord_proto::limit::NAME_BYTES)
            .collect(),
    })
}

fn random_id() -> Result<String, WeightError> {
    let mut id = [0_u8; leftovers::ID_DIGITS / 2];
    getrandom::fill(&mut id).map_err(|_| WeightError::Internal("no random numbers"))?;
    Ok(id.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A load or put that counts against the limits.
#[derive(Debug)]
pub(crate) struct Call {
    store: Arc<WeightStore>,
    uid: u32,
}

impl Drop for Call {
    fn drop(&mut self) {
        let calls = &self.store.calls;
        let mut calls = calls.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = calls.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                calls.remove(&self.uid);
            }
        }
    }
}

/// The answer of [`WeightStore::claim`].
#[derive(Debug)]
pub(crate) enum Claim {
    /// There is a live set.
    Live(Arc<WeightSet>),
    /// The caller may build one.
    Build(Build),
}

/// The right to build a set under a key; others wait until it is dropped.
#[derive(Debug)]
pub(crate) struct Build {
    store: Arc<WeightStore>,
    key: Key,
    pub(crate) progress: Arc<BuildProgress>,
}

impl Drop for Build {
    fn drop(&mut self) {
        self.store.sets().building.remove(&self.key);
        self.store.changed.notify_all();
    }
}

/// A segment under construction with its budget and the id of its set.
#[derive(Debug)]
pub(crate) struct Room {
    // before the reservation, so that bytes return to the kernel before the budget
    pub(crate) builder: SegmentBuilder,
    pub(crate) reservation: Reservation,
    pub(crate) id: String,
}
