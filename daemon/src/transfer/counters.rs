//! What was moved, and what a client waits for: written by the engine, read by Status.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use flextensord_proto::layout::WANT_NONE;

/// Counters of one manager, or of one device for all its managers.
#[derive(Debug)]
pub struct Counters {
    /// Bytes copied into the ring (counted when submitted).
    pub streamed_bytes: AtomicU64,
    /// Bytes copied into blocks of residents on this manager's behalf.
    pub resident_fill_bytes: AtomicU64,
    /// Parts issued.
    pub parts_filled: AtomicU64,
    /// Full parts revoked because the client waited for another in their place.
    pub parts_revoked: AtomicU64,
    /// Parts issued because the client waited for them, not because they were next.
    pub parts_out_of_order: AtomicU64,
    /// Copies that found the link idle although others had gone before: what was to come
    /// next waited for the client, or for us.
    pub link_ran_dry: AtomicU64,
    /// Slot words found in a state that the protocol does not allow.
    pub protocol_violations: AtomicU64,
    /// Where everything is counted once more.
    total: Option<Arc<Counters>>,
    waits_for: AtomicU32,
    waits_since_ms: AtomicU64,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            streamed_bytes: AtomicU64::new(0),
            resident_fill_bytes: AtomicU64::new(0),
            parts_filled: AtomicU64::new(0),
            parts_revoked: AtomicU64::new(0),
            parts_out_of_order: AtomicU64::new(0),
            link_ran_dry: AtomicU64::new(0),
            protocol_violations: AtomicU64::new(0),
            total: None,
            waits_for: AtomicU32::new(WANT_NONE),
            waits_since_ms: AtomicU64::new(0),
        }
    }
}

impl Counters {
    /// Counters whose figures are counted in `total` as well.
    #[must_use]
    pub fn under(total: Arc<Counters>) -> Self {
        Self {
            total: Some(total),
            ..Self::default()
        }
    }

    /// Adds to the counter that `which` picks, here and in the total.
    pub fn count(&self, which: impl Fn(&Self) -> &AtomicU64, amount: u64) {
        which(self).fetch_add(amount, Relaxed);
        if let Some(total) = &self.total {
            which(total).fetch_add(amount, Relaxed);
        }
    }

    /// Notes what `want` says, and since when.
    pub fn note_want(&self, part: u32) {
        if self.waits_for.swap(part, Relaxed) != part {
            self.waits_since_ms.store(now_ms(), Relaxed);
        }
    }

    /// The part that the client waits for, and since when (milliseconds since the Unix
    /// epoch).
    pub fn waits_for(&self) -> Option<(u32, u64)> {
        let part = self.waits_for.load(Relaxed);
        (part != WANT_NONE).then(|| (part, self.waits_since_ms.load(Relaxed)))
    }
}

/// Milliseconds since the Unix epoch.
#[must_use]
pub fn now_ms() -> u64 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
