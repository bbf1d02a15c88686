//! A GPU behind the trait of [`crate::device`].
//!
//! Copies run back to back on one stream, each with an event behind it. Who asks for
//! arrivals finds the events that have passed and publishes their copies from the host. A
//! slot word written by the stream itself would be written by the engine of the kernels,
//! which changes the process for it: pieces of 32 MiB beside a process that computes then
//! came to 96.8 % of the link instead of 99.4 %, and a hand-over took 5 us longer (H200;
//! docs/performance.md).

use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use flextensord_proto::layout::{LABEL_BYTES, LABEL_SIZE};

use super::{
    context::Context,
    driver::Driver,
    error::CudaError,
    event::Event,
    gpu::{self, Gpu},
    memory::DeviceMapping,
    pace::Pace,
    registration::{Pinned, Registration},
    stream::{CallerStream, Stream},
};
use crate::{
    device::{Device, DeviceError, DeviceInfo, Label, Memory, Pins, Publish, Source, Ticket},
    doorbell::Doorbell,
    failpoint::{self, Point},
    kernel::KernelError,
    mapping::{Mapping, RangeError},
};

/// A GPU that the daemon may use. Its context is made when it is first needed.
#[derive(Debug)]
pub struct CudaDevice {
    info: DeviceInfo,
    driver: Arc<dyn Driver>,
    gpu: Gpu,
    chunk_limit: u64,
    bell: Arc<Doorbell>,
    running: OnceLock<Arc<Running>>,
    starting: Mutex<()>,
}

impl CudaDevice {
    /// The GPU `gpu`, after a look at what it can do. Host memory is registered in chunks
    /// of at most `chunk_limit` bytes.
    ///
    /// # Errors
    /// [`CudaError::Unfit`] naming what it lacks.
    pub fn new(driver: &Arc<dyn Driver>, gpu: &Gpu, chunk_limit: u64) -> Result<Self, DeviceError> {
        gpu::check(driver, gpu)?;
        Ok(Self {
            info: DeviceInfo {
                name: format!("cuda:{}", gpu.ordinal.0),
                uuid: gpu.uuid.clone(),
                kind: "cuda",
                total_bytes: gpu.total_bytes,
                link_limit: None,
                clients_can_ring: false,
                numa_node: gpu.numa_node,
            },
            driver: Arc::clone(driver),
            gpu: gpu.clone(),
            chunk_limit,
            bell: Arc::new(Doorbell::new()?),
            running: OnceLock::new(),
            starting: Mutex::default(),
        })
    }

    /// Its context.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn context(&self) -> Result<Arc<Context>, DeviceError> {
        Ok(Arc::clone(&self.running()?.context))
    }

    fn running(&self) -> Result<&Arc<Running>, DeviceError> {
        if let Some(running) = self.running.get() {
            return Ok(running);
        }
        // a context takes a tenth of a second: it is made once
        let _starting = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
        if self.running.get().is_none() {
            let running = Arc::new(Running::start(&self.driver, &self.gpu)?);
            // nobody else sets it: the lock is held
            let _ = self.running.set(running);
        }
        self.running.get().ok_or(DeviceError::Cuda(CudaError::State(
            "a device did not start",
        )))
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn start(&self) -> Result<(), DeviceError> {
        self.running().map(drop)
    }

    fn free_bytes(&self) -> u64 {
        let info = self
            .running
            .get()
            .map(|running| running.context.memory_info());
        match info {
            Some(Ok(info)) => info.free,
            // a broken context has nothing to give
            Some(Err(_)) => 0,
            None => self.info.total_bytes,
        }
    }

    fn allocated_bytes(&self) -> u64 {
        self.running
            .get()
            .map_or(0, |running| running.allocated.load(SeqCst))
    }

    fn granularity(&self) -> u64 {
        self.running.get().map_or(1, |running| running.granularity)
    }

    fn allocate(&self, bytes: u64, label: &Label) -> Result<Arc<dyn Memory>, DeviceError> {
        let running = self.running()?;
        let bytes = bytes.next_multiple_of(running.granularity);
        let mapping = DeviceMapping::create(&running.context, bytes).map_err(|error| {
            if error.is_out_of_memory() {
                DeviceError::Refused {
                    device: self.info.name.clone(),
                    wanted: bytes,
                    free: self.free_bytes(),
                    total: self.info.total_bytes,
                    source: error,
                }
            } else {
                error.into()
            }
        })?;
        mapping.write(0, &label.encode())?;
        running.allocated.fetch_add(bytes, SeqCst);
        Ok(Arc::new(CudaMemory {
            mapping: Arc::new(mapping),
            running: Arc::clone(running),
        }))
    }

    fn take_back(
        &self,
        descriptor: OwnedFd,
        bytes: u64,
        label: &Label,
    ) -> Result<Arc<dyn Memory>, DeviceError> {
        let running = self.running()?;
        // the driver maps no more than there is: a smaller allocation is refused by it
        let mapping = DeviceMapping::adopt(&running.context, descriptor, bytes)?;
        let mut found = [0; LABEL_SIZE];
        mapping.read(0, &mut found)?;
        if found != label.encode() {
            let allocation = label.allocation;
            return Err(DeviceError::Label { allocation, bytes });
        }
        running.allocated.fetch_add(bytes, SeqCst);
        Ok(Arc::new(CudaMemory {
            mapping: Arc::new(mapping),
            running: Arc::clone(running),
        }))
    }

    fn pin_range(
        &self,
        segment: &Arc<Mapping>,
        offset: u64,
        bytes: u64,
    ) -> Result<Pins, DeviceError> {
        let context = &self.running()?.context;
        let range = index(offset)..index(offset.saturating_add(bytes));
        Ok(Pins::of(Registration::part(context, segment, range)?))
    }

    fn pin_segment(
        &self,
        segment: &Arc<Mapping>,
        cuts: &[u64],
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Pins, DeviceError> {
        let context = &self.running()?.context;
        let registration = Registration::new(context, segment, self.chunk_limit, cuts, progress)?;
        Ok(Pins::of(registration))
    }

    fn completed(&self) -> Ticket {
        self.running
            .get()
            .map_or(Ticket::default(), |running| running.completed())
    }

    fn queued_bytes(&self) -> u64 {
        self.running
            .get()
            .map_or(0, |running| running.queued_bytes.load(SeqCst))
    }

    fn failed_publications(&self) -> u64 {
        self.running
            .get()
            .map_or(0, |running| running.unpublished.load(SeqCst))
    }

    fn next_arrival(&self) -> Option<Duration> {
        self.running.get()?.next_arrival()
    }

    fn completion_bell(&self) -> &Arc<Doorbell> {
        &self.bell
    }

    fn failure(&self) -> Option<CudaError> {
        self.running.get()?.failure()
    }

    fn failed_drops(&self) -> (u64, Vec<String>) {
        self.running
            .get()
            .map_or((0, Vec::new()), |running| running.context.failed_drops())
    }

    fn stuck_bytes(&self) -> u64 {
        self.running
            .get()
            .map_or(0, |running| running.context.stuck_bytes())
    }
}

/// A GPU in use.
#[derive(Debug)]
struct Running {
    copies: Stream,
    queue: Mutex<Queue>,
    queued_bytes: AtomicU64,
    unpublished: AtomicU64,
    allocated: AtomicU64,
    granularity: u64,
    context: Arc<Context>,
}

#[derive(Debug, Default)]
struct Queue {
    submitted: u64,
    arrived: u64,
    flights: VecDeque<Flight>,
    /// Events that no flight uses.
    spare: Vec<Event>,
    pace: Pace,
}

/// A copy under way, and what it needs until it has arrived.
#[derive(Debug)]
struct Flight {
    ticket: u64,
    bytes: u64,
    submitted: Instant,
    /// Recorded behind the copy.
    landing: Event,
    publishes: Vec<Publish>,
    _target: Arc<DeviceMapping>,
    _source: Arc<Mapping>,
    _pinned: Vec<Arc<Pinned>>,
}

impl Running {
    fn start(driver: &Arc<dyn Driver>, gpu: &Gpu) -> Result<Self, DeviceError> {
        let context = Context::open(driver, gpu)?;
        Ok(Self {
            copies: Stream::new(&context)?,
            queue: Mutex::default(),
            queued_bytes: AtomicU64::new(0),
            unpublished: AtomicU64::new(0),
            allocated: AtomicU64::new(0),
            granularity: driver.granularity(gpu.ordinal)?.max(1),
            context,
        })
    }

    /// Publishes what has arrived, in order, and says what was the last of it.
    fn completed(&self) -> Ticket {
        let mut done = Vec::new();
        let mut queue = self.queue();
        // an error of the driver is found by `failure`: nothing arrives any more
        while let Some(flight) = queue.flights.front()
            && matches!(flight.landing.has_passed(), Ok(true))
        {
            for publish in &flight.publishes {
                failpoint::cross(Point::Slot);
                if !publish.control.publish(publish.part, publish.sequence) {
                    self.unpublished.fetch_add(1, SeqCst);
                }
                failpoint::cross(Point::SlotWritten);
            }
            let (bytes, submitted) = (flight.bytes, flight.submitted);
            queue.arrived = flight.ticket;
            queue.pace.note(bytes, submitted, Instant::now());
            self.queued_bytes.fetch_sub(bytes, SeqCst);
            done.extend(queue.flights.pop_front());
        }
        let arrived = queue.arrived;
        drop(queue);
        // what the copies held goes outside the lock: the last of it may take long
        let landings: Vec<Event> = done.into_iter().map(|flight| flight.landing).collect();
        if !landings.is_empty() {
            self.queue().spare.extend(landings);
        }
        Ticket(arrived)
    }

    fn next_arrival(&self) -> Option<Duration> {
        let queue = self.queue();
        let flight = queue.flights.front()?;
        let left = queue.pace.left(flight.bytes, flight.submitted);
        Some(left.unwrap_or_default())
    }

    /// Queues a copy, with an event behind it.
    fn submit(
        &self,
        target: &Arc<DeviceMapping>,
        offset: u64,
        source: Source,
        publishes: &[Publish],
    ) -> Result<Ticket, DeviceError> {
        let bytes = source.bytes;
        let target_address = target.at(offset, bytes)?;
        let start = source.segment.address(index(source.offset), index(bytes))?;
        let mut pinned = Vec::new();
        let mut queue = self.queue();
        let landing = match queue.spare.pop() {
            Some(event) => event,
            None => Event::new(&self.context)?,
        };
        let mut done = 0;
        while done < index(bytes) {
            // a copy that straddles two registrations fails
            let (registration, end) = self.context.range_at(start + done);
            let length = (end - (start + done)).min(index(bytes) - done);
            let to = target_address + done as u64;
            // SAFETY: both ranges were checked to lie in their mappings, which the flight
            // keeps, with the registration, until the copy has arrived; the target is
            // mapped for writing.
            self.context.with(|driver| unsafe {
                driver.copy_in(to, start + done, length, self.copies.handle())
            })?;
            pinned.extend(registration);
            done += length;
        }
        landing.record(CallerStream::from(&self.copies))?;
        queue.submitted += 1;
        let ticket = queue.submitted;
        self.queued_bytes.fetch_add(bytes, SeqCst);
        queue.flights.push_back(Flight {
            ticket,
            bytes,
            submitted: Instant::now(),
            landing,
            publishes: publishes.to_vec(),
            _target: Arc::clone(target),
            _source: source.segment,
            _pinned: pinned,
        });
        Ok(Ticket(ticket))
    }

    fn failure(&self) -> Option<CudaError> {
        if !self.queue().flights.is_empty() {
            // what fails on the GPU shows only when the driver is asked
            if let Err(error) = self.copies.is_done()
                && !error.is_sticky()
            {
                return Some(error);
            }
        }
        self.context.failure().cloned()
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // a copy under way needs what its flight holds; a broken context does no more
        let wait = || {
            let end = Event::new(&self.context)?;
            end.record(CallerStream::from(&self.copies))?;
            end.wait()
        };
        if let Err(error) = wait() {
            let flights = std::mem::take(&mut self.queue().flights);
            if !error.is_sticky() && !flights.is_empty() {
                // it may still run: what it touches stays for good
                std::mem::forget(flights);
            }
        }
    }
}

/// An allocation.
#[derive(Debug)]
struct CudaMemory {
    mapping: Arc<DeviceMapping>,
    running: Arc<Running>,
}

impl CudaMemory {
    fn check(&self, offset: u64, bytes: u64) -> Result<(), RangeError> {
        let inside = offset
            .checked_add(bytes)
            .is_some_and(|end| end <= self.mapping.bytes());
        if inside && offset >= LABEL_BYTES {
            return Ok(());
        }
        Err(RangeError {
            offset: index(offset),
            bytes: index(bytes),
            size: index(self.mapping.bytes()),
        })
    }
}

/// An offset or size of memory; what no address can hold lies outside of everything.
fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        self.running
            .allocated
            .fetch_sub(self.mapping.bytes(), SeqCst);
    }
}

impl Memory for CudaMemory {
    fn bytes(&self) -> u64 {
        self.mapping.bytes()
    }

    fn export(&self) -> Result<OwnedFd, DeviceError> {
        let exported = self.mapping.export();
        Ok(exported.map_err(|e| KernelError::new("duplicate a descriptor", e))?)
    }

    fn held_elsewhere(&self) -> Option<bool> {
        // the driver keeps the memory for whoever still maps it, and gives it to nobody
        // else meanwhile: this daemon may let go at any time
        Some(false)
    }

    fn is_kept_by_driver(&self) -> bool {
        true
    }

    fn fill(
        &self,
        offset: u64,
        source: Source,
        publishes: &[Publish],
    ) -> Result<Ticket, DeviceError> {
        self.check(offset, source.bytes)?;
        self.running
            .submit(&self.mapping, offset, source, publishes)
    }

    fn poison(&self, offset: u64, bytes: u64, byte: u8) -> Result<(), DeviceError> {
        self.check(offset, bytes)?;
        let target = self.mapping.at(offset, bytes)?;
        let stream = self.running.copies.handle();
        // the lock keeps it in order with the copies of other threads
        let _queue = self.running.queue();
        let context = &self.running.context;
        // SAFETY: the range was checked to lie in the mapping, which is writable; copies
        // and their streams are waited for before it goes.
        context.with(|driver| unsafe { driver.fill(target, byte, index(bytes), stream) })?;
        Ok(())
    }
}
