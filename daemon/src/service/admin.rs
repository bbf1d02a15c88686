//! The `Admin` service: what an operator asks and does.

use std::{
    pin::Pin,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use flextensord_device::{handover::Cells as _, process::Peer};
use flextensord_proto::{
    kind::Failure,
    layout::WANT_NONE,
    v1::{
        DeviceStatus, DrainRequest, DrainResponse, DumpRecord, DumpRequest, HostStatus,
        ManagerStatus, StatusRequest, StatusResponse, TerminateManagerRequest,
        TerminateManagerResponse, TransferCounters, admin_server::Admin, lease_ended::Reason,
    },
};
use tokio_stream::Stream;
use tonic::{Request, Response, Status};

use super::{caller, dump, idempotency::Idempotency, request, weights::weight_set_message};
use crate::{
    managers::{error::ManagerError, manager::Manager, record::ManagerRecord, registry::Managers},
    phase::Life,
    plan::Place,
    transfer::{
        counters::{Counters, now_ms},
        managed::ManagedDevice,
    },
    weights::set::WeightSet,
};

/// The service.
#[derive(Debug)]
pub struct AdminService {
    /// The managers; through them devices and weights.
    pub managers: Arc<Managers>,
    /// Name of the instance.
    pub instance: String,
    /// The daemon's generation.
    pub generation: u64,
    /// The user that the daemon runs as.
    pub daemon_uid: u32,
    /// When the daemon started.
    pub started: Instant,
    /// The daemon's life cycle.
    pub life: Life,
    /// How long a drain may take when nobody says.
    pub drain_grace: Duration,
    /// Answers to repeated calls of TerminateManager.
    pub terminations: Arc<Idempotency<TerminateManagerResponse>>,
}

impl AdminService {
    /// Whether a user may see and do everything.
    #[must_use]
    pub fn is_admin(&self, peer: Peer) -> bool {
        peer.uid == 0 || peer.uid == self.daemon_uid
    }

    /// The managers that a user may see.
    #[must_use]
    pub fn visible(&self, peer: Peer) -> Vec<Arc<Manager>> {
        let mut list = self.managers.list();
        list.retain(|manager| self.is_admin(peer) || manager.owner.uid == peer.uid);
        list
    }

    /// What this user may see of managers, those that wait for their owners last.
    fn manager_statuses(&self, peer: Peer) -> Vec<ManagerStatus> {
        let owned = self.visible(peer);
        let devices = self.managers.devices();
        let name_of = |uuid: &str| {
            let device = devices.iter().find(|device| device.info().uuid == uuid);
            device.map_or(String::new(), |device| device.info().name.clone())
        };
        let mut waiting = self.managers.waiting();
        waiting.retain(|record| self.is_admin(peer) || record.uid == peer.uid);
        let waiting = waiting
            .iter()
            .map(|record| waiting_status(record, &name_of(&record.device)));
        owned
            .iter()
            .map(|manager| manager_status(manager))
            .chain(waiting)
            .collect()
    }

    /// The weight sets that a user may see.
    #[must_use]
    pub fn visible_sets(&self, peer: Peer) -> Vec<Arc<WeightSet>> {
        let weights = self.managers.weights();
        if self.is_admin(peer) {
            weights.all()
        } else {
            weights.visible_to(peer.uid)
        }
    }

    /// Everything that Status says, for this user.
    #[must_use]
    pub fn status_for(&self, peer: Peer) -> StatusResponse {
        let (protocol_lowest, protocol_highest) = flextensord_proto::PROTOCOL;
        let sets = self.visible_sets(peer);
        StatusResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            instance: self.instance.clone(),
            pid: std::process::id(),
            daemon_generation: self.generation,
            phase: self.life.phase().name().to_owned(),
            uptime_ms: millis(self.started.elapsed()),
            protocol_lowest,
            protocol_highest,
            managers: self.manager_statuses(peer),
            weight_sets: sets.iter().map(|set| weight_set_message(set)).collect(),
            devices: self
                .managers
                .devices()
                .iter()
                .map(|d| device_status(d, &self.managers))
                .collect(),
            host: Some(self.host()),
        }
    }

    fn host(&self) -> HostStatus {
        let figures = self.managers.weights().host();
        let sets = self.managers.weights().all();
        HostStatus {
            pinned_bytes: sets.iter().map(|set| set.pinned_bytes()).sum(),
            degraded: sets.iter().any(|set| set.degraded().is_some()),
            budget_bytes: figures.budget_bytes,
            budget_limited_by: figures.budget_limited_by,
            segment_bytes: figures.segment_bytes,
            reserved_bytes: figures.reserved_bytes,
            stuck_bytes: figures.stuck_bytes,
            shm_dir: figures.shm_dir.display().to_string(),
            shm_free_bytes: figures.shm_free_bytes,
        }
    }
}

#[tonic::async_trait]
impl Admin for AdminService {
    type DumpStream = Pin<Box<dyn Stream<Item = Result<DumpRecord, Status>> + Send>>;

    async fn status(
        &self,
        request: Request<StatusRequest>,
    ) -> Result<Response<StatusResponse>, Status> {
        let peer = caller::peer(request.extensions())?;
        Ok(Response::new(self.status_for(peer)))
    }

    async fn dump(
        &self,
        request: Request<DumpRequest>,
    ) -> Result<Response<Self::DumpStream>, Status> {
        let peer = caller::peer(request.extensions())?;
        let records = dump::records(self, peer, &request.into_inner().manager)?;
        Ok(Response::new(Box::pin(tokio_stream::iter(
            records.into_iter().map(Ok),
        ))))
    }

    async fn terminate_manager(
        &self,
        request: Request<TerminateManagerRequest>,
    ) -> Result<Response<TerminateManagerResponse>, Status> {
        let peer = caller::peer(request.extensions())?;
        let message = request.into_inner();
        request::name("name", &message.name)?;
        let uid = message.uid.unwrap_or(peer.uid);
        if uid != peer.uid && !self.is_admin(peer) {
            let what = "terminate another user's manager";
            return Err(Failure::from(ManagerError::NotAllowed {
                uid: peer.uid,
                what,
            })
            .into());
        }
        let content: [&[u8]; 2] = [&uid.to_le_bytes(), message.name.as_bytes()];
        let work = async {
            if let Some(held_bytes) = self.managers.terminate_waiting(uid, &message.name) {
                return Ok(TerminateManagerResponse { held_bytes });
            }
            let manager = self
                .managers
                .find_name(uid, &message.name)
                .map_err(Failure::from)?;
            let held_bytes = manager.model().map_or(0, |model| model.plan.held_bytes());
            // the memory returns in the background, when its process is gone
            drop(self.managers.end(&manager, Reason::Terminated));
            Ok(TerminateManagerResponse { held_bytes })
        };
        let answer = self
            .terminations
            .once(peer.uid, &message.request_id, &content, work)
            .await?;
        Ok(Response::new(answer))
    }

    async fn drain(
        &self,
        request: Request<DrainRequest>,
    ) -> Result<Response<DrainResponse>, Status> {
        let peer = caller::peer(request.extensions())?;
        if !self.is_admin(peer) {
            let what = "drain the daemon";
            return Err(Failure::from(ManagerError::NotAllowed {
                uid: peer.uid,
                what,
            })
            .into());
        }
        let message = request.into_inner();
        request::id(&message.request_id)?;
        let limit = match message.deadline_ms {
            0 => self.drain_grace,
            millis => Duration::from_millis(millis),
        };
        let managers = self.managers.begin_drain(limit);
        let managers = u32::try_from(managers).unwrap_or(u32::MAX);
        Ok(Response::new(DrainResponse { managers }))
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// What is known of a manager that waits for its owner.
#[must_use]
fn waiting_status(record: &ManagerRecord, device: &str) -> ManagerStatus {
    let mut status = ManagerStatus {
        name: record.name.clone(),
        owner_uid: record.uid,
        owner_pid: record.pid,
        since_ms: record.since_ms,
        phase: "RECOVERING".to_owned(),
        lease_epoch: record.lease_epoch,
        device: device.to_owned(),
        lease: "waiting".to_owned(),
        ..ManagerStatus::default()
    };
    if let Some(plan) = record.plans.last() {
        status.plan_version = plan.version;
        status.layers = number(plan.layers.len());
        status.resident_bytes = plan.plan.resident_bytes;
        status.ring_bytes = plan.plan.ring_bytes;
        status.planned_stream_bytes = plan.plan.streamed_bytes;
        status.granted_bytes = plan.granted;
    }
    status
}

/// What Status says of a manager.
#[must_use]
pub fn manager_status(manager: &Manager) -> ManagerStatus {
    let mut status = ManagerStatus {
        name: manager.name.clone(),
        owner_uid: manager.owner.uid,
        owner_pid: manager.owner.pid,
        since_ms: manager.since_ms,
        phase: manager.phase().as_str().to_owned(),
        lease_epoch: manager.lease_epoch,
        client: manager.client.clone(),
        device: manager.device.info().name.clone(),
        lease: manager.lease_state().to_owned(),
        passes: manager.passes.load(Relaxed),
        waited_ns: manager.waited_ns.load(Relaxed),
        transfer: Some(counters_message(&manager.counters)),
        // an acquire that waits keeps the table; then the figure is that of no hold more
        rpc_holds: manager
            .holds
            .try_lock()
            .map_or(0, |holds| number(holds.len())),
        ..ManagerStatus::default()
    };
    if let Ok(model) = manager.model() {
        let streamed = |place: &&Place| matches!(place, Place::Streamed { .. });
        status.weight_set = model.attachment.set().name().to_owned();
        status.plan_version = model.plan_version;
        status.layers = number(model.structure.layers.len());
        status.parts_streamed = number(model.plan.places.iter().filter(streamed).count());
        status.parts_resident = number(model.plan.places.len()) - status.parts_streamed;
        status.resident_bytes = model.plan.resident_bytes;
        status.ring_bytes = model.plan.ring_bytes;
        status.planned_stream_bytes = model.plan.streamed_bytes;
        status.granted_bytes = model.granted;
        status.parts_in_use = model.control.parts_in_use();
        // the engine notes since when, but does not look while nothing is to be done
        let want = model.control.want();
        if want != WANT_NONE {
            let noted = manager
                .counters
                .waits_for()
                .filter(|(part, _)| *part == want);
            status.waits_for_part = Some(want);
            status.waits_for_tensor = model.tensor_name(want).to_owned();
            status.waits_since_ms = noted.map_or_else(now_ms, |(_, since)| since);
        }
    }
    status
}

/// What was moved for one manager.
#[must_use]
pub fn counters_message(counters: &Counters) -> TransferCounters {
    TransferCounters {
        streamed_bytes: counters.streamed_bytes.load(Relaxed),
        resident_fill_bytes: counters.resident_fill_bytes.load(Relaxed),
        parts_filled: counters.parts_filled.load(Relaxed),
        parts_revoked: counters.parts_revoked.load(Relaxed),
        parts_out_of_order: counters.parts_out_of_order.load(Relaxed),
        link_ran_dry: counters.link_ran_dry.load(Relaxed),
        protocol_violations: counters.protocol_violations.load(Relaxed),
    }
}

/// What Status says of a device. Its counters are those of its managers, those that
/// have ended included.
#[must_use]
pub fn device_status(device: &ManagedDevice, managers: &Managers) -> DeviceStatus {
    let info = device.info();
    let owned = managers.list();
    let rings = owned
        .iter()
        .filter(|manager| manager.device.index == device.index)
        .filter_map(|manager| manager.model().ok())
        .map(|model| model.plan.ring_bytes)
        .sum();
    let (failed_drops, failed_drop_reasons) = device.memory.device().failed_drops();
    DeviceStatus {
        name: info.name.clone(),
        uuid: info.uuid.clone(),
        kind: info.kind.to_owned(),
        total_bytes: info.total_bytes,
        allocated_bytes: device.memory.device().allocated_bytes(),
        resident_bytes: device.residents.bytes(),
        ring_bytes: rings,
        reclaiming_bytes: device.memory.reclaiming_bytes(),
        reserved_bytes: device.memory.reserved_bytes(),
        link_limit: info.link_limit.unwrap_or(0),
        transfer: Some(counters_message(&device.counters)),
        queued_bytes: device.memory.device().queued_bytes(),
        engine_asleep: device.engine.is_asleep(),
        free_bytes: device.memory.device().free_bytes(),
        numa_node: info.numa_node,
        failure: device
            .memory
            .device()
            .failure()
            .map_or_else(String::new, |error| error.to_string()),
        failed_drops,
        failed_drop_reasons,
    }
}
