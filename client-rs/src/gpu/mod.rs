//! Managers on a GPU: the same hand-over, with the caller's stream in the place of its
//! thread. Nothing here waits for the GPU while layers are acquired and released.
//!
//! - [`attach`]: the driver, the GPU and its context; [`imported`]: memory of the daemon;
//! - [`order`]: the one order over streams, and the edges of captures;
//! - [`fastpath`]: acquire and release; [`mark`]: waiting for what is queued;
//! - [`ending`]: what becomes of queued work when a lease is over or a manager closed.

pub(crate) mod attach;
pub(crate) mod ending;
mod fastpath;
mod imported;
mod manager;
mod mark;
pub(crate) mod order;

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use flextensord_device::{
    control::ControlPage,
    cuda::{context::Context, error::CudaError, slots::SlotWords, stream::CallerStream},
    fork::ForkMark,
};

pub(crate) use imported::{Imported, Source};
pub(crate) use mark::Mark;

use crate::{error::ClientError, lease::Lease, plan::Plan};
use order::Order;

/// Most parts that are taken by one batch, three operations each and one at the end: it
/// is queued as a whole or not at all.
const TAKE_PARTS: usize = 84;

/// Where a hold was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OnStream {
    pub(crate) stream: CallerStream,
    /// The capture that it was taken in.
    pub(crate) capture: Option<u64>,
}

/// What the queued work of a plan uses. It outlives the plan where that is dropped with
/// work queued: until that is done, none of it is unmapped.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) context: Arc<Context>,
    control: Arc<ControlPage>,
    /// Rings first: what is read there is the daemon's to change.
    rings: Vec<Arc<Imported>>,
    _residents: Vec<Arc<Imported>>,
    lease: Arc<Lease>,
    order: Mutex<Order>,
    /// Nothing is queued any more.
    over: AtomicBool,
    /// Limit of waits for what is queued, where there is no other.
    pub(crate) limit: Duration,
}

impl Core {
    pub(crate) fn order(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The order, unless a call is under way: the driver may keep one for as long as the
    /// GPU waits.
    fn try_order(&self) -> Option<MutexGuard<'_, Order>> {
        match self.order.try_lock() {
            Ok(order) => Some(order),
            Err(TryLockError::Poisoned(order)) => Some(order.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Refuses once nothing may be queued any more.
    fn check_open(&self) -> Result<(), ClientError> {
        if self.over.load(SeqCst) {
            self.lease.check()?;
            return Err(ClientError::State("the manager is closed"));
        }
        Ok(())
    }

    /// Whether anything was queued outside captures.
    pub(crate) fn has_queued(&self) -> bool {
        self.order().last().is_some()
    }

    /// Queues the taking of parts, all or nothing.
    fn take(&self, stream: CallerStream, parts: &[u32]) -> Result<(), ClientError> {
        let slots = self.slots()?;
        for (done, chunk) in parts.chunks(TAKE_PARTS).enumerate() {
            if let Err(error) = slots.take(stream, chunk) {
                // nobody would ever give back what was taken before
                let taken = parts.get(..done * TAKE_PARTS).unwrap_or(&[]);
                if !taken.is_empty() {
                    let _: Result<(), CudaError> = slots.give_back(stream, taken);
                }
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Queues the giving back of parts behind all that was queued.
    pub(crate) fn give_back(&self, parts: &[u32]) -> Result<(), ClientError> {
        match self.order().last() {
            Some(last) if !parts.is_empty() => Ok(self.slots()?.give_back(last, parts)?),
            _ => Ok(()),
        }
    }

    fn slots(&self) -> Result<&SlotWords, ClientError> {
        let none = ClientError::State("the control page is not registered with the driver");
        self.control.slots().ok_or(none)
    }

    /// The lease's own error where it is over: the driver's comes of that.
    fn explain(&self, error: ClientError) -> ClientError {
        match error {
            ClientError::Cuda(_) => self.lease.check().err().unwrap_or(error),
            other => other,
        }
    }
}

/// A plan's own hold on its core. Dropped with work queued, it is ended in the
/// background.
#[derive(Debug)]
pub(crate) struct Gpu {
    core: Arc<Core>,
    mark: ForkMark,
}

impl Gpu {
    pub(crate) fn new(
        plan: &Plan,
        control: &Arc<ControlPage>,
        context: Arc<Context>,
        allocations: Vec<Arc<Imported>>,
        lease: &Arc<Lease>,
        limit: Duration,
    ) -> Result<Self, ClientError> {
        control.pin(&context)?;
        let order = Order::new(&context, plan.layers().len())?;
        let (rings, residents) = allocations.into_iter().partition(|memory| memory.is_ring());
        let core = Core {
            context,
            control: Arc::clone(control),
            rings,
            _residents: residents,
            lease: Arc::clone(lease),
            order: Mutex::new(order),
            over: AtomicBool::new(false),
            limit,
        };
        Ok(Self {
            core: Arc::new(core),
            mark: ForkMark::new(),
        })
    }

    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    /// For who looks on without keeping anything mapped.
    pub(crate) fn weak(&self) -> Weak<Core> {
        Arc::downgrade(&self.core)
    }

    /// Waits until what is queued is done, at most for `limit`, and ends it then. Nothing
    /// is queued any more.
    pub(crate) async fn close(&self, limit: Duration) -> Result<(), ClientError> {
        ending::close(&self.core, limit).await
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.mark.in_child() {
            // the driver does not survive a fork, and the memory is the parent's
            std::mem::forget(Arc::clone(&self.core));
        } else {
            ending::abandon(&self.core);
        }
    }
}

#[cfg(test)]
mod tests;
