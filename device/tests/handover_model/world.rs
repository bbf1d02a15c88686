//! The state of the model: what both sides share, what each remembers, and what must
//! hold in every state.

use std::ops::{Deref, DerefMut};

use flextensord_proto::layout::{State, WANT_NONE, Word};

/// Most parts, and most cells of a ring.
pub(crate) const PARTS: usize = 6;
/// `want` while the client waits for nothing, as the model keeps it.
pub(crate) const NOTHING: u8 = 0x3f;
/// Content of a cell between the submission of a copy and its arrival.
pub(crate) const TORN: u8 = 0xff;

/// A short list that needs no allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct List<T, const N: usize> {
    length: u8,
    items: [T; N],
}

impl<T: Copy + Default, const N: usize> List<T, N> {
    pub(crate) fn new() -> Self {
        Self {
            length: 0,
            items: [T::default(); N],
        }
    }

    pub(crate) fn push(&mut self, item: T) {
        self.items[usize::from(self.length)] = item;
        self.length += 1;
    }

    pub(crate) fn remove(&mut self, at: usize) {
        let length = usize::from(self.length);
        self.items.copy_within(at + 1..length, at);
        self.length -= 1;
        // no trace of it may tell two equal states apart
        self.items[length - 1] = T::default();
    }
}

impl<T, const N: usize> Deref for List<T, N> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.items[..usize::from(self.length)]
    }
}

impl<T, const N: usize> DerefMut for List<T, N> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.items[..usize::from(self.length)]
    }
}

/// Answers that a function got so far from the words it looked at.
pub(crate) type Log = List<u8, 14>;

/// A slot word: index of the sequence (see [`Sequences`]) and low half.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Slot {
    pub(crate) sequence: u8,
    pub(crate) low: u8,
}

/// Which real 32-bit sequences the model's few stand for: `base`, `base + 1`, ..., and
/// after `modulus` of them again `base`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sequences {
    pub(crate) base: u32,
    pub(crate) modulus: u8,
}

impl Sequences {
    pub(crate) fn real(self, index: u8) -> u32 {
        self.base.wrapping_add(index.into())
    }

    pub(crate) fn index(self, real: u32) -> u8 {
        let distance = real.wrapping_sub(self.base).cast_signed();
        let index = distance.rem_euclid(i32::from(self.modulus));
        u8::try_from(index).unwrap_or(u8::MAX)
    }

    pub(crate) fn word(self, slot: Slot) -> Word {
        Word(u64::from(self.real(slot.sequence)) << 32 | u64::from(slot.low))
    }

    pub(crate) fn slot(self, word: Word) -> Slot {
        Slot {
            sequence: self.index(word.sequence()),
            low: u8::try_from(word.state_bits()).unwrap_or(u8::MAX),
        }
    }
}

/// `want` as the page holds it.
pub(crate) fn real_want(want: u8) -> u32 {
    if want == NOTHING {
        WANT_NONE
    } else {
        want.into()
    }
}

/// `want` as the model keeps it.
pub(crate) fn kept_want(want: u32) -> u8 {
    u8::try_from(want).unwrap_or(NOTHING)
}

/// What a client is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Doing {
    /// Outside of the hand-over.
    Idle,
    /// `take` without a wait before it.
    Fast(u8),
    /// About to write `want`.
    Say(u8),
    /// Looks, and takes.
    Look(u8),
    /// Did not get it and saw this low half: about to sleep on it.
    Sleepy(u8, u8),
    /// In the futex.
    Asleep(u8),
    /// A stream waits for the part to be full.
    Pass(u8),
    /// A stream is about to write "in use".
    Mark(u8),
    /// About to write `want = none`.
    End,
    /// `give_back`.
    Give(u8),
    /// Killed.
    Dead,
}

/// A client: one thread, or one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Client {
    pub(crate) doing: Doing,
    /// A bit for every part it reads.
    pub(crate) held: u8,
    /// Where it is in its program.
    pub(crate) position: u8,
    pub(crate) log: Log,
}

/// A manager: its page, its journal, its ring, its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Manager {
    pub(crate) slots: [Slot; PARTS],
    pub(crate) want: u8,
    pub(crate) issued: [u8; PARTS],
    /// The part whose bytes a cell holds, or [`TORN`].
    pub(crate) ring: [u8; PARTS],
    pub(crate) client: Client,
    pub(crate) attached: bool,
    /// The ring belongs to somebody else now.
    pub(crate) freed: bool,
}

/// What the engine thread is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Task {
    /// Between two managers.
    Idle,
    /// `frozen`, and the revokes that it allows.
    Answer(u8),
    /// The client is not frozen: picks what to prefetch.
    Choose(u8),
    /// Looks whether a part and all that overlaps it is empty.
    Clear(u8, u8),
    /// About to write the journal.
    Issue(u8, u8),
    /// About to submit this piece of the copy with this sequence.
    Submit(u8, u8, u8, u8),
    /// A planted fault: drops a part without a proof.
    Drop(u8, u8),
    /// A successor reads this word against the journal.
    Recover(u8, u8),
    /// Killed; a successor waits until the copies are over.
    Dead,
}

/// The engine thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Engine {
    pub(crate) task: Task,
    /// Whose turn it is.
    pub(crate) turn: u8,
    pub(crate) log: Log,
}

/// How far a copy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) enum Stage {
    #[default]
    Queued,
    Arrived,
    /// Published: looks whether someone waits for it.
    Published,
    /// Someone does: about to wake.
    Waking,
}

/// A submitted copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Job {
    pub(crate) manager: u8,
    pub(crate) part: u8,
    pub(crate) from: u8,
    pub(crate) to: u8,
    pub(crate) sequence: u8,
    /// Whether it is the last piece.
    pub(crate) publishes: bool,
    pub(crate) stage: Stage,
    pub(crate) log: Log,
}

impl Default for Job {
    fn default() -> Self {
        Self {
            manager: 0,
            part: 0,
            from: 0,
            to: 0,
            sequence: 0,
            publishes: false,
            stage: Stage::Queued,
            log: Log::new(),
        }
    }
}

/// What must never be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Broken {
    /// A client holds a part whose cells hold something else.
    TornRead = 0,
    /// A copy was submitted into a part that a client reads.
    WrittenInUse,
    /// The daemon changed a word that says in use, or one that it did not expect.
    WordTaken,
    /// Two copies that overlap were under way at once.
    CopiesOverlap,
    /// A copy went into memory that was given to somebody else.
    FreedWritten,
    /// A word and its journal are further apart than one copy under way.
    Adrift,
    /// A real function refused what the protocol must allow.
    Refused,
}

impl Broken {
    /// All of them, the gravest first.
    pub(crate) const ALL: [Self; 7] = [
        Self::TornRead,
        Self::WrittenInUse,
        Self::WordTaken,
        Self::CopiesOverlap,
        Self::FreedWritten,
        Self::Adrift,
        Self::Refused,
    ];

    /// Whether a set of bits has this one.
    pub(crate) fn is_in(self, set: u8) -> bool {
        set & 1 << self as u8 != 0
    }
}

/// Everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) managers: [Manager; 2],
    pub(crate) engine: Engine,
    pub(crate) queue: List<Job, 3>,
    /// How often the daemon may still be killed.
    pub(crate) deaths: u8,
    /// Breaches that a step has seen, a bit for each.
    pub(crate) broken: u8,
}

impl World {
    pub(crate) fn new(deaths: u8) -> Self {
        let manager = Manager {
            slots: [Slot::default(); PARTS],
            want: NOTHING,
            issued: [0; PARTS],
            ring: [TORN; PARTS],
            client: Client {
                doing: Doing::Idle,
                held: 0,
                position: 0,
                log: Log::new(),
            },
            attached: true,
            freed: false,
        };
        Self {
            managers: [manager; 2],
            engine: Engine {
                task: Task::Idle,
                turn: 0,
                log: Log::new(),
            },
            queue: List::new(),
            deaths,
            broken: 0,
        }
    }

    pub(crate) fn manager(&mut self, manager: u8) -> &mut Manager {
        &mut self.managers[usize::from(manager)]
    }

    /// Notes a breach that a step saw.
    pub(crate) fn note(&mut self, broken: Broken) {
        self.broken |= 1 << broken as u8;
    }
}

/// Where the parts lie in a ring: the cells `from..to` of each.
pub(crate) type Ranges = &'static [(u8, u8)];

/// Whether two different parts share a cell.
pub(crate) fn overlap(ranges: Ranges, one: u8, other: u8) -> bool {
    let (a, b) = (ranges[usize::from(one)], ranges[usize::from(other)]);
    one != other && a.0 < b.1 && b.0 < a.1
}

/// The parts of a bit set.
pub(crate) fn bits(set: u8) -> impl Iterator<Item = u8> {
    (0..8).filter(move |part| set & 1 << part != 0)
}

/// The breaches in a state, a bit for each: what must not be in any state, however it
/// was reached.
pub(crate) fn breaches(world: &World, ranges: Ranges, sequences: Sequences) -> u8 {
    let mut found = *world;
    for manager in &world.managers {
        for part in bits(manager.client.held) {
            let (from, to) = ranges[usize::from(part)];
            let cells = &manager.ring[usize::from(from)..usize::from(to)];
            if cells.iter().any(|content| *content != part) {
                found.note(Broken::TornRead);
            }
        }
        for (slot, issued) in manager.slots.iter().zip(manager.issued) {
            let word = sequences.word(*slot);
            let under_way = (slot.sequence + 1) % sequences.modulus == issued;
            let settled = slot.sequence == issued;
            let empty = word.state() == Some(State::Empty);
            if !(settled || under_way && empty) {
                found.note(Broken::Adrift);
            }
        }
    }
    found.broken
}
