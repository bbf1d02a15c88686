//! A GPU in use: its primary context, parent of everything that is made on it.

use std::{
    collections::BTreeMap,
    marker::PhantomData,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak},
};

use super::{
    driver::{ContextHandle, Driver, MemoryInfo, Outcome},
    error::CudaError,
    gpu::Gpu,
    registration::Pinned,
};

/// Most failed drops whose words are kept.
const FAULTS_KEPT: usize = 16;

/// A retained primary context. Everything made on the GPU holds it, so that it is
/// released last.
#[derive(Debug)]
pub struct Context {
    driver: Arc<dyn Driver>,
    gpu: Gpu,
    handle: ContextHandle,
    /// Registered host memory by its first address.
    ranges: RwLock<BTreeMap<usize, Weak<Pinned>>>,
    faults: Mutex<Faults>,
    broken: OnceLock<CudaError>,
}

#[derive(Debug, Default)]
struct Faults {
    count: u64,
    texts: Vec<String>,
    /// Mappings of host memory that the driver still holds: where they begin, and their
    /// bytes.
    stuck: BTreeMap<usize, usize>,
}

impl Context {
    /// Takes the primary context of `gpu` into use.
    ///
    /// # Errors
    /// What the driver says.
    pub fn open(driver: &Arc<dyn Driver>, gpu: &Gpu) -> Result<Arc<Self>, CudaError> {
        let handle = driver.retain_primary(gpu.ordinal)?;
        Ok(Arc::new(Self {
            driver: Arc::clone(driver),
            gpu: gpu.clone(),
            handle,
            ranges: RwLock::default(),
            faults: Mutex::default(),
            broken: OnceLock::new(),
        }))
    }

    /// The GPU.
    #[must_use]
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The driver behind it.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Memory of the GPU, as the driver counts it over all processes.
    ///
    /// # Errors
    /// What the driver says.
    pub fn memory_info(&self) -> Result<MemoryInfo, CudaError> {
        self.with(|driver| driver.memory_info())
    }

    /// The first error after which the context is unusable, if there was one.
    #[must_use]
    pub fn failure(&self) -> Option<&CudaError> {
        self.broken.get()
    }

    /// How many resources could not be given back, and what the driver said of the first
    /// of them.
    #[must_use]
    pub fn failed_drops(&self) -> (u64, Vec<String>) {
        let faults = self.faults();
        (faults.count, faults.texts.clone())
    }

    /// Bytes of host memory that could not be unregistered, and so stay mapped for good.
    #[must_use]
    pub fn stuck_bytes(&self) -> u64 {
        self.faults()
            .stuck
            .values()
            .map(|bytes| *bytes as u64)
            .sum()
    }

    /// Counts host memory that stays mapped for good.
    pub(super) fn add_stuck(&self, start: usize, bytes: usize) {
        self.faults().stuck.insert(start, bytes);
    }

    /// Runs `call` with this context current, and remembers an error that broke it.
    pub(super) fn with<T>(&self, call: impl FnOnce(&dyn Driver) -> Outcome<T>) -> Outcome<T> {
        let current = self.note(self.enter())?;
        let outcome = self.note(call(self.driver.as_ref()));
        drop(current);
        outcome
    }

    /// As [`Context::with`] for giving something back: a failure is kept and shown.
    /// Whether it worked.
    pub(super) fn give_back(
        &self,
        what: &str,
        call: impl FnOnce(&dyn Driver) -> Outcome<()>,
    ) -> bool {
        match self.with(call) {
            Ok(()) => true,
            Err(error) => {
                let mut faults = self.faults();
                faults.count += 1;
                if faults.texts.len() < FAULTS_KEPT {
                    faults.texts.push(format!("{what}: {error}"));
                }
                false
            }
        }
    }

    /// Notes an error that broke the context.
    pub(super) fn note<T>(&self, outcome: Outcome<T>) -> Outcome<T> {
        if let Err(error) = &outcome
            && error.is_sticky()
        {
            // the first counts: the others come of it
            let _ = self.broken.set(error.clone());
        }
        outcome
    }

    /// Adds registered host memory, so that copies know where a registration ends.
    pub(super) fn add_range(&self, first: usize, pinned: &Arc<Pinned>) {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        ranges.insert(first, Arc::downgrade(pinned));
    }

    /// Takes it away again.
    pub(super) fn remove_range(&self, first: usize) {
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        ranges.remove(&first);
    }

    /// The registration that `address` lies in, and the first address behind its chunk;
    /// for unregistered memory nothing, and where the next registration begins.
    pub(super) fn range_at(&self, address: usize) -> (Option<Arc<Pinned>>, usize) {
        let ranges = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
        let inside = ranges
            .range(..=address)
            .next_back()
            .and_then(|(_, pinned)| pinned.upgrade())
            .and_then(|pinned| Some((pinned.chunk_end(address)?, pinned)));
        match inside {
            Some((end, pinned)) => (Some(pinned), end),
            None => {
                let next = ranges.range(address.saturating_add(1)..).next();
                (None, next.map_or(usize::MAX, |(first, _)| *first))
            }
        }
    }

    fn enter(&self) -> Outcome<Option<Current<'_>>> {
        // PyTorch's threads have it current, and two calls a layer are spared
        if self.driver.is_current(self.handle) {
            return Ok(None);
        }
        // SAFETY: self retains the context, and the guard, which pops, borrows self.
        unsafe { self.driver.push(self.handle) }?;
        Ok(Some(Current {
            context: self,
            thread: PhantomData,
        }))
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`; whatever was made in it held an Arc of self,
        // so it is gone. A failure has nobody left to be told to.
        let _: Outcome<()> = unsafe { self.driver.release_primary(self.gpu.ordinal) };
    }
}

/// The context is that of the thread until this is dropped; it stays on its thread.
struct Current<'a> {
    context: &'a Context,
    thread: PhantomData<*const ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let _: PhantomData<*const ()> = self.thread;
        // a failed pop is that of a broken context, which the call before has noted
        let _: Outcome<()> = self.context.note(self.context.driver.pop());
    }
}
