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
    registry::{Sets, WeightSet, WeightStore},
};

/// Most live sets, and most of one user who is no administrator.
const SETS: usize = 1024;
const SETS_OF_USER: usize = SETS / 2;
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

impl Sets {
    /// Whether there may be one more set of a user.
    fn admit(&self, uid: u32) -> Result<(), WeightError> {
        let is_admin = uid == 0 || uid == nix::unistd::geteuid().as_raw();
        let of = |keys: &mut dyn Iterator<Item = &Key>| keys.filter(|key| key.0 == uid).count();
        let own = || of(&mut self.live.keys()) + of(&mut self.building.keys());
        if !is_admin && own() >= SETS_OF_USER {
            let what = "weight sets of this user";
            let limit = SETS_OF_USER;
            return Err(WeightError::TooMany { what, limit });
        }
        if self.live.len() + self.building.len() >= SETS {
            let what = "weight sets";
            return Err(WeightError::TooMany { what, limit: SETS });
        }
        Ok(())
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
                sets.admit(key.0)?;
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

#[cfg(test)]
mod tests {
    use super::{super::registry::fixture::Scratch, *};
    use crate::weights::loader::Cancel;

    #[test]
    fn one_user_cannot_take_all_weight_sets() {
        let scratch = Scratch::new(None);
        // users that this test does not run as
        let [greedy, other] = [1, 2].map(|n| nix::unistd::geteuid().as_raw() + n);
        let claim = |uid, n: usize| {
            let key = (uid, format!("s{n}"));
            scratch.store.claim(key, &Cancel::default())
        };
        let mut claims: Vec<_> = (0..SETS_OF_USER)
            .map(|n| claim(greedy, n).unwrap())
            .collect();
        assert!(matches!(
            claim(greedy, SETS_OF_USER),
            Err(WeightError::TooMany {
                limit: SETS_OF_USER,
                what: "weight sets of this user"
            })
        ));
        claims.extend((0..SETS_OF_USER).map(|n| claim(other, n).unwrap()));
        assert!(matches!(
            claim(0, 0),
            Err(WeightError::TooMany { limit: SETS, .. })
        ));
    }
}
