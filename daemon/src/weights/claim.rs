//! Who may build a set now: limits on calls, one builder a name.

use std::{
    sync::{
        Arc, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use super::{
    error::WeightError,
    loader::Watch,
    registry::{WeightSet, WeightStore},
};

/// Most live sets.
const SETS: usize = 1024;
/// Most loads and puts at a time, of all users and of one. Those that wait for another
/// one of the same name count: all processes of a job may ask at once.
const CALLS: usize = 256;
const CALLS_OF_USER: usize = 64;
/// How long a call waits for another one that loads the same name.
const BUILD_WAIT: Duration = Duration::from_secs(30 * 60);
/// How often a waiting call looks whether its caller is still there.
pub(crate) const WAIT_STEP: Duration = Duration::from_millis(50);

/// User and name, or user and what stands for a name while that is not known.
pub(crate) type Key = (u32, String);

/// How far a load or put is, for those who ask or wait.
#[derive(Debug, Default)]
pub struct BuildProgress {
    pub(crate) done: AtomicU64,
    pub(crate) total: AtomicU64,
}

impl BuildProgress {
    /// Takes in what [`Watch::progress`] says.
    pub fn record(&self, done: u64, total: u64) {
        self.total.store(total, Ordering::Relaxed);
        if done == 0 {
            self.done.store(0, Ordering::Relaxed);
        } else {
            self.done.fetch_max(done, Ordering::Relaxed);
        }
    }

    /// Bytes done, and bytes in all.
    #[must_use]
    pub fn figures(&self) -> (u64, u64) {
        (
            self.done.load(Ordering::Relaxed),
            self.total.load(Ordering::Relaxed),
        )
    }
}

impl WeightStore {
    /// Counts a load or put of `uid` for as long as the answer lives.
    pub(crate) fn admit(self: &Arc<Self>, uid: u32) -> Result<Call, WeightError> {
        if self.refuses_new.load(Ordering::SeqCst) {
            return Err(WeightError::Draining);
        }
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
            let (done, total) = progress.figures();
            watch.progress(done, total);
            if watch.is_cancelled() {
                return Err(WeightError::gone("wait for another load"));
            }
            if Instant::now() >= deadline {
                let (name, seconds) = (key.1, BUILD_WAIT.as_secs());
                return Err(WeightError::Timeout { name, seconds });
            }
            let waited = self.changed.wait_timeout(sets, WAIT_STEP);
            sets = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
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
