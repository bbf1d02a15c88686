//! All managers: names and tokens, opening, resuming, ending.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use flextensord_device::{
    doorbell::Doorbell,
    failpoint::{self, Point},
    process::{self, Peer, Process},
};
use flextensord_proto::{limit, name, v1::lease_ended::Reason};
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
    time,
};
use tokio_util::task::TaskTracker;

use super::{
    adoption::Orphan,
    drain::GivenUp,
    error::ManagerError,
    lease::OpenLease,
    manager::{Lease, Manager, Token},
    record::{self, ManagerRecord},
    registration,
};
use crate::{
    state::StateDirectory,
    transfer::{
        counters::{Counters, now_ms},
        managed::ManagedDevice,
    },
    weights::registry::WeightStore,
};

/// Most names "default-N" that are tried.
const DEFAULT_NAMES: usize = 1 << 16;
/// How often memory of ended leases is looked at.
const RECLAIM: Duration = Duration::from_millis(50);

/// What the operator configured.
#[derive(Debug, Clone)]
pub struct ManagerSettings {
    /// Most managers at a time. A user who is no administrator may have half of them.
    pub limit: usize,
    /// The user that the daemon runs as: an administrator, as root is.
    pub daemon_uid: u32,
    /// How long a living owner may take to resume a lost stream.
    pub resume_grace: Duration,
    /// Overwrite released ring ranges (for tests).
    pub poison_released: bool,
}

impl ManagerSettings {
    /// Whether there may be one more manager of a user.
    fn admit(&self, names: &Names, uid: u32) -> Result<(), ManagerError> {
        let is_admin = uid == 0 || uid == self.daemon_uid;
        let share = (self.limit / 2).max(1);
        let own = || names.by_name.keys().filter(|key| key.0 == uid).count();
        if !is_admin && own() >= share {
            return Err(ManagerError::TooManyOfUser { uid, limit: share });
        }
        if names.by_name.len() >= self.limit {
            return Err(ManagerError::TooMany { limit: self.limit });
        }
        Ok(())
    }
}

/// A request to open a manager.
#[derive(Debug, Clone)]
pub struct OpenRequest {
    /// Id of the request.
    pub request_id: String,
    /// The name; empty for "default" and its successors.
    pub name: String,
    /// The caller's software.
    pub client: String,
    /// Token of a lease to take up.
    pub resume_token: Option<Vec<u8>>,
    /// Name of the device; empty for the first.
    pub device: String,
    /// Share of the link.
    pub link_weight: u32,
}

/// Managers by name and by token.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub(super) by_name: HashMap<(u32, String), Arc<Manager>>,
    pub(super) by_token: HashMap<Token, Arc<Manager>>,
    /// Managers of a dead daemon, by the digest of their token.
    pub(super) orphans: HashMap<String, Orphan>,
    /// Those of them that are being taken up.
    pub(super) adopting: HashMap<String, (u32, String)>,
}

impl Names {
    /// Who has a name: its process and since when; 0 where that is not known yet.
    fn holder(&self, uid: u32, name: &str) -> Option<(u32, u64)> {
        let key = (uid, name.to_owned());
        if let Some(manager) = self.by_name.get(&key) {
            return Some((manager.owner.pid, manager.since_ms));
        }
        let orphan = self.orphans.values().map(|orphan| &orphan.record);
        let mut orphan = orphan.filter(|record| record.uid == uid && record.name == name);
        match orphan.next() {
            Some(record) => Some((record.pid, record.since_ms)),
            None => self
                .adopting
                .values()
                .any(|taken| *taken == key)
                .then_some((0, 0)),
        }
    }
}

/// Told the id of each manager that ends, at once.
pub struct OnEnd(pub Box<dyn Fn(u64) + Send + Sync>);

impl fmt::Debug for OnEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnEnd")
    }
}

/// All managers of the daemon.
#[derive(Debug)]
pub struct Managers {
    pub(super) this: Weak<Managers>,
    settings: ManagerSettings,
    devices: Vec<Arc<ManagedDevice>>,
    weights: Arc<WeightStore>,
    state: StateDirectory,
    on_end: OnEnd,
    names: Mutex<Names>,
    /// Ids and epochs: the generation in the high half, so that they grow over restarts.
    next: AtomicU64,
    /// Until when managers may go on, once the daemon drains.
    pub(super) drain: watch::Sender<Option<time::Instant>>,
    /// Why calls that wait will not be answered any more.
    pub(super) given_up: watch::Sender<Option<GivenUp>>,
    pub(super) tasks: TaskTracker,
}

impl Managers {
    /// No managers yet.
    #[must_use]
    pub fn new(
        settings: ManagerSettings,
        generation: u64,
        devices: Vec<Arc<ManagedDevice>>,
        weights: Arc<WeightStore>,
        state: StateDirectory,
        on_end: OnEnd,
    ) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            settings,
            devices,
            weights,
            state,
            on_end,
            names: Mutex::default(),
            next: AtomicU64::new(generation << 32 | 1),
            drain: watch::Sender::new(None),
            given_up: watch::Sender::new(None),
            tasks: TaskTracker::new(),
        })
    }

    /// What the operator configured.
    #[must_use]
    pub fn settings(&self) -> &ManagerSettings {
        &self.settings
    }

    /// The devices.
    #[must_use]
    pub fn devices(&self) -> &[Arc<ManagedDevice>] {
        &self.devices
    }

    /// The weight sets.
    #[must_use]
    pub fn weights(&self) -> &Arc<WeightStore> {
        &self.weights
    }

    /// The state directory.
    #[must_use]
    pub fn state(&self) -> &StateDirectory {
        &self.state
    }

    /// All managers, in order of user and name.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<Manager>> {
        let mut list: Vec<_> = self.names().by_name.values().cloned().collect();
        list.sort_by(|a, b| (a.owner.uid, &a.name).cmp(&(b.owner.uid, &b.name)));
        list
    }

    /// Opens a manager, or takes up a lease again.
    ///
    /// # Errors
    /// When the name is taken or illegal, the token owns nothing, or the daemon drains.
    pub fn open(&self, peer: Peer, request: &OpenRequest) -> Result<OpenLease, ManagerError> {
        if let Some(token) = &request.resume_token {
            return Ok(self.lease(self.find(peer, token)?));
        }
        if !request.name.is_empty() {
            name::check(&request.name).map_err(|source| ManagerError::Name {
                field: "name",
                value: short(&request.name),
                source,
            })?;
        }
        failpoint::pass(Point::Open)?;
        let device = self.device(&request.device)?;
        self.fence_dead(peer.uid, &request.name);
        let mut names = self.names();
        let repeated = names.by_name.values().find(|manager| {
            manager.open_id == request.request_id
                && (manager.owner.uid, manager.owner.pid) == (peer.uid, peer.pid)
        });
        if let Some(manager) = repeated {
            return Ok(self.lease(Arc::clone(manager)));
        }
        if self.drain.borrow().is_some() {
            return Err(ManagerError::Draining);
        }
        self.settings.admit(&names, peer.uid)?;
        let name = free_name(&names, peer.uid, &request.name)?;
        let mut manager = self.bare(peer, &request.request_id, &request.client, name, &device)?;
        manager.link_weight = request.link_weight;
        let manager = Arc::new(manager);
        // a successor must know of it before the client does
        let record = ManagerRecord::new(&manager, None);
        self.state.write(&record::name(manager.id), &record)?;
        names
            .by_name
            .insert((peer.uid, manager.name.clone()), Arc::clone(&manager));
        names.by_token.insert(manager.token, Arc::clone(&manager));
        drop(names);
        self.watch(&manager);
        failpoint::cross(Point::Opened);
        tracing::info!(
            manager = manager.name,
            uid = peer.uid,
            pid = peer.pid,
            lease_epoch = manager.lease_epoch,
            request_id = request.request_id,
            "manager opened"
        );
        Ok(self.lease(manager))
    }

    /// The manager that a token owns.
    ///
    /// # Errors
    /// When it owns none, or none of this user.
    pub fn find(&self, peer: Peer, token: &[u8]) -> Result<Arc<Manager>, ManagerError> {
        let token: Token = token.try_into().map_err(|_| ManagerError::LeaseLost)?;
        let names = self.names();
        if let Some(manager) = names.by_token.get(&token) {
            let is_own = manager.owner.uid == peer.uid;
            return is_own
                .then(|| Arc::clone(manager))
                .ok_or(ManagerError::LeaseLost);
        }
        if names.orphans.is_empty() && names.adopting.is_empty() {
            return Err(ManagerError::LeaseLost);
        }
        let digest = record::token_digest(&token);
        match names.orphans.contains_key(&digest) || names.adopting.contains_key(&digest) {
            true => Err(ManagerError::Recovering),
            false => Err(ManagerError::LeaseLost),
        }
    }

    /// The manager of that user and name.
    ///
    /// # Errors
    /// When there is none.
    pub fn find_name(&self, uid: u32, name: &str) -> Result<Arc<Manager>, ManagerError> {
        self.names()
            .by_name
            .get(&(uid, name.to_owned()))
            .cloned()
            .ok_or_else(|| ManagerError::UnknownManager {
                field: "name",
                name: short(name),
            })
    }

    /// Ends a manager: its name is free at once, the rest goes in the background. Returns
    /// what to wait for, or `None` when it was over already.
    pub fn end(&self, manager: &Arc<Manager>, reason: Reason) -> Option<JoinHandle<()>> {
        let mut names = self.names();
        names.by_token.remove(&manager.token)?;
        names
            .by_name
            .remove(&(manager.owner.uid, manager.name.clone()));
        drop(names);
        tracing::info!(
            manager = manager.name,
            uid = manager.owner.uid,
            pid = manager.owner.pid,
            lease_epoch = manager.lease_epoch,
            reason = reason.as_str_name(),
            "manager ended"
        );
        failpoint::cross(Point::End);
        manager.ended.cancel();
        manager.end_stream(reason);
        (self.on_end.0)(manager.id);
        let model = manager.model_slot().take();
        let this = self.this.upgrade()?;
        let manager = Arc::clone(manager);
        Some(self.tasks.spawn_blocking(move || {
            registration::dismantle(&this, &manager, model.as_ref());
        }))
    }

    /// Notes that the process behind a manager without a visible pid has closed its
    /// descriptor channel: that is all there is to know of its end.
    pub fn channel_closed(&self, id: u64) {
        let found = self
            .names()
            .by_name
            .values()
            .find(|manager| manager.id == id)
            .cloned();
        if let Some(manager) = found.filter(|manager| manager.process.is_none()) {
            self.end(&manager, Reason::Fenced);
        }
    }

    /// Frees memory of ended leases as its last holders go; `retired` tells when there is
    /// some. Runs until cancelled.
    pub async fn reclaim(&self, retired: &Notify) {
        loop {
            retired.notified().await;
            while self.devices.iter().any(|device| device.memory.reclaiming()) {
                time::sleep(RECLAIM).await;
                for device in &self.devices {
                    let memory = Arc::clone(&device.memory);
                    // freeing may take long: the next look waits for it, nobody else does
                    let _: Result<(), _> = self.tasks.spawn_blocking(move || memory.sweep()).await;
                }
            }
        }
    }

    /// Ends the manager of that name if its owner's process is dead: whoever opens the
    /// name next need not wait until that is noticed.
    fn fence_dead(&self, uid: u32, name: &str) {
        self.give_up_dead(uid, name);
        let holder = self.find_name(uid, name).ok();
        let dead =
            |manager: &Arc<Manager>| manager.process.as_ref().is_some_and(Process::has_exited);
        if let Some(manager) = holder.filter(dead) {
            self.end(&manager, Reason::Fenced);
        }
    }

    /// A manager that nobody knows of yet.
    pub(super) fn bare(
        &self,
        peer: Peer,
        open_id: &str,
        client: &str,
        name: String,
        device: &Arc<ManagedDevice>,
    ) -> Result<Manager, ManagerError> {
        // a call may outlive its caller: its manager would have no owner
        if Process::is_gone(peer.pid) {
            return Err(ManagerError::OwnerGone { pid: peer.pid });
        }
        let mut token = [0; 32];
        getrandom::fill(&mut token).map_err(|_| ManagerError::Random)?;
        let number = self.next.fetch_add(1, SeqCst);
        Ok(Manager {
            id: number,
            name,
            owner: peer,
            owner_started: process::start_time(peer.pid),
            since_ms: now_ms(),
            lease_epoch: number,
            is_adopted: false,
            open_id: open_id.to_owned(),
            client: client.to_owned(),
            counters: Arc::new(Counters::under(Arc::clone(&device.counters))),
            device: Arc::clone(device),
            link_weight: 0,
            doorbell: Arc::new(Doorbell::new()?),
            passes: AtomicU64::new(0),
            waited_ns: AtomicU64::new(0),
            holds: tokio::sync::Mutex::default(),
            arrived: Arc::default(),
            rpc_waits: Arc::default(),
            ended: tokio_util::sync::CancellationToken::new(),
            token,
            process: Process::open(peer.pid),
            registering: AtomicBool::new(false),
            lease: Mutex::new(Lease::default()),
            model: Mutex::new(None),
        })
    }

    fn device(&self, name: &str) -> Result<Arc<ManagedDevice>, ManagerError> {
        let found = self.devices.iter().find(|device| {
            name.is_empty() || device.info().name == name || device.info().uuid == name
        });
        found.cloned().ok_or_else(|| ManagerError::UnknownDevice {
            name: name.to_owned(),
            known: self
                .devices
                .iter()
                .map(|d| d.info().name.as_str())
                .collect::<Vec<_>>()
                .join(", "),
        })
    }

    pub(super) fn names(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The beginning of a name that may be of any length, for a message.
fn short(name: &str) -> String {
    name.chars().take(limit::NAME_BYTES).collect()
}

/// The name asked for if it is free, else the first free default name.
fn free_name(names: &Names, uid: u32, asked: &str) -> Result<String, ManagerError> {
    let holder = |name: &str| names.holder(uid, name);
    if !asked.is_empty() {
        return match holder(asked) {
            None => Ok(asked.to_owned()),
            Some((pid, since_ms)) => Err(ManagerError::Taken {
                name: asked.to_owned(),
                pid,
                since_ms,
            }),
        };
    }
    std::iter::once("default".to_owned())
        .chain((2..DEFAULT_NAMES).map(|number| format!("default-{number}")))
        .find(|name| holder(name).is_none())
        .ok_or(ManagerError::TooMany {
            limit: DEFAULT_NAMES,
        })
}
