//! One manager: its owner, its lease, its model.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Instant,
};

use flextensord_device::{
    doorbell::Doorbell,
    process::{Peer, Process},
};
use flextensord_proto::v1::{LeaseEnded, LeaseEvent, lease_ended::Reason, lease_event};
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use super::{error::ManagerError, holds::Holds, model::Model};
use crate::transfer::{counters::Counters, managed::ManagedDevice};

/// Proves ownership: 32 unguessable bytes.
pub type Token = [u8; 32];

/// Where a manager stands in the pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// No model is registered.
    NotInitialized,
    /// The plan is carried out.
    Inference,
}

impl Phase {
    /// Its name in Status.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotInitialized => "NOT_INITIALIZED",
            Self::Inference => "INFERENCE",
        }
    }
}

/// The stream of lease events, and since when it is lost.
#[derive(Debug, Default)]
pub(super) struct Lease {
    events: Option<mpsc::Sender<LeaseEvent>>,
    stream: u64,
    lost_since: Option<Instant>,
}

/// A manager. It is alive while its registry knows it; `ended` says when it is over.
#[derive(Debug)]
pub struct Manager {
    /// Unique for the life of the daemon and its successors.
    pub id: u64,
    /// Its name, unique per user.
    pub name: String,
    /// Its owner.
    pub owner: Peer,
    /// When the owner's process started, to tell it from a later one of the same pid.
    pub owner_started: Option<u64>,
    /// Milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// Grows whenever a manager changes owner.
    pub lease_epoch: u64,
    /// Whether it was taken over from a dead daemon.
    pub is_adopted: bool,
    /// The id of the request that opened it.
    pub open_id: String,
    /// Software of the owner.
    pub client: String,
    /// Its device.
    pub device: Arc<ManagedDevice>,
    /// Its share of the link in proportion to others.
    pub link_weight: u32,
    /// Wakes its engine.
    pub doorbell: Arc<Doorbell>,
    /// What was moved for it.
    pub counters: Arc<Counters>,
    /// Passes that its client reported.
    pub passes: AtomicU64,
    /// Time that its client waited for bytes, as reported, in nanoseconds.
    pub waited_ns: AtomicU64,
    /// Holds taken over RPC. Held while an acquire waits: calls of one manager form one
    /// order.
    pub holds: tokio::sync::Mutex<Holds>,
    /// Told by the engine when the part that an RPC waits for has arrived.
    pub arrived: Arc<Notify>,
    /// Whether an RPC waits.
    pub rpc_waits: Arc<AtomicBool>,
    /// Cancelled when the manager is over.
    pub ended: CancellationToken,
    pub(super) token: Token,
    pub(super) process: Option<Process>,
    pub(super) registering: AtomicBool,
    pub(super) lease: Mutex<Lease>,
    pub(super) model: Mutex<Option<Arc<Model>>>,
}

impl Manager {
    /// Its phase.
    #[must_use]
    pub fn phase(&self) -> Phase {
        if self.model_slot().is_some() {
            Phase::Inference
        } else {
            Phase::NotInitialized
        }
    }

    /// Its model.
    ///
    /// # Errors
    /// When none is registered, or the manager is over.
    pub fn model(&self) -> Result<Arc<Model>, ManagerError> {
        let model = self.model_slot().clone();
        model.ok_or_else(|| match self.ended.is_cancelled() {
            // it had one: the end takes it away
            true => ManagerError::LeaseLost,
            false => ManagerError::NotRegistered {
                name: self.name.clone(),
            },
        })
    }

    /// The token, for its owner alone.
    #[must_use]
    pub fn token(&self) -> &Token {
        &self.token
    }

    /// "owned", or "detached" while its stream is lost and may be resumed.
    #[must_use]
    pub fn lease_state(&self) -> &'static str {
        if self.lease().lost_since.is_some() {
            "detached"
        } else {
            "owned"
        }
    }

    /// Tells the owner something, if its stream takes it now.
    pub fn tell(&self, event: lease_event::Event) {
        if let Some(events) = &self.lease().events {
            // a client that does not read its stream misses what is no more than news
            let _: Result<(), _> = events.try_send(LeaseEvent { event: Some(event) });
        }
    }

    /// A new stream of lease events, in place of an earlier one. Returns its number.
    pub(super) fn new_stream(&self) -> (u64, mpsc::Receiver<LeaseEvent>) {
        let (sender, receiver) = mpsc::channel(16);
        let mut lease = self.lease();
        if let Some(old) = lease.events.replace(sender) {
            let _: Result<(), _> = old.try_send(ended(Reason::ResumedElsewhere));
        }
        lease.stream += 1;
        lease.lost_since = None;
        (lease.stream, receiver)
    }

    /// Notes that a stream is gone. `false` when it was replaced already.
    pub(super) fn stream_lost(&self, stream: u64) -> bool {
        let mut lease = self.lease();
        if lease.stream != stream {
            return false;
        }
        lease.events = None;
        lease.lost_since = Some(Instant::now());
        true
    }

    /// Whether that stream is still lost, and none took its place.
    pub(super) fn is_lost(&self, stream: u64) -> bool {
        let lease = self.lease();
        lease.stream == stream && lease.lost_since.is_some()
    }

    /// Ends the stream with a reason.
    pub(super) fn end_stream(&self, reason: Reason) {
        if let Some(events) = self.lease().events.take() {
            let _: Result<(), _> = events.try_send(ended(reason));
        }
    }

    pub(super) fn lease(&self) -> MutexGuard<'_, Lease> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn model_slot(&self) -> MutexGuard<'_, Option<Arc<Model>>> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn ended(reason: Reason) -> LeaseEvent {
    let ended = LeaseEnded {
        reason: reason.into(),
    };
    LeaseEvent {
        event: Some(lease_event::Event::Ended(ended)),
    }
}
