//! What the threads of a fake driver share.

use std::{
    collections::HashMap,
    sync::{
        Arc, Condvar, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{
            AtomicBool, AtomicU32, AtomicU64,
            Ordering::{self, SeqCst},
        },
    },
    time::{Duration, Instant},
};

use super::{
    super::driver::{EventHandle, Ordinal, StreamHandle},
    capture::Captures,
    codes::{INVALID_DEVICE, INVALID_HANDLE, Refusable},
    event::Event,
    faults::Faults,
    lock,
    pages::Pages,
    physical::Physical,
    settings::FakeSettings,
    space::Space,
    stream::Stream,
    wait,
};

/// A GPU and its primary context.
#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) uuid: [u8; 16],
    /// The sticky error of the context, 0 when there is none. It outlives the context:
    /// only a new process helps.
    pub(super) broken: AtomicU32,
    pub(super) retained: AtomicU32,
    pub(super) link_free_at: Mutex<Option<Instant>>,
    pub(super) implicit: Mutex<Option<Arc<Stream>>>,
}

/// Memory of all kinds, under one lock: engines hold it shared while they touch memory,
/// so that none of it goes meanwhile.
#[derive(Debug, Default)]
pub(super) struct Memory {
    pub(super) physical: Physical,
    pub(super) space: Space,
    pub(super) pages: Pages,
}

/// Whether host memory was registered or taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pinning {
    /// It was registered.
    Register,
    /// It was taken back.
    Unregister,
}

/// What a fake driver has done so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bytes that are registered now, as they were asked for.
    pub registered_bytes: usize,
    /// Register calls, refused ones included.
    pub register_calls: u64,
    /// Registrations in order: address, bytes, and which way. Refused ones are not there.
    pub pinnings: Vec<(usize, usize, Pinning)>,
    /// Allocations with a handle or a mapping in this process.
    pub live_allocations: usize,
    /// How often the context of each GPU is retained, by the machine's order of GPUs.
    pub contexts: Vec<u32>,
    /// Copies that are done.
    pub copies_done: u64,
}

#[derive(Debug, Default)]
struct Held {
    held: bool,
    passes: u64,
}

/// The manual clock of copies.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<Held>,
    changed: Condvar,
}

impl Gate {
    pub(super) fn hold(&self, held: bool) {
        *lock(&self.state) = Held { held, passes: 0 };
        self.changed.notify_all();
    }

    pub(super) fn allow(&self, copies: u64) {
        lock(&self.state).passes += copies;
        self.changed.notify_all();
    }

    /// Waits a little while to be let through; whether it was.
    pub(super) fn pass(&self, patience: Duration) -> bool {
        let mut state = lock(&self.state);
        if state.held && state.passes == 0 {
            state = wait(&self.changed, state, patience);
        }
        if state.held && state.passes == 0 {
            return false;
        }
        state.passes = state.passes.saturating_sub(1);
        true
    }
}

/// State of a fake driver.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) gpus: Vec<Gpu>,
    /// Indices of the GPUs by ordinal.
    pub(super) seen: Vec<usize>,
    pub(super) total: u64,
    pub(super) granularity: u64,
    pub(super) bandwidth: Option<u64>,
    pub(super) version: i32,
    pub(super) faults: Faults,
    pub(super) gate: Gate,
    pub(super) counts: Mutex<Counts>,
    pub(super) captures: Mutex<Captures>,
    memory: RwLock<Memory>,
    streams: Mutex<HashMap<StreamHandle, Arc<Stream>>>,
    events: Mutex<HashMap<EventHandle, Arc<Event>>>,
    ended: AtomicBool,
    last_number: AtomicU64,
}

impl Shared {
    pub(super) fn new(settings: FakeSettings) -> Self {
        let gpu = |index| Gpu {
            uuid: settings.uuid(index),
            broken: AtomicU32::new(0),
            retained: AtomicU32::new(0),
            link_free_at: Mutex::default(),
            implicit: Mutex::default(),
        };
        Self {
            gpus: (0..settings.gpus).map(gpu).collect(),
            seen: settings.seen(),
            total: settings.memory,
            granularity: settings.granularity.max(super::PAGE as u64),
            bandwidth: settings.bandwidth.filter(|rate| *rate > 0),
            version: settings.version,
            faults: settings.faults,
            gate: Gate::default(),
            counts: Mutex::default(),
            captures: Mutex::default(),
            memory: RwLock::default(),
            streams: Mutex::default(),
            events: Mutex::default(),
            ended: AtomicBool::new(false),
            // handles of streams begin above those with a meaning of their own
            last_number: AtomicU64::new(0x1000),
        }
    }

    /// A number that nothing else has.
    pub(super) fn number(&self) -> u64 {
        self.last_number.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The index of a GPU by its ordinal.
    pub(super) fn index(&self, ordinal: Ordinal) -> Refusable<usize> {
        let seen = usize::try_from(ordinal.0).ok();
        let index = seen.and_then(|ordinal| self.seen.get(ordinal));
        index.copied().ok_or(INVALID_DEVICE)
    }

    pub(super) fn memory(&self) -> RwLockReadGuard<'_, Memory> {
        self.memory.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn memory_mut(&self) -> RwLockWriteGuard<'_, Memory> {
        self.memory.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses with the sticky error of a GPU's context, where it has one.
    pub(super) fn sound(&self, gpu: usize) -> Refusable<()> {
        match self.gpus[gpu].broken.load(SeqCst) {
            0 => Ok(()),
            code => Err(code),
        }
    }

    /// Breaks the context of a GPU; the first error stays.
    pub(super) fn break_context(&self, gpu: usize, code: u32) {
        let broken = &self.gpus[gpu].broken;
        // a context that is broken already keeps its first error
        let _: Result<u32, u32> = broken.compare_exchange(0, code, SeqCst, SeqCst);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(SeqCst)
    }

    /// Whether what is queued on a stream is not to run any more.
    pub(super) fn is_stopped(&self, stream: &Stream) -> bool {
        self.has_ended() || stream.is_abandoned() || self.sound(stream.gpu).is_err()
    }

    pub(super) fn add_stream(&self, stream: &Arc<Stream>) {
        lock(&self.streams).insert(stream.handle, Arc::clone(stream));
    }

    pub(super) fn stream(&self, handle: StreamHandle) -> Refusable<Arc<Stream>> {
        let found = lock(&self.streams).get(&handle).cloned();
        found.ok_or(INVALID_HANDLE)
    }

    pub(super) fn remove_stream(&self, handle: StreamHandle) -> Refusable<Arc<Stream>> {
        let found = lock(&self.streams).remove(&handle);
        found.ok_or(INVALID_HANDLE)
    }

    /// Drops all that was made in the context of a GPU, at once.
    pub(super) fn end_context(&self, gpu: usize) {
        let mut streams: Vec<_> = {
            let mut all = lock(&self.streams);
            all.extract_if(|_, s| s.gpu == gpu)
                .map(|(_, s)| s)
                .collect()
        };
        streams.extend(lock(&self.gpus[gpu].implicit).take());
        for stream in streams {
            lock(&self.captures).forget(stream.handle);
            stream.abandon();
        }
        lock(&self.events).retain(|_, event| event.gpu != gpu);
        let forgotten = self.memory_mut().pages.forget(gpu);
        let mut counts = lock(&self.counts);
        for (address, bytes) in forgotten {
            counts.registered_bytes = counts.registered_bytes.saturating_sub(bytes);
            let pinning = (address, bytes, Pinning::Unregister);
            counts.pinnings.push(pinning);
        }
    }

    pub(super) fn add_event(&self, handle: EventHandle, event: Event) {
        lock(&self.events).insert(handle, Arc::new(event));
    }

    pub(super) fn event(&self, handle: EventHandle) -> Refusable<Arc<Event>> {
        let found = lock(&self.events).get(&handle).cloned();
        found.ok_or(INVALID_HANDLE)
    }

    pub(super) fn remove_event(&self, handle: EventHandle) -> Refusable<Arc<Event>> {
        let found = lock(&self.events).remove(&handle);
        found.ok_or(INVALID_HANDLE)
    }

    /// Tells every thread to end.
    pub(super) fn end(&self) {
        self.ended.store(true, SeqCst);
        let streams: Vec<_> = lock(&self.streams).drain().map(|(_, s)| s).collect();
        let implicit = self
            .gpus
            .iter()
            .filter_map(|gpu| lock(&gpu.implicit).take());
        for stream in streams.into_iter().chain(implicit) {
            stream.wake();
        }
    }
}
