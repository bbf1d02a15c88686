//! Blocks of residents: filled once, read by all managers of one user that planned the
//! same block, freed when the last one is gone.

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    thread,
    time::{Duration, Instant},
};

use super::memory::{Allocation, DeviceMemory, MemoryError, Reservation};
use flextensord_device::{
    device::{Source, Ticket},
    process::Process,
};

/// Most bytes of a block's filling that are queued at a time, so that it takes turns
/// with the rings.
const QUEUED_BYTES: u64 = 32 << 20;
/// How long a block may take to be filled before those who wait for it give up.
const FILL_LIMIT: Duration = Duration::from_secs(600);

/// Why a block is not there.
#[derive(Debug, thiserror::Error)]
pub enum ResidentError {
    /// No memory, or the device failed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The copies did not arrive.
    #[error("filling a block of {bytes} bytes took longer than {limit:?}")]
    Deadline {
        /// Bytes of the block.
        bytes: u64,
        /// The limit.
        limit: Duration,
    },
}

/// What makes two blocks the same: user, weight set, and which of its storages lie in
/// it, in order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BlockKey {
    /// The user: memory is never shared between users.
    pub uid: u32,
    /// Id of the weight set.
    pub weight_set: String,
    /// Indices of its storages.
    pub storages: Vec<u32>,
}

/// A filled block.
#[derive(Debug)]
pub struct Block {
    memory: Arc<DeviceMemory>,
    allocation: Allocation,
    /// Owners of ended leases that had it.
    owners: Mutex<Vec<Process>>,
}

impl Block {
    /// Notes the owner of an ended lease, who may hold it after its last user is gone.
    pub fn note_owner(&self, owner: Process) {
        let mut owners = self.owners();
        // whoever is gone holds nothing, and a block may outlive many leases
        owners.retain(|owner| !owner.has_exited());
        owners.push(owner);
    }

    fn owners(&self) -> MutexGuard<'_, Vec<Process>> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its memory and label.
    #[must_use]
    pub fn allocation(&self) -> &Allocation {
        &self.allocation
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // clients may still map it; nobody overwrites it meanwhile
        let owners = std::mem::take(&mut *self.owners());
        self.memory
            .retire_memory(Arc::clone(&self.allocation.memory), owners);
    }
}

#[derive(Debug)]
enum Slot {
    /// Under way, with its bytes.
    Filling(u64),
    Filled(Weak<Block>),
}

/// The blocks of one device.
#[derive(Debug)]
pub struct Residents {
    memory: Arc<DeviceMemory>,
    slots: Mutex<HashMap<BlockKey, Slot>>,
    changed: Condvar,
    /// Blocks of a dead daemon by the ids of their allocations.
    adopted: Mutex<HashMap<u64, Weak<Block>>>,
}

/// A block to have: its key, its bytes, and where its contents come from.
#[derive(Debug)]
pub struct BlockRequest {
    /// What makes it the same as another.
    pub key: BlockKey,
    /// Its bytes, label included.
    pub bytes: u64,
    /// For each of its parts: offset in the block, and the bytes in the segment.
    pub contents: Vec<(u64, Source)>,
}

impl Residents {
    /// No blocks yet.
    #[must_use]
    pub fn new(memory: Arc<DeviceMemory>) -> Self {
        Self {
            memory,
            slots: Mutex::default(),
            changed: Condvar::new(),
            adopted: Mutex::default(),
        }
    }

    /// Bytes of the weight set's blocks that this user has on the device, those that are
    /// being filled included.
    #[must_use]
    pub fn bytes_of(&self, uid: u32, weight_set: &str) -> u64 {
        let slots = self.slots();
        let own = slots
            .iter()
            .filter(|(key, _)| key.uid == uid && key.weight_set == weight_set);
        let (live, filling) = sum(own.map(|(_, slot)| slot));
        drop(slots);
        filling + bytes(&live)
    }

    /// Bytes of those blocks that are neither there nor being filled.
    #[must_use]
    pub fn missing(&self, requests: &[BlockRequest]) -> u64 {
        let slots = self.slots();
        let there = |request: &&BlockRequest| match slots.get(&request.key) {
            Some(Slot::Filling(_)) => true,
            Some(Slot::Filled(block)) => block.strong_count() > 0,
            None => false,
        };
        requests
            .iter()
            .filter(|request| !there(request))
            .map(|request| request.bytes)
            .sum()
    }

    /// Bytes of all blocks.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let (live, _) = sum(self.slots().values());
        bytes(&live)
    }

    /// All blocks of a plan, filled, and the reservation of `other_bytes` (its ring).
    /// Blocks that are there, or that another manager is filling, are shared; the rest is
    /// reserved together with the ring in one step, allocated and filled now. Blocks the
    /// thread until all are filled.
    ///
    /// # Errors
    /// When there is no memory, the device fails, or it takes too long. Nothing of what
    /// was begun is left then.
    pub fn get(
        &self,
        requests: &[BlockRequest],
        other_bytes: u64,
    ) -> Result<Granted, ResidentError> {
        let (mut claims, mut reservation) = self.claim(requests, other_bytes)?;
        // own blocks first: nobody waits for another while another waits for it
        for (claim, request) in claims.iter_mut().zip(requests) {
            if let Claim::Mine(claimed) = claim {
                let block = self.make(request, &mut reservation)?;
                claimed.block = Some(Arc::downgrade(&block));
                *claim = Claim::Made(block);
            }
        }
        let mut granted = Granted {
            blocks: Vec::new(),
            shared_bytes: 0,
            reservation,
        };
        for (claim, request) in claims.into_iter().zip(requests) {
            let block = match claim {
                Claim::Made(block) => block,
                Claim::Shared(block) => {
                    granted.shared_bytes += request.bytes;
                    block
                }
                Claim::Theirs | Claim::Mine(_) => {
                    let (block, shared) = self.wait_for(request)?;
                    granted.shared_bytes += if shared { request.bytes } else { 0 };
                    block
                }
            };
            granted.blocks.push(block);
        }
        Ok(granted)
    }

    /// Looks at all slots and reserves what is missing, in one step.
    fn claim<'a>(
        &'a self,
        requests: &'a [BlockRequest],
        other_bytes: u64,
    ) -> Result<(Vec<Claim<'a>>, Reservation), ResidentError> {
        let mut slots = self.slots();
        slots.retain(|_, slot| !matches!(slot, Slot::Filled(b) if b.strong_count() == 0));
        let mut missing = other_bytes;
        let mut found = Vec::with_capacity(requests.len());
        for request in requests {
            let there = match slots.get(&request.key) {
                Some(Slot::Filling(_)) => Some(None),
                Some(Slot::Filled(block)) => block.upgrade().map(Some),
                None => None,
            };
            missing = missing.saturating_add(if there.is_none() { request.bytes } else { 0 });
            found.push(there);
        }
        let reservation = match self.memory.reserve(missing) {
            Ok(reservation) => reservation,
            Err(error) => {
                // upgraded blocks may be the last: they are dropped outside the lock
                drop(slots);
                return Err(error.into());
            }
        };
        let mut claims = Vec::with_capacity(requests.len());
        for (request, there) in requests.iter().zip(found) {
            claims.push(match there {
                Some(Some(block)) => Claim::Shared(block),
                Some(None) => Claim::Theirs,
                None => {
                    slots.insert(request.key.clone(), Slot::Filling(request.bytes));
                    Claim::Mine(Claimed {
                        residents: self,
                        key: &request.key,
                        block: None,
                    })
                }
            });
        }
        Ok((claims, reservation))
    }

    /// Waits for a block that another manager was filling, or fills it when that failed.
    fn wait_for(&self, request: &BlockRequest) -> Result<(Arc<Block>, bool), ResidentError> {
        let deadline = Instant::now() + FILL_LIMIT;
        let late = || ResidentError::Deadline {
            bytes: request.bytes,
            limit: FILL_LIMIT,
        };
        loop {
            let (mut claims, mut reservation) = self.claim(std::slice::from_ref(request), 0)?;
            match claims.pop() {
                Some(Claim::Shared(block)) => return Ok((block, true)),
                Some(Claim::Mine(mut claimed)) => {
                    let block = self.make(request, &mut reservation)?;
                    claimed.block = Some(Arc::downgrade(&block));
                    return Ok((block, false));
                }
                _ => {
                    let slots = self.slots();
                    let left = deadline
                        .checked_duration_since(Instant::now())
                        .ok_or_else(late)?;
                    if matches!(slots.get(&request.key), Some(Slot::Filling(_))) {
                        let waited = self.changed.wait_timeout(slots, left);
                        drop(waited.unwrap_or_else(PoisonError::into_inner));
                    }
                }
            }
        }
    }

    fn make(
        &self,
        request: &BlockRequest,
        reservation: &mut Reservation,
    ) -> Result<Arc<Block>, ResidentError> {
        let allocation = reservation.allocate(request.bytes)?;
        let block = Block {
            memory: Arc::clone(&self.memory),
            allocation,
            owners: Mutex::default(),
        };
        self.fill(request, &block.allocation)?;
        Ok(Arc::new(block))
    }

    fn fill(&self, request: &BlockRequest, allocation: &Allocation) -> Result<(), ResidentError> {
        let device = self.memory.device();
        let deadline = Instant::now() + FILL_LIMIT;
        let late = || ResidentError::Deadline {
            bytes: request.bytes,
            limit: FILL_LIMIT,
        };
        let mut last = Ticket::default();
        for (offset, source) in &request.contents {
            let mut done = 0;
            while done < source.bytes {
                let bytes = (source.bytes - done).min(QUEUED_BYTES);
                let piece = Source {
                    offset: source.offset + done,
                    bytes,
                    ..source.clone()
                };
                let filled = allocation.memory.fill(offset + done, piece, &[]);
                last = filled.map_err(MemoryError::from)?;
                done += bytes;
                while device.queued_bytes() > QUEUED_BYTES && device.completed() < last {
                    pause(deadline).ok_or_else(late)?;
                }
            }
        }
        while device.completed() < last {
            pause(deadline).ok_or_else(late)?;
        }
        Ok(())
    }

    /// A block that a dead daemon filled, by the id of its allocation: the one that another
    /// client has handed back already, or the one that `take` takes back.
    ///
    /// # Errors
    /// What `take` says.
    pub fn adopt(
        &self,
        key: BlockKey,
        allocation: u64,
        take: impl FnOnce() -> Result<Allocation, String>,
    ) -> Result<Arc<Block>, String> {
        // one after the other: no allocation is taken back twice
        let mut adopted = self.adopted.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(block) = adopted.get(&allocation).and_then(Weak::upgrade) {
            return Ok(block);
        }
        let block = Arc::new(Block {
            memory: Arc::clone(&self.memory),
            allocation: take()?,
            owners: Mutex::default(),
        });
        adopted.retain(|_, block| block.strong_count() > 0);
        adopted.insert(allocation, Arc::downgrade(&block));
        drop(adopted);
        let mut slots = self.slots();
        let filled = |slot: &Slot| match slot {
            Slot::Filling(_) => true,
            Slot::Filled(block) => block.strong_count() > 0,
        };
        // where a new one of that key is there, both live until their managers end
        if !slots.get(&key).is_some_and(filled) {
            slots.insert(key, Slot::Filled(Arc::downgrade(&block)));
        }
        Ok(block)
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<BlockKey, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The filled blocks among `slots`, and the bytes of those being filled. The blocks are to
/// be dropped outside the lock: a last one retires its memory.
fn sum<'a>(slots: impl Iterator<Item = &'a Slot>) -> (Vec<Arc<Block>>, u64) {
    let (mut live, mut filling) = (Vec::new(), 0);
    for slot in slots {
        match slot {
            Slot::Filled(block) => live.extend(block.upgrade()),
            Slot::Filling(bytes) => filling += bytes,
        }
    }
    (live, filling)
}

fn bytes(blocks: &[Arc<Block>]) -> u64 {
    blocks
        .iter()
        .map(|block| block.allocation.memory.bytes())
        .sum()
}

/// Sleeps for a moment; `None` when the deadline is over.
fn pause(deadline: Instant) -> Option<()> {
    thread::sleep(Duration::from_micros(200));
    (Instant::now() < deadline).then_some(())
}

/// What a plan was granted.
#[derive(Debug)]
pub struct Granted {
    /// Its blocks, filled, in the order of the requests.
    pub blocks: Vec<Arc<Block>>,
    /// Bytes of those that other managers had on the device already.
    pub shared_bytes: u64,
    /// What is left of the reservation: the bytes for the ring.
    pub reservation: Reservation,
}

/// How a block comes to a plan.
enum Claim<'a> {
    Shared(Arc<Block>),
    Theirs,
    Mine(Claimed<'a>),
    Made(Arc<Block>),
}

/// The right and duty to fill a slot: dropped without a block, the slot is free again.
struct Claimed<'a> {
    residents: &'a Residents,
    key: &'a BlockKey,
    block: Option<Weak<Block>>,
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        let mut slots = self.residents.slots();
        match self.block.take() {
            Some(block) => slots.insert(self.key.clone(), Slot::Filled(block)),
            None => slots.remove(self.key),
        };
        drop(slots);
        self.residents.changed.notify_all();
    }
}

#[cfg(test)]
mod tests;
