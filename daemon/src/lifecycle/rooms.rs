//! Puts the rooms of a daemon together, and takes them apart.

use std::{
    sync::{Arc, Weak},
    thread,
    time::{Duration, Instant},
};

use flextensord_device::{
    cuda::error::CudaError,
    device::Device,
    notice::{NoticePage, NoticePhase},
};
use flextensord_proto::v1::{
    admin_server::AdminServer, offload_server::OffloadServer, weights_server::WeightsServer,
};
use tokio::{
    sync::{Notify, oneshot},
    time,
};
use tonic::transport::server::Router;

use super::{
    Instance, Life,
    devices::{self, Drivers},
    instance::StartError,
    predecessor,
};
use crate::{
    admission::Room,
    channel::{self, server::ChannelServer, ticket::Tickets},
    managers::{
        drain::GivenUp,
        registry::{ManagerSettings, Managers, OnEnd},
    },
    service::{
        admin::AdminService,
        offload::{Calls, OffloadService},
        weights::WeightService,
    },
    state::StateDirectory,
    transfer::managed::ManagedDevice,
    weights::registry::{WeightSettings, WeightStore},
};

/// How often devices are asked whether they still work.
const HEALTH: Duration = Duration::from_millis(200);
/// How often tickets that nobody redeemed are thrown away.
const EXPIRY: Duration = Duration::from_secs(10);
/// Most threads that block at a time: loads, registrations, clean-ups.
pub(super) const BLOCKING_THREADS: usize = 128;
/// Names of the services in `grpc.health.v1`, beside the empty one for the whole.
pub(super) const SERVICES: [&str; 3] = [
    "flextensor.v1.Offload",
    "flextensor.v1.Weights",
    "flextensor.v1.Admin",
];

/// Why a daemon cannot go on.
#[derive(Debug, thiserror::Error)]
enum Failed {
    /// A device has failed for good.
    #[error("device {device} has failed: {source}")]
    Device {
        /// Its name.
        device: String,
        /// What the driver said.
        source: CudaError,
    },
    /// Nobody looks at the devices any more.
    #[error("{0}")]
    Look(String),
}

/// The rooms of a daemon that serves.
#[derive(Debug)]
pub(super) struct Rooms {
    managers: Arc<Managers>,
    weights: Arc<WeightStore>,
    tickets: Arc<Tickets>,
    notice: Arc<NoticePage>,
    generation: u64,
    to_reclaim: Arc<Notify>,
    /// Whether a successor takes over what is left.
    keeps: bool,
}

impl Rooms {
    /// Makes all rooms, with what a dead predecessor left in them; what cannot be taken over
    /// is removed.
    pub(super) fn new(instance: &Instance, drivers: &Drivers) -> Result<Self, StartError> {
        let settings = &instance.settings;
        let generation = instance.generation;
        let state = StateDirectory::open(&instance.directory.state)
            .map_err(|error| StartError::setup("open the state directory", error))?;
        let devices = devices::all(settings, drivers)?;
        let weight_settings = WeightSettings {
            pinner: devices::pinner(settings, &devices),
            instance: settings.instance.clone(),
            shm_dir: settings.shm_dir.clone(),
            host_limit: settings.host_memory,
            load_threads: settings.load_threads,
        };
        let weights = WeightStore::new(weight_settings, state.clone())
            .map_err(|error| StartError::setup("open the store of weights", error))?;
        weights
            .adopt(settings.verify_adopted)
            .map_err(|error| StartError::setup("take over what a dead daemon left", error))?;
        let notice = NoticePage::create(generation)
            .map_err(|error| StartError::setup("make the notice page", error))?;
        let notice = Arc::new(notice);
        let to_reclaim = Arc::new(Notify::new());
        let devices = manage(devices, instance, &notice, &to_reclaim)?;
        let manager_settings = ManagerSettings {
            limit: settings.max_managers,
            daemon_uid: nix::unistd::geteuid().as_raw(),
            resume_grace: settings.resume_grace,
            poison_released: settings.poison_released,
        };
        let tickets = Arc::new(Tickets::default());
        let on_end = {
            let tickets = Arc::clone(&tickets);
            OnEnd(Box::new(move |manager| tickets.forget(manager)))
        };
        let managers = Managers::new(
            manager_settings,
            generation,
            devices,
            Arc::clone(&weights),
            state,
            on_end,
        );
        if managers.has_left_rings(&["cuda"]) {
            predecessor::let_come_to_rest(instance.lock.predecessor());
        }
        let waiting = managers
            .restore(settings.client_patience)
            .map_err(|error| StartError::setup("take over what a dead daemon left", error))?;
        if waiting > 0 || !weights.all().is_empty() {
            pin_in_background(&weights);
        }
        Ok(Self {
            managers,
            weights,
            tickets,
            notice,
            generation,
            to_reclaim,
            keeps: settings.keep_on_stop,
        })
    }

    /// Adds the services to a server.
    pub(super) fn serve_in<L>(
        &self,
        router: Router<L>,
        instance: &Instance,
        life: &Life,
    ) -> Router<L> {
        let offload = OffloadService {
            managers: Arc::clone(&self.managers),
            tickets: Arc::clone(&self.tickets),
            notice: Arc::clone(&self.notice),
            generation: self.generation,
            calls: Calls::default(),
        };
        let daemon_uid = nix::unistd::geteuid().as_raw();
        let weights = WeightService::new(Arc::clone(&self.weights), Arc::clone(&self.tickets));
        let admin = AdminService {
            managers: Arc::clone(&self.managers),
            instance: instance.settings.instance.clone(),
            generation: self.generation,
            daemon_uid,
            started: Instant::now(),
            life: life.clone(),
            drain_grace: instance.settings.drain_grace,
            terminations: Arc::default(),
        };
        router
            .add_service(OffloadServer::new(offload))
            .add_service(WeightsServer::new(weights))
            .add_service(AdminServer::new(admin))
    }

    /// The server of the descriptor channel, in a process that may have so many.
    pub(super) fn channel(&self, descriptors: u64) -> ChannelServer {
        let limits = channel::server::LIMITS.within(descriptors);
        ChannelServer {
            room: Room::new(limits, nix::unistd::geteuid().as_raw()),
            tickets: Arc::clone(&self.tickets),
            managers: Arc::downgrade(&self.managers),
            generation: self.generation,
        }
    }

    /// Says on the notice page what the daemon does.
    pub(super) fn notice(&self, phase: NoticePhase) {
        self.notice.set_phase(phase);
    }

    /// Waits until an operator has asked for a drain.
    pub(super) async fn drain_begun(&self) {
        self.managers.drain_begun().await;
    }

    /// Takes nothing new; the managers may go on for `limit`, or less if that was said.
    pub(super) fn begin_drain(&self, limit: Duration) {
        let managers = self.managers.begin_drain(limit);
        tracing::info!(managers, ?limit, "draining");
    }

    /// Waits until the managers have ended, at most as long as they may go on. Those that
    /// have not are ended, or kept for a successor.
    pub(super) async fn finish_drain(&self, keep: bool) {
        self.notice(NoticePhase::Draining);
        self.managers.finish_drain(keep).await;
    }

    /// Does what comes round again and again. Ends only when a device has failed for good,
    /// and says how.
    pub(super) async fn upkeep(&self) -> String {
        let expire = async {
            loop {
                time::sleep(EXPIRY).await;
                self.tickets.expire();
            }
        };
        tokio::select! {
            failed = self.failed() => {
                let text = failed.to_string();
                if let Failed::Device { device, source } = failed {
                    let kept = self.keeps;
                    self.managers.abandon_calls(GivenUp::Device { device, source, kept });
                }
                text
            }
            () = self.managers.reclaim(&self.to_reclaim) => "reclaiming ended by itself".into(),
            () = self.managers.wait_for_owners() => "waiting for owners ended by itself".into(),
            () = expire => "expiry ended by itself".into(),
        }
    }

    /// Waits until a device has failed for good.
    async fn failed(&self) -> Failed {
        let devices: Vec<Weak<ManagedDevice>> = self
            .managers
            .devices()
            .iter()
            .filter(|device| device.info().kind == "cuda")
            .map(Arc::downgrade)
            .collect();
        if devices.is_empty() {
            return std::future::pending().await;
        }
        let (tell, told) = oneshot::channel();
        // a thread of its own: a driver in trouble may take long to answer, and a look
        // every moment would keep all idle threads of the blocking pool alive in turn
        let started = thread::Builder::new()
            .name("health".to_owned())
            .spawn(move || watch_devices(&devices, tell));
        match started {
            Ok(_) => told
                .await
                .unwrap_or_else(|_| Failed::Look("the look at devices ended by itself".to_owned())),
            Err(error) => Failed::Look(format!("no thread to look at devices: {error}")),
        }
    }

    /// Answers all calls that still wait, and lets go of what is being pinned: the daemon
    /// stops.
    pub(super) fn give_up(&self) {
        self.managers.abandon_calls(GivenUp::Stopping);
        self.weights.give_up();
    }

    /// Removes all weight sets, or keeps them for a successor; the daemon stops.
    pub(super) fn close(self, keep: bool) {
        self.notice(NoticePhase::Stopped);
        self.weights.close(keep);
    }
}

/// Logs each resource that a device could not give back, once; `logged` counts them.
fn warn_of_drops(device: &dyn Device, logged: &mut u64) {
    let (count, reasons) = device.failed_drops();
    let name = &device.info().name;
    for number in *logged..count {
        let reason = usize::try_from(number)
            .ok()
            .and_then(|number| reasons.get(number));
        match reason {
            Some(reason) => tracing::warn!(device = name, reason, "a resource is not given back"),
            None => {
                let more = count - number;
                tracing::warn!(device = name, more, "more resources are not given back");
                break;
            }
        }
    }
    *logged = count;
}

/// Tells how the first device failed; ends when nobody listens any more.
fn watch_devices(devices: &[Weak<ManagedDevice>], tell: oneshot::Sender<Failed>) {
    let mut logged = vec![0; devices.len()];
    while !tell.is_closed() {
        thread::sleep(HEALTH);
        for (device, logged) in devices.iter().zip(&mut logged) {
            let Some(device) = device.upgrade() else {
                continue;
            };
            warn_of_drops(device.memory.device().as_ref(), logged);
            if let Some(source) = device.memory.device().failure() {
                let device = device.info().name.clone();
                // whoever listened may be gone by now
                let _: Result<(), Failed> = tell.send(Failed::Device { device, source });
                return;
            }
        }
    }
}

fn manage(
    devices: Vec<Arc<dyn Device>>,
    instance: &Instance,
    notice: &Arc<NoticePage>,
    to_reclaim: &Arc<Notify>,
) -> Result<Vec<Arc<ManagedDevice>>, StartError> {
    let manage = |(index, device)| {
        let managed = ManagedDevice::new(
            index,
            &instance.settings.instance,
            instance.generation,
            device,
            Arc::clone(notice),
            Arc::clone(to_reclaim),
        )
        .map_err(|error| StartError::setup("start an engine", error))?;
        Ok(Arc::new(managed))
    };
    devices.into_iter().enumerate().map(manage).collect()
}

/// Pins what was taken over while it is served already: until then copies are slow.
fn pin_in_background(weights: &Arc<WeightStore>) {
    let weights = Arc::downgrade(weights);
    let work = move || {
        if let Some(weights) = weights.upgrade() {
            weights.pin_adopted();
        }
    };
    // without it copies stay slow, and nothing is wrong
    if let Err(error) = thread::Builder::new().name("pin".to_owned()).spawn(work) {
        tracing::warn!(%error, "no thread to pin what was taken over");
    }
}
