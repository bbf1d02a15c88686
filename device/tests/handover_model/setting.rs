//! What a run of the model explores.

use super::{
    planted::Planted,
    world::{Broken, Ranges, Sequences},
};

/// How slot words are changed and copies published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Both sides by compare-and-swap on the whole word, through the real functions; a
    /// client sleeps in a futex; copies run one after the other.
    Cpu,
    /// A GPU stream: the client waits for and writes the low half alone, and cannot
    /// fail, look back or give up; the daemon publishes by a plain 64-bit write; a copy
    /// may arrive before the one ahead of it is published.
    Stream,
}

/// What the clients do.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Program {
    /// Anything that the client library allows, holding at most this many parts at once.
    Free(u32),
    /// These parts, one after the other, for ever.
    Order(&'static [u8]),
}

/// Which copies the device may refuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusals {
    /// None.
    Never,
    /// The first piece of a part; the issue is withdrawn.
    First,
    /// Any piece; the issue is withdrawn, although earlier pieces may be under way.
    Any,
    /// Any piece; the issue is withdrawn only when it was the first.
    AnyKept,
}

/// What a run explores.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    pub(crate) kind: Kind,
    pub(crate) ranges: Ranges,
    pub(crate) managers: u8,
    pub(crate) program: Program,
    pub(crate) sequences: Sequences,
    /// Sequences run on in a circle; otherwise the engine stops at the last one.
    pub(crate) circle: bool,
    /// Most copies submitted and not over.
    pub(crate) queued: usize,
    /// Copies per part.
    pub(crate) pieces: u8,
    /// How often the daemon may be killed.
    pub(crate) deaths: u8,
    /// The clients of this many managers may be killed.
    pub(crate) mortal_clients: u8,
    /// Whether a client may give up a wait (CPU device).
    pub(crate) gives_up: bool,
    pub(crate) refusals: Refusals,
    /// Whether a client that sleeps does so until it is woken. Otherwise it may look again
    /// at any time, as the client library does after a while: then whether and when it is
    /// woken makes no difference, and the model leaves it out.
    pub(crate) sleeps: bool,
    /// Whether a client sleeps on "empty" rather than on the state it saw.
    pub(crate) sleeps_on_empty: bool,
    /// Whether all full parts are revoked that the proof of a frozen client covers, rather
    /// than only those in the place of the wanted one.
    pub(crate) revokes_all: bool,
    pub(crate) planted: Option<Planted>,
    /// Looks for this breach alone, rather than for all of them.
    pub(crate) seeks: Option<Broken>,
}

/// Parts 0 and 2 share a place, part 1 has its own: the prototype's ring.
pub(crate) const TWO_PLACES: Ranges = &[(0, 1), (1, 2), (0, 1)];
/// Part 1 reaches into the places of parts 0 and 2.
pub(crate) const STAGGERED: Ranges = &[(0, 2), (1, 3), (2, 4)];
/// Parts 0 and 3 share a place, the others have their own.
pub(crate) const THREE_PLACES: Ranges = &[(0, 1), (1, 2), (2, 3), (0, 1)];
/// Two parts in one place.
pub(crate) const ONE_PLACE: Ranges = &[(0, 1), (0, 1)];
/// Sequences that wrap with every second copy of a part.
pub(crate) const WRAPPING: Sequences = Sequences {
    base: u32::MAX,
    modulus: 2,
};

impl Setting {
    /// One manager on a ring of two places, free to do anything, nobody dies.
    pub(crate) fn new(kind: Kind) -> Self {
        Self {
            kind,
            ranges: TWO_PLACES,
            managers: 1,
            program: Program::Free(2),
            sequences: WRAPPING,
            circle: true,
            queued: 2,
            pieces: 1,
            deaths: 0,
            mortal_clients: 0,
            gives_up: false,
            refusals: Refusals::Never,
            sleeps: false,
            sleeps_on_empty: false,
            revokes_all: false,
            planted: None,
            seeks: None,
        }
    }

    pub(crate) fn parts(&self) -> u8 {
        u8::try_from(self.ranges.len()).unwrap_or(u8::MAX)
    }
}

/// Who takes a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Actor {
    Client(u8),
    Engine,
    Copies,
    /// A client gives up a wait, the device refuses a copy: may happen, need not.
    Chance,
    /// Somebody is killed: may happen, need not.
    Death,
}

/// A step that a trace shows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    pub(crate) actor: Actor,
    pub(crate) what: &'static str,
    pub(crate) part: u8,
}
