//! Streams: queues of steps, each worked off in order by a thread of its own.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

use super::{
    super::driver::{StreamHandle, StreamOp},
    engine::Kernel,
    event::Event,
    lock,
    shared::Shared,
    wait,
};

/// Work that a test queues as a kernel.
pub(super) type Work = Arc<dyn Fn(&Kernel<'_>) + Send + Sync>;

/// Which side of a copy is device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    In,
    Out,
}

/// What a stream does next.
#[derive(Clone)]
pub(super) enum Step {
    Copy {
        target: usize,
        source: usize,
        bytes: usize,
        direction: Direction,
    },
    Fill {
        target: usize,
        byte: u8,
        bytes: usize,
    },
    Words(Vec<StreamOp>),
    Record(Arc<Event>, u64),
    Wait(Arc<Event>, u64),
    Run(Work),
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Copy { .. } => "copy",
            Self::Fill { .. } => "fill",
            Self::Words(_) => "words",
            Self::Record(..) => "record",
            Self::Wait(..) => "wait",
            Self::Run(_) => "run",
        })
    }
}

#[derive(Debug, Default)]
struct Queue {
    steps: VecDeque<Step>,
    /// Steps that are queued or under way.
    pending: usize,
    closed: bool,
}

/// A stream.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) handle: StreamHandle,
    pub(super) gpu: usize,
    queue: Mutex<Queue>,
    changed: Condvar,
    abandoned: AtomicBool,
}

impl Stream {
    pub(super) fn new(handle: StreamHandle, gpu: usize) -> Self {
        Self {
            handle,
            gpu,
            queue: Mutex::default(),
            changed: Condvar::new(),
            abandoned: AtomicBool::new(false),
        }
    }

    /// Queues steps with nothing of others between them.
    pub(super) fn push(&self, steps: impl IntoIterator<Item = Step>) {
        let mut queue = lock(&self.queue);
        let before = queue.steps.len();
        queue.steps.extend(steps);
        queue.pending += queue.steps.len() - before;
        drop(queue);
        self.changed.notify_all();
    }

    pub(super) fn is_done(&self) -> bool {
        lock(&self.queue).pending == 0
    }

    /// Nothing more will be queued; what is still runs.
    pub(super) fn close(&self) {
        lock(&self.queue).closed = true;
        self.changed.notify_all();
    }

    /// Nothing more will be queued, and what is does not run.
    pub(super) fn abandon(&self) {
        self.abandoned.store(true, SeqCst);
        self.close();
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.abandoned.load(SeqCst)
    }

    /// Wakes the thread, so that it sees that the driver has ended.
    pub(super) fn wake(&self) {
        // under the lock, or a thread about to wait could miss it
        let _queue = lock(&self.queue);
        self.changed.notify_all();
    }

    fn next(&self, shared: &Shared) -> Option<Step> {
        let mut queue = lock(&self.queue);
        loop {
            if shared.has_ended() {
                return None;
            }
            if let Some(step) = queue.steps.pop_front() {
                return Some(step);
            }
            if queue.closed {
                return None;
            }
            queue = wait(&self.changed, queue, super::SLICE * 100);
        }
    }
}

/// The thread of a stream.
pub(super) fn work(shared: &Shared, stream: &Stream) {
    while let Some(step) = stream.next(shared) {
        // a broken context drops what is queued
        if !shared.is_stopped(stream)
            && let Err(code) = shared.execute(stream, &step)
        {
            shared.break_context(stream.gpu, code);
        }
        // what the step holds is let go before it counts as done
        drop(step);
        lock(&stream.queue).pending -= 1;
    }
}
