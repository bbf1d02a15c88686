//! A CUDA driver in host memory, with faults on demand: daemon and clients are tested
//! against it where there is no GPU.
//!
//! It acts like the real one across processes. Physical memory is a memfd, which other
//! processes import and map; device addresses are host addresses; streams are threads
//! that work in order, wait for words in memory that another process writes, and check
//! every access, so that what would fault on a GPU breaks the context and not the
//! process. Where it is not known what the real driver does, a comment says so.
//!
//! Known to differ from a real GPU: a context costs no memory; what other processes have
//! allocated is only known as far as it was imported here or made here; pageable host
//! memory is read when the copy runs, not when it is queued; registrations count in
//! whole pages; steps of a graph run in one order.

mod calls;
mod capture;
mod codes;
mod current;
mod engine;
mod event;
mod faults;
mod pages;
mod physical;
mod requests;
mod settings;
mod shared;
mod space;
mod stream;
#[cfg(test)]
mod tests;

use std::{
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

pub use capture::FakeGraph;
pub use engine::Kernel;
pub use faults::Faults;
pub use settings::{FakeSettings, SettingsError};
pub use shared::{Counts, Pinning};

use super::driver::{Ordinal, Outcome, StreamHandle};
use codes::{CAPTURE_UNSUPPORTED, INVALID_CONTEXT, OUT_OF_MEMORY, Refusable, named};
use shared::Shared;
use stream::{Step, Stream};

/// Unit of registration.
const PAGE: usize = 4096;
/// No thread sleeps longer without a look at whether it is to end.
const SLICE: Duration = Duration::from_millis(2);
/// How long a driver that is dropped waits for its threads.
const END: Duration = Duration::from_millis(90);

/// A CUDA driver in host memory. Dropping it ends its threads; a kernel of a test that
/// runs on is left behind.
pub struct FakeDriver {
    shared: Arc<Shared>,
    workers: Mutex<Vec<JoinHandle<()>>>,
}

impl fmt::Debug for FakeDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FakeDriver").finish_non_exhaustive()
    }
}

impl FakeDriver {
    /// A driver as the settings say.
    #[must_use]
    pub fn new(settings: FakeSettings) -> Arc<Self> {
        Arc::new(Self {
            shared: Arc::new(Shared::new(settings)),
            workers: Mutex::default(),
        })
    }

    /// Faults, to be set at any time.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.shared.faults
    }

    /// What was done so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let live_allocations = self.shared.memory().physical.live();
        let gpus = self.shared.gpus.iter();
        let contexts = gpus.map(|gpu| gpu.retained.load(std::sync::atomic::Ordering::SeqCst));
        Counts {
            live_allocations,
            contexts: contexts.collect(),
            ..lock(&self.shared.counts).clone()
        }
    }

    /// Holds copies: from now each waits, before it moves a byte, to be let through.
    pub fn hold_copies(&self) {
        self.shared.gate.hold(true);
    }

    /// Lets the next `copies` copies through that are held, or will be.
    pub fn let_copies_pass(&self, copies: u64) {
        self.shared.gate.allow(copies);
    }

    /// Lets all copies through again.
    pub fn stop_holding_copies(&self) {
        self.shared.gate.hold(false);
    }

    /// Breaks the context of a GPU with a sticky error.
    ///
    /// # Errors
    /// When there is no such GPU.
    pub fn break_context(&self, gpu: Ordinal, code: u32) -> Outcome<()> {
        let index = named("break", self.shared.index(gpu))?;
        self.shared.break_context(index, code);
        Ok(())
    }

    /// Queues a kernel; under capture it is recorded, and runs at every launch.
    ///
    /// # Errors
    /// No such stream, a broken context, or an invalid capture.
    pub fn run(
        &self,
        stream: StreamHandle,
        kernel: impl Fn(&Kernel<'_>) + Send + Sync + 'static,
    ) -> Outcome<()> {
        let step = Step::Run(Arc::new(kernel));
        named("run", self.submit(stream, [step]))
    }

    /// Queues a kernel that runs once, and so cannot be captured.
    ///
    /// # Errors
    /// No such stream, a broken context, or a capture (900), which it makes invalid.
    pub fn run_once(
        &self,
        stream: StreamHandle,
        kernel: impl FnOnce(&Kernel<'_>) + Send + 'static,
    ) -> Outcome<()> {
        let found = named("run", self.stream(stream))?;
        let mut captures = lock(&self.shared.captures);
        named("run", captures.forbid(found.handle, CAPTURE_UNSUPPORTED))?;
        drop(captures);
        let once = Mutex::new(Some(kernel));
        self.run(stream, move |running| {
            let taken = lock(&once).take();
            if let Some(kernel) = taken {
                kernel(running);
            }
        })
    }

    /// Waits until all that was queued on a stream is done; `false` when that takes
    /// longer than `patience`.
    ///
    /// # Errors
    /// No such stream, or a broken context.
    pub fn settle(&self, stream: StreamHandle, patience: Duration) -> Outcome<bool> {
        let found = named("settle", self.stream(stream))?;
        let until = Instant::now() + patience;
        loop {
            let done = found.is_done();
            named("settle", self.shared.sound(found.gpu))?;
            if done || Instant::now() > until {
                return Ok(done);
            }
            thread::sleep(Duration::from_micros(100));
        }
    }

    /// Captures what is queued on a stream from here on instead of running it, as
    /// `cuStreamBeginCapture` in relaxed mode: other calls are not restricted.
    ///
    /// # Errors
    /// The implicit stream (900), or a stream that is captured already (401; not known
    /// to be what the real driver says).
    pub fn begin_capture(&self, stream: StreamHandle) -> Outcome<()> {
        let result = self.stream(stream).and_then(|found| {
            if found.handle.0 == 0 {
                return Err(CAPTURE_UNSUPPORTED);
            }
            let id = self.shared.number();
            lock(&self.shared.captures).begin(found.handle, id)
        });
        named("cuStreamBeginCapture", result)
    }

    /// Ends a capture where it was begun.
    ///
    /// # Errors
    /// An invalid capture (901), a stream that joined it (903), streams that joined and
    /// that this one has not waited for (904), or no capture (401).
    pub fn end_capture(&self, stream: StreamHandle) -> Outcome<FakeGraph> {
        let result = self.stream(stream).and_then(|found| {
            let steps = lock(&self.shared.captures).end(found.handle)?;
            let gpu = found.gpu;
            Ok(FakeGraph { gpu, steps })
        });
        named("cuStreamEndCapture", result)
    }

    /// Queues what was captured; under capture it becomes part of that.
    ///
    /// # Errors
    /// No such stream, one of another GPU, a broken context, or an invalid capture.
    pub fn launch(&self, graph: &FakeGraph, stream: StreamHandle) -> Outcome<()> {
        let result = self.stream(stream).and_then(|found| {
            if found.gpu != graph.gpu {
                return Err(INVALID_CONTEXT);
            }
            self.submit(stream, graph.steps.iter().cloned())
        });
        named("cuGraphLaunch", result)
    }

    /// The stream behind a handle; the implicit one of the current context for 0, 1, 2.
    fn stream(&self, handle: StreamHandle) -> Refusable<Arc<Stream>> {
        let stream = if handle.0 <= 2 {
            let gpu = self.current()?;
            let mut implicit = lock(&self.shared.gpus[gpu].implicit);
            match &*implicit {
                Some(stream) => Arc::clone(stream),
                None => Arc::clone(implicit.insert(self.start(StreamHandle(0), gpu)?)),
            }
        } else {
            self.shared.stream(handle)?
        };
        self.shared.sound(stream.gpu)?;
        Ok(stream)
    }

    fn start(&self, handle: StreamHandle, gpu: usize) -> Refusable<Arc<Stream>> {
        let stream = Arc::new(Stream::new(handle, gpu));
        let (shared, theirs) = (Arc::clone(&self.shared), Arc::clone(&stream));
        let worker = thread::Builder::new()
            .name(format!("fake-stream-{}", handle.0))
            .spawn(move || stream::work(&shared, &theirs))
            .map_err(|_| OUT_OF_MEMORY)?;
        let mut workers = lock(&self.workers);
        workers.retain(|worker| !worker.is_finished());
        workers.push(worker);
        Ok(stream)
    }

    fn submit(&self, stream: StreamHandle, steps: impl IntoIterator<Item = Step>) -> Refusable<()> {
        let found = self.stream(stream)?;
        lock(&self.shared.captures).submit(&found, steps)
    }
}

impl Drop for FakeDriver {
    fn drop(&mut self) {
        self.shared.end();
        let until = Instant::now() + END;
        for worker in lock(&self.workers).drain(..) {
            // a kernel that held the last reference drops the driver on its own thread
            if worker.thread().id() == thread::current().id() {
                continue;
            }
            while !worker.is_finished() && Instant::now() < until {
                thread::sleep(Duration::from_micros(200));
            }
            if worker.is_finished() {
                // panics of kernels were caught, and others are on stderr
                let _: thread::Result<()> = worker.join();
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // every state here is consistent between any two statements that hold its lock
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait<'a, T>(
    condition: &Condvar,
    guard: MutexGuard<'a, T>,
    patience: Duration,
) -> MutexGuard<'a, T> {
    let woken = condition.wait_timeout(guard, patience);
    woken.unwrap_or_else(PoisonError::into_inner).0
}
