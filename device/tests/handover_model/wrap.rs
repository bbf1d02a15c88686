//! The wrap of the 32-bit sequence does no harm.
//!
//! The argument has three legs, each a test. **(1)** In every reachable state the
//! sequence in a word is that of the journal, or the one before while a copy is under
//! way (`Broken::Adrift` is checked in every state of every setting). **(2)** So two
//! sequences that the protocol ever compares are at most one apart, and numbers that
//! close are equal if and only if they are equal modulo 2, 3, ... or 2^32: a model with
//! sequences modulo a small number takes exactly the branches of the product, and
//! exploring it covers any number of copies. **(3)** The real functions look at nothing
//! but that difference, so that no sequence is special: the same states are reached from
//! every start, those at the wrap among them.

use std::cell::Cell;

use flextensord_device::handover::{Cells, Filler, Journal, Sight, publish, take};
use flextensord_proto::layout::{State, Word};

use super::{
    explorer::{Verdict, explore},
    setting::{Kind, Setting},
    world::Sequences,
};

fn size(kind: Kind, base: u32, modulus: u8) -> (usize, usize) {
    let setting = Setting {
        sequences: Sequences { base, modulus },
        deaths: u8::from(kind == Kind::Stream && modulus < 4),
        ..Setting::new(kind)
    };
    match explore(&setting) {
        Verdict::Holds { states, steps } => {
            println!("{kind:?}, {base:#x} modulo {modulus}: {states} states, {steps} steps");
            (states, steps)
        }
        found => panic!("{setting:?}: {found:?}"),
    }
}

#[test]
fn the_same_states_are_reached_from_every_start() {
    let bases = [0, 1 << 31, i32::MAX.cast_unsigned(), u32::MAX - 1, u32::MAX];
    let sizes = bases.map(|base| size(Kind::Stream, base, 3));
    assert_eq!(sizes, [sizes[0]; 5]);
    let sizes = bases.map(|base| size(Kind::Cpu, base, 2));
    assert_eq!(sizes, [sizes[0]; 5]);
}

#[test]
fn every_property_holds_whatever_the_sequences_are_counted_modulo() {
    for modulus in 2..=5 {
        size(Kind::Stream, u32::MAX - 1, modulus);
    }
    size(Kind::Cpu, u32::MAX - 1, 4);
}

/// One part: its word, its journal, and a client that waits for it.
struct Part(Cell<Word>, u32);

impl Cells for Part {
    fn load(&self, _part: u32) -> Word {
        self.0.get()
    }

    fn exchange(&self, _part: u32, from: Word, to: Word) -> Result<(), Word> {
        if self.0.get() != from {
            return Err(self.0.get());
        }
        self.0.set(to);
        Ok(())
    }

    fn want(&self) -> u32 {
        0
    }

    fn set_want(&self, _part: u32) {}
}

impl Journal for Part {
    fn parts(&self) -> u32 {
        1
    }

    fn issued(&self, _part: u32) -> u32 {
        self.1
    }

    fn record(&mut self, _part: u32, sequence: u32) {
        self.1 = sequence;
    }
}

/// All that the real functions say and do for a word `behind` its journal, sequences
/// counted from `start`.
fn seen_from(start: u32, behind: i32, state: State) -> impl PartialEq + std::fmt::Debug {
    let issued = start;
    let word = Word::new(start.wrapping_sub(behind.cast_unsigned()), state);
    let page = Part(Cell::new(word), 0);
    let mut filler = Filler::new(Part(Cell::new(word), issued));
    let sight = filler.sight(&page, 0);
    let frozen = filler.frozen(&page).is_some();
    let revoked = filler.frozen(&page).is_some_and(|frozen| frozen.revoke(0));
    let empty = word.is_empty(issued);
    let next = filler.issue(0).wrapping_sub(start);
    filler.withdraw(0);
    let back = filler.journal().1.wrapping_sub(start);
    let published = publish(&page, 0, start.wrapping_add(1));
    let taken = take(&page, 0);
    let left = (
        page.0.get().sequence().wrapping_sub(start),
        page.0.get().state(),
    );
    (
        (sight, frozen, revoked, empty),
        (next, back, published, taken, left),
    )
}

#[test]
fn the_real_functions_look_at_nothing_but_the_difference_of_sequences() {
    let starts = (0..70u32).map(|n| n.wrapping_sub(35));
    let middles = (0..32).flat_map(|bit| [1 << bit, (1u32 << bit).wrapping_sub(1)]);
    for start in starts.chain(middles) {
        for behind in -5..=5 {
            for state in [State::Empty, State::Full, State::InUse] {
                let here = seen_from(start, behind, state);
                assert_eq!(here, seen_from(1000, behind, state), "{start:#x}");
            }
        }
    }
    let word = Part(Cell::new(Word::new(u32::MAX, State::Empty)), 0);
    let filler = Filler::new(Part(Cell::new(Word(0)), 0));
    assert_eq!(filler.sight(&word, 0), Sight::Filling);
}
