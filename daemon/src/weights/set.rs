//! A live weight set, and what keeps it.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use flextensord_device::segment::Segment;

use super::{
    budget::Reservation,
    digest::{self, Digest},
    manifest::Manifest,
    pinning::Pinned,
    shares,
};

/// What tells that two sets have the same content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// The digest of the content.
    Digest(Digest),
    /// An id that the caller vouched with; nothing was hashed.
    ContentId(String),
}

/// A named, sealed, immutable collection of tensors in shared memory.
#[derive(Debug)]
pub struct WeightSet {
    // before the segment: memory is unpinned before it is unmapped
    pinned: Mutex<Pinned>,
    // before the reservation, so that bytes return to the kernel before the budget
    segment: Segment,
    _reservation: Reservation,
    id: String,
    name: String,
    owner_uid: u32,
    shared: AtomicBool,
    manifest: Manifest,
    identity: Identity,
    tensor_digests: Vec<Digest>,
    loaded_at: u64,
    attached: Mutex<Attached>,
    last_use: AtomicU64,
    // last: the heap is looked at after the manifest is gone from it
    _trim: TrimOnDrop,
}

/// Gives the heap back after a manifest of many tensors is gone.
#[derive(Debug)]
struct TrimOnDrop(u64);

impl Drop for TrimOnDrop {
    fn drop(&mut self) {
        shares::trim(self.0);
    }
}

#[derive(Debug, Default)]
struct Attached {
    next: u64,
    by: BTreeMap<u64, Attacher>,
}

/// Who is attached to a set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attacher {
    /// Its user.
    pub uid: u32,
    /// Its name, which only the same user and admins may see.
    pub manager: String,
}

/// What a new set is made of.
#[derive(Debug)]
pub(crate) struct NewSet {
    pub(crate) pinned: Pinned,
    pub(crate) segment: Segment,
    pub(crate) reservation: Reservation,
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) owner_uid: u32,
    pub(crate) shared: bool,
    pub(crate) manifest: Manifest,
    pub(crate) identity: Identity,
    pub(crate) tensor_digests: Vec<Digest>,
    pub(crate) loaded_at: u64,
}

impl WeightSet {
    pub(crate) fn new(new: NewSet) -> Self {
        let entries = size_of_val(new.manifest.tensors());
        Self {
            _trim: TrimOnDrop(entries as u64),
            pinned: Mutex::new(new.pinned),
            segment: new.segment,
            _reservation: new.reservation,
            id: new.id,
            name: new.name,
            owner_uid: new.owner_uid,
            shared: AtomicBool::new(new.shared),
            manifest: new.manifest,
            identity: new.identity,
            tensor_digests: new.tensor_digests,
            loaded_at: new.loaded_at,
            attached: Mutex::default(),
            last_use: AtomicU64::new(0),
        }
    }

    /// Names the set for ever: 32 hexadecimal digits, random, never used again.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its name among its owner's sets.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// User that loaded it.
    #[must_use]
    pub fn owner_uid(&self) -> u32 {
        self.owner_uid
    }

    /// Whether other users may attach.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.shared.load(Ordering::Relaxed)
    }

    pub(crate) fn share(&self) {
        self.shared.store(true, Ordering::Relaxed);
    }

    /// Whether `uid` may know of it.
    #[must_use]
    pub fn is_visible_to(&self, uid: u32) -> bool {
        self.owner_uid == uid || self.is_shared()
    }

    /// Its tensors and their places.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Its bytes.
    #[must_use]
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// Bytes that are pinned for the devices' copies.
    #[must_use]
    pub fn pinned_bytes(&self) -> u64 {
        self.pinned().pins.bytes()
    }

    /// Why it is not pinned although the device would be faster so.
    #[must_use]
    pub fn degraded(&self) -> Option<String> {
        self.pinned().degraded.clone()
    }

    /// Adds what more of it was pinned.
    pub(super) fn add_pins(&self, more: Pinned) {
        let mut pinned = self.pinned();
        pinned.pins.add(more.pins);
        if more.degraded.is_some() {
            pinned.degraded = more.degraded;
        }
    }

    fn pinned(&self) -> MutexGuard<'_, Pinned> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What tells its content.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The digest in hexadecimal digits; `None` when the caller vouched for the content.
    #[must_use]
    pub fn digest(&self) -> Option<String> {
        match &self.identity {
            Identity::Digest(digest) => Some(digest::hex(digest)),
            Identity::ContentId(_) => None,
        }
    }

    /// What the caller vouched with.
    #[must_use]
    pub fn content_id(&self) -> Option<&str> {
        match &self.identity {
            Identity::Digest(_) => None,
            Identity::ContentId(id) => Some(id),
        }
    }

    /// The tensors' digests in the order of the manifest; none when the caller vouched
    /// for the content.
    #[must_use]
    pub fn tensor_digests(&self) -> &[Digest] {
        &self.tensor_digests
    }

    /// When it was loaded, in seconds since the Unix epoch.
    #[must_use]
    pub fn loaded_at(&self) -> u64 {
        self.loaded_at
    }

    /// Who is attached, in order of attaching.
    #[must_use]
    pub fn attached_by(&self) -> Vec<Attacher> {
        self.attached().by.values().cloned().collect()
    }

    /// How many attachments there are.
    #[must_use]
    pub fn attachments(&self) -> usize {
        self.attached().by.len()
    }

    /// When it was last used, in the store's own count.
    pub(crate) fn last_use(&self) -> u64 {
        self.last_use.load(Ordering::Relaxed)
    }

    pub(crate) fn touch(&self, count: u64) {
        self.last_use.fetch_max(count, Ordering::Relaxed);
    }

    fn attached(&self) -> MutexGuard<'_, Attached> {
        self.attached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps a set from being dropped or evicted while a manager uses it.
#[derive(Debug)]
pub struct Attachment {
    set: Arc<WeightSet>,
    key: u64,
    clock: Arc<AtomicU64>,
}

impl Attachment {
    /// Called by the store alone, under its lock, so that no drop comes between.
    pub(crate) fn new(set: Arc<WeightSet>, attacher: Attacher, clock: Arc<AtomicU64>) -> Self {
        let mut attached = set.attached();
        let key = attached.next;
        attached.next += 1;
        attached.by.insert(key, attacher);
        drop(attached);
        Self { set, key, clock }
    }

    /// The set.
    #[must_use]
    pub fn set(&self) -> &Arc<WeightSet> {
        &self.set
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.set.attached().by.remove(&self.key);
        self.set.touch(self.clock.fetch_add(1, Ordering::Relaxed));
    }
}
