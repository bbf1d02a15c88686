//! Layout of the memory that daemon and client share beside the weights. All
//! numbers are little-endian; the daemon runs on 64-bit little-endian Linux only.
//!
//! **Control page**: one memfd per manager, lease epoch and plan version, mapped by
//! both sides. The client writes `want`, `plan_ack` and the low half of slot words;
//! nothing in it decides an address, a size or the life of a resource.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 8 | magic [`CONTROL_MAGIC`] |
//! | 8 | 4 | layout version [`LAYOUT_VERSION`] |
//! | 12 | 4 | number of parts |
//! | 16 | 8 | lease epoch |
//! | 24 | 8 | plan version |
//! | 128 | 4 | `want`: part that the client waits for, or [`WANT_NONE`] |
//! | 192 | 8 | `plan_ack`: plan version that the client has left behind |
//! | 4096 | 8 x parts | slot words, see [`Word`] |
//!
//! **Notice page**: one memfd per daemon, writable by the daemon alone.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 8 | magic [`NOTICE_MAGIC`] |
//! | 8 | 4 | layout version |
//! | 12 | 4 | daemon phase: 1 recovering, 2 serving, 3 draining, 4 stopped |
//! | 16 | 8 | daemon generation |
//! | 24 | 8 | recovery steps done |
//! | 32 | 8 | recovery steps in all |
//! | 1024 + 64 x engine | 4 | engine sleeps: 1, else 0 |

/// First bytes of a control page: "FTCTRL01".
pub const CONTROL_MAGIC: u64 = u64::from_le_bytes(*b"FTCTRL01");
/// First bytes of a notice page: "FTNOTE01".
pub const NOTICE_MAGIC: u64 = u64::from_le_bytes(*b"FTNOTE01");
/// First bytes of a journal file: "FTJRNL01".
pub const JOURNAL_MAGIC: u64 = u64::from_le_bytes(*b"FTJRNL01");
/// Version of every layout in this module.
pub const LAYOUT_VERSION: u32 = 1;

/// Offset of the magic, in all pages.
pub const MAGIC: usize = 0;
/// Offset of the layout version, in all pages.
pub const VERSION: usize = 8;
/// Control page: offset of the number of parts.
pub const PARTS: usize = 12;
/// Control page: offset of the lease epoch.
pub const LEASE_EPOCH: usize = 16;
/// Control page: offset of the plan version.
pub const PLAN_VERSION: usize = 24;
/// Control page: offset of `want`, alone in its cache line.
pub const WANT: usize = 128;
/// Control page: offset of `plan_ack`, alone in its cache line.
pub const PLAN_ACK: usize = 192;
/// Control page: offset of the first slot word.
pub const SLOTS: usize = 4096;

/// Value of `want` while the client waits for nothing.
pub const WANT_NONE: u32 = u32::MAX;

/// Notice page: offset of the daemon's phase.
pub const NOTICE_PHASE: usize = 12;
/// Notice page: offset of the daemon's generation.
pub const NOTICE_GENERATION: usize = 16;
/// Notice page: offset of the recovery steps done.
pub const NOTICE_RECOVERY_DONE: usize = 24;
/// Notice page: offset of the recovery steps in all.
pub const NOTICE_RECOVERY_TOTAL: usize = 32;
/// Notice page: offset of the first engine's sleep word.
pub const NOTICE_ENGINES: usize = 1024;
/// Notice page: bytes from one engine's sleep word to the next.
pub const NOTICE_ENGINE_STRIDE: usize = 64;
/// Most engines (devices) of one daemon.
pub const NOTICE_ENGINE_LIMIT: usize = 32;
/// Bytes of a notice page.
pub const NOTICE_BYTES: usize = 4096;

/// Journal file: offset of the first `issued` word (32 bits a part). Its header is
/// that of a control page, with [`JOURNAL_MAGIC`].
pub const JOURNAL_ISSUED: usize = 64;

/// Bytes at the begin of every device allocation that hold its label; parts lie
/// behind. The label names instance, allocation id and a random value.
pub const LABEL_BYTES: u64 = LABEL_SIZE as u64;
/// [`LABEL_BYTES`], as the size of an array.
pub const LABEL_SIZE: usize = 256;

/// Bytes of a control page for `parts` parts, before rounding to a page.
#[must_use]
pub fn control_bytes(parts: u32) -> usize {
    SLOTS + 8 * parts as usize
}

/// Bytes of a journal file for `parts` parts.
#[must_use]
pub fn journal_bytes(parts: u32) -> usize {
    JOURNAL_ISSUED + 4 * parts as usize
}

/// Offset of the slot word of `part` in its control page.
#[must_use]
pub fn slot(part: u32) -> usize {
    SLOTS + 8 * part as usize
}

/// State of a part, the low half of its slot word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum State {
    /// Holds no bytes that anyone may read; the daemon may fill it.
    Empty = 0,
    /// Filled; the client may take it, the daemon may revoke it by its rule.
    Full = 1,
    /// The client reads it; the daemon never touches it.
    InUse = 2,
}

/// A slot word: high half = sequence of the copy, low half = state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Word(pub u64);

impl Word {
    /// The word for `sequence` and `state`.
    #[must_use]
    pub fn new(sequence: u32, state: State) -> Self {
        Self(u64::from(sequence) << 32 | state as u64)
    }

    /// The high half.
    #[must_use]
    pub fn sequence(self) -> u32 {
        let [.., a, b, c, d] = self.0.to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }

    /// The low half as it stands.
    #[must_use]
    pub fn state_bits(self) -> u32 {
        let [a, b, c, d, ..] = self.0.to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }

    /// The low half; `None` when it is none of the protocol's states.
    #[must_use]
    pub fn state(self) -> Option<State> {
        match self.state_bits() {
            0 => Some(State::Empty),
            1 => Some(State::Full),
            2 => Some(State::InUse),
            _ => None,
        }
    }

    /// The same sequence with another state.
    #[must_use]
    pub fn with(self, state: State) -> Self {
        Self(self.0 & !0xffff_ffff | state as u64)
    }

    /// Whether a part whose journal says `issued` may be filled: the last copy was
    /// published and the client has given it back. Equality, never an order: the
    /// sequence wraps.
    #[must_use]
    pub fn is_empty(self, issued: u32) -> bool {
        self == Self::new(issued, State::Empty)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_keeps_sequence_and_state_apart() {
        let word = Word::new(0xdead_beef, State::InUse);
        assert_eq!(word.0, 0xdead_beef_0000_0002);
        assert_eq!(word.sequence(), 0xdead_beef);
        assert_eq!(word.state(), Some(State::InUse));
        assert_eq!(
            word.with(State::Empty),
            Word::new(0xdead_beef, State::Empty)
        );
        assert_eq!(Word(7).state(), None);
    }

    #[test]
    fn a_part_with_a_copy_under_way_is_not_empty_across_the_wrap() {
        let published = Word::new(u32::MAX, State::Empty);
        assert!(published.is_empty(u32::MAX));
        assert!(!published.is_empty(u32::MAX.wrapping_add(1)));
        assert!(!Word::new(3, State::Full).is_empty(3));
    }

    #[test]
    fn words_are_aligned_and_do_not_meet_the_header() {
        assert_eq!(slot(0), 4096);
        assert_eq!(slot(3) % 8, 0);
        const {
            assert!(PLAN_ACK + 8 <= SLOTS && WANT + 4 <= PLAN_ACK);
            assert!(NOTICE_ENGINES + NOTICE_ENGINE_LIMIT * NOTICE_ENGINE_STRIDE <= NOTICE_BYTES);
        }
    }
}
