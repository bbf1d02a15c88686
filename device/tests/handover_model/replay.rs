//! Runs the real functions one access at a time.
//!
//! The real functions are ordinary code: they cannot be stopped between two accesses.
//! So a step runs the function from its begin with the answers that it got so far; the
//! first access without an answer is the one that this step performs. What the function
//! does behind it, until it returns, is fed with zeros and thrown away. Functions that
//! are so run must be free of effects other than through [`Cells`] and [`Journal`], and
//! must end whatever they read; those of the hand-over are.

use std::cell::{Cell, RefCell};

use flextensord_device::handover::{Cells, Journal};
use flextensord_proto::layout::{State, Word};

use super::world::{
    Broken, Log, Manager, NOTHING, PARTS, Sequences, Slot, World, kept_want, real_want,
};

/// One atomic access to what both sides share.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Access {
    Load(u8),
    Exchange(u8, Word, Word),
    Want,
    SetWant(u8),
}

/// Who makes an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    /// The daemon, by compare-and-swap.
    Daemon,
    /// The daemon on a page that a GPU writes too, where a revoke is a plain store: the
    /// word that was expected must stand there by the protocol alone.
    Store,
}

/// [`Cells`] that give the answers of a log and stop at the first access beyond it.
pub(crate) struct Replay<'a> {
    log: &'a Log,
    sequences: Sequences,
    at: Cell<usize>,
    next: Cell<Option<Access>>,
}

/// Answer of an access that has none to give, or succeeded.
const DONE: u8 = 0xff;

impl Replay<'_> {
    fn answer(&self, access: Access) -> Option<u8> {
        if self.next.get().is_some() {
            return None;
        }
        let answer = self.log.get(self.at.get()).copied();
        match answer {
            Some(_) => self.at.set(self.at.get() + 1),
            None => self.next.set(Some(access)),
        }
        answer
    }

    fn decode(&self, answer: u8) -> Word {
        let slot = Slot {
            sequence: answer >> 2,
            low: answer & 3,
        };
        self.sequences.word(slot)
    }
}

impl Cells for Replay<'_> {
    fn load(&self, part: u32) -> Word {
        let answer = self.answer(Access::Load(index(part)));
        answer.map_or(Word(0), |answer| self.decode(answer))
    }

    fn exchange(&self, part: u32, from: Word, to: Word) -> Result<(), Word> {
        match self.answer(Access::Exchange(index(part), from, to)) {
            Some(DONE) | None => Ok(()),
            Some(found) => Err(self.decode(found)),
        }
    }

    fn want(&self) -> u32 {
        self.answer(Access::Want).map_or(0, real_want)
    }

    fn set_want(&self, part: u32) {
        let _: Option<u8> = self.answer(Access::SetWant(kept_want(part)));
    }
}

fn index(part: u32) -> u8 {
    u8::try_from(part).unwrap_or(NOTHING)
}

/// Performs an access on the shared words, at once; the answer goes into a log.
fn perform(world: &mut World, sequences: Sequences, manager: u8, side: Side, access: Access) -> u8 {
    let page = world.manager(manager);
    match access {
        Access::Load(part) => {
            let slot = page.slots[usize::from(part)];
            slot.sequence << 2 | slot.low
        }
        Access::Exchange(part, from, to) => {
            let slot = page.slots[usize::from(part)];
            let expected = sequences.word(slot) == from;
            if !expected && side != Side::Store {
                return slot.sequence << 2 | slot.low;
            }
            page.slots[usize::from(part)] = sequences.slot(to);
            let in_use = u32::from(slot.low) == State::InUse as u32;
            if side != Side::Client && (in_use || !expected) {
                world.note(Broken::WordTaken);
            }
            DONE
        }
        Access::Want => page.want,
        Access::SetWant(part) => {
            page.want = part;
            DONE
        }
    }
}

/// Makes the next access of `function`. `Some` with what it returns when that was its
/// last one.
pub(crate) fn step<R>(
    world: &mut World,
    sequences: Sequences,
    (manager, side): (u8, Side),
    log: &mut Log,
    function: impl Fn(&Replay<'_>) -> R,
) -> Option<R> {
    let run = |log: &Log| {
        let replay = Replay {
            log,
            sequences,
            at: Cell::new(0),
            next: Cell::new(None),
        };
        let result = function(&replay);
        match replay.next.get() {
            Some(access) => Err(access),
            None => Ok(result),
        }
    };
    match run(log) {
        Ok(result) => Some(result),
        Err(access) => {
            log.push(perform(world, sequences, manager, side, access));
            let result = run(log).ok()?;
            *log = Log::new();
            Some(result)
        }
    }
}

/// The journal of a manager as a [`Filler`](flextensord_device::handover::Filler) wants
/// it. No client sees it, so its accesses are no steps of their own; it is written at
/// the end of a step, so that the daemon can die before and behind.
pub(crate) struct Ledger {
    issued: RefCell<[u8; PARTS]>,
    parts: u8,
    sequences: Sequences,
}

impl Ledger {
    pub(crate) fn of(manager: &Manager, parts: u8, sequences: Sequences) -> Self {
        Self {
            issued: RefCell::new(manager.issued),
            parts,
            sequences,
        }
    }

    pub(crate) fn into_issued(self) -> [u8; PARTS] {
        self.issued.into_inner()
    }
}

impl Journal for Ledger {
    fn parts(&self) -> u32 {
        self.parts.into()
    }

    fn issued(&self, part: u32) -> u32 {
        self.sequences.real(self.issued.borrow()[part as usize])
    }

    fn record(&mut self, part: u32, sequence: u32) {
        self.issued.get_mut()[part as usize] = self.sequences.index(sequence);
    }
}
