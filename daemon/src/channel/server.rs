//! The socket where tickets are redeemed and files handed over.

use std::{
    collections::{HashMap, HashSet},
    fmt::Display,
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
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
use crate::managers::registry::Managers;

/// Most connections at a time, of all users and of one.
const CONNECTIONS: usize = 4096;
const CONNECTIONS_OF_USER: usize = 1024;
/// How long a connection may take to say hello.
const HELLO: Duration = Duration::from_secs(10);
/// Time between two lines of the log about connections that are refused.
const COMPLAINT: Duration = Duration::from_secs(10);

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
        let room = Arc::new(Room::default());
        let mut complained: Option<Instant> = None;
        let mut complain = |what: &dyn Display| {
            if complained.is_none_or(|at| at.elapsed() > COMPLAINT) {
                complained = Some(Instant::now());
                tracing::warn!("descriptor channel refuses a connection: {what}");
            }
        };
        loop {
            let accepted = tokio::select! {
                () = stop.cancelled() => return Ok(()),
                accepted = listener.read(descriptor::accept) => accepted,
            };
            let connection = match accepted {
                Ok(connection) => connection,
                Err(error) => {
                    // out of descriptors, most likely: leave room for some to close
                    complain(&error);
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let Ok(peer) = process::peer(connection.as_fd()) else {
                continue;
            };
            let Some(place) = Room::enter(&room, peer.uid) else {
                complain(&format_args!("user {} has too many", peer.uid));
                continue;
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
            if let Err(rule) = check_file(name, descriptor.as_fd()) {
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

/// How many connections there are, of whom.
#[derive(Debug, Default)]
struct Room {
    of_user: Mutex<HashMap<u32, usize>>,
    next: AtomicU64,
}

/// A connection's place; dropped, it is free again.
#[derive(Debug)]
struct Place {
    room: Arc<Room>,
    uid: u32,
    number: u64,
}

impl Room {
    fn enter(room: &Arc<Self>, uid: u32) -> Option<Place> {
        let mut of_user = room.of_user();
        let own = of_user.get(&uid).copied().unwrap_or(0);
        if own >= CONNECTIONS_OF_USER || of_user.values().sum::<usize>() >= CONNECTIONS {
            return None;
        }
        of_user.insert(uid, own + 1);
        Some(Place {
            room: Arc::clone(room),
            uid,
            number: room.next.fetch_add(1, Relaxed),
        })
    }

    fn of_user(&self) -> MutexGuard<'_, HashMap<u32, usize>> {
        self.of_user.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut of_user = self.room.of_user();
        match of_user.get_mut(&self.uid) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(of_user.remove(&self.uid)),
        }
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
