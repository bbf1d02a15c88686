//! The end of queued work. A wait that is queued on a stream cannot be taken back: where
//! nobody will ever fill its part, it is let go, but only after the ring was taken away,
//! so that a kernel behind it faults instead of reading what is not there.
//!
//! Nothing is unmapped before the queued work is done or can never run.

use std::{
    sync::{Arc, Mutex, PoisonError, Weak, atomic::Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

use super::{Core, Mark};
use crate::{
    error::ClientError,
    lease::{Fate, Lease},
};

/// How long queued work may take to come to its end once its waits are let go.
const END_LIMIT: Duration = Duration::from_secs(10);
/// How long work may go on that is queued when its plan is dropped.
const ABANDON_LIMIT: Duration = Duration::from_secs(5);
/// Pause between two rounds over the words: a release that is queued makes a word empty
/// again, and the next wait for it must not wait long.
const ROUND: Duration = Duration::from_micros(100);
/// Pause between two looks at work that may well end by itself.
const LOOK: Duration = Duration::from_millis(1);

/// How queued work stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// All of it is done.
    Done,
    /// Some is not, or nobody knows.
    Running,
    /// The context is unusable: none of it runs any more.
    Broken,
}

/// Looks at all that was queued.
#[derive(Debug, Default)]
struct Tail {
    mark: Option<Mark>,
}

impl Tail {
    /// How it stands. Nothing may be queued any more.
    fn look(&mut self, core: &Core) -> Standing {
        let reached = match &self.mark {
            Some(mark) => mark.is_reached(),
            None => core.try_mark().and_then(|mark| {
                self.mark = mark;
                self.mark.as_ref().map_or(Ok(false), Mark::is_reached)
            }),
        };
        match reached {
            Ok(true) => Standing::Done,
            Err(_) if core.context.failure().is_some() => Standing::Broken,
            Ok(false) | Err(_) => Standing::Running,
        }
    }
}

impl Core {
    /// Takes the ring away and lets go what waits for it, until all that was queued is
    /// done or has failed.
    fn end(&self, mut tail: Tail) -> Standing {
        for ring in &self.rings {
            if ring.mapping().forbid().is_err() && self.context.failure().is_none() {
                // kernels could still read it: better that they wait for ever
                return Standing::Running;
            }
        }
        let begin = Instant::now();
        loop {
            self.control.release_waiters();
            let standing = tail.look(self);
            // of the launches of graphs nothing is known: they have all the time
            let order = self.try_order();
            let known = order.is_some_and(|order| !order.has_recorded());
            let ended = standing == Standing::Broken || (standing == Standing::Done && known);
            if ended || begin.elapsed() > END_LIMIT {
                return standing;
            }
            thread::sleep(ROUND);
        }
    }

    /// The work is done: what is left of graphs must neither wait for ever nor read.
    fn retire(&self) {
        self.lease.note_fate(Fate::Finished);
        let taken = || {
            self.rings
                .iter()
                .all(|ring| ring.mapping().forbid().is_ok())
        };
        if self.order().has_recorded() && taken() {
            self.control.release_waiters();
        }
    }

    /// Sees to work that needs no ending. `false` while it runs.
    fn has_ended(&self, tail: &mut Tail) -> bool {
        match tail.look(self) {
            Standing::Done => self.retire(),
            Standing::Broken => self.lease.note_fate(Fate::Lost),
            Standing::Running => return false,
        }
        true
    }
}

/// Waits for the end of the lease, and ends what is queued then.
pub(crate) async fn watch(core: Weak<Core>, lease: Arc<Lease>) {
    lease.until_over().await;
    // gone or closed: who did that has seen to it
    if let Some(core) = core.upgrade()
        && !core.over.swap(true, SeqCst)
    {
        in_background(move || finish(core, Tail::default()));
    }
}

/// Nothing is queued any more: waits for what is, at most for `limit`, and ends it then,
/// or at once when the lease is over meanwhile.
pub(crate) async fn close(core: &Arc<Core>, limit: Duration) -> Result<(), ClientError> {
    if core.over.swap(true, SeqCst) {
        return Ok(());
    }
    // a task that is dropped in the middle leaves the rest to a thread
    let mut unfinished = Unfinished {
        core: Some(Arc::clone(core)),
        tail: Tail::default(),
    };
    let begin = Instant::now();
    while !core.has_ended(&mut unfinished.tail) {
        core.lease.check()?;
        if begin.elapsed() >= limit {
            return Err(ClientError::LeaseLost {
                manager: core.lease.name.clone(),
                reason: format!("it was closed, and its queued work did not end in {limit:?}"),
                context_lost: true,
            });
        }
        tokio::time::sleep(LOOK).await;
    }
    unfinished.core = None;
    Ok(())
}

/// A plan is dropped: what it has queued may go on for a while, in the background.
pub(crate) fn abandon(core: &Arc<Core>) {
    if core.over.swap(true, SeqCst) {
        return;
    }
    let mut tail = Tail::default();
    if core.has_ended(&mut tail) {
        return;
    }
    let core = Arc::clone(core);
    in_background(move || {
        let begin = Instant::now();
        while begin.elapsed() < ABANDON_LIMIT && core.lease.check().is_ok() {
            if core.has_ended(&mut tail) {
                return;
            }
            thread::sleep(LOOK);
        }
        finish(core, tail);
    });
}

/// Ends what is queued; what cannot be ended keeps its memory for ever.
fn finish(core: Arc<Core>, tail: Tail) {
    let standing = core.end(tail);
    let lost = standing != Standing::Done || core.context.failure().is_some();
    core.lease
        .note_fate(if lost { Fate::Lost } else { Fate::Finished });
    if standing == Standing::Running {
        std::mem::forget(core);
    }
}

/// Ends work whose close did not come to its end.
struct Unfinished {
    core: Option<Arc<Core>>,
    tail: Tail,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(core) = self.core.take() {
            let tail = std::mem::take(&mut self.tail);
            in_background(move || finish(core, tail));
        }
    }
}

/// Runs `work` on a thread of its own, which no runtime ends; here where there is none.
fn in_background(work: impl FnOnce() + Send + 'static) {
    let work = Arc::new(Mutex::new(Some(work)));
    let theirs = Arc::clone(&work);
    let started = thread::Builder::new()
        .name("flextensord-end".to_owned())
        .spawn(move || run(&theirs));
    if started.is_err() {
        run(&work);
    }
}

fn run(work: &Mutex<Option<impl FnOnce()>>) {
    let taken = work.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(work) = taken {
        work();
    }
}
