//! The `Weights` service.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use flextensord_device::process::Peer;
use flextensord_proto::{
    kind::{Failure, Kind, Origin},
    limit,
    v1::{self, put_request::Part, weights_server::Weights},
};
use prost::Message as _;
use tokio::{
    sync::mpsc,
    task::{JoinHandle, spawn_blocking},
    time::{MissedTickBehavior, interval, timeout},
};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};

use super::{
    caller,
    failure::invalid_argument,
    idempotency::{First, Idempotency, Turn},
};
use crate::{
    channel::ticket::{Gift, Tickets},
    weights::{
        checkpoint::SourceFile,
        error::WeightError,
        load::{Outcome, SetRequest},
        loader::{Cancel, Watch},
        manifest::TensorEntry,
        put::{Declaration, PutSession},
        registry::{WeightSet, WeightStore},
    },
};

/// How often progress is sent.
const PROGRESS: Duration = Duration::from_millis(100);
/// How long a put may be silent between two messages.
const SILENCE: Duration = Duration::from_secs(60);
/// Tensors a page, and most that may be asked for.
const TENSORS_A_PAGE: (usize, usize) = (500, 2000);
/// Sets a page, and most that may be asked for.
const SETS_A_PAGE: (usize, usize) = (100, 1000);
/// Bytes of an answer's list, well under a message's limit.
const PAGE_BYTES: usize = limit::MESSAGE_BYTES / 4 * 3;

/// The service over a store.
#[derive(Debug)]
pub struct WeightService {
    store: Arc<WeightStore>,
    tickets: Arc<Tickets>,
    loads: Arc<Idempotency<v1::Loaded>>,
    puts: Arc<Idempotency<v1::PutResponse>>,
    drops: Arc<Idempotency<v1::DropResponse>>,
}

impl WeightService {
    /// A service over `store`, with descriptors by way of `tickets`.
    #[must_use]
    pub fn new(store: Arc<WeightStore>, tickets: Arc<Tickets>) -> Self {
        Self {
            store,
            tickets,
            loads: Arc::default(),
            puts: Arc::default(),
            drops: Arc::default(),
        }
    }

    fn collect(&self, peer: Peer, tickets: &[Vec<u8>]) -> Result<Vec<SourceFile>, Failure> {
        tickets
            .iter()
            .map(|ticket| {
                let offered = self.tickets.collect(peer, ticket)?;
                Ok(SourceFile {
                    name: offered.name,
                    file: offered.file,
                })
            })
            .collect()
    }

    fn segment_ticket(&self, peer: Peer, set: &WeightSet) -> Result<Vec<u8>, Failure> {
        let gift = Gift {
            descriptor: set.segment().export().map_err(WeightError::from)?,
            bytes: set.segment().bytes(),
            manager: None,
        };
        Ok(self.tickets.give(peer, gift)?)
    }

    async fn receive(
        &self,
        uid: u32,
        header: v1::PutHeader,
        stream: &mut Streaming<v1::PutRequest>,
    ) -> Result<Outcome, Failure> {
        let request = set_request(uid, header.name, header.content_id, header.share);
        let watch = Arc::new(Cancel::default());
        // should the caller go away, whatever waits on a blocking thread ends
        let _gone = CancelOnDrop(Arc::clone(&watch));
        let mut session = PutSession::new(&self.store, request)?;
        while let Some(message) = next_part(stream).await? {
            match message {
                Part::Tensors(tensors) => {
                    session.declare(tensors.tensors.into_iter().map(declaration).collect())?;
                }
                Part::Data(data) if data.bytes.len() > limit::PUT_BYTES => {
                    let rule = format!("at most {} bytes", limit::PUT_BYTES);
                    let field = format!("data[{}].bytes", data.tensor);
                    return Err(invalid_argument(&field, data.bytes.len(), &rule));
                }
                Part::Data(data) => {
                    let watch = Arc::clone(&watch);
                    session = blocking(move || {
                        session.write(&data.tensor, data.offset, &data.bytes, &*watch)?;
                        Ok(session)
                    })
                    .await?;
                }
                Part::Header(header) => {
                    let rule = "only the first message is a header";
                    return Err(invalid_argument("header", header.name, rule));
                }
            }
        }
        let watch = Arc::clone(&watch);
        blocking(move || session.finish(&*watch)).await
    }
}

#[tonic::async_trait]
impl Weights for WeightService {
    type LoadStream = Pin<Box<dyn Stream<Item = Result<v1::LoadProgress, Status>> + Send>>;

    async fn load(
        &self,
        request: Request<v1::LoadRequest>,
    ) -> Result<Response<Self::LoadStream>, Status> {
        let peer = caller::peer(request.extensions())?;
        let request = request.into_inner();
        // a repeated call has other tickets for the same files
        let content = [
            request.name.as_bytes(),
            request.content_id.as_bytes(),
            &[u8::from(request.share)],
        ];
        let (sender, receiver) = mpsc::channel(4);
        match self
            .loads
            .enter(peer.uid, &request.request_id, &content)
            .await?
        {
            Turn::Answer(loaded) => {
                // the channel is empty and its other end is at hand
                let _: Result<_, _> = sender.try_send(Ok(load_event(loaded)));
            }
            Turn::First(first) => {
                let files = self.collect(peer, &request.files)?;
                let wanted = set_request(peer.uid, request.name, request.content_id, request.share);
                let watch = Arc::new(LoadWatch::default());
                let store = Arc::clone(&self.store);
                let work = {
                    let watch = Arc::clone(&watch);
                    spawn_blocking(move || store.load(&wanted, files, &*watch))
                };
                let viewer = Viewer::of(peer.uid);
                tokio::spawn(report(work, watch, sender, first, viewer));
            }
        }
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn put(
        &self,
        request: Request<Streaming<v1::PutRequest>>,
    ) -> Result<Response<v1::PutResponse>, Status> {
        let uid = caller::peer(request.extensions())?.uid;
        let mut stream = request.into_inner();
        let Some(Part::Header(header)) = next_part(&mut stream).await? else {
            let rule = "the first message is a header";
            return Err(invalid_argument("part", "other", rule).into());
        };
        let content = [
            header.name.as_bytes(),
            header.content_id.as_bytes(),
            &[u8::from(header.share)],
        ];
        let turn = self.puts.enter(uid, &header.request_id, &content).await?;
        let first = match turn {
            Turn::Answer(answer) => return Ok(Response::new(answer)),
            Turn::First(first) => first,
        };
        let outcome = self.receive(uid, header, &mut stream).await?;
        let answer = v1::PutResponse {
            set: Some(Viewer::of(uid).message(&outcome.set)),
            attached: outcome.attached,
        };
        first.complete(answer.clone());
        Ok(Response::new(answer))
    }

    async fn get(
        &self,
        request: Request<v1::GetRequest>,
    ) -> Result<Response<v1::GetResponse>, Status> {
        let peer = caller::peer(request.extensions())?;
        let request = request.into_inner();
        let set = self
            .store
            .get(peer.uid, &request.name)
            .map_err(Failure::from)?;
        let size = page_size(request.page_size, TENSORS_A_PAGE)?;
        let start = tensor_page(&set, &request.page_token)?;
        let mut answer = v1::GetResponse {
            set: Some(Viewer::of(peer.uid).message(&set)),
            ..v1::GetResponse::default()
        };
        let manifest = set.manifest();
        let mut bytes = 0;
        for tensor in manifest.tensors().iter().skip(start).take(size) {
            let message = tensor_message(tensor);
            bytes += message.encoded_len();
            if bytes > PAGE_BYTES && !answer.tensors.is_empty() {
                break;
            }
            let offset = manifest.storage_of(tensor).map_or(0, |s| s.offset);
            answer.tensors.push(message);
            answer.storage_segment_offsets.push(offset);
        }
        let next = start + answer.tensors.len();
        if next < manifest.tensors().len() {
            answer.next_page_token = format!("{}:{next}", set.id());
        }
        if request.segment {
            answer.segment_ticket = self.segment_ticket(peer, &set)?;
        }
        Ok(Response::new(answer))
    }

    async fn list(
        &self,
        request: Request<v1::ListRequest>,
    ) -> Result<Response<v1::ListResponse>, Status> {
        let uid = caller::peer(request.extensions())?.uid;
        let request = request.into_inner();
        let size = page_size(request.page_size, SETS_A_PAGE)?;
        let after = set_page(&request.page_token)?;
        let mut sets = self.store.visible_to(uid);
        if let Some((name, owner)) = &after {
            sets.retain(|set| (set.name(), set.owner_uid()) > (name.as_str(), *owner));
        }
        let mut answer = v1::ListResponse::default();
        let mut bytes = 0;
        let mut last = None;
        for set in &sets {
            let message = Viewer::of(uid).message(set);
            bytes += message.encoded_len();
            if answer.sets.len() == size || (bytes > PAGE_BYTES && !answer.sets.is_empty()) {
                answer.next_page_token = last.unwrap_or_default();
                break;
            }
            last = Some(format!("{}/{}", set.name(), set.owner_uid()));
            answer.sets.push(message);
        }
        Ok(Response::new(answer))
    }

    async fn drop(
        &self,
        request: Request<v1::DropRequest>,
    ) -> Result<Response<v1::DropResponse>, Status> {
        let uid = caller::peer(request.extensions())?.uid;
        let v1::DropRequest { request_id, name } = request.into_inner();
        let turn = self
            .drops
            .enter(uid, &request_id, &[name.as_bytes()])
            .await?;
        let first = match turn {
            Turn::Answer(answer) => return Ok(Response::new(answer)),
            Turn::First(first) => first,
        };
        let store = Arc::clone(&self.store);
        let is_admin = Viewer::of(uid).is_admin;
        let freed_bytes = blocking(move || store.remove(uid, is_admin, &name)).await?;
        let answer = v1::DropResponse { freed_bytes };
        first.complete(answer);
        Ok(Response::new(answer))
    }
}

/// Runs blocking work of the domain.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, WeightError> + Send + 'static,
) -> Result<T, Failure> {
    joined(spawn_blocking(work).await)
}

fn joined<T>(result: Result<Result<T, WeightError>, tokio::task::JoinError>) -> Result<T, Failure> {
    match result {
        Ok(result) => Ok(result?),
        Err(e) => {
            let text = format!("work on a weight set ended: {e}");
            Err(Failure::new(Kind::Internal, Origin::Daemon, text))
        }
    }
}

/// Sends progress while `work` runs, then its end. Cancels it when the caller is gone.
async fn report(
    mut work: JoinHandle<Result<Outcome, WeightError>>,
    watch: Arc<LoadWatch>,
    sender: mpsc::Sender<Result<v1::LoadProgress, Status>>,
    first: First<v1::Loaded>,
    viewer: Viewer,
) {
    let mut tick = interval(PROGRESS);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut sent = None;
    let mut is_gone = false;
    let result = loop {
        tokio::select! {
            biased;
            result = &mut work => break joined(result),
            () = sender.closed(), if !is_gone => {
                watch.cancel.set();
                is_gone = true;
            }
            _ = tick.tick(), if !is_gone => {
                let now = watch.figures();
                let event = v1::LoadProgress {
                    event: Some(v1::load_progress::Event::Progress(now)),
                };
                // a client that does not read misses figures, and holds nothing up
                if sent != Some(now) && sender.try_send(Ok(event)).is_ok() {
                    sent = Some(now);
                }
            }
        }
    };
    let end = match result {
        Ok(outcome) => {
            let loaded = v1::Loaded {
                set: Some(viewer.message(&outcome.set)),
                attached: outcome.attached,
            };
            first.complete(loaded.clone());
            Ok(load_event(loaded))
        }
        Err(failure) => {
            drop(first);
            Err(failure.into())
        }
    };
    // the caller may be gone; then nobody is to be told
    let _: Result<_, _> = sender.send(end).await;
}

fn load_event(loaded: v1::Loaded) -> v1::LoadProgress {
    v1::LoadProgress {
        event: Some(v1::load_progress::Event::Loaded(loaded)),
    }
}

/// The next part of a put; `None` at its end.
async fn next_part(stream: &mut Streaming<v1::PutRequest>) -> Result<Option<Part>, Failure> {
    let aborted = |reason: String| -> Failure {
        let what = "put";
        WeightError::Aborted { what, reason }.into()
    };
    match timeout(SILENCE, stream.message()).await {
        Err(_) => Err(aborted(format!("no message for {} s", SILENCE.as_secs()))),
        Ok(Err(status)) if status.code() == tonic::Code::OutOfRange => {
            let rule = format!("at most {} bytes", limit::MESSAGE_BYTES);
            Err(invalid_argument("message", "larger", &rule))
        }
        Ok(Err(status)) => Err(aborted(format!(
            "its stream broke off: {}",
            status.message()
        ))),
        Ok(Ok(None)) => Ok(None),
        Ok(Ok(Some(v1::PutRequest { part: Some(part) }))) => Ok(Some(part)),
        Ok(Ok(Some(v1::PutRequest { part: None }))) => {
            Err(invalid_argument("part", "", "header, tensors or data"))
        }
    }
}

#[derive(Debug, Default)]
struct LoadWatch {
    done: AtomicU64,
    total: AtomicU64,
    cancel: Cancel,
}

impl LoadWatch {
    fn figures(&self) -> v1::Progress {
        v1::Progress {
            bytes_done: self.done.load(Ordering::Relaxed),
            bytes_total: self.total.load(Ordering::Relaxed),
        }
    }
}

impl Watch for LoadWatch {
    fn progress(&self, done: u64, total: u64) {
        self.total.store(total, Ordering::Relaxed);
        self.done.fetch_max(done, Ordering::Relaxed);
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }
}

struct CancelOnDrop(Arc<Cancel>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.set();
    }
}

fn set_request(uid: u32, name: String, content_id: String, share: bool) -> SetRequest {
    SetRequest {
        uid,
        name: Some(name).filter(|name| !name.is_empty()),
        content_id: Some(content_id).filter(|id| !id.is_empty()),
        share,
    }
}

fn declaration(tensor: v1::PutTensor) -> Declaration {
    Declaration {
        name: tensor.name,
        dtype: tensor.dtype,
        shape: tensor.shape,
        stride: tensor.stride,
        alias_of: tensor.alias_of,
        storage_offset: tensor.storage_offset,
        storage_bytes: tensor.storage_bytes,
    }
}

fn page_size(asked: u32, (usual, most): (usize, usize)) -> Result<usize, Failure> {
    match usize::try_from(asked).unwrap_or(usize::MAX) {
        0 => Ok(usual),
        size if size <= most => Ok(size),
        _ => {
            let rule = format!("0 to {most}");
            Err(invalid_argument("page_size", asked, &rule))
        }
    }
}

/// The first tensor of a page. A token names its set, so that pages of two sets that
/// had the same name one after the other never mix.
fn tensor_page(set: &WeightSet, token: &str) -> Result<usize, Failure> {
    if token.is_empty() {
        return Ok(0);
    }
    token
        .split_once(':')
        .filter(|(id, _)| *id == set.id())
        .and_then(|(_, start)| start.parse().ok())
        .filter(|start| *start <= set.manifest().tensors().len())
        .ok_or_else(|| invalid_argument("page_token", token, "a token of an answer about this set"))
}

/// Name and owner of the last set of the page before.
fn set_page(token: &str) -> Result<Option<(String, u32)>, Failure> {
    if token.is_empty() {
        return Ok(None);
    }
    token
        .rsplit_once('/')
        .and_then(|(name, owner)| Some(Some((name.to_owned(), owner.parse().ok()?))))
        .ok_or_else(|| invalid_argument("page_token", token, "a token of an answer"))
}

/// Who reads about a set.
#[derive(Debug, Clone, Copy)]
struct Viewer {
    uid: u32,
    is_admin: bool,
}

impl Viewer {
    fn of(uid: u32) -> Self {
        let is_admin = uid == 0 || uid == nix::unistd::geteuid().as_raw();
        Self { uid, is_admin }
    }

    /// The set without the names of other users' managers.
    fn message(self, set: &WeightSet) -> v1::WeightSet {
        let mut message = weight_set_message(set);
        let attached = set.attached_by().into_iter().map(|by| {
            if self.is_admin || by.uid == self.uid {
                by.manager
            } else {
                "(another user's)".to_owned()
            }
        });
        message.attached_by = attached.collect();
        message
    }
}

/// A set as operators see it, with the names of all managers attached.
#[must_use]
pub fn weight_set_message(set: &WeightSet) -> v1::WeightSet {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    v1::WeightSet {
        name: set.name().to_owned(),
        id: set.id().to_owned(),
        digest: set.digest().unwrap_or_default(),
        content_id: set.content_id().unwrap_or_default().to_owned(),
        tensors: count(set.manifest().tensors().len()),
        storages: count(set.manifest().storages().len()),
        logical_bytes: set.manifest().logical_bytes(),
        segment_bytes: set.segment().bytes(),
        pinned_bytes: 0,
        attached_by: set.attached_by().into_iter().map(|by| by.manager).collect(),
        shared: set.is_shared(),
        owner_uid: set.owner_uid(),
        loaded_at: set.loaded_at(),
        unlinked: set.segment().is_unlinked(),
    }
}

/// A tensor as clients see it.
#[must_use]
pub fn tensor_message(tensor: &TensorEntry) -> v1::Tensor {
    v1::Tensor {
        name: tensor.name.clone(),
        dtype: tensor.dtype.clone(),
        shape: tensor.shape.clone(),
        stride: tensor.stride.clone(),
        bytes: tensor.bytes,
        storage: tensor.storage,
        storage_offset: tensor.storage_offset,
    }
}
