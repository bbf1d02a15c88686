//! The hand-over of parts through slot words: who may change what, and when.
//!
//! The client takes a full part ([`take`]) and gives it back ([`give_back`]); while
//! it waits it says for which part ([`Cells::set_want`]). The daemon fills empty
//! parts ([`Filler::issue`], [`publish`]) and may revoke full ones, but only while
//! the client is frozen ([`Filler::frozen`]): it saw the wanted part empty with no
//! copy of it under way and then `want`, so the client cannot move before the
//! daemon itself fills that part. The borrow of the filler by [`Frozen`] keeps the
//! daemon from issuing anything until the last revoke is done.
//!
//! The code is written over [`Cells`] and [`Journal`], so that a model checker runs
//! the same lines as the daemon. All operations must be sequentially consistent.

use flextensord_proto::layout::{State, WANT_NONE, Word};

/// The words that both sides share: one slot word a part, and `want`.
pub trait Cells {
    /// The slot word of `part`.
    fn load(&self, part: u32) -> Word;
    /// Changes the slot word of `part` from `from` to `to`, or says what stands there.
    ///
    /// # Errors
    /// The word that was found instead of `from`.
    fn exchange(&self, part: u32, from: Word, to: Word) -> Result<(), Word>;
    /// The part that the client waits for, or [`WANT_NONE`].
    fn want(&self) -> u32;
    /// Says which part the client waits for.
    fn set_want(&self, part: u32);
}

/// The sequence of the last copy issued for each part: written before the copy is
/// submitted, and never visible to a client.
pub trait Journal {
    /// Number of parts.
    fn parts(&self) -> u32;
    /// The last sequence issued for `part`.
    fn issued(&self, part: u32) -> u32;
    /// Notes that `sequence` is about to be issued.
    fn record(&mut self, part: u32, sequence: u32);
}

/// Client: takes `part` if it is full. `false` when it is not (yet).
pub fn take<C: Cells + ?Sized>(cells: &C, part: u32) -> bool {
    let word = cells.load(part);
    // a failed exchange means that the daemon revoked it in between
    word.state() == Some(State::Full) && cells.exchange(part, word, word.with(State::InUse)).is_ok()
}

/// Client: gives `part` back, all reads of it completed. `false` when it was not in
/// use, which is a fault of the caller.
pub fn give_back<C: Cells + ?Sized>(cells: &C, part: u32) -> bool {
    let word = cells.load(part);
    word.state() == Some(State::InUse)
        && cells.exchange(part, word, word.with(State::Empty)).is_ok()
}

/// Client: ends a wait, fulfilled or abandoned.
pub fn end_wait<C: Cells + ?Sized>(cells: &C) {
    cells.set_want(WANT_NONE);
}

/// Daemon: says that the copy with `sequence` has arrived. `false` when the slot word
/// is not the one that the issue left behind: the client broke the protocol, which
/// harms only itself; the word is left alone.
pub fn publish<C: Cells + ?Sized>(cells: &C, part: u32, sequence: u32) -> bool {
    let before = cells.load(part);
    before.state() == Some(State::Empty)
        && cells
            .exchange(part, before, Word::new(sequence, State::Full))
            .is_ok()
}

/// What the daemon makes of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sight {
    /// It may be filled, if all that overlap it are empty too.
    Empty,
    /// A copy was issued and is not published.
    Filling,
    /// Full, not taken.
    Full,
    /// The client reads it.
    InUse,
    /// The word is none that the protocol allows: never touched again.
    Foreign,
}

/// Daemon: the one thread that issues copies for a manager, with its journal.
#[derive(Debug)]
pub struct Filler<J> {
    journal: J,
}

impl<J: Journal> Filler<J> {
    /// A filler that goes on from `journal`.
    pub fn new(journal: J) -> Self {
        Self { journal }
    }

    /// The journal.
    pub fn journal(&self) -> &J {
        &self.journal
    }

    /// Ends the filling; the journal goes on.
    pub fn into_journal(self) -> J {
        self.journal
    }

    /// What the slot word of `part` says, read against the journal.
    pub fn sight<C: Cells + ?Sized>(&self, cells: &C, part: u32) -> Sight {
        let word = cells.load(part);
        let current = word.sequence() == self.journal.issued(part);
        match word.state() {
            Some(State::Empty) if word.is_empty(self.journal.issued(part)) => Sight::Empty,
            Some(State::Empty) => Sight::Filling,
            Some(State::Full) if current => Sight::Full,
            Some(State::InUse) if current => Sight::InUse,
            _ => Sight::Foreign,
        }
    }

    /// Notes that a copy of `part` is about to be submitted, and returns its sequence.
    /// The part and all that overlap it must be empty.
    pub fn issue(&mut self, part: u32) -> u32 {
        let sequence = self.journal.issued(part).wrapping_add(1);
        self.journal.record(part, sequence);
        sequence
    }

    /// Takes back an issue whose copy was never submitted.
    pub fn withdraw(&mut self, part: u32) {
        let sequence = self.journal.issued(part).wrapping_sub(1);
        self.journal.record(part, sequence);
    }

    /// The part that the client is frozen on, if it is: it waits for a part that is
    /// empty, with no copy of it under way. The order of the two looks is the proof.
    pub fn frozen<'a, C: Cells + ?Sized>(&'a mut self, cells: &'a C) -> Option<Frozen<'a, C, J>> {
        let part = cells.want();
        if part >= self.journal.parts() || self.sight(cells, part) != Sight::Empty {
            return None;
        }
        // seen empty; only now does `want` prove that the client waits for it
        (cells.want() == part).then_some(Frozen {
            cells,
            filler: self,
            part,
        })
    }
}

/// Proof that the client waits for an empty part: until the daemon fills that one,
/// the client takes no other.
#[derive(Debug)]
pub struct Frozen<'a, C: ?Sized, J> {
    cells: &'a C,
    filler: &'a mut Filler<J>,
    part: u32,
}

impl<C: Cells + ?Sized, J: Journal> Frozen<'_, C, J> {
    /// The part that the client waits for.
    #[must_use]
    pub fn part(&self) -> u32 {
        self.part
    }

    /// Revokes `part` if it is full and not taken. `true` when it was revoked.
    #[must_use]
    pub fn revoke(&self, part: u32) -> bool {
        let full = Word::new(self.filler.journal.issued(part), State::Full);
        // on the CPU device a wait may have been abandoned meanwhile and the part
        // taken: then the exchange fails and the part is the client's
        self.cells.load(part) == full
            && self
                .cells
                .exchange(part, full, full.with(State::Empty))
                .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    struct Page {
        words: RefCell<Vec<Word>>,
        want: Cell<u32>,
    }

    impl Cells for Page {
        fn load(&self, part: u32) -> Word {
            self.words.borrow()[part as usize]
        }
        fn exchange(&self, part: u32, from: Word, to: Word) -> Result<(), Word> {
            let word = &mut self.words.borrow_mut()[part as usize];
            if *word == from {
                *word = to;
                Ok(())
            } else {
                Err(*word)
            }
        }
        fn want(&self) -> u32 {
            self.want.get()
        }
        fn set_want(&self, part: u32) {
            self.want.set(part);
        }
    }

    struct Issued(Vec<u32>);

    impl Journal for Issued {
        fn parts(&self) -> u32 {
            u32::try_from(self.0.len()).unwrap()
        }
        fn issued(&self, part: u32) -> u32 {
            self.0[part as usize]
        }
        fn record(&mut self, part: u32, sequence: u32) {
            self.0[part as usize] = sequence;
        }
    }

    fn setting(parts: usize) -> (Page, Filler<Issued>) {
        let page = Page {
            words: RefCell::new(vec![Word(0); parts]),
            want: Cell::new(WANT_NONE),
        };
        (page, Filler::new(Issued(vec![0; parts])))
    }

    #[test]
    fn a_part_goes_from_empty_over_filling_full_and_in_use_to_empty() {
        let (page, mut filler) = setting(1);
        for round in 1..4 {
            assert_eq!(filler.sight(&page, 0), Sight::Empty);
            let sequence = filler.issue(0);
            assert_eq!(sequence, round);
            assert_eq!(filler.sight(&page, 0), Sight::Filling);
            assert!(!take(&page, 0));
            assert!(publish(&page, 0, sequence));
            assert_eq!(filler.sight(&page, 0), Sight::Full);
            assert!(take(&page, 0));
            assert_eq!(filler.sight(&page, 0), Sight::InUse);
            assert!(!take(&page, 0));
            assert!(give_back(&page, 0));
            assert!(!give_back(&page, 0));
        }
    }

    #[test]
    fn nothing_is_revoked_unless_the_client_waits_for_an_empty_part() {
        let (page, mut filler) = setting(2);
        let sequence = filler.issue(1);
        assert!(publish(&page, 1, sequence));
        assert!(filler.frozen(&page).is_none(), "waits for nothing");
        page.set_want(1);
        assert!(filler.frozen(&page).is_none(), "the wanted part is full");
        page.set_want(9);
        assert!(filler.frozen(&page).is_none(), "no such part");
        page.set_want(0);
        let frozen = filler.frozen(&page).unwrap();
        assert_eq!(frozen.part(), 0);
        assert!(frozen.revoke(1));
        assert!(!frozen.revoke(1));
        assert_eq!(filler.sight(&page, 1), Sight::Empty);
    }

    #[test]
    fn a_part_in_use_is_never_revoked() {
        let (page, mut filler) = setting(2);
        let sequence = filler.issue(1);
        assert!(publish(&page, 1, sequence));
        assert!(take(&page, 1));
        page.set_want(0);
        assert!(!filler.frozen(&page).unwrap().revoke(1));
    }

    #[test]
    fn a_word_that_a_client_made_up_is_never_filled_over() {
        let (page, mut filler) = setting(1);
        page.words.borrow_mut()[0] = Word(9);
        assert_eq!(filler.sight(&page, 0), Sight::Foreign);
        page.words.borrow_mut()[0] = Word::new(77, State::Full);
        assert_eq!(filler.sight(&page, 0), Sight::Foreign);
        page.words.borrow_mut()[0] = Word(0);
        let sequence = filler.issue(0);
        page.words.borrow_mut()[0] = Word::new(sequence, State::Full);
        assert!(!publish(&page, 0, sequence));
    }
}
