//! The real functions as threads under loom: every interleaving within a bound of
//! preemptions, and every value that a load may return under the C11 memory model.
//!
//! What the explorer takes for granted is checked here: that the words alone order the
//! reads and writes of the bytes between them. Cells of a ring are loom's `UnsafeCell`s,
//! so that a read and a write without an order between them is a failure ("Causality
//! violation" or "Concurrent ... accesses"), whatever value is read.
//!
//! Loom takes a sequentially consistent access for an acquire-release one, which allows
//! more than the page does: that the properties hold even so is the stronger result.
//! (Fences would make up for it, but in loom they order more than they do in C11, and
//! hide races.) A client that waits yields, so a wait that never ends is a failure as
//! well: the run exceeds loom's limit of steps.

use flextensord_device::handover::{
    Cells, Filler, Journal, Sight, end_wait, give_back, publish, take,
};
use flextensord_proto::layout::{State, WANT_NONE, Word};
use loom::{
    cell::UnsafeCell,
    model::Builder,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    thread,
};

/// A page, a ring of one place that both parts share, and a journal that outlives its
/// daemon.
struct Shared {
    words: [AtomicU64; 2],
    want: AtomicU32,
    place: UnsafeCell<u32>,
    journal: UnsafeCell<[u32; 2]>,
    /// The client will want nothing more.
    over: AtomicBool,
    order: Ordering,
}

// SAFETY: loom watches every access of the cells and fails when two are not ordered.
unsafe impl Sync for Shared {}
// SAFETY: nothing in it is tied to a thread.
unsafe impl Send for Shared {}

/// What the place holds between the submission of a copy and its arrival.
const TORN: u32 = 99;
/// Where sequences begin: the second copy of a part wraps.
const START: u32 = u32::MAX - 1;

impl Shared {
    fn new(order: Ordering) -> Arc<Self> {
        let word = || AtomicU64::new(Word::new(START, State::Empty).0);
        Arc::new(Self {
            words: [word(), word()],
            want: AtomicU32::new(WANT_NONE),
            place: UnsafeCell::new(TORN),
            journal: UnsafeCell::new([START; 2]),
            over: AtomicBool::new(false),
            order,
        })
    }

    fn read(&self) -> u32 {
        // SAFETY: the pointer is of the cell, and loom checks that nobody writes
        self.place.with(|place| unsafe { *place })
    }

    /// A client reads the part that it holds.
    fn expect(&self, part: u32) {
        let content = self.read();
        assert_eq!(content, part, "torn read");
    }

    fn write(&self, content: u32) {
        // SAFETY: the pointer is of the cell, and loom checks that nobody else is there
        self.place.with_mut(|place| unsafe { *place = content });
    }
}

impl Cells for Shared {
    fn load(&self, part: u32) -> Word {
        Word(self.words[part as usize].load(self.order))
    }

    fn exchange(&self, part: u32, from: Word, to: Word) -> Result<(), Word> {
        self.words[part as usize]
            .compare_exchange(from.0, to.0, self.order, self.order)
            .map(drop)
            .map_err(Word)
    }

    fn want(&self) -> u32 {
        self.want.load(self.order)
    }

    fn set_want(&self, part: u32) {
        self.want.store(part, self.order);
    }
}

struct Kept(Arc<Shared>);

impl Journal for Kept {
    fn parts(&self) -> u32 {
        2
    }

    fn issued(&self, part: u32) -> u32 {
        // SAFETY: the pointer is of the cell, and loom checks that nobody writes
        self.0.journal.with(|all| unsafe { (*all)[part as usize] })
    }

    fn record(&mut self, part: u32, sequence: u32) {
        // SAFETY: as above; a successor begins when its predecessor is gone
        self.0
            .journal
            .with_mut(|all| unsafe { (*all)[part as usize] = sequence });
    }
}

/// Where a daemon dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Dies {
    BehindJournal,
    BehindSubmission,
    BehindCopy,
    BehindPublication,
    Never,
}

/// Fills `part` up to where the daemon dies; `false` when it did.
fn fill(shared: &Shared, filler: &mut Filler<Kept>, part: u32, dies: Dies) -> bool {
    let sequence = filler.issue(part);
    if dies == Dies::BehindJournal {
        return false;
    }
    shared.write(TORN);
    if dies == Dies::BehindSubmission {
        return false;
    }
    shared.write(part);
    if dies == Dies::BehindCopy {
        return false;
    }
    assert!(publish(shared, part, sequence));
    dies != Dies::BehindPublication
}

/// The engine: answers a frozen client, and prefetches `next` once.
fn engine(shared: &Shared, filler: &mut Filler<Kept>, next: u32, dies: Dies) {
    let clear =
        |filler: &Filler<Kept>| (0..2).all(|part| filler.sight(shared, part) == Sight::Empty);
    let mut prefetches = true;
    while !shared.over.load(Ordering::Acquire) {
        let wanted = filler.frozen(shared).map(|frozen| {
            let _: bool = frozen.revoke(1 - frozen.part());
            frozen.part()
        });
        let chosen = wanted.or_else(|| std::mem::take(&mut prefetches).then_some(next));
        if let Some(part) = chosen
            && clear(filler)
            && !fill(shared, filler, part, dies)
        {
            return;
        }
        thread::yield_now();
    }
}

/// Waits for `part`, at most for `patience` looks, reads it, gives it back.
fn use_part(shared: &Shared, part: u32, patience: Option<usize>) {
    let mut taken = take(shared, part);
    if !taken {
        shared.set_want(part);
        let mut looks = 0;
        while !taken && patience.is_none_or(|patience| looks < patience) {
            taken = take(shared, part);
            looks += 1;
            if !taken {
                thread::yield_now();
            }
        }
        end_wait(shared);
    }
    if taken {
        shared.expect(part);
        assert!(give_back(shared, part));
    }
}

/// The same as a GPU stream does it: it touches the low half alone, and looks at nothing
/// else.
fn stream_part(shared: &Shared, part: u32) {
    let word = &shared.words[part as usize];
    shared.set_want(part);
    while shared.load(part).state() != Some(State::Full) {
        thread::yield_now();
    }
    // a 32-bit write of 2 where 1 stands
    word.fetch_xor(3, shared.order);
    end_wait(shared);
    shared.expect(part);
    // a 32-bit write of 0
    word.fetch_and(!0xffff_ffff, shared.order);
}

/// Runs a model with at most four preemptions, or as many as `LOOM_MAX_PREEMPTIONS`
/// says, which loom itself reads.
fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    let preemptions = *builder.preemption_bound.get_or_insert(4);
    builder.max_branches = 20_000;
    let runs = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = std::sync::Arc::clone(&runs);
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    println!(
        "at most {preemptions} preemptions: {} runs",
        runs.load(Ordering::Relaxed)
    );
}

/// A client beside an engine that prefetches `next`.
fn passes(next: u32, client: impl FnOnce(&Shared) + Send + 'static) {
    let shared = Shared::new(Ordering::SeqCst);
    let ours = Arc::clone(&shared);
    let client = thread::spawn(move || {
        client(&ours);
        ours.over.store(true, Ordering::Release);
    });
    let mut filler = Filler::new(Kept(Arc::clone(&shared)));
    engine(&shared, &mut filler, next, Dies::Never);
    client.join().unwrap();
}

/// A client that uses these parts, one after the other.
fn in_order(order: &'static [u32]) -> impl FnOnce(&Shared) + Send {
    move |shared| order.iter().for_each(|part| use_part(shared, *part, None))
}

#[test]
fn a_pass_in_order_reads_what_was_copied() {
    check(|| passes(0, in_order(&[0, 1])));
}

#[test]
fn a_client_that_skips_what_was_prefetched_is_served_by_a_revoke() {
    check(|| passes(0, in_order(&[1, 0])));
}

#[test]
fn a_part_used_twice_is_filled_twice_across_the_wrap() {
    check(|| passes(1, in_order(&[1, 1, 0])));
}

#[test]
fn a_wait_given_up_races_the_revoke_that_it_allowed() {
    check(|| {
        passes(0, |shared| {
            use_part(shared, 1, Some(1));
            use_part(shared, 0, None);
        });
    });
}

#[test]
fn a_stream_that_touches_the_low_half_alone_reads_what_was_copied() {
    check(|| {
        passes(0, |shared| {
            stream_part(shared, 1);
            stream_part(shared, 0);
        });
    });
}

#[test]
fn a_successor_goes_on_from_the_journal_wherever_its_predecessor_died() {
    for dies in [
        Dies::BehindJournal,
        Dies::BehindSubmission,
        Dies::BehindCopy,
        Dies::BehindPublication,
    ] {
        check(move || {
            let shared = Shared::new(Ordering::SeqCst);
            let ours = Arc::clone(&shared);
            let client = thread::spawn(move || {
                in_order(&[0, 1])(&ours);
                ours.over.store(true, Ordering::Release);
            });
            let first = Arc::clone(&shared);
            let daemon = thread::spawn(move || {
                let mut filler = Filler::new(Kept(Arc::clone(&first)));
                fill(&first, &mut filler, 0, dies);
            });
            // it is gone, and no copy of it is under way
            daemon.join().unwrap();
            let mut filler = Filler::new(Kept(Arc::clone(&shared)));
            for part in 0..2 {
                if filler.sight(&*shared, part) == Sight::Filling {
                    filler.withdraw(part);
                }
            }
            engine(&shared, &mut filler, 0, Dies::Never);
            client.join().unwrap();
        });
    }
}

#[test]
#[should_panic(expected = "Causality violation")]
fn words_without_an_order_do_not_keep_reads_and_copies_apart() {
    check(|| {
        let shared = Shared::new(Ordering::Relaxed);
        let ours = Arc::clone(&shared);
        let client = thread::spawn(move || {
            if take(&*ours, 0) {
                ours.read();
            }
        });
        let mut filler = Filler::new(Kept(Arc::clone(&shared)));
        fill(&shared, &mut filler, 0, Dies::Never);
        client.join().unwrap();
    });
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_part_dropped_without_proof_is_found_by_loom_as_well() {
    check(|| {
        let shared = Shared::new(Ordering::SeqCst);
        let mut filler = Filler::new(Kept(Arc::clone(&shared)));
        fill(&shared, &mut filler, 0, Dies::Never);
        let ours = Arc::clone(&shared);
        let stream = thread::spawn(move || stream_part(&ours, 0));
        let full = shared.load(0);
        if shared.exchange(0, full, full.with(State::Empty)).is_ok() {
            fill(&shared, &mut filler, 1, Dies::Never);
            shared.write(0);
            let empty = full.with(State::Empty);
            // whether the stream has passed or not, let it come to its end
            let _: Result<(), Word> = shared.exchange(0, empty, full);
        }
        stream.join().unwrap();
    });
}
