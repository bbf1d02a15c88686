//! The `Offload` service: managers, registration, holds.

use std::{pin::Pin, sync::Arc, time::Duration};

use flextensord_device::{notice::NoticePage, process::Peer};
use flextensord_proto::{
    kind::{Failure, Kind, Origin},
    limit, negotiate,
    v1::{
        AcquireRequest, AcquireResponse, CloseManagerRequest, CloseManagerResponse, GetPlanRequest,
        LeaseEvent, OpenManagerRequest, Opened, PlanPage, RegisterModelRequest,
        RegisterModelResponse, ReleaseRequest, ReleaseResponse, ReportPassRequest,
        ReportPassResponse, offload_server::Offload, register_header, register_model_request::Part,
    },
};
use tokio::time;
use tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};

use super::{
    caller, failure,
    idempotency::Idempotency,
    lease_events::lease_events,
    plan_pages,
    request::{self, field},
};
use crate::{
    channel::ticket::{Gift, Tickets},
    managers::{
        error::ManagerError,
        holds,
        lease::OpenLease,
        manager::Manager,
        model::{LayerSpec, Model},
        registration::{self, Budget, Registration},
        registry::{Managers, OpenRequest},
    },
};

/// Waiting time of an acquire that names none, and the longest one.
const WAIT: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(600));
/// Longest wait for the memory of a closed manager before the answer.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);
/// Share of the link of a manager that names none, and the largest one.
const LINK_WEIGHT: (u32, u32) = (100, 1000);

/// The service.
#[derive(Debug)]
pub struct OffloadService {
    /// The managers.
    pub managers: Arc<Managers>,
    /// Where descriptors wait to be fetched.
    pub tickets: Arc<Tickets>,
    /// The page that clients only read.
    pub notice: Arc<NoticePage>,
    /// The daemon's generation.
    pub generation: u64,
    /// Answers to repeated requests.
    pub calls: Calls,
}

/// Answers to repeated requests, an RPC each.
#[derive(Debug, Default)]
pub struct Calls {
    registrations: Arc<Idempotency<RegisterModelResponse>>,
    acquires: Arc<Idempotency<AcquireResponse>>,
    releases: Arc<Idempotency<ReleaseResponse>>,
    passes: Arc<Idempotency<ReportPassResponse>>,
    closes: Arc<Idempotency<CloseManagerResponse>>,
}

type EventStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl OffloadService {
    fn find(&self, peer: Peer, token: &[u8]) -> Result<Arc<Manager>, Failure> {
        Ok(self.managers.find(peer, token)?)
    }

    /// What `work` answers, or why nothing will be any more.
    async fn unless_given_up<T>(
        &self,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        tokio::select! {
            biased;
            answer = work => answer,
            why = self.managers.given_up() => Err(ManagerError::from(why).into()),
        }
    }

    fn opened(&self, peer: Peer, lease: &OpenLease, protocol: u32) -> Result<Opened, Failure> {
        let manager = &lease.manager;
        let gift = |descriptor, bytes| Gift {
            descriptor,
            bytes,
            manager: Some(manager.id),
        };
        let notice = self
            .notice
            .export()
            .map_err(|e| failure::kernel_failure(&e))?;
        let doorbell = manager
            .doorbell
            .export()
            .map_err(|e| failure::kernel_failure(&e))?;
        let engine = u32::try_from(manager.device.index).unwrap_or(u32::MAX);
        Ok(Opened {
            name: manager.name.clone(),
            token: manager.token().to_vec(),
            lease_epoch: manager.lease_epoch,
            daemon_generation: self.generation,
            protocol,
            device: manager.device.info().name.clone(),
            notice_ticket: self.tickets.give(
                peer,
                gift(notice, flextensord_proto::layout::NOTICE_BYTES as u64),
            )?,
            doorbell_ticket: self.tickets.give(peer, gift(doorbell, 0))?,
            engine,
            device_kind: manager.device.info().kind.to_owned(),
            device_uuid: manager.device.info().uuid.clone(),
        })
    }
}

#[tonic::async_trait]
impl Offload for OffloadService {
    type OpenManagerStream = EventStream<LeaseEvent>;
    type GetPlanStream = EventStream<PlanPage>;

    async fn open_manager(
        &self,
        request: Request<OpenManagerRequest>,
    ) -> Result<Response<Self::OpenManagerStream>, Status> {
        let peer = caller::peer(request.extensions())?;
        let message = request.into_inner();
        request::id(&message.request_id)?;
        let range = message.protocol.unwrap_or_default();
        let protocol = negotiate(range.lowest, range.highest).ok_or_else(|| {
            let (lowest, highest) = flextensord_proto::PROTOCOL;
            let text = format!(
                "client speaks protocol versions {} to {}, the daemon {lowest} to {highest}",
                range.lowest, range.highest
            );
            Failure::new(Kind::ProtocolVersion, Origin::Client, text)
                .with("field", "protocol")
                .with("value", format!("{} to {}", range.lowest, range.highest))
                .with("rule", format!("a range that meets {lowest} to {highest}"))
        })?;
        let client = &message.client;
        if client.len() > limit::NAME_BYTES || client.chars().any(char::is_control) {
            let rule = "at most 128 bytes without control characters";
            return Err(field("client", format!("{:?}", request::cut(client)), rule).into());
        }
        let link_weight = match message.link_weight {
            0 => LINK_WEIGHT.0,
            weight if weight <= LINK_WEIGHT.1 => weight,
            weight => return Err(field("link_weight", weight, "1 to 1000, or 0 for 100").into()),
        };
        let open = OpenRequest {
            request_id: message.request_id,
            name: message.name,
            client: message.client,
            resume_token: Some(message.resume_token).filter(|token| !token.is_empty()),
            device: message.device,
            link_weight,
        };
        let lease = match &open.resume_token {
            Some(token) if self.managers.is_orphan(token) => {
                let handed = self.handed_back(
                    peer,
                    message.handed_back,
                    message.holds,
                    message.nothing_mapped,
                )?;
                self.adopt(peer, token.clone(), &open, handed).await?
            }
            _ => self.managers.open(peer, &open).map_err(Failure::from)?,
        };
        let opened = self.opened(peer, &lease, protocol)?;
        let given_up = self.managers.given_up();
        Ok(Response::new(Box::pin(lease_events(
            opened, lease, given_up,
        ))))
    }

    async fn register_model(
        &self,
        request: Request<Streaming<RegisterModelRequest>>,
    ) -> Result<Response<RegisterModelResponse>, Status> {
        let peer = caller::peer(request.extensions())?;
        let (id, token, registration) = collect(request.into_inner()).await?;
        let manager = self.find(peer, &token)?;
        let managers = Arc::clone(&self.managers);
        let calls = Arc::clone(&self.calls.registrations);
        // a task of its own, which finishes also when the caller is gone
        let task = tokio::spawn(async move {
            let content = format!("{registration:?}");
            let work = async {
                let registration = registration.clone();
                let work = move || {
                    registration::register(
                        &managers,
                        &manager,
                        &registration,
                        plan_pages::check_layers,
                    )
                };
                let model = tokio::task::spawn_blocking(work)
                    .await
                    .map_err(|_| request::worker())?
                    .map_err(Failure::from)?;
                Ok(registered(&model))
            };
            calls
                .once(peer.uid, &id, &[&token, content.as_bytes()], work)
                .await
        });
        let answer = async { task.await.map_err(|_| request::worker())? };
        Ok(Response::new(self.unless_given_up(answer).await?))
    }

    async fn get_plan(
        &self,
        request: Request<GetPlanRequest>,
    ) -> Result<Response<Self::GetPlanStream>, Status> {
        let peer = caller::peer(request.extensions())?;
        let message = request.into_inner();
        let manager = self.find(peer, &message.token)?;
        let model = manager.model().map_err(Failure::from)?;
        let tickets = message.tickets.then_some((self.tickets.as_ref(), peer));
        let pages = plan_pages::pages(&manager, &model, tickets)?;
        if manager.ended.is_cancelled() {
            // it ended meanwhile: tickets made after its end would keep its memory
            self.tickets.forget(manager.id);
            return Err(Failure::from(ManagerError::LeaseLost).into());
        }
        Ok(Response::new(Box::pin(tokio_stream::iter(
            pages.into_iter().map(Ok),
        ))))
    }

    async fn acquire(
        &self,
        request: Request<AcquireRequest>,
    ) -> Result<Response<AcquireResponse>, Status> {
        let peer = caller::peer(request.extensions())?;
        let message = request.into_inner();
        let limit = match Duration::from_millis(message.timeout_ms.into()) {
            Duration::ZERO => WAIT.0,
            limit if limit <= WAIT.1 => limit,
            limit => {
                return Err(field("timeout_ms", limit.as_millis(), "at most 600000").into());
            }
        };
        let manager = self.find(peer, &message.token)?;
        let except = format!("{:?}", message.except_parts);
        let content: [&[u8]; 3] = [&message.token, message.layer.as_bytes(), except.as_bytes()];
        let work = async {
            let (hold, model) =
                holds::acquire(&manager, &message.layer, &message.except_parts, limit)
                    .await
                    .map_err(Failure::from)?;
            let layer = model
                .layer(&manager.name, &message.layer)
                .map_err(Failure::from)?;
            Ok(AcquireResponse {
                hold,
                plan_version: model.plan_version,
                parts: layer
                    .parts
                    .iter()
                    .map(|part| plan_pages::part(&model, *part))
                    .collect(),
            })
        };
        let acquires = &self.calls.acquires;
        let answer = acquires.once(peer.uid, &message.request_id, &content, work);
        let answer = self.unless_given_up(answer).await?;
        // the answer to a repeated call may tell of a hold that was given back since
        holds::check(&manager, answer.hold)
            .await
            .map_err(Failure::from)?;
        Ok(Response::new(answer))
    }

    async fn release(
        &self,
        request: Request<ReleaseRequest>,
    ) -> Result<Response<ReleaseResponse>, Status> {
        let peer = caller::peer(request.extensions())?;
        let message = request.into_inner();
        let lost = &message.acquire_request_id;
        let rule = "a hold or an acquire_request_id, one of the two";
        match (message.hold, lost.is_empty()) {
            (0, true) => return Err(field("hold", "missing", rule).into()),
            (0, false) => request::id_of("acquire_request_id", lost)?,
            (hold, false) => {
                let both = format!("{hold}, with acquire_request_id {:?}", request::cut(lost));
                return Err(field("hold", both, rule).into());
            }
            (_, true) => {}
        }
        let manager = self.find(peer, &message.token)?;
        let figures = format!("{} {:?}", message.hold, message.keep_parts);
        let content: [&[u8]; 3] = [&message.token, figures.as_bytes(), lost.as_bytes()];
        let work = async {
            let hold = if lost.is_empty() {
                message.hold
            } else {
                let answer = self.calls.acquires.abandon(peer.uid, lost).await?;
                if answer.is_none() && manager.is_adopted {
                    holds::give_up(&manager, &message.acquired_parts)
                        .await
                        .map_err(Failure::from)?;
                }
                answer.map_or(0, |answer| answer.hold)
            };
            holds::release(&manager, hold, &message.keep_parts)
                .await
                .map_err(Failure::from)?;
            Ok(ReleaseResponse {})
        };
        let answer = self
            .calls
            .releases
            .once(peer.uid, &message.request_id, &content, work)
            .await?;
        Ok(Response::new(answer))
    }

    async fn report_pass(
        &self,
        request: Request<ReportPassRequest>,
    ) -> Result<Response<ReportPassResponse>, Status> {
        use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
        let peer = caller::peer(request.extensions())?;
        let message = request.into_inner();
        let manager = self.find(peer, &message.token)?;
        let figures = format!("{} {}", message.passes, message.waited_ns);
        let content: [&[u8]; 2] = [&message.token, figures.as_bytes()];
        let work = async {
            let add = |counter: &AtomicU64, more: u64| {
                let sum = counter.fetch_update(Relaxed, Relaxed, |n| Some(n.saturating_add(more)));
                sum.unwrap_or_else(|now| now).saturating_add(more)
            };
            add(&manager.waited_ns, message.waited_ns);
            Ok(ReportPassResponse {
                passes: add(&manager.passes, message.passes),
            })
        };
        let answer = self
            .calls
            .passes
            .once(peer.uid, &message.request_id, &content, work)
            .await?;
        Ok(Response::new(answer))
    }

    async fn close_manager(
        &self,
        request: Request<CloseManagerRequest>,
    ) -> Result<Response<CloseManagerResponse>, Status> {
        let peer = caller::peer(request.extensions())?;
        let message = request.into_inner();
        let content: [&[u8]; 1] = [&message.token];
        let work = async {
            let closed = self.managers.close(peer, &message.token);
            if let Some(cleanup) = closed.map_err(Failure::from)? {
                // memory that takes longer goes on returning in the background
                let _: Result<_, _> = time::timeout(CLOSE_LIMIT, cleanup).await;
            }
            Ok(CloseManagerResponse {})
        };
        let answer = self
            .calls
            .closes
            .once(peer.uid, &message.request_id, &content, work)
            .await?;
        Ok(Response::new(answer))
    }
}

/// Reads a registration whole: header first, then layers, within the limits.
async fn collect(
    mut stream: Streaming<RegisterModelRequest>,
) -> Result<(String, Vec<u8>, Registration), Status> {
    let what = "registration";
    let first = request::next_message(&mut stream, what).await?;
    let rule = "the first message is the header";
    let header = match first.map(|message| message.part) {
        Some(Some(Part::Header(header))) => header,
        Some(Some(Part::Layers(_))) => return Err(field("part", "layers", rule).into()),
        Some(None) => return Err(field("part", "empty", rule).into()),
        None => return Err(field("part", "missing", request::NO_HEADER).into()),
    };
    let budget = match header.budget {
        Some(register_header::Budget::MemoryFraction(fraction)) => Budget::Fraction(fraction),
        Some(register_header::Budget::BudgetBytes(bytes)) => Budget::Bytes(bytes),
        None => return Err(field("budget", "unset", "memory_fraction or budget_bytes").into()),
    };
    let mut layers = Vec::new();
    let mut tensors = 0;
    while let Some(message) = request::next_message(&mut stream, what).await? {
        let Some(Part::Layers(more)) = message.part else {
            return Err(field("part", "header", "comes once, as the first message").into());
        };
        for layer in more.layers {
            request::qualified("layers.name", &layer.name)?;
            for tensor in &layer.tensors {
                request::qualified("layers.tensors", tensor)?;
            }
            tensors += layer.tensors.len();
            layers.push(LayerSpec {
                name: layer.name,
                tensors: layer.tensors,
            });
        }
        if layers.len() > limit::LAYERS {
            return Err(field("layers", layers.len(), "at most 65536").into());
        }
        if tensors > limit::TENSORS {
            return Err(field("layers.tensors", tensors, "at most 1048576 in all").into());
        }
    }
    if layers.is_empty() {
        return Err(field("layers", 0, "at least one").into());
    }
    let registration = Registration {
        weight_set: header.weight_set,
        layers,
        budget,
    };
    Ok((header.request_id, header.token, registration))
}

fn registered(model: &Model) -> RegisterModelResponse {
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    RegisterModelResponse {
        plan_version: model.plan_version,
        layers: number(model.structure.layers.len()),
        parts: number(model.structure.parts.len()),
        requested_bytes: model.requested,
        granted_bytes: model.granted,
        resident_bytes: model.plan.resident_bytes,
        resident_bytes_shared: model.shared_bytes,
        streamed_bytes: model.plan.streamed_bytes,
        ring_bytes: model.plan.ring_bytes,
        least_feasible_bytes: model.least_feasible,
        unregistered_tensors: model.structure.unregistered.0,
        unregistered_bytes: model.structure.unregistered.1,
    }
}
