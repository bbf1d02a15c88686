//! Who may connect: limits on connections, and patience with a kernel that has none left.

use std::{
    collections::HashMap,
    fmt::Display,
    hash::Hash,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use flextensord_device::process::Peer;

/// The part of the descriptors that the connections of one socket may take at most: with
/// two sockets, half of them stays for tickets, segments and memory.
const SHARE: u64 = 4;
/// The part of all connections that is kept for administrators.
const RESERVE: usize = 8;
/// How long to wait after the first connection that could not be accepted, and at most.
const WAIT: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
/// Time between two lines of the log about connections that are refused.
const COMPLAINT: Duration = Duration::from_secs(1);

/// Why a connection is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// Its process has too many.
    #[error("process {pid} of user {uid} has {limit} connections, the limit of a process")]
    Process {
        /// The process.
        pid: u32,
        /// Its user.
        uid: u32,
        /// The limit.
        limit: usize,
    },
    /// Its user has too many.
    #[error("user {uid} has {limit} connections, the limit of a user")]
    User {
        /// The user.
        uid: u32,
        /// The limit.
        limit: usize,
    },
    /// There are too many.
    #[error("there are {limit} connections, the limit for user {uid}")]
    All {
        /// The user.
        uid: u32,
        /// The limit.
        limit: usize,
    },
}

/// Most connections of a socket at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Of all users.
    pub all: usize,
    /// Of one user, unless it is root or the daemon's own.
    pub of_user: usize,
    /// Of one process.
    pub of_process: usize,
}

impl Limits {
    /// The same limits, lowered to what a process with so many descriptors can keep: one
    /// user never takes more than half of that.
    #[must_use]
    pub fn within(self, descriptors: u64) -> Self {
        let share = usize::try_from(descriptors / SHARE).unwrap_or(usize::MAX);
        let all = self.all.min(share).max(1);
        Self {
            all,
            of_user: self.of_user.min(all / 2).max(1),
            of_process: self.of_process.min(all / 4).max(1),
        }
    }
}

/// The connections of a socket, counted by user and process.
#[derive(Debug)]
pub struct Room {
    limits: Limits,
    daemon_uid: u32,
    counts: Mutex<Counts>,
    next: AtomicU64,
}

#[derive(Debug, Default)]
struct Counts {
    all: usize,
    of_user: HashMap<u32, usize>,
    of_process: HashMap<u32, usize>,
}

/// A connection's place; dropped, it is free again.
#[derive(Debug)]
pub struct Place {
    room: Arc<Room>,
    peer: Peer,
    /// Unique among the connections of the socket.
    pub number: u64,
}

impl Room {
    /// An empty room.
    #[must_use]
    pub fn new(limits: Limits, daemon_uid: u32) -> Arc<Self> {
        Arc::new(Self {
            limits,
            daemon_uid,
            counts: Mutex::default(),
            next: AtomicU64::new(0),
        })
    }

    /// Takes a place for a connection of `peer`.
    ///
    /// # Errors
    /// When its process, its user or all users have too many.
    pub fn enter(room: &Arc<Self>, peer: Peer) -> Result<Place, AdmissionError> {
        let (uid, pid) = (peer.uid, peer.pid);
        let limits = room.limits;
        let is_admin = uid == 0 || uid == room.daemon_uid;
        let mut counts = room.counts();
        let of = |counts: &HashMap<u32, usize>, key| counts.get(&key).copied().unwrap_or(0);
        // processes that we cannot see have the same number
        if pid != 0 && of(&counts.of_process, pid) >= limits.of_process {
            let limit = limits.of_process;
            return Err(AdmissionError::Process { pid, uid, limit });
        }
        if !is_admin && of(&counts.of_user, uid) >= limits.of_user {
            let limit = limits.of_user;
            return Err(AdmissionError::User { uid, limit });
        }
        // whoever is to end the others must still get in
        let limit = match is_admin {
            true => limits.all,
            false => limits.all - limits.all / RESERVE,
        };
        if counts.all >= limit {
            return Err(AdmissionError::All { uid, limit });
        }
        counts.all += 1;
        *counts.of_user.entry(uid).or_default() += 1;
        *counts.of_process.entry(pid).or_default() += 1;
        drop(counts);
        Ok(Place {
            room: Arc::clone(room),
            peer,
            number: room.next.fetch_add(1, Relaxed),
        })
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.room.counts();
        counts.all = counts.all.saturating_sub(1);
        leave(&mut counts.of_user, self.peer.uid);
        leave(&mut counts.of_process, self.peer.pid);
    }
}

fn leave<K: Eq + Hash>(counts: &mut HashMap<K, usize>, key: K) {
    match counts.get_mut(&key) {
        Some(count) if *count > 1 => *count -= 1,
        _ => drop(counts.remove(&key)),
    }
}

/// Says in the log why connections are refused, once a second at most.
#[derive(Debug)]
pub struct Complaints {
    socket: &'static str,
    last: Option<Instant>,
    untold: u64,
}

impl Complaints {
    /// None yet, about that socket.
    #[must_use]
    pub fn about(socket: &'static str) -> Self {
        Self {
            socket,
            last: None,
            untold: 0,
        }
    }

    /// A connection is refused.
    pub fn add(&mut self, why: &dyn Display) {
        if self.last.is_some_and(|last| last.elapsed() < COMPLAINT) {
            self.untold += 1;
            return;
        }
        self.last = Some(Instant::now());
        let untold = std::mem::take(&mut self.untold);
        tracing::warn!(
            socket = self.socket,
            untold,
            "connection not accepted: {why}"
        );
    }
}

/// How long to wait before the next try when the kernel gives no connection, out of
/// descriptors most likely: longer each time, until one is given.
#[derive(Debug)]
pub struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(WAIT.0)
    }
}

impl Backoff {
    /// The next wait.
    #[must_use]
    pub fn wait(&mut self) -> Duration {
        let wait = self.0;
        self.0 = (wait * 2).min(WAIT.1);
        wait
    }

    /// A connection came.
    pub fn reset(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        all: 16,
        of_user: 8,
        of_process: 4,
    };

    fn peer(uid: u32, pid: u32) -> Peer {
        Peer { uid, gid: 1, pid }
    }

    #[test]
    fn neither_a_process_nor_a_user_locks_others_out() {
        let room = Room::new(LIMITS, 9);
        let enter = |uid, pid| Room::enter(&room, peer(uid, pid));
        let mut places: Vec<_> = (0..4).map(|_| enter(1, 10).unwrap()).collect();
        let (pid, uid, limit) = (10, 1, 4);
        assert_eq!(
            enter(1, 10).unwrap_err(),
            AdmissionError::Process { pid, uid, limit }
        );
        places.extend((0..4).map(|_| enter(1, 11).unwrap()));
        let limit = 8;
        assert_eq!(
            enter(1, 12).unwrap_err(),
            AdmissionError::User { uid, limit }
        );
        places.extend((0..6).map(|at| enter(2, 20 + at / 4).unwrap()));
        let (uid, limit) = (3, 14);
        assert_eq!(
            enter(3, 30).unwrap_err(),
            AdmissionError::All { uid, limit }
        );
        // the last ones are for those who may end the others
        places.push(enter(0, 40).unwrap());
        places.push(enter(9, 41).unwrap());
        assert!(enter(0, 40).is_err());
        places.clear();
        let counts = room.counts();
        assert!(counts.all == 0 && counts.of_user.is_empty() && counts.of_process.is_empty());
    }

    #[test]
    fn an_administrator_has_the_limit_of_a_process_alone() {
        let room = Room::new(LIMITS, 9);
        let places: Vec<_> = (0..12)
            .map(|at| Room::enter(&room, peer(9, 1 + at / 4)).unwrap())
            .collect();
        assert!(Room::enter(&room, peer(9, 1)).is_err());
        assert_ne!(places[0].number, places[11].number);
    }

    #[test]
    fn few_descriptors_lower_the_limits_and_leave_half_for_the_rest() {
        let limits = Limits {
            all: 4096,
            of_user: 256,
            of_process: 64,
        };
        assert_eq!(limits.within(1 << 20), limits);
        let low = limits.within(128);
        assert_eq!((low.all, low.of_user, low.of_process), (32, 16, 8));
        let least = limits.within(0);
        assert_eq!((least.all, least.of_user, least.of_process), (1, 1, 1));
    }

    #[test]
    fn waits_grow_to_a_second_and_begin_anew_after_a_connection() {
        let mut backoff = Backoff::default();
        let waits: Vec<_> = (0..9).map(|_| backoff.wait().as_millis()).collect();
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        backoff.reset();
        assert_eq!(backoff.wait(), WAIT.0);
    }
}
