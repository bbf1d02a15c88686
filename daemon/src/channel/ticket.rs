//! One-time tickets that stand for descriptors, bound to the peer they were made for.

use std::{
    collections::HashMap,
    fs::File,
    os::fd::OwnedFd,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use flextensord_device::process::Peer;

/// How long a ticket may wait to be redeemed.
const LIFETIME: Duration = Duration::from_secs(60);
/// Most tickets of one process, and of one user, that wait at a time: each keeps a
/// descriptor open.
const PROCESS_LIMIT: usize = 1024;
const USER_LIMIT: usize = 8192;

/// Why a ticket is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    /// There is no such ticket for this peer.
    #[error("ticket is unknown, spent, expired or another process's")]
    Unknown,
    /// It stands for something else than what was asked.
    #[error("ticket stands for another kind of object")]
    Kind,
    /// Too many wait.
    #[error("{whose} has {limit} tickets waiting, the limit")]
    TooMany {
        /// Whose tickets they are.
        whose: &'static str,
        /// The limit.
        limit: usize,
    },
    /// The system has no random numbers.
    #[error("no random numbers for a ticket")]
    Random,
}

/// A descriptor that the daemon gives away.
#[derive(Debug)]
pub struct Gift {
    /// The descriptor.
    pub descriptor: OwnedFd,
    /// Bytes of the object behind it; 0 where that has no meaning.
    pub bytes: u64,
    /// The manager it belongs to: the connection that takes it is that of its client.
    pub manager: Option<u64>,
}

/// A file that a client handed over.
#[derive(Debug)]
pub struct OfferedFile {
    /// Its plain name.
    pub name: String,
    /// Open for reading, a regular file.
    pub file: File,
    /// The connection that it came over: its ticket dies with it.
    pub connection: u64,
}

#[derive(Debug)]
enum Item {
    Gift(Gift),
    File(OfferedFile),
}

#[derive(Debug)]
struct Entry {
    peer: Peer,
    item: Item,
    expires: Instant,
}

/// All tickets that wait.
#[derive(Debug, Default)]
pub struct Tickets {
    waiting: Mutex<HashMap<[u8; 16], Entry>>,
}

impl Tickets {
    /// A ticket for a descriptor that `peer` may take.
    ///
    /// # Errors
    /// When too many wait.
    pub fn give(&self, peer: Peer, gift: Gift) -> Result<Vec<u8>, TicketError> {
        self.add(peer, Item::Gift(gift))
    }

    /// A ticket for a file that `peer` handed over.
    ///
    /// # Errors
    /// When too many wait.
    pub fn offer(&self, peer: Peer, file: OfferedFile) -> Result<Vec<u8>, TicketError> {
        self.add(peer, Item::File(file))
    }

    /// Redeems a ticket for a descriptor.
    ///
    /// # Errors
    /// When it is not this peer's, or stands for a file (it is spent then).
    pub fn redeem(&self, peer: Peer, ticket: &[u8]) -> Result<Gift, TicketError> {
        match self.take(peer, ticket)? {
            Item::Gift(gift) => Ok(gift),
            Item::File(_) => Err(TicketError::Kind),
        }
    }

    /// Redeems a ticket for a file.
    ///
    /// # Errors
    /// When it is not this peer's, or stands for a descriptor (it is spent then).
    pub fn collect(&self, peer: Peer, ticket: &[u8]) -> Result<OfferedFile, TicketError> {
        match self.take(peer, ticket)? {
            Item::File(file) => Ok(file),
            Item::Gift(_) => Err(TicketError::Kind),
        }
    }

    /// Drops the tickets of a manager that is over: each would keep its memory.
    pub fn forget(&self, manager: u64) {
        let of_manager = |entry: &Entry| match &entry.item {
            Item::Gift(gift) => gift.manager == Some(manager),
            Item::File(_) => false,
        };
        self.waiting().retain(|_, entry| !of_manager(entry));
    }

    /// Drops the tickets of files that came over a connection which has ended.
    pub fn close(&self, connection: u64) {
        let of_connection = |entry: &Entry| match &entry.item {
            Item::File(file) => file.connection == connection,
            Item::Gift(_) => false,
        };
        self.waiting().retain(|_, entry| !of_connection(entry));
    }

    /// Drops what was not redeemed in time.
    pub fn expire(&self) {
        let now = Instant::now();
        self.waiting().retain(|_, entry| entry.expires > now);
    }

    /// Number of tickets that wait.
    pub fn count(&self) -> usize {
        self.waiting().len()
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<[u8; 16], Entry>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, peer: Peer, item: Item) -> Result<Vec<u8>, TicketError> {
        self.expire();
        let mut key = [0; 16];
        getrandom::fill(&mut key).map_err(|_| TicketError::Random)?;
        let mut waiting = self.waiting();
        let of_user = || waiting.values().filter(|entry| entry.peer.uid == peer.uid);
        let of_process = of_user().filter(|entry| entry.peer.pid == peer.pid);
        for (count, limit, whose) in [
            (of_process.count(), PROCESS_LIMIT, "this process"),
            (of_user().count(), USER_LIMIT, "this user"),
        ] {
            if count >= limit {
                return Err(TicketError::TooMany { whose, limit });
            }
        }
        waiting.insert(
            key,
            Entry {
                peer,
                item,
                expires: Instant::now() + LIFETIME,
            },
        );
        Ok(key.to_vec())
    }

    fn take(&self, peer: Peer, ticket: &[u8]) -> Result<Item, TicketError> {
        let key: [u8; 16] = ticket.try_into().map_err(|_| TicketError::Unknown)?;
        let mut waiting = self.waiting();
        let entry = waiting.get(&key).ok_or(TicketError::Unknown)?;
        if (entry.peer.uid, entry.peer.pid) != (peer.uid, peer.pid)
            || entry.expires <= Instant::now()
        {
            return Err(TicketError::Unknown);
        }
        waiting
            .remove(&key)
            .map(|entry| entry.item)
            .ok_or(TicketError::Unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: Peer = Peer {
        uid: 1,
        gid: 1,
        pid: 10,
    };

    fn gift() -> Gift {
        Gift {
            descriptor: tempfile::tempfile().unwrap().into(),
            bytes: 3,
            manager: None,
        }
    }

    #[test]
    fn a_ticket_works_once_and_only_for_its_peer() {
        let tickets = Tickets::default();
        let ticket = tickets.give(PEER, gift()).unwrap();
        let other = Peer { pid: 11, ..PEER };
        assert_eq!(
            tickets.redeem(other, &ticket).unwrap_err(),
            TicketError::Unknown
        );
        assert_eq!(tickets.redeem(PEER, &ticket).unwrap().bytes, 3);
        assert_eq!(
            tickets.redeem(PEER, &ticket).unwrap_err(),
            TicketError::Unknown
        );
        assert_eq!(
            tickets.redeem(PEER, b"short").unwrap_err(),
            TicketError::Unknown
        );
    }

    #[test]
    fn the_end_of_a_manager_drops_its_tickets_alone() {
        let tickets = Tickets::default();
        let of = |manager| Gift { manager, ..gift() };
        let one = tickets.give(PEER, of(Some(1))).unwrap();
        let two = tickets.give(PEER, of(Some(2))).unwrap();
        tickets.forget(1);
        assert!(tickets.redeem(PEER, &one).is_err());
        assert!(tickets.redeem(PEER, &two).is_ok());
    }

    #[test]
    fn a_user_cannot_pile_tickets_up() {
        let tickets = Tickets::default();
        for _ in 0..PROCESS_LIMIT {
            tickets.give(PEER, gift()).unwrap();
        }
        let refused = tickets.give(PEER, gift()).unwrap_err();
        assert!(matches!(
            refused,
            TicketError::TooMany {
                limit: PROCESS_LIMIT,
                ..
            }
        ));
        // another process of the user is not locked out by it
        assert!(tickets.give(Peer { pid: 11, ..PEER }, gift()).is_ok());
    }

    #[test]
    fn files_that_were_offered_go_with_the_connection() {
        let tickets = Tickets::default();
        let file = || OfferedFile {
            name: "m".into(),
            file: tempfile::tempfile().unwrap(),
            connection: 7,
        };
        let (one, two) = (
            tickets.offer(PEER, file()).unwrap(),
            tickets.give(PEER, gift()).unwrap(),
        );
        tickets.close(7);
        assert!(tickets.collect(PEER, &one).is_err());
        assert!(tickets.redeem(PEER, &two).is_ok());
    }
}
