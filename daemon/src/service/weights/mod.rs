//! The `Weights` service.

mod message;
mod page;
mod put;
#[cfg(test)]
mod tests;
mod work;

use std::{pin::Pin, sync::Arc};

use flextensord_device::process::Peer;
use flextensord_proto::{
    kind::Failure,
    v1::{self, put_request::Part, weights_server::Weights},
};
use prost::Message as _;
use tokio::{sync::mpsc, task::spawn_blocking};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};

pub use self::message::{tensor_message, weight_set_message};
use self::{
    message::{Viewer, set_request},
    page::{PAGE_BYTES, SETS_A_PAGE, TENSORS_A_PAGE, page_size, set_page, tensor_page},
    put::{next_part, receive},
    work::{LoadWatch, blocking, load_event, report},
};
use super::{
    caller,
    idempotency::{Idempotency, Turn},
    request,
};
use crate::{
    channel::ticket::{Gift, Tickets},
    weights::{
        checkpoint::SourceFile,
        error::WeightError,
        registry::{WeightSet, WeightStore},
    },
};

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
        let rule = "the first message is the header";
        let header = match next_part(&mut stream).await? {
            Some(Part::Header(header)) => header,
            Some(Part::Tensors(_)) => return Err(request::field("part", "tensors", rule).into()),
            Some(Part::Data(_)) => return Err(request::field("part", "data", rule).into()),
            None => return Err(request::field("part", "missing", request::NO_HEADER).into()),
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
        let outcome = receive(&self.store, uid, header, &mut stream).await?;
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
        let viewer = Viewer::of(uid);
        let mut sets = if viewer.is_admin {
            self.store.all()
        } else {
            self.store.visible_to(uid)
        };
        if let Some((name, owner)) = &after {
            sets.retain(|set| (set.name(), set.owner_uid()) > (name.as_str(), *owner));
        }
        let mut answer = v1::ListResponse::default();
        let mut bytes = 0;
        let mut last = None;
        for set in &sets {
            let message = viewer.message(set);
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
