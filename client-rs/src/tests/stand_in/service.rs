//! The gRPC side.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use flextensord_device::handover;
use flextensord_proto::{
    kind::{Failure, Kind, Origin},
    v1::{
        Allocation, Layer, PlanLayer, PlanMemory, PlanPage, PlanPart, Tensor,
        lease_event::Event,
        offload_server::{Offload, OffloadServer},
        register_model_request::Part,
        weights_server::{Weights, WeightsServer},
        *,
    },
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{UnboundedReceiverStream, UnixListenerStream};
use tonic::{Request, Response, Status, Streaming};

use super::Stage;

const TOKEN: [u8; 32] = [5; 32];

type Answer<T> = Result<Response<T>, Status>;
type Pages<T> = tokio_stream::Iter<std::vec::IntoIter<Result<T, Status>>>;

pub(super) async fn serve(stage: Arc<Stage>, listener: tokio::net::UnixListener) {
    let served = tonic::transport::Server::builder()
        .add_service(OffloadServer::new(Actor(stage.clone())))
        .add_service(WeightsServer::new(Actor(stage)))
        .serve_with_incoming(UnixListenerStream::new(listener));
    served.await.unwrap();
}

struct Actor(Arc<Stage>);

impl Actor {
    fn owned(&self, token: &[u8], request_id: &str) -> Result<(), Status> {
        let mut state = self.0.state();
        state.request_ids.push(request_id.to_owned());
        if token != TOKEN || state.closed {
            return Err(Failure::new(Kind::LeaseLost, Origin::Client, "no such lease").into());
        }
        Ok(())
    }
}

#[tonic::async_trait]
impl Offload for Actor {
    type OpenManagerStream = UnboundedReceiverStream<Result<LeaseEvent, Status>>;
    type GetPlanStream = Pages<PlanPage>;

    async fn open_manager(
        &self,
        request: Request<OpenManagerRequest>,
    ) -> Answer<Self::OpenManagerStream> {
        let request = request.into_inner();
        if !request.resume_token.is_empty() {
            self.owned(&request.resume_token, &request.request_id)?;
            if self.0.resumes_refused.load(Ordering::SeqCst) {
                let gone = Failure::new(Kind::LeaseLost, Origin::Daemon, "its grace is over");
                return Err(gone.into());
            }
            self.0.state().resumed += 1;
        }
        let notice = self.0.notice.lock().unwrap().export().unwrap();
        let uuid = self.0.memory.gpu_uuid();
        let kind = if uuid.is_some() { "cuda" } else { "cpu" };
        let opened = Opened {
            name: request.name,
            token: TOKEN.to_vec(),
            lease_epoch: 7,
            daemon_generation: 1,
            protocol: 1,
            device: format!("{kind}:0"),
            notice_ticket: self.0.ticket(notice),
            doorbell_ticket: self.0.ticket(self.0.doorbell.export().unwrap()),
            engine: 3,
            device_kind: kind.to_owned(),
            device_uuid: uuid.unwrap_or_default(),
        };
        let (sender, receiver) = mpsc::unbounded_channel();
        let event = Some(Event::Opened(opened));
        sender.send(Ok(LeaseEvent { event })).unwrap();
        self.0.state().lease = Some(sender);
        Ok(Response::new(UnboundedReceiverStream::new(receiver)))
    }

    async fn register_model(
        &self,
        request: Request<Streaming<RegisterModelRequest>>,
    ) -> Answer<RegisterModelResponse> {
        let mut stream = request.into_inner();
        let mut layers = Vec::new();
        while let Some(message) = stream.message().await? {
            match message.part.unwrap() {
                Part::Header(header) => self.owned(&header.token, &header.request_id)?,
                Part::Layers(part) => layers.extend(part.layers),
            }
        }
        let part = |name: String| name[1..].parse().unwrap();
        let parts = |layer: Layer| (layer.name, layer.tensors.into_iter().map(part).collect());
        let mut state = self.0.state();
        state.layers = layers.into_iter().map(parts).collect();
        Ok(Response::new(RegisterModelResponse {
            plan_version: 1,
            layers: u32::try_from(state.layers.len()).unwrap(),
            ..RegisterModelResponse::default()
        }))
    }

    async fn get_plan(&self, request: Request<GetPlanRequest>) -> Answer<Self::GetPlanStream> {
        self.owned(&request.into_inner().token, "")?;
        let stage = &self.0;
        let memory = stage.memory.export();
        let layers = u32::try_from(stage.state().layers.len()).unwrap();
        let memory = PlanMemory {
            plan_version: 1,
            parts: u32::try_from(stage.parts.len()).unwrap(),
            layers,
            allocations: vec![Allocation {
                id: 1,
                bytes: stage.memory.bytes(),
                ticket: stage.ticket(memory),
                ring: true,
            }],
            control_ticket: stage.ticket(stage.control.export().unwrap()),
            ..PlanMemory::default()
        };
        let part = |(part, at): (u32, &super::StagePart)| PlanPart {
            part,
            streamed: at.streamed,
            allocation: 0,
            offset: at.place * 256,
            stored_bytes: at.bytes,
            logical_bytes: at.bytes,
            tensors: vec![Tensor {
                name: format!("t{part}"),
                dtype: "U8".to_owned(),
                shape: vec![at.bytes],
                bytes: at.bytes,
                ..Tensor::default()
            }],
        };
        let layer = |(name, parts): &(String, Vec<u32>)| PlanLayer {
            name: name.clone(),
            parts: parts.clone(),
        };
        let pages = vec![
            Ok(PlanPage {
                memory: Some(memory),
                ..PlanPage::default()
            }),
            Ok(PlanPage {
                parts: (0u32..).zip(&stage.parts).map(part).collect(),
                layers: stage.state().layers.iter().map(layer).collect(),
                memory: None,
            }),
        ];
        Ok(Response::new(tokio_stream::iter(pages)))
    }

    async fn acquire(&self, request: Request<AcquireRequest>) -> Answer<AcquireResponse> {
        let request = request.into_inner();
        self.owned(&request.token, &request.request_id)?;
        let failing = &self.0.acquires_failing;
        if failing.load(Ordering::SeqCst) > 0 {
            failing.fetch_sub(1, Ordering::SeqCst);
            return Err(Status::unavailable("the connection broke"));
        }
        let layers = self.0.state().layers.clone();
        let (_, parts) = layers
            .into_iter()
            .find(|(name, _)| *name == request.layer)
            .unwrap();
        let wanted = parts.into_iter().filter(|&part| {
            self.0.parts[part as usize].streamed && !request.except_parts.contains(&part)
        });
        let limit = Instant::now() + Duration::from_millis(request.timeout_ms.into());
        let mut taken = Vec::new();
        for part in wanted {
            while !handover::take(&self.0.control, part) {
                if Instant::now() > limit {
                    for part in taken {
                        handover::give_back(&self.0.control, part);
                    }
                    let late = Failure::new(Kind::DeadlineExceeded, Origin::Daemon, "late");
                    return Err(late.into());
                }
                self.0.doorbell.ring();
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            taken.push(part);
        }
        let mut state = self.0.state();
        state.next += 1;
        let hold = state.next;
        state.holds.insert(hold, taken);
        Ok(Response::new(AcquireResponse {
            hold,
            plan_version: 1,
            parts: Vec::new(),
        }))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Answer<ReleaseResponse> {
        let request = request.into_inner();
        self.owned(&request.token, &request.request_id)?;
        let held = self.0.state().holds.remove(&request.hold);
        let unknown = || Failure::new(Kind::UnknownHold, Origin::Client, "no such hold");
        for part in held.ok_or_else(unknown)? {
            if !request.keep_parts.contains(&part) {
                assert!(handover::give_back(&self.0.control, part));
            }
        }
        self.0.doorbell.ring();
        Ok(Response::new(ReleaseResponse {}))
    }

    async fn report_pass(&self, request: Request<ReportPassRequest>) -> Answer<ReportPassResponse> {
        let request = request.into_inner();
        self.owned(&request.token, &request.request_id)?;
        let mut state = self.0.state();
        state.passes += request.passes;
        let passes = state.passes;
        Ok(Response::new(ReportPassResponse { passes }))
    }

    async fn close_manager(
        &self,
        request: Request<CloseManagerRequest>,
    ) -> Answer<CloseManagerResponse> {
        let request = request.into_inner();
        self.owned(&request.token, &request.request_id)?;
        self.0.state().closed = true;
        Ok(Response::new(CloseManagerResponse {}))
    }
}

#[tonic::async_trait]
impl Weights for Actor {
    type LoadStream = Pages<LoadProgress>;

    async fn load(&self, request: Request<LoadRequest>) -> Answer<Self::LoadStream> {
        use load_progress::Event;
        let request = request.into_inner();
        self.0.state().request_ids.push(request.request_id);
        let progress = |bytes_done| {
            let bytes_total = 20;
            Event::Progress(Progress {
                bytes_done,
                bytes_total,
            })
        };
        let set = WeightSet {
            name: request.name,
            tensors: u32::try_from(request.files.len()).unwrap(),
            shared: request.share,
            ..WeightSet::default()
        };
        let loaded = Event::Loaded(Loaded {
            set: Some(set),
            attached: false,
        });
        let events = [progress(10), progress(20), loaded]
            .map(|event| Ok(LoadProgress { event: Some(event) }));
        Ok(Response::new(tokio_stream::iter(
            events.into_iter().collect::<Vec<_>>(),
        )))
    }

    async fn put(&self, request: Request<Streaming<PutRequest>>) -> Answer<PutResponse> {
        let mut stream = request.into_inner();
        let mut seen = Vec::new();
        while let Some(message) = stream.message().await? {
            if matches!(&message.part, Some(put_request::Part::Header(header)) if header.name == "refused")
            {
                return Err(Failure::new(Kind::HostMemory, Origin::Daemon, "full").into());
            }
            seen.push(message);
        }
        self.0.state().put = seen;
        let set = Some(WeightSet::default());
        let attached = false;
        Ok(Response::new(PutResponse { set, attached }))
    }

    async fn get(&self, request: Request<GetRequest>) -> Answer<GetResponse> {
        let request = request.into_inner();
        let first = request.page_token.is_empty();
        Ok(Response::new(GetResponse {
            set: Some(WeightSet {
                name: request.name,
                ..WeightSet::default()
            }),
            tensors: vec![Tensor::default(); if first { 3 } else { 2 }],
            storage_segment_offsets: vec![0; if first { 3 } else { 2 }],
            next_page_token: if first { "2" } else { "" }.to_owned(),
            segment_ticket: Vec::new(),
        }))
    }

    async fn list(&self, request: Request<ListRequest>) -> Answer<ListResponse> {
        // a daemon that never comes to an end
        let token = request.into_inner().page_token;
        Ok(Response::new(ListResponse {
            sets: vec![WeightSet::default()],
            next_page_token: if token.is_empty() {
                "1".to_owned()
            } else {
                token
            },
        }))
    }

    async fn drop(&self, _request: Request<DropRequest>) -> Answer<DropResponse> {
        let in_use = Failure::new(Kind::InUse, Origin::Client, "attached by m");
        Err(in_use.with("remedy", "close manager m").into())
    }
}
