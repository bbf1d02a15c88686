//! Faults that can be put in, to see that the checker finds them. The product has no
//! switch for them: the real functions run over [`Cells`] that lie to them, so that
//! they do what faulty ones would.

use std::cell::Cell;

use flextensord_device::handover::{Cells, Journal};
use flextensord_proto::layout::{State, Word};

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Planted {
    /// The engine never revokes.
    NoRevoke,
    /// The engine drops any full part, with no proof that the client is frozen.
    NaiveDrop,
    /// `frozen` looks at `want` first and then whether the part is empty.
    SwappedLooks,
    /// A part counts as empty when its sequence is that of the journal *or later*.
    Lenient,
    /// A successor goes on while copies of its predecessor are under way.
    Impatient,
    /// A ring is given away while a copy into it is under way.
    EarlyFree,
}

/// Cells that tell each fault's lie.
pub(crate) struct Lying<'a, C, J> {
    pub(crate) cells: &'a C,
    pub(crate) journal: &'a J,
    pub(crate) planted: Option<Planted>,
    /// For [`Planted::NaiveDrop`]: the part that `frozen` shall believe in.
    pub(crate) pretext: u32,
    wanted: Cell<Option<u32>>,
}

impl<'a, C: Cells, J: Journal> Lying<'a, C, J> {
    pub(crate) fn new(cells: &'a C, journal: &'a J, planted: Option<Planted>) -> Self {
        Self {
            cells,
            journal,
            planted,
            pretext: u32::MAX,
            wanted: Cell::new(None),
        }
    }
}

impl<C: Cells, J: Journal> Cells for Lying<'_, C, J> {
    fn load(&self, part: u32) -> Word {
        if part == self.pretext {
            return Word::new(self.journal.issued(part), State::Empty);
        }
        let word = self.cells.load(part);
        let later = word.sequence() >= self.journal.issued(part);
        if self.planted == Some(Planted::Lenient) && word.state() == Some(State::Empty) && later {
            return Word::new(self.journal.issued(part), State::Empty);
        }
        word
    }

    fn exchange(&self, part: u32, from: Word, to: Word) -> Result<(), Word> {
        self.cells.exchange(part, from, to)
    }

    fn want(&self) -> u32 {
        if self.pretext != u32::MAX {
            return self.pretext;
        }
        match (self.planted, self.wanted.get()) {
            // the look behind the empty word is not made
            (Some(Planted::SwappedLooks), Some(wanted)) => wanted,
            _ => {
                let wanted = self.cells.want();
                self.wanted.set(Some(wanted));
                wanted
            }
        }
    }

    fn set_want(&self, part: u32) {
        self.cells.set_want(part);
    }
}
