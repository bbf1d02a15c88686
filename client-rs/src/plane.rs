//! What a manager has mapped: the pages and the memory of its plan, and the table of
//! its holds. The fast path ([`crate::fastpath`]) and the RPC path
//! ([`crate::rpc_holds`]) work on it.

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use flextensord_device::{control::ControlPage, fork::ForkMark, handover, kernel::KernelError};
use flextensord_proto::v1::handed_back::What;
use tokio::sync::mpsc;

use crate::{
    connection::check_process,
    error::ClientError,
    gpu::{Gpu, OnStream},
    holds::{HoldTable, Overlap, overlap_within},
    lease::{Lease, Possessions},
    memory::PlaneMemory,
    plan::{Layer, LayerId, Plan, TensorPlace},
    rpc_holds::{Job, RpcPart},
    thread::OwnerThread,
};

/// A hold that ended where it could not be given back at once: on another thread, or
/// with an acquire over RPC that failed.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) layer: LayerId,
    pub(crate) rpc: Option<RpcPart>,
    /// On a GPU, where it is given back.
    pub(crate) on: Option<OnStream>,
}

/// The data plane of one plan.
#[derive(Debug)]
pub(crate) struct Plane {
    pub(crate) mark: ForkMark,
    pub(crate) owner: OwnerThread,
    pub(crate) lease: Arc<Lease>,
    pub(crate) plan: Plan,
    pub(crate) control: Arc<ControlPage>,
    memory: Vec<Option<PlaneMemory>>,
    /// The ids of the allocations, in their order.
    ids: Vec<u64>,
    /// On a GPU, what is queued there.
    pub(crate) gpu: Option<Gpu>,
    table: Mutex<HoldTable>,
    /// Layers whose own parts overlap: a fault of the plan.
    torn: HashMap<LayerId, Overlap>,
    /// Ended on other threads; the owner gives them back, so that the order stays one.
    parked: Mutex<Vec<Ended>>,
    has_parked: AtomicBool,
    /// An acquire over RPC is under way.
    pub(crate) rpc_busy: AtomicBool,
    /// To the task that sends the RPCs in order; taken only on drop.
    jobs: Option<mpsc::UnboundedSender<Job>>,
    /// Time that acquires waited, and what of it was reported, in nanoseconds.
    pub(crate) waited: AtomicU64,
    pub(crate) waited_reported: AtomicU64,
}

impl Plane {
    /// Puts a plan, its pages and its memory (in the order of its allocations) together.
    /// The thread that calls becomes the owner.
    pub(crate) fn new(
        plan: Plan,
        control: Arc<ControlPage>,
        memory: Vec<Option<PlaneMemory>>,
        ids: Vec<u64>,
        gpu: Option<Gpu>,
        lease: Arc<Lease>,
        jobs: mpsc::UnboundedSender<Job>,
    ) -> Self {
        let torn = plan.layer_ids().filter_map(|id| {
            let overlap = overlap_within(&plan, plan.layer(id).ok()?)?;
            Some((id, overlap))
        });
        Self {
            mark: ForkMark::new(),
            owner: OwnerThread::current(),
            lease,
            torn: torn.collect(),
            table: Mutex::new(HoldTable::new(&plan)),
            plan,
            control,
            memory,
            ids,
            gpu,
            parked: Mutex::new(Vec::new()),
            has_parked: AtomicBool::new(false),
            rpc_busy: AtomicBool::new(false),
            jobs: Some(jobs),
            waited: AtomicU64::new(0),
            waited_reported: AtomicU64::new(0),
        }
    }

    /// The start of every acquire: right process, right thread, live lease.
    #[inline]
    pub(crate) fn enter(&self, id: LayerId) -> Result<&Layer, ClientError> {
        check_process(&self.mark)?;
        self.owner.check()?;
        self.lease.check()?;
        if self.has_parked.load(Ordering::Acquire) {
            self.settle_parked();
        }
        self.plan.layer(id)
    }

    /// Refuses a layer with a part that would overlap a held one.
    #[inline]
    pub(crate) fn check_overlap(
        &self,
        table: &HoldTable,
        id: LayerId,
        layer: &Layer,
    ) -> Result<(), ClientError> {
        let torn = || self.torn.get(&id).copied().map_or(Ok(()), Err);
        let checked = table
            .check(&layer.streamed)
            .and_then(|()| if self.torn.is_empty() { Ok(()) } else { torn() });
        checked.map_err(|Overlap { part, held }| ClientError::HoldConflict {
            part,
            tensor: self.plan.tensor_in(part).to_owned(),
            held,
        })
    }

    pub(crate) fn table(&self) -> MutexGuard<'_, HoldTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The memory that a part lies in; none when it has no bytes.
    pub(crate) fn memory_of(&self, part: u32) -> Option<&PlaneMemory> {
        let part = self.plan.parts().get(part as usize)?;
        self.memory.get(part.allocation as usize)?.as_ref()
    }

    /// The address of a tensor's bytes; `None` when it has none.
    pub(crate) fn address_of(&self, place: &TensorPlace) -> Result<Option<usize>, ClientError> {
        check_process(&self.mark)?;
        if place.bytes == 0 {
            return Ok(None);
        }
        let memory = self.memory_of(place.part).ok_or(ClientError::State(
            "the tensor is none of the manager's plan",
        ))?;
        memory.address(place.offset, place.bytes).map(Some)
    }

    /// The refusal of a call that is for another kind of device.
    #[cold]
    pub(crate) fn wrong_device(&self, call: &'static str, instead: &'static str) -> ClientError {
        ClientError::WrongDevice {
            call,
            device: self.lease.device.clone(),
            instead,
        }
    }

    /// Writes the word of a part that nobody holds any more, all reads completed.
    pub(crate) fn give_back(&self, part: u32) {
        if !handover::give_back(&*self.control, part) && self.lease.check().is_ok() {
            self.lease.note_release_error(ClientError::Protocol {
                call: "release",
                reason: format!("the slot word of part {part} was not in use"),
            });
        }
    }

    /// Ends a hold, or keeps it for the owner when another thread calls.
    pub(crate) fn end(&self, ended: Ended) -> Result<(), ClientError> {
        if !self.owner.is_current() {
            self.park(ended);
            return Ok(());
        }
        if self.has_parked.load(Ordering::Acquire) {
            self.settle_parked();
        }
        if let Some(job) = self.settle(ended, None)? {
            self.send(job);
        }
        Ok(())
    }

    /// Keeps an ended hold for the owner's next call.
    pub(crate) fn park(&self, ended: Ended) {
        let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
        parked.push(ended);
        self.has_parked.store(true, Ordering::Release);
    }

    /// Gives back what other threads left behind.
    pub(crate) fn settle_parked(&self) {
        let parked = {
            let mut parked = self.parked.lock().unwrap_or_else(PoisonError::into_inner);
            self.has_parked.store(false, Ordering::Release);
            std::mem::take(&mut *parked)
        };
        for ended in parked {
            match self.settle(ended, None) {
                Ok(Some(job)) => self.send(job),
                Ok(None) => {}
                Err(error) => self.lease.note_release_error(error),
            }
        }
    }

    /// Hands a job to the task that sends the RPCs.
    pub(crate) fn send(&self, job: Job) {
        // without that task the client is gone, and the daemon drops all holds itself
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(job);
        }
    }

    /// Adds to the time that acquires waited.
    pub(crate) fn note_wait(&self, waited: Duration) {
        let waited = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
        self.waited.fetch_add(waited, Ordering::Relaxed);
    }
}

impl Possessions for Plane {
    fn descriptors(&self) -> Result<Vec<(What, OwnedFd)>, ClientError> {
        check_process(&self.mark)?;
        let control = self.control.export()?;
        let mut all = vec![(What::ControlOfPlan(self.plan.version()), control)];
        for (id, memory) in self.ids.iter().zip(&self.memory) {
            if let Some(memory) = memory {
                let failed = |error| KernelError::new("duplicate a descriptor", error);
                let descriptor = memory.descriptor().map_err(failed)?;
                all.push((What::Allocation(*id), descriptor));
            }
        }
        Ok(all)
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        // closing the queue wakes a task, and a forked child has no runtime to wake; nor
        // has it a driver that would give memory and pages of a GPU back
        if self.mark.in_child() {
            std::mem::forget(self.jobs.take());
            if let Some(gpu) = self.gpu.take() {
                std::mem::forget((gpu, std::mem::take(&mut self.memory)));
                std::mem::forget(Arc::clone(&self.control));
            }
        }
    }
}
