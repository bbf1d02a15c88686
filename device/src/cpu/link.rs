//! The link of a CPU device: one thread that copies in order.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::{
    device::{DeviceError, Publish, Ticket},
    doorbell::Doorbell,
    failpoint::{self, Point},
    kernel::KernelError,
    mapping::Mapping,
};

/// Bytes copied between two looks at the clock.
const STRIDE: usize = 1 << 20;
/// The copy thread sleeps only when it is this far ahead of the held bandwidth.
const SLACK: Duration = Duration::from_micros(100);

/// A copy whose ranges were checked.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) source: Arc<Mapping>,
    pub(super) source_offset: usize,
    pub(super) target: Arc<Mapping>,
    pub(super) target_offset: usize,
    pub(super) bytes: usize,
    pub(super) publishes: Vec<Publish>,
}

#[derive(Debug, Default)]
struct Queue {
    /// Each with when it was submitted.
    jobs: VecDeque<(Instant, Job)>,
    submitted: u64,
    ended: bool,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    more: Condvar,
    completed: AtomicU64,
    queued_bytes: AtomicU64,
    failed_publications: AtomicU64,
    bell: Arc<Doorbell>,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        // the queue is consistent between any two statements that hold the lock
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The queue and its thread; dropping it ends the thread after the copy in hand.
#[derive(Debug)]
pub(super) struct Link {
    device: String,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Link {
    pub(super) fn start(device: &str, limit: Option<u64>) -> Result<Self, DeviceError> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            more: Condvar::new(),
            completed: AtomicU64::new(0),
            queued_bytes: AtomicU64::new(0),
            failed_publications: AtomicU64::new(0),
            bell: Arc::new(Doorbell::new()?),
        });
        let theirs = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name(format!("copy-{device}"))
            .spawn(move || run(&theirs, limit))
            .map_err(|e| KernelError::new("start a copy thread", e))?;
        Ok(Self {
            device: device.to_owned(),
            shared,
            thread: Some(thread),
        })
    }

    pub(super) fn submit(&self, job: Job) -> Result<Ticket, DeviceError> {
        let mut queue = self.shared.queue();
        if queue.ended {
            return Err(DeviceError::Ended {
                device: self.device.clone(),
            });
        }
        self.shared.queued_bytes.fetch_add(job.bytes as u64, SeqCst);
        queue.jobs.push_back((Instant::now(), job));
        queue.submitted += 1;
        let ticket = Ticket(queue.submitted);
        drop(queue);
        self.shared.more.notify_one();
        Ok(ticket)
    }

    pub(super) fn completed(&self) -> Ticket {
        Ticket(self.shared.completed.load(SeqCst))
    }

    pub(super) fn queued_bytes(&self) -> u64 {
        self.shared.queued_bytes.load(SeqCst)
    }

    pub(super) fn failed_publications(&self) -> u64 {
        self.shared.failed_publications.load(SeqCst)
    }

    pub(super) fn bell(&self) -> &Arc<Doorbell> {
        &self.shared.bell
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.queue().ended = true;
        self.shared.more.notify_one();
        if let Some(thread) = self.thread.take() {
            // the thread does not panic; if it did, its message is on stderr
            let _: thread::Result<()> = thread.join();
        }
    }
}

fn run(shared: &Shared, limit: Option<u64>) {
    let mut pace = Pace {
        limit,
        free_at: Instant::now(),
    };
    while let Some((submitted, job)) = next(shared) {
        pace.begin(submitted);
        let mut done = 0;
        while done < job.bytes {
            let bytes = STRIDE.min(job.bytes - done);
            // the ranges were checked when the job was made
            let _: Result<(), _> = Mapping::copy(
                &job.source,
                job.source_offset + done,
                &job.target,
                job.target_offset + done,
                bytes,
            );
            pace.after(bytes);
            done += bytes;
        }
        for publish in &job.publishes {
            failpoint::cross(Point::Slot);
            if !publish.control.publish(publish.part, publish.sequence) {
                shared.failed_publications.fetch_add(1, SeqCst);
            }
            failpoint::cross(Point::SlotWritten);
        }
        shared.queued_bytes.fetch_sub(job.bytes as u64, SeqCst);
        // memory is let go before the copy counts as completed
        drop(job);
        shared.completed.fetch_add(1, SeqCst);
        shared.bell.ring();
    }
}

fn next(shared: &Shared) -> Option<(Instant, Job)> {
    let mut queue = shared.queue();
    loop {
        if queue.ended {
            return None;
        }
        if let Some(job) = queue.jobs.pop_front() {
            return Some(job);
        }
        queue = shared
            .more
            .wait(queue)
            .unwrap_or_else(PoisonError::into_inner);
    }
}

/// Holds copies to a bandwidth: the link is busy until `free_at`.
struct Pace {
    limit: Option<u64>,
    free_at: Instant,
}

impl Pace {
    /// A link that was idle begins with what is submitted, and does not save its time up.
    fn begin(&mut self, submitted: Instant) {
        self.free_at = self.free_at.max(submitted);
    }

    /// Waits until the link would have copied `bytes` bytes more.
    fn after(&mut self, bytes: usize) {
        let Some(limit) = self.limit.filter(|limit| *limit > 0) else {
            return;
        };
        let nanos = u128::from(bytes as u64) * 1_000_000_000 / u128::from(limit);
        let busy = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        let now = Instant::now();
        // nor does one whose copies take longer than they are held to
        self.free_at = (self.free_at + busy).max(now);
        if let Some(ahead) = self
            .free_at
            .checked_duration_since(now)
            .filter(|d| *d > SLACK)
        {
            thread::sleep(ahead);
        }
    }
}
