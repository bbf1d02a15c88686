//! The socket where tickets are redeemed and files handed over.

use std::{
    collections::HashSet,
    fmt::Display,
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::{Arc, Weak},
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
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::ticket::{OfferedFile, Tickets};
use crate::managers::registry::Managers;

/// Most connections at a time.
const CONNECTIONS: usize = 4096;

/// What the channel serves from.
#[derive(Debug, Clone)]
pub struct ChannelServer {
    /// Tickets that wait.
    pub tickets: Arc<Tickets>,
    /// Told when the process of a manager without a visible pid is gone.
    pub managers: Weak<Managers>,
    /// The daemon's generation.
    pub generation: u64,
}

impl ChannelServer {
    /// Accepts connections until `stop` is cancelled.
    ///
    /// # Errors
    /// When the listener cannot be watched.
    pub async fn serve(self, listener: OwnedFd, stop: CancellationToken) -> io::Result<()> {
        let listener = Watched::new(listener)?;
        let room = Arc::new(Semaphore::new(CONNECTIONS));
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                accepted = listener.read(descriptor::accept) => accepted,
            };
            let connection = match accepted {
                Ok(connection) => connection,
                Err(error) => {
                    // out of descriptors, most likely: leave room for some to close
                    tracing::warn!(%error, "descriptor channel cannot accept");
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                    continue;
                }
            };
            let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
                tracing::warn!(limit = CONNECTIONS, "too many descriptor channels");
                continue;
            };
            let (server, stop) = (self.clone(), stop.clone());
            tokio::spawn(async move {
                tokio::select! {
                    () = stop.cancelled() => {}
                    ended = server.converse(connection) => {
                        if let Err(error) = ended {
                            tracing::debug!(%error, "descriptor channel ended");
                        }
                    }
                }
                drop(permit);
            });
        }
    }

    /// Answers one peer until it is gone.
    async fn converse(&self, connection: OwnedFd) -> io::Result<()> {
        let peer = process::peer(connection.as_fd()).map_err(|error| error.source)?;
        let connection = Watched::new(connection)?;
        let mut served = HashSet::new();
        let outcome = loop {
            let received = connection.read(descriptor::receive).await;
            let (answer, gift) = match received {
                Ok((packet, _)) if packet.is_empty() => break Ok(()),
                Ok((packet, descriptors)) => self.answer(peer, &packet, descriptors, &mut served),
                // the packet is gone as a whole, the next one can be read
                Err(error) if error.kind() == io::ErrorKind::InvalidData => (over_limit(), None),
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
            served
                .into_iter()
                .for_each(|manager| managers.channel_closed(manager));
        }
        outcome
    }

    fn answer(
        &self,
        peer: Peer,
        packet: &[u8],
        descriptors: Vec<OwnedFd>,
        served: &mut HashSet<u64>,
    ) -> (Answer, Option<OwnedFd>) {
        match ChannelRequest::decode(packet).map(|request| request.request) {
            Ok(Some(Request::Hello(hello))) => (self.welcome(&hello), None),
            Ok(Some(Request::Redeem(redeem))) => self.redeem(peer, &redeem, served),
            Ok(Some(Request::Offer(offer))) => (self.take(peer, &offer, descriptors), None),
            Ok(None) => (invalid("request", "empty", "hello, redeem or offer"), None),
            Err(error) => (invalid("packet", error, "a ChannelRequest"), None),
        }
    }

    fn welcome(&self, hello: &Hello) -> Answer {
        match negotiate(hello.protocol, hello.protocol) {
            Some(protocol) => Answer::Welcome(Welcome {
                protocol,
                daemon_generation: self.generation,
            }),
            None => {
                let (lowest, highest) = flextensord_proto::PROTOCOL;
                let rule = format!("version {lowest} to {highest}");
                refused("PROTOCOL_VERSION", "protocol", hello.protocol, rule)
            }
        }
    }

    fn redeem(
        &self,
        peer: Peer,
        redeem: &Redeem,
        served: &mut HashSet<u64>,
    ) -> (Answer, Option<OwnedFd>) {
        match self.tickets.redeem(peer, &redeem.ticket) {
            Ok(gift) => {
                served.extend(gift.manager);
                (
                    Answer::Redeemed(Redeemed { bytes: gift.bytes }),
                    Some(gift.descriptor),
                )
            }
            Err(error) => (refused("NOT_FOUND", "ticket", "(not shown)", error), None),
        }
    }

    fn take(&self, peer: Peer, offer: &Offer, descriptors: Vec<OwnedFd>) -> Answer {
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
            if let Err(rule) = check_file(name, descriptor.as_fd()) {
                let shown: String = name.chars().take(limit::NAME_BYTES).collect();
                return invalid("file_names", format!("{shown:?}"), rule);
            }
            let file = OfferedFile {
                name: name.clone(),
                file: descriptor.into(),
            };
            match self.tickets.offer(peer, file) {
                Ok(ticket) => tickets.push(ticket),
                Err(error) => {
                    return refused("TOO_MANY", "file_names", offer.file_names.len(), error);
                }
            }
        }
        Answer::Offered(Offered { tickets })
    }
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
