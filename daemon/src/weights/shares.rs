//! How many bytes of what callers describe (headers, declarations) are in memory at a
//! time: of one user, and of all. They become several times as many bytes of heap, which
//! the host budget does not see.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

use flextensord_device::heap;

use super::{claim::WAIT_STEP, error::WeightError, loader::Watch};

/// Bytes from which on the heap is given back to the kernel when they are dropped.
const TRIM: u64 = 1 << 20;

/// What all callers share.
#[derive(Debug)]
pub(crate) struct Shares {
    what: &'static str,
    of_user: u64,
    of_all: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    taken: BTreeMap<u32, u64>,
    /// Who waits, in order of coming: number, user, bytes.
    waiting: VecDeque<(u64, u32, u64)>,
    next: u64,
}

impl State {
    fn of(&self, uid: u32) -> u64 {
        self.taken.get(&uid).copied().unwrap_or(0)
    }

    fn all(&self) -> u64 {
        self.taken.values().sum()
    }

    fn add(&mut self, uid: u32, bytes: u64) {
        *self.taken.entry(uid).or_default() += bytes;
    }
}

impl Shares {
    /// At most `of_all` bytes of `what` at a time, `of_user` of one user.
    pub(crate) fn new(what: &'static str, of_user: u64, of_all: u64) -> Arc<Self> {
        Arc::new(Self {
            what,
            of_user,
            of_all,
            state: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Takes `bytes` bytes, which must not be over a user's share. Waits in turn while
    /// others have them; who waits for the end of its own user's calls holds up nobody
    /// else.
    pub(crate) fn wait(
        self: &Arc<Self>,
        uid: u32,
        bytes: u64,
        watch: &dyn Watch,
    ) -> Result<Share, WeightError> {
        let bytes = bytes.min(self.of_user);
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        state.waiting.push_back((number, uid, bytes));
        loop {
            let first = state
                .waiting
                .iter()
                .find(|(_, uid, bytes)| state.of(*uid) + bytes <= self.of_user);
            let is_next = first.is_some_and(|(first, _, _)| *first == number)
                && state.all() + bytes <= self.of_all;
            let is_gone = watch.is_cancelled();
            if is_next || is_gone {
                state.waiting.retain(|(other, _, _)| *other != number);
                self.changed.notify_all();
            }
            if is_gone {
                return Err(WeightError::gone("load"));
            }
            if is_next {
                state.add(uid, bytes);
                drop(state);
                return Ok(self.share(uid, bytes));
            }
            let waited = self.changed.wait_timeout(state, WAIT_STEP);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// A share of nothing yet, for [`Share::grow`].
    pub(crate) fn none(self: &Arc<Self>, uid: u32) -> Share {
        self.share(uid, 0)
    }

    fn share(self: &Arc<Self>, uid: u32, bytes: u64) -> Share {
        let shares = Arc::clone(self);
        Share { shares, uid, bytes }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of [`Shares`], given back on drop: what they stand for is to be dropped before.
#[derive(Debug)]
pub(crate) struct Share {
    shares: Arc<Shares>,
    uid: u32,
    bytes: u64,
}

impl Share {
    /// Takes `bytes` more bytes, or says that there are too many.
    pub(crate) fn grow(&mut self, bytes: u64) -> Result<(), WeightError> {
        let mut state = self.shares.lock();
        let (own, all) = (state.of(self.uid), state.all());
        for (taken, limit) in [(own, self.shares.of_user), (all, self.shares.of_all)] {
            if taken.saturating_add(bytes) > limit {
                let (what, limit) = (self.shares.what, usize::try_from(limit));
                let limit = limit.unwrap_or(usize::MAX);
                return Err(WeightError::TooMany { what, limit });
            }
        }
        state.add(self.uid, bytes);
        self.bytes += bytes;
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut state = self.shares.lock();
        if let Some(taken) = state.taken.get_mut(&self.uid) {
            *taken = taken.saturating_sub(self.bytes);
            if *taken == 0 {
                state.taken.remove(&self.uid);
            }
        }
        drop(state);
        self.shares.changed.notify_all();
        trim(self.bytes);
    }
}

/// Gives the heap back after about `bytes` bytes of it were dropped, if they are many.
pub(crate) fn trim(bytes: u64) {
    if bytes >= TRIM {
        heap::trim();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::{super::loader::Cancel, *};

    fn shares() -> Arc<Shares> {
        Shares::new("bytes", 4, 6)
    }

    /// Waits until `count` calls wait.
    fn until_waiting(shares: &Shares, count: usize) {
        while shares.lock().waiting.len() != count {
            std::thread::yield_now();
        }
    }

    #[test]
    fn calls_over_the_limit_wait_in_turn_and_hold_up_no_other_user() {
        let shares = shares();
        let none = Cancel::default();
        let first = shares.wait(1, 4, &none).unwrap();
        let came = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let own = scope.spawn(|| {
                let share = shares.wait(1, 1, &none).unwrap();
                came.store(true, Ordering::SeqCst);
                share
            });
            until_waiting(&shares, 1);
            // another user passes the one that waits for its own user's end
            let other = shares.wait(2, 2, &none).unwrap();
            let large = scope.spawn(|| shares.wait(3, 4, &none).unwrap());
            until_waiting(&shares, 2);
            assert!(!came.load(Ordering::SeqCst));
            drop(first);
            drop((own.join().unwrap(), other));
            drop(large.join().unwrap());
        });
        assert_eq!(shares.lock().all(), 0);
    }

    #[test]
    fn a_call_that_waits_gives_up_when_its_caller_does() {
        let shares = shares();
        let _first = shares.wait(1, 4, &Cancel::default()).unwrap();
        let cancel = Cancel::default();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| shares.wait(1, 4, &cancel).map(|_| ()));
            until_waiting(&shares, 1);
            cancel.set();
            assert!(second.join().unwrap().is_err());
        });
        assert!(shares.lock().waiting.is_empty());
    }

    #[test]
    fn a_share_grows_to_the_limit_of_its_user_and_of_all() {
        let shares = shares();
        let mut one = shares.none(1);
        one.grow(4).unwrap();
        let error = one.grow(1).unwrap_err();
        assert!(matches!(error, WeightError::TooMany { limit: 4, .. }));
        let mut two = shares.none(2);
        let error = two.grow(3).unwrap_err();
        assert!(matches!(error, WeightError::TooMany { limit: 6, .. }));
        drop(one);
        two.grow(3).unwrap();
    }
}
