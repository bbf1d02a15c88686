//! The service over a real socket, with the generated client.

use std::{os::fd::AsFd as _, process, time::Duration};

use flextensord_device::mapping::{Access, Mapping};
use flextensord_proto::{
    kind::Kind,
    limit,
    v1::{load_progress::Event, weights_client::WeightsClient, weights_server::WeightsServer},
};
use tokio::net::UnixListener;
use tokio_stream::{StreamExt as _, wrappers::UnixListenerStream};
use tonic::transport::{Channel, Endpoint, Server};

use super::*;
use crate::{
    channel::ticket::OfferedFile,
    weights::{
        checkpoint::fixture,
        load::SetRequest,
        registry::fixture::{Scratch, named},
    },
};

const ID: &str = "0123456789abcdef";

struct Served {
    scratch: Scratch,
    tickets: Arc<Tickets>,
    client: WeightsClient<Channel>,
    _sockets: tempfile::TempDir,
}

impl Served {
    async fn new() -> Self {
        let scratch = Scratch::new(Some(1 << 30));
        let tickets = Arc::new(Tickets::default());
        let sockets = tempfile::tempdir().unwrap();
        let path = sockets.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let service = WeightService::new(Arc::clone(&scratch.store), Arc::clone(&tickets));
        let incoming = UnixListenerStream::new(listener);
        let service = WeightsServer::new(service);
        tokio::spawn(async move {
            Server::builder()
                .serve_with_incoming(service, incoming)
                .await
        });
        let endpoint = Endpoint::try_from(format!("unix://{}", path.display())).unwrap();
        let client = WeightsClient::new(endpoint.connect().await.unwrap());
        Self {
            scratch,
            tickets,
            client,
            _sockets: sockets,
        }
    }

    fn peer() -> Peer {
        Peer {
            uid: nix::unistd::geteuid().as_raw(),
            gid: nix::unistd::getegid().as_raw(),
            pid: process::id(),
        }
    }

    fn offer(&self, file: SourceFile) -> Vec<u8> {
        let SourceFile { name, file } = file;
        let offered = OfferedFile {
            name,
            file,
            connection: 0,
        };
        self.tickets.offer(Self::peer(), offered).unwrap()
    }

    fn load_request(&self, id: &str, tensors: &[(&str, &[u8])]) -> v1::LoadRequest {
        let files = fixture::single(tensors);
        v1::LoadRequest {
            request_id: id.to_owned(),
            name: "m".to_owned(),
            files: files.into_iter().map(|file| self.offer(file)).collect(),
            ..v1::LoadRequest::default()
        }
    }

    async fn load(&self, request: v1::LoadRequest) -> Result<v1::Loaded, Failure> {
        let mut client = self.client.clone();
        let failed = |status: Status| Failure::from_status(&status).unwrap();
        let mut stream = client.load(request).await.map_err(failed)?.into_inner();
        while let Some(message) = stream.message().await.map_err(failed)? {
            match message.event.unwrap() {
                Event::Progress(now) => assert!(now.bytes_done <= now.bytes_total),
                Event::Loaded(loaded) => return Ok(loaded),
            }
        }
        panic!("stream ended without an end");
    }

    async fn put(&self, parts: Vec<Part>) -> Result<v1::PutResponse, Failure> {
        let mut client = self.client.clone();
        let messages = parts
            .into_iter()
            .map(|part| v1::PutRequest { part: Some(part) });
        match client.put(tokio_stream::iter(messages)).await {
            Ok(answer) => Ok(answer.into_inner()),
            Err(status) => Err(Failure::from_status(&status).unwrap()),
        }
    }

    async fn is_empty_soon(&self) -> bool {
        for _ in 0..500 {
            let host = self.scratch.store.host();
            if self.scratch.files() == (0, 0) && (host.segment_bytes, host.reserved_bytes) == (0, 0)
            {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        false
    }
}

fn header(id: &str) -> Part {
    Part::Header(v1::PutHeader {
        request_id: id.to_owned(),
        name: "m".to_owned(),
        ..v1::PutHeader::default()
    })
}

fn tensors(list: &[(&str, u64)]) -> Part {
    let tensors = list.iter().map(|(name, bytes)| v1::PutTensor {
        name: (*name).to_owned(),
        dtype: "U8".to_owned(),
        shape: vec![*bytes],
        ..v1::PutTensor::default()
    });
    Part::Tensors(v1::PutTensors {
        tensors: tensors.collect(),
    })
}

fn data(tensor: &str, offset: u64, bytes: &[u8]) -> Part {
    Part::Data(v1::PutData {
        tensor: tensor.to_owned(),
        offset,
        bytes: bytes.to_vec(),
    })
}

#[tokio::test]
async fn a_set_is_loaded_listed_read_and_dropped() {
    let served = Served::new().await;
    let mut client = served.client.clone();
    let content: Vec<_> = (0..7).map(|i| format!("l.{i}")).collect();
    let content: Vec<_> = content.iter().map(|n| (n.as_str(), n.as_bytes())).collect();
    let loaded = served
        .load(served.load_request(ID, &content))
        .await
        .unwrap();
    let set = loaded.set.clone().unwrap();
    assert!(!loaded.attached);
    assert_eq!(
        (set.tensors, set.logical_bytes, set.segment_bytes),
        (7, 21, 4096)
    );
    assert_eq!(set.digest.len(), 64);

    // the same call again, whose tickets are spent
    let again = v1::LoadRequest {
        request_id: ID.to_owned(),
        name: "m".to_owned(),
        files: vec![vec![0; 16]],
        ..v1::LoadRequest::default()
    };
    assert_eq!(served.load(again.clone()).await.unwrap(), loaded);
    let other = v1::LoadRequest {
        share: true,
        ..again
    };
    let error = served.load(other).await.unwrap_err();
    assert_eq!(
        (error.kind, &*error.details["field"]),
        (Kind::InvalidArgument, "request_id")
    );

    let mut names = Vec::new();
    let mut token = String::new();
    loop {
        let request = v1::GetRequest {
            name: "m".to_owned(),
            page_size: 3,
            page_token: token,
            segment: names.is_empty(),
        };
        let page = client.get(request).await.unwrap().into_inner();
        if names.is_empty() {
            let gift = served
                .tickets
                .redeem(Served::peer(), &page.segment_ticket)
                .unwrap();
            let size = usize::try_from(gift.bytes).unwrap();
            let map = Mapping::new(gift.descriptor.as_fd(), size, Access::Read).unwrap();
            for (tensor, begin) in page.tensors.iter().zip(&page.storage_segment_offsets) {
                let at = usize::try_from(begin + tensor.storage_offset).unwrap();
                assert!(map.equals(at, tensor.name.as_bytes()).unwrap());
            }
        }
        names.extend(page.tensors.into_iter().map(|t| t.name));
        token = page.next_page_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(names.len(), 7);

    let list = client
        .list(v1::ListRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(list.sets, [set]);
    let request = v1::DropRequest {
        request_id: ID.to_owned(),
        name: "m".to_owned(),
    };
    for _ in 0..2 {
        let answer = client.drop(request.clone()).await.unwrap().into_inner();
        assert_eq!(answer.freed_bytes, 4096);
    }
    assert!(served.is_empty_soon().await);
}

#[tokio::test]
async fn lists_come_in_pages_and_bad_tokens_are_refused() {
    let served = Served::new().await;
    let uid = Served::peer().uid;
    for name in ["a", "b", "c"] {
        let request = crate::weights::load::SetRequest { uid, ..named(name) };
        served.scratch.load(&request, &[(name, b"1")]).unwrap();
    }
    let mut client = served.client.clone();
    let mut names = Vec::new();
    let mut token = String::new();
    for _ in 0..2 {
        let request = v1::ListRequest {
            page_size: 2,
            page_token: token,
        };
        let page = client.list(request).await.unwrap().into_inner();
        names.extend(page.sets.into_iter().map(|set| set.name));
        token = page.next_page_token;
    }
    assert_eq!((names.join(""), token), ("abc".to_owned(), String::new()));
    for (page_size, page_token) in [(1001, ""), (0, "x"), (0, "x/y")] {
        let page_token = page_token.to_owned();
        let request = v1::ListRequest {
            page_size,
            page_token,
        };
        let status = client.list(request).await.unwrap_err();
        assert_eq!(
            Failure::from_status(&status).unwrap().kind,
            Kind::InvalidArgument
        );
    }
    for (page_size, token) in [(2001, ""), (0, "x"), (0, "x:0"), (0, ":")] {
        let request = v1::GetRequest {
            name: "a".to_owned(),
            page_size,
            page_token: token.to_owned(),
            segment: false,
        };
        let status = client.get(request).await.unwrap_err();
        assert_eq!(
            Failure::from_status(&status).unwrap().kind,
            Kind::InvalidArgument
        );
    }
}

#[tokio::test]
async fn bad_loads_leave_nothing_behind() {
    let served = Served::new().await;
    let request = |files| v1::LoadRequest {
        request_id: ID.to_owned(),
        name: "m".to_owned(),
        files,
        ..v1::LoadRequest::default()
    };
    let cut = served.offer(fixture::source("cut", b"\x05\0\0\0\0\0\0\0{"));
    for (wanted, kind) in [
        (request(vec![vec![0; 16]]), Kind::NotFound),
        (request(vec![]), Kind::InvalidArgument),
        (request(vec![cut]), Kind::CheckpointInvalid),
        (
            v1::LoadRequest {
                name: "a/b".to_owned(),
                ..request(vec![])
            },
            Kind::InvalidArgument,
        ),
        (
            v1::LoadRequest {
                request_id: String::new(),
                ..request(vec![])
            },
            Kind::InvalidArgument,
        ),
    ] {
        assert_eq!(served.load(wanted).await.unwrap_err().kind, kind);
    }
    let mut client = served.client.clone();
    for name in ["unknown", "a/b", ""] {
        let request = v1::DropRequest {
            request_id: ID.to_owned(),
            name: name.to_owned(),
        };
        assert!(client.drop(request).await.is_err());
        let request = v1::GetRequest {
            name: name.to_owned(),
            ..v1::GetRequest::default()
        };
        assert!(client.get(request).await.is_err());
    }
    assert_eq!(served.scratch.files(), (0, 0));
    // the id of calls that failed is free
    served
        .load(served.load_request(ID, &[("a", b"1")]))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_cancelled_load_leaves_nothing() {
    let served = Served::new().await;
    let large = vec![1; 128 << 20];
    let request = served.load_request(ID, &[("a", &large)]);
    let mut client = served.client.clone();
    let mut stream = client.load(request).await.unwrap().into_inner();
    let first = stream.next().await.unwrap().unwrap();
    assert!(matches!(first.event, Some(Event::Progress(_))));
    drop(stream);
    assert!(served.is_empty_soon().await);
    assert!(served.scratch.store.all().is_empty());
}

#[tokio::test]
async fn a_set_is_put_and_put_again() {
    let served = Served::new().await;
    let parts = |id: &str| {
        vec![
            header(id),
            tensors(&[("b", 2)]),
            tensors(&[("a", 3), ("z", 0)]),
            data("a", 0, b"12"),
            data("b", 0, b"45"),
            data("a", 2, b"3"),
        ]
    };
    let answer = served.put(parts(ID)).await.unwrap();
    assert!(!answer.attached);
    assert_eq!(answer.set.as_ref().unwrap().logical_bytes, 5);
    assert_eq!(served.put(parts(ID)).await.unwrap(), answer);
    assert!(
        served
            .put(parts("another id of 16"))
            .await
            .unwrap()
            .attached
    );
    let loaded = served.load_request(
        "a third id of 16",
        &[("a", b"123"), ("b", b"45"), ("z", b"")],
    );
    assert!(served.load(loaded).await.unwrap().attached);
}

#[tokio::test]
async fn a_put_that_breaks_a_rule_or_ends_early_leaves_nothing() {
    let served = Served::new().await;
    let long = vec![0; limit::PUT_BYTES + 1];
    let huge = vec![0; limit::MESSAGE_BYTES + 1];
    let whole = tensors(&[("a", 1 << 30)]);
    for (parts, kind) in [
        (vec![], Kind::InvalidArgument),
        (vec![whole.clone()], Kind::InvalidArgument),
        (vec![header("short")], Kind::InvalidArgument),
        (vec![header(ID), header(ID)], Kind::InvalidArgument),
        (
            vec![header(ID), tensors(&[("a", 3)]), data("a", 0, b"1")],
            Kind::Aborted,
        ),
        (
            vec![header(ID), tensors(&[("a", 3)]), data("a", 1, b"1")],
            Kind::InvalidArgument,
        ),
        (
            vec![header(ID), whole.clone(), data("a", 0, &long)],
            Kind::InvalidArgument,
        ),
        (
            vec![header(ID), whole.clone(), data("a", 0, &huge)],
            Kind::InvalidArgument,
        ),
        (
            vec![header(ID), tensors(&[("a", 1 << 31)]), data("a", 0, b"1")],
            Kind::HostMemory,
        ),
        (
            vec![header(ID), tensors(&[("a\0", 1)])],
            Kind::InvalidArgument,
        ),
    ] {
        assert_eq!(served.put(parts).await.unwrap_err().kind, kind);
        assert!(served.is_empty_soon().await);
    }
    let silent = v1::PutRequest { part: None };
    let mut client = served.client.clone();
    assert!(client.put(tokio_stream::iter([silent])).await.is_err());
}

#[tokio::test]
async fn a_client_that_goes_away_in_mid_put_leaves_nothing() {
    let served = Served::new().await;
    let mut client = served.client.clone();
    let (sender, receiver) = mpsc::channel(4);
    for part in [header(ID), tensors(&[("a", 3)]), data("a", 0, b"1")] {
        sender
            .send(v1::PutRequest { part: Some(part) })
            .await
            .unwrap();
    }
    let call = tokio::spawn(async move { client.put(ReceiverStream::new(receiver)).await });
    while served.scratch.store.host().reserved_bytes == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    call.abort();
    assert!(served.is_empty_soon().await);
    drop(sender);
}

#[tokio::test]
async fn an_administrator_lists_all_sets_with_their_owners_and_drops_its_own_first() {
    let served = Served::new().await;
    let own = Served::peer().uid;
    for uid in [own, 1234] {
        let request = SetRequest { uid, ..named("m") };
        served.scratch.load(&request, &[("a", b"1")]).unwrap();
    }
    let mut client = served.client.clone();
    let mut owners = Vec::new();
    for round in ["0", "1", "2"] {
        let list = client.list(v1::ListRequest::default()).await.unwrap();
        let sets = list.into_inner().sets;
        owners.push(sets.iter().map(|set| set.owner_uid).collect::<Vec<_>>());
        let request = v1::DropRequest {
            request_id: format!("{ID}{round}"),
            name: "m".to_owned(),
        };
        assert_eq!(client.drop(request).await.is_ok(), !sets.is_empty());
    }
    assert_eq!(owners, [vec![own, 1234], vec![1234], vec![]]);
}
