//! The socket where tickets are redeemed and files handed over.

use std::{
    collections::HashSet,
    fmt::Display,
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use flextensord_device::{
    descriptor,
    process::{self, Peer},
    readiness::Watched,
};
use flextensord_proto::{
    limit, name, negotiate,
    v1::{
        ChannelAnswer, ChannelRequest, Hello, Offer, Offered, Redeem, Redeemed, Refused, Welcome,
        channel_answer::Answer, channel_request::Request,
    },
};
use prost::Message as _;
use tokio_util::sync::CancellationToken;

use super::ticket::{OfferedFile, Tickets};
use crate::{
    admission::{Backoff, Complaints, Limits, Room},
    managers::registry::Managers,
};

/// Most connections at a time, before the limit of descriptors is looked at.
pub const LIMITS: Limits = Limits {
    all: 4096,
    of_user: 1024,
    of_process: 1024,
};
/// What a receive says when the process may open no more descriptors.
const EMFILE: i32 = nix::errno::Errno::EMFILE as i32;
/// How long a connection may take to say hello.
const HELLO: Duration = Duration::from_secs(10);

/// What the channel serves from.
#[derive(Debug, Clone)]
pub struct ChannelServer {
    /// Tickets that wait.
    pub tickets: Arc<Tickets>,
    /// Told when the process of a manager without a visible pid is gone.
    pub managers: Weak<Managers>,
    /// The daemon's generation.
    pub generation: u64,
    /// Its connections.
    pub room: Arc<Room>,
}

impl ChannelServer {
    /// Accepts connections until `stop` is cancelled.
    ///
    /// # Errors
    /// When the listener cannot be watched.
    pub async fn serve(self, listener: OwnedFd, stop: CancellationToken) -> io::Result<()> {
        let listener = Watched::new(listener)?;
        let mut complaints = Complaints::about("fd.sock");
        let mut backoff = Backoff::default();
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                accepted = listener.read(descriptor::accept) => accepted,
            };
            let connection = match accepted {
                Ok(connection) => connection,
                Err(error) => {
                    complaints.add(&error);
                    // leaves room for some to close
                    tokio::time::sleep(backoff.wait()).await;
                    continue;
                }
            };
            backoff.reset();
            let Ok(peer) = process::peer(connection.as_fd()) else {
                continue;
            };
            let place = match Room::enter(&self.room, peer) {
                Ok(place) => place,
                Err(refusal) => {
                    complaints.add(&refusal);
                    continue;
                }
            };
            let (server, stop) = (self.clone(), stop.clone());
            tokio::spawn(async move {
                tokio::select! {
                    () = stop.cancelled() => {}
                    ended = server.converse(connection, peer, place.number) => {
                        if let Err(error) = ended {
                            tracing::debug!(%error, "descriptor channel ended");
                        }
                    }
                }
                server.tickets.close(place.number);
                drop(place);
            });
        }
    }

    /// Answers one peer until it is gone.
    async fn converse(&self, connection: OwnedFd, peer: Peer, number: u64) -> io::Result<()> {
        let connection = Watched::new(connection)?;
        let mut talk = Talk {
            peer,
            number,
            greeted: false,
            served: HashSet::new(),
        };
        let silence = Instant::now() + HELLO;
        let outcome = loop {
            let receive = connection.read(descriptor::receive);
            let received = if talk.greeted {
                receive.await
            } else {
                let limit = silence.saturating_duration_since(Instant::now());
                match tokio::time::timeout(limit, receive).await {
                    Ok(received) => received,
                    Err(_) => break Ok(()),
                }
            };
            let (answer, gift) = match received {
                Ok((packet, _)) if packet.is_empty() => break Ok(()),
                Ok((packet, descriptors)) => self.answer(&mut talk, &packet, descriptors),
                // the packet is gone as a whole, the next one can be read
                Err(error) if error.kind() == io::ErrorKind::InvalidData => (over_limit(), None),
                Err(error) if error.raw_os_error() == Some(EMFILE) => (out_of_descriptors(), None),
                Err(error) => break Err(error),
            };
            let answer = ChannelAnswer {
                answer: Some(answer),
            }
            .encode_to_vec();
            let gifts: Vec<BorrowedFd<'_>> = gift.iter().map(|gift| gift.as_fd()).collect();
            let sent = connection.write(|socket| descriptor::send(socket, &answer, &gifts));
            if let Err(error) = sent.await {
                break Err(error);
            }
        };
        if let Some(managers) = self.managers.upgrade() {
            for manager in talk.served {
                managers.channel_closed(manager);
            }
        }
        outcome
    }

    fn answer(
        &self,
        talk: &mut Talk,
        packet: &[u8],
        descriptors: Vec<OwnedFd>,
    ) -> (Answer, Option<OwnedFd>) {
        match ChannelRequest::decode(packet).map(|request| request.request) {
            Ok(Some(Request::Hello(hello))) => (self.welcome(talk, &hello), None),
            Ok(Some(_)) if !talk.greeted => {
                let rule = "hello comes first";
                (
                    refused("FAILED_PRECONDITION", "request", "another", rule),
                    None,
                )
            }
            Ok(Some(Request::Redeem(redeem))) => self.redeem(talk, &redeem),
            Ok(Some(Request::Offer(offer))) => (self.take(talk, &offer, descriptors), None),
            Ok(None) => (invalid("request", "empty", "hello, redeem or offer"), None),
            Err(error) => (invalid("packet", error, "a ChannelRequest"), None),
        }
    }

    fn welcome(&self, talk: &mut Talk, hello: &Hello) -> Answer {
        match negotiate(hello.protocol, hello.protocol) {
            Some(protocol) => {
                talk.greeted = true;
                Answer::Welcome(Welcome {
                    protocol,
                    daemon_generation: self.generation,
                })
            }
            None => {
                let (lowest, highest) = flextensord_proto::PROTOCOL;
                let rule = format!("version {lowest} to {highest}");
                refused("PROTOCOL_VERSION", "protocol", hello.protocol, rule)
            }
        }
    }

    fn redeem(&self, talk: &mut Talk, redeem: &Redeem) -> (Answer, Option<OwnedFd>) {
        match self.tickets.redeem(talk.peer, &redeem.ticket) {
            Ok(gift) => {
                talk.served.extend(gift.manager);
                (
                    Answer::Redeemed(Redeemed { bytes: gift.bytes }),
                    Some(gift.descriptor),
                )
            }
            Err(error) => (refused("NOT_FOUND", "ticket", "(not shown)", error), None),
        }
    }

    fn take(&self, talk: &Talk, offer: &Offer, descriptors: Vec<OwnedFd>) -> Answer {
        if offer.file_names.len() != descriptors.len() || descriptors.is_empty() {
            let value = format!(
                "{} names with {} descriptors",
                offer.file_names.len(),
                descriptors.len()
            );
            return invalid(
                "file_names",
                value,
                "a name for each descriptor, at least one",
            );
        }
        let mut tickets = Vec::with_capacity(descriptors.len());
        for (name, descriptor) in offer.file_names.iter().zip(descriptors) {
            let checked = match offer.handed_back {
                // what it is shows when it is taken back
                true => Ok(()),
                false => check_file(name, descriptor.as_fd()),
            };
            if let Err(rule) = checked {
                let shown: String = name.chars().take(limit::NAME_BYTES).collect();
                return invalid("file_names", format!("{shown:?}"), rule);
            }
            let file = OfferedFile {
                name: name.clone(),
                file: descriptor.into(),
                connection: talk.number,
            };
            match self.tickets.offer(talk.peer, file) {
                Ok(ticket) => tickets.push(ticket),
                Err(error) => {
                    return refused("TOO_MANY", "file_names", offer.file_names.len(), error);
                }
            }
        }
        Answer::Offered(Offered { tickets })
    }
}

/// One connection and what is known of it.
struct Talk {
    peer: Peer,
    number: u64,
    greeted: bool,
    /// Managers whose tickets it redeemed.
    served: HashSet<u64>,
}

fn check_file(name: &str, descriptor: BorrowedFd<'_>) -> Result<(), String> {
    name::check_qualified(name).map_err(|error| error.to_string())?;
    if name.contains('/') || matches!(name, "." | "..") {
        return Err("the plain name of a file, without a directory".to_owned());
    }
    if descriptor::is_readable_regular_file(descriptor) {
        Ok(())
    } else {
        Err("a regular file open for reading".to_owned())
    }
}

fn over_limit() -> Answer {
    let rule = format!(
        "at most {} bytes and {} descriptors",
        limit::PACKET_BYTES,
        limit::PACKET_DESCRIPTORS
    );
    invalid("packet", "larger", rule)
}

fn out_of_descriptors() -> Answer {
    let value = "whole, but the daemon has no descriptors left for its files";
    let rule = "try again when others have closed theirs";
    refused("TOO_MANY", "packet", value, rule)
}

fn invalid(field: &str, value: impl Display, rule: impl Display) -> Answer {
    refused("INVALID_ARGUMENT", field, value, rule)
}

fn refused(kind: &str, field: &str, value: impl Display, rule: impl Display) -> Answer {
    Answer::Refused(Refused {
        kind: kind.to_owned(),
        message: format!("{field} is {value}: {rule}"),
        field: field.to_owned(),
        value: value.to_string(),
        rule: rule.to_string(),
    })
}
