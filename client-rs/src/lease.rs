//! The lease of a manager: what its stream says; `resumption`: taking it up when it was lost.

mod resumption;

use std::{
    collections::BTreeMap,
    future::Future,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use flextensord_device::{doorbell::Doorbell, notice::NoticeView};
use flextensord_proto::v1::{
    LeaseEnded, LeaseEvent, OpenManagerRequest, Opened, handed_back::What, lease_ended::Reason,
    lease_event::Event, offload_client::OffloadClient,
};
use tokio::sync::watch;
use tonic::{Status, Streaming, transport::Channel};

use crate::{
    connection::Client,
    error::{ClientError, is_transport},
};

/// Pause between two calls that meet a restart of the daemon.
const AGAIN_AFTER: Duration = Duration::from_millis(20);

/// What a manager has of the daemon's, to hand back to a successor.
pub(crate) trait Possessions: std::fmt::Debug + Send + Sync {
    /// A descriptor of each page and each allocation.
    ///
    /// # Errors
    /// When the kernel has no descriptors.
    fn descriptors(&self) -> Result<Vec<(What, OwnedFd)>, ClientError>;
}

/// What is to be handed back to a successor.
#[derive(Debug, Default)]
enum Owned {
    /// No plan is mapped.
    #[default]
    Nothing,
    /// None is, and a successor was told so.
    Disclaimed,
    /// A plan's.
    These(Weak<dyn Possessions>),
}

/// How a lease stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum LeaseState {
    /// The daemon holds it for this process.
    Live = 0,
    /// Its stream was lost; it is being taken up again.
    Detached = 1,
    /// It is over.
    Ended = 2,
    /// The daemon is gone and no successor came in time.
    DaemonLost = 3,
}

/// What became of the work that was queued on a GPU when the lease was over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Fate {
    /// Nothing was ever queued.
    Nothing = 0,
    /// Something was, and nobody has looked since: the worst is assumed.
    Unknown = 1,
    /// It ran to its end.
    Finished = 2,
    /// It was ended, and the process's context with it.
    Lost = 3,
}

/// What wakes the engine.
#[derive(Debug)]
pub(crate) struct Bell {
    notice: NoticeView,
    doorbell: Doorbell,
}

/// A lease, shared by the manager, its holds and the task that follows its stream.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) name: String,
    pub(crate) epoch: u64,
    pub(crate) device: String,
    /// "cpu" or "cuda"; empty from a daemon that knows the first alone.
    pub(crate) device_kind: String,
    pub(crate) device_uuid: String,
    pub(crate) token: Token,
    /// Of the daemon that holds it.
    generation: AtomicU64,
    patience: Duration,
    state: AtomicU8,
    reason: Mutex<String>,
    /// Deadline of the drain in milliseconds, plus one; 0 while the daemon serves.
    draining: AtomicU64,
    /// Made anew by each daemon, so a resumed lease changes it.
    bell: RwLock<Bell>,
    /// A release that failed where nobody could be told.
    release_error: Mutex<Option<ClientError>>,
    fate: AtomicU8,
    /// Once a model is registered.
    possessions: Mutex<Owned>,
    /// Holds over RPC: number and streamed parts.
    rpc_holds: Mutex<BTreeMap<u64, Vec<u32>>>,
    /// Tells that the lease is over.
    over: watch::Sender<bool>,
}

/// Proves ownership; never shown.
#[derive(Clone)]
pub(crate) struct Token(pub(crate) Vec<u8>);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(secret)")
    }
}

impl Lease {
    pub(crate) fn new(opened: Opened, bell: Bell, patience: Duration) -> Self {
        Self {
            name: opened.name,
            epoch: opened.lease_epoch,
            device: opened.device,
            device_kind: opened.device_kind,
            device_uuid: opened.device_uuid,
            generation: AtomicU64::new(opened.daemon_generation),
            token: Token(opened.token),
            patience,
            state: AtomicU8::new(LeaseState::Live as u8),
            reason: Mutex::new(String::new()),
            draining: AtomicU64::new(0),
            bell: RwLock::new(bell),
            release_error: Mutex::new(None),
            fate: AtomicU8::new(Fate::Nothing as u8),
            possessions: Mutex::default(),
            rpc_holds: Mutex::default(),
            over: watch::Sender::new(false),
        }
    }

    /// A registration was answered: what it gave is about to be mapped.
    pub(crate) fn expects(&self) {
        *self.owned() = Owned::Nothing;
    }

    /// Says what is to be handed back to a successor. `false` when one was told meanwhile that
    /// there is nothing: what was mapped is nobody's.
    pub(crate) fn owns(&self, possessions: Weak<dyn Possessions>) -> bool {
        let mut owned = self.owned();
        let is_still_own = !matches!(*owned, Owned::Disclaimed);
        if is_still_own {
            *owned = Owned::These(possessions);
        }
        is_still_own
    }

    fn owned(&self) -> MutexGuard<'_, Owned> {
        self.possessions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a hold over RPC.
    pub(crate) fn note_hold(&self, hold: u64, parts: Vec<u32>) {
        self.rpc_holds().insert(hold, parts);
    }

    /// A hold over RPC is over.
    pub(crate) fn forget_hold(&self, hold: u64) {
        self.rpc_holds().remove(&hold);
    }

    fn rpc_holds(&self) -> MutexGuard<'_, BTreeMap<u64, Vec<u32>>> {
        self.rpc_holds
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a call of the owner's, again and again while the daemon is gone or takes the
    /// manager over, as long as `limit` and the patience last. `send` must build the same
    /// request each time.
    pub(crate) async fn call<T, F>(
        &self,
        client: &Client,
        call: &'static str,
        limit: Duration,
        send: impl Fn(Channel) -> F,
    ) -> Result<T, ClientError>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let begin = Instant::now();
        loop {
            let error = match client.call(call, limit, &send).await {
                Err(error) if error.is_of_a_restart() => error,
                answered => return answered,
            };
            self.check()?;
            if begin.elapsed() >= limit.min(self.patience) {
                return Err(error);
            }
            tokio::time::sleep(AGAIN_AFTER).await;
        }
    }

    /// Generation of the daemon that holds it.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Waits until it is over.
    pub(crate) async fn until_over(&self) {
        // it fails when the sender is gone, which self is
        let _ = self.over.subscribe().wait_for(|over| *over).await;
    }

    /// Notes what becomes of work on a GPU.
    pub(crate) fn note_fate(&self, fate: Fate) {
        self.fate.store(fate as u8, Ordering::Release);
    }

    fn context_lost(&self) -> bool {
        let fate = self.fate.load(Ordering::Acquire);
        fate == Fate::Unknown as u8 || fate == Fate::Lost as u8
    }

    pub(crate) fn state(&self) -> LeaseState {
        match self.state.load(Ordering::Acquire) {
            0 => LeaseState::Live,
            1 => LeaseState::Detached,
            2 => LeaseState::Ended,
            _ => LeaseState::DaemonLost,
        }
    }

    /// Deadline of the drain in milliseconds, while the daemon drains.
    pub(crate) fn draining(&self) -> Option<u64> {
        self.draining.load(Ordering::Acquire).checked_sub(1)
    }

    /// Refuses when the lease is over. A detached one may go on: its words and its
    /// memory stay as they are.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), ClientError> {
        match self.state() {
            LeaseState::Live | LeaseState::Detached => Ok(()),
            LeaseState::Ended => Err(ClientError::LeaseLost {
                manager: self.name.clone(),
                reason: self
                    .reason
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .clone(),
                context_lost: self.context_lost(),
            }),
            LeaseState::DaemonLost => Err(ClientError::DaemonLost {
                manager: self.name.clone(),
                patience: self.patience,
                context_lost: self.context_lost(),
            }),
        }
    }

    /// Rings the doorbell if the engine sleeps. To be called after a word was changed.
    pub(crate) fn wake_engine(&self) {
        let bell = self.bell.read().unwrap_or_else(PoisonError::into_inner);
        if bell.notice.engine_asleep() {
            bell.doorbell.ring();
        }
    }

    /// The lease is over.
    pub(crate) fn end(&self, reason: &str) {
        let mut text = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(self.state(), LeaseState::Live | LeaseState::Detached) {
            reason.clone_into(&mut text);
            self.set(LeaseState::Ended);
        }
    }

    /// Keeps the error of a release for who asks.
    pub(crate) fn note_release_error(&self, error: ClientError) {
        let mut slot = self
            .release_error
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        slot.get_or_insert(error);
    }

    /// The first error of a release since this was asked last.
    pub(crate) fn take_release_error(&self) -> Option<ClientError> {
        let mut slot = self
            .release_error
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        slot.take()
    }

    /// Changes the state, unless the lease is over: that is for ever.
    fn set(&self, state: LeaseState) {
        let live = |now: u8| (now <= LeaseState::Detached as u8).then_some(state as u8);
        // an error means that it is over already
        let _ = self
            .state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, live);
        if matches!(self.state(), LeaseState::Ended | LeaseState::DaemonLost) {
            self.over.send_replace(true);
        }
    }
}

/// Opens the stream and waits for its first event.
pub(crate) async fn open_stream(
    client: &Client,
    message: OpenManagerRequest,
    limit: Duration,
) -> Result<(Opened, Streaming<LeaseEvent>), ClientError> {
    let opened = client.call("OpenManager", limit, |channel| {
        let message = message.clone();
        // no deadline in the request: the stream lives as long as the manager
        async move {
            let mut stream = OffloadClient::new(channel)
                .open_manager(message)
                .await?
                .into_inner();
            let first = stream.message().await?;
            Ok((first, stream))
        }
    });
    match opened.await? {
        (
            Some(LeaseEvent {
                event: Some(Event::Opened(opened)),
            }),
            stream,
        ) => Ok((opened, stream)),
        (
            Some(LeaseEvent {
                event: Some(Event::Ended(ended)),
            }),
            _,
        ) => Err(ClientError::LeaseLost {
            manager: message.name,
            reason: describe(ended).to_owned(),
            context_lost: false,
        }),
        _ => Err(ClientError::Protocol {
            call: "OpenManager",
            reason: "the first event is not `opened`".to_owned(),
        }),
    }
}

/// Fetches what wakes the engine.
pub(crate) async fn fetch_bell(client: &Client, opened: &Opened) -> Result<Bell, ClientError> {
    let tickets = (opened.notice_ticket.clone(), opened.doorbell_ticket.clone());
    let redeem = client
        .descriptors(move |channel| Ok((channel.redeem(&tickets.0)?, channel.redeem(&tickets.1)?)));
    let (notice, doorbell) = redeem.await?;
    Ok(Bell {
        notice: NoticeView::open(notice, opened.engine as usize)?,
        doorbell: Doorbell::from_descriptor(doorbell),
    })
}

/// Follows the stream until the lease is over, and takes it up when the stream is lost.
pub(crate) async fn follow(
    client: Client,
    lease: Arc<Lease>,
    resume: OpenManagerRequest,
    mut stream: Streaming<LeaseEvent>,
) {
    loop {
        match until_lost(&lease, &mut stream).await {
            Some(reason) => return lease.end(&reason),
            None => lease.set(LeaseState::Detached),
        }
        match resumption::take_up(&client, &lease, &resume).await {
            Some(resumed) => stream = resumed,
            None => return,
        }
        lease.set(LeaseState::Live);
    }
}

/// The reason why the lease is over, or `None` when only its stream is.
async fn until_lost(lease: &Lease, stream: &mut Streaming<LeaseEvent>) -> Option<String> {
    loop {
        match stream.message().await {
            Ok(Some(LeaseEvent { event })) => match event {
                Some(Event::Ended(ended)) => return Some(describe(ended).to_owned()),
                Some(Event::Draining(draining)) => {
                    let deadline = draining.deadline_ms.saturating_add(1);
                    lease.draining.store(deadline, Ordering::Release);
                }
                Some(Event::Opened(_) | Event::Heartbeat(_)) | None => {}
            },
            Ok(None) => return None,
            Err(status) => return refusal(&status),
        }
    }
}

/// What the daemon says against the lease; `None` when it is the connection.
fn refusal(status: &Status) -> Option<String> {
    let failure = flextensord_proto::kind::Failure::from_status(status)?;
    (!is_transport(status) && !failure.retryable).then_some(failure.message)
}

fn describe(ended: LeaseEnded) -> &'static str {
    match ended.reason() {
        Reason::Unspecified => "the daemon ended it",
        Reason::Closed => "it was closed",
        Reason::Terminated => "an operator terminated it",
        Reason::Stopping => "the daemon stopped",
        Reason::ResumedElsewhere => "another stream took it up",
        Reason::Fenced => "the daemon found its owner gone",
    }
}
