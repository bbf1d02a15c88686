//! The store of live weight sets: names, attachments, removal.
//!
//! Names are per user. A name is looked for among the caller's own sets first, then
//! among those that other users share, lowest user id first; another user's unshared
//! set is as good as absent.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use flextensord_device::{
    failpoint::{self, Point},
    heap, segment,
};

pub use super::set::{Attachment, Identity, WeightSet};
use super::{
    budget::{Budget, HostMemory},
    checkpoint,
    claim::{BuildProgress, Key},
    declaration,
    error::WeightError,
    loader::Watch,
    pinning::Pinner,
    record,
    room::Builders,
    set::Attacher,
    shares::Shares,
};
use crate::state::StateDirectory;

/// How long loads under way may hold up a stop: as long as a chunk takes to pin.
const CLOSE: Duration = Duration::from_secs(1);

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
    /// Pins segments for the devices.
    pub pinner: Pinner,
}

/// What weight sets take on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFigures {
    /// Most bytes that all sets may take now.
    pub budget_bytes: u64,
    /// What sets that limit.
    pub budget_limited_by: String,
    /// Bytes of the segments of sets.
    pub segment_bytes: u64,
    /// Bytes reserved for loads and puts under way, until each is a set or gone.
    pub reserved_bytes: u64,
    /// Bytes of segments whose sets are gone, and which the driver does not let go of.
    pub stuck_bytes: u64,
    /// Directory for segments.
    pub shm_dir: PathBuf,
    /// Bytes free there; 0 when that cannot be told.
    pub shm_free_bytes: u64,
}

/// All live weight sets.
#[derive(Debug)]
pub struct WeightStore {
    settings: WeightSettings,
    state: StateDirectory,
    pub(super) budget: Arc<Budget>,
    pub(super) builders: Builders,
    pub(super) headers: Arc<Shares>,
    pub(super) declarations: Arc<Shares>,
    clock: Arc<AtomicU64>,
    sets: Mutex<Sets>,
    /// Told when a build ends.
    pub(super) changed: Condvar,
    /// Loads and puts under way, by user.
    pub(super) calls: Mutex<BTreeMap<u32, usize>>,
    pub(super) refuses_new: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct Sets {
    pub(super) live: BTreeMap<Key, Arc<WeightSet>>,
    pub(super) building: HashMap<Key, Arc<BuildProgress>>,
    is_closed: bool,
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
        heap::keep_little();
        let pinner = settings.pinner.clone();
        let stuck = Box::new(move || pinner.stuck_bytes());
        Ok(Arc::new(Self {
            budget: Budget::beside(settings.host_limit, host, stuck),
            builders: Builders::default(),
            headers: checkpoint::shares(),
            declarations: declaration::shares(),
            settings,
            state,
            clock: Arc::new(AtomicU64::new(1)),
            sets: Mutex::default(),
            changed: Condvar::new(),
            calls: Mutex::default(),
            refuses_new: AtomicBool::new(false),
        }))
    }

    /// Makes a set live that a dead daemon left; before anything is served, so that no name
    /// is taken twice.
    pub(super) fn restore(&self, set: Arc<WeightSet>) {
        self.touch(&set);
        let key = (set.owner_uid(), set.name().to_owned());
        self.sets().live.insert(key, set);
    }

    /// As [`WeightStore::attach`], to the set of that id.
    ///
    /// # Errors
    /// [`WeightError::NotFound`] when it is not live.
    pub fn attach_id(&self, uid: u32, id: &str, manager: &str) -> Result<Attachment, WeightError> {
        let sets = self.sets();
        let found = sets.live.values().find(|set| set.id() == id);
        let set = found.ok_or_else(|| WeightError::NotFound {
            name: id.to_owned(),
        })?;
        let manager = manager.to_owned();
        let attacher = Attacher { uid, manager };
        self.touch(set);
        let (set, clock) = (Arc::clone(set), Arc::clone(&self.clock));
        Ok(Attachment::new(set, attacher, clock))
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
    /// another user's: a shared one first, then the one of the lowest user id. Returns the bytes of its segment.
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
        failpoint::pass(Point::Drop)?;
        self.take_out(&mut sets, &set)?;
        // unmapping a large segment takes long, and others wait for the lock
        drop(sets);
        tracing::info!(set = set.id(), name, uid, "weight set dropped");
        Ok(set.segment().bytes())
    }

    /// Builds no new sets: the daemon drains. Sets under way are finished.
    pub fn refuse_new(&self) {
        self.refuses_new.store(true, Ordering::SeqCst);
    }

    /// The daemon is about to stop: builds no new sets, and gives up what is being pinned.
    pub fn give_up(&self) {
        self.refuse_new();
        self.settings.pinner.close();
    }

    /// The daemon stops: removes all sets, whose memory goes with its last holder, or leaves
    /// them for a successor when `keep` says so. Loads under way are given a moment to undo what they began; of one that hangs in the read
    /// of a file the names are removed, so that a successor starts clean.
    pub fn close(&self, keep: bool) {
        self.give_up();
        let mut sets = self.sets();
        let deadline = Instant::now() + CLOSE;
        while !sets.building.is_empty() && Instant::now() < deadline {
            let waited = self.changed.wait_timeout(sets, CLOSE / 20);
            sets = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        sets.is_closed = true;
        let all: Vec<_> = sets.live.values().cloned().collect();
        for set in all {
            if keep {
                set.segment().keep();
                continue;
            }
            if let Err(error) = self.take_out(&mut sets, &set) {
                tracing::warn!(set = set.id(), %error, "weight set left behind");
                continue;
            }
            // a thread that hangs in the driver may hold the set to the end of the process
            if let Err(error) = set.segment().unlink() {
                tracing::warn!(set = set.id(), %error, "segment left behind");
            }
        }
        let (directory, instance) = (&self.settings.shm_dir, &self.settings.instance);
        for id in self.builders.close(directory, instance) {
            if let Err(error) = self.state.remove(&record::file_name(&id)) {
                tracing::warn!(set = id, %error, "state of a weight set left behind");
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
            segment_bytes: figures.live,
            reserved_bytes: figures.building,
            stuck_bytes: figures.stuck,
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

    /// Makes a set live, unless one of its name has come in between, its caller is gone
    /// or the daemon stops.
    pub(crate) fn insert(&self, set: Arc<WeightSet>, watch: &dyn Watch) -> Result<(), WeightError> {
        let mut sets = self.sets();
        if watch.is_cancelled() {
            return Err(WeightError::gone("load"));
        }
        if sets.is_closed {
            return Err(WeightError::stopping());
        }
        let key = (set.owner_uid(), set.name().to_owned());
        if sets.live.contains_key(&key) {
            // only a set that was given another's digest as its name can be there
            return Err(WeightError::ContentDiffers {
                name: set.name().to_owned(),
                tensor: String::new(),
                difference: "its name is the digest of other content".to_owned(),
            });
        }
        self.touch(&set);
        sets.live.insert(key, set);
        Ok(())
    }

    pub(super) fn take_out(&self, sets: &mut Sets, set: &WeightSet) -> Result<(), WeightError> {
        self.state.remove(&record::file_name(set.id()))?;
        failpoint::cross(Point::Dropped);
        sets.live.remove(&(set.owner_uid(), set.name().to_owned()));
        Ok(())
    }

    fn touch(&self, set: &WeightSet) {
        set.touch(self.clock.fetch_add(1, Ordering::Relaxed));
    }

    pub(super) fn sets(&self) -> MutexGuard<'_, Sets> {
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

#[cfg(test)]
pub(crate) mod fixture {
    //! A store in scratch directories.

    use std::{fs, path::Path, sync::Arc};

    use super::{
        super::{
            budget::HostMemory, checkpoint::fixture::single, error::WeightError, load::Outcome,
            load::SetRequest, loader::Cancel,
        },
        WeightSettings, WeightStore,
    };
    use crate::state::StateDirectory;

    /// A store with its directories, which must end up empty.
    pub(crate) struct Scratch {
        pub(crate) store: Arc<WeightStore>,
        pub(crate) shm: tempfile::TempDir,
        pub(crate) state: tempfile::TempDir,
    }

    impl Scratch {
        pub(crate) fn new(host_limit: Option<u64>) -> Self {
            let shm = tempfile::tempdir().unwrap();
            let state = tempfile::tempdir().unwrap();
            let settings = WeightSettings {
                instance: "test".to_owned(),
                shm_dir: shm.path().to_owned(),
                host_limit,
                load_threads: 2,
                pinner: crate::weights::pinning::Pinner::none(),
            };
            let host = HostMemory {
                root: state.path().join("none"),
                available: Box::new(|| Some(1 << 40)),
            };
            let directory = StateDirectory::open(state.path()).unwrap();
            let store = WeightStore::on_host(settings, directory, host).unwrap();
            Self { store, shm, state }
        }

        /// Number of segments and of state files.
        pub(crate) fn files(&self) -> (usize, usize) {
            let count = |path: &Path| fs::read_dir(path).unwrap().count();
            (count(self.shm.path()), count(self.state.path()))
        }

        /// Loads `U8` tensors.
        pub(crate) fn load(
            &self,
            request: &SetRequest,
            tensors: &[(&str, &[u8])],
        ) -> Result<Outcome, WeightError> {
            self.store
                .load(request, single(tensors), &Cancel::default())
        }
    }

    /// A request of user 1 for a set with that name; none when it is empty.
    pub(crate) fn named(name: &str) -> SetRequest {
        SetRequest {
            uid: 1,
            name: Some(name.to_owned()).filter(|name| !name.is_empty()),
            content_id: None,
            share: false,
        }
    }
}

#[cfg(test)]
mod tests;
