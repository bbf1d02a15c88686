//! The descriptor channel: what gRPC cannot carry.

use std::{
    fs::File,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use flextensord_device::descriptor;
use flextensord_proto::{
    PROTOCOL,
    kind::{Failure, Kind, Origin},
    limit,
    v1::{
        ChannelAnswer, ChannelRequest, Hello, Offer, Redeem, Refused, channel_answer::Answer,
        channel_request::Request,
    },
};
use prost::Message as _;

use crate::error::{ClientError, unreachable};

/// How long one packet may take each way.
const PACKET_LIMIT: Duration = Duration::from_secs(10);

/// A connection to `fd.sock`, kept open for life: where the daemon can have no pidfd,
/// its end is how the daemon knows that this process is gone. Calls block for at most
/// ten seconds each way.
#[derive(Debug)]
pub(crate) struct DescriptorChannel {
    path: PathBuf,
    /// None after a failed exchange: request and answer would no longer pair up.
    connection: Mutex<Option<Connection>>,
}

/// A connection that has said hello.
#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    /// Of the daemon at its other end.
    generation: u64,
}

impl DescriptorChannel {
    /// A channel that connects when it is first used.
    pub(crate) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            connection: Mutex::new(None),
        }
    }

    /// Connects and exchanges versions, unless that was done. Returns the generation of the
    /// daemon at the other end.
    pub(crate) fn hello(&self) -> Result<u64, ClientError> {
        let mut guard = self.lock();
        let connection = connected(&mut guard, &self.path)?;
        let generation = connection.generation;
        *guard = Some(connection);
        Ok(generation)
    }

    /// The descriptor that `ticket` stands for.
    pub(crate) fn redeem(&self, ticket: &[u8]) -> Result<OwnedFd, ClientError> {
        let redeem = Request::Redeem(Redeem {
            ticket: ticket.to_vec(),
        });
        match self.exchange("redeem a ticket", redeem, &[])? {
            (Answer::Redeemed(_), mut descriptors) if descriptors.len() == 1 => descriptors
                .pop()
                .ok_or_else(|| unexpected("redeem a ticket")),
            _ => Err(unexpected("redeem a ticket")),
        }
    }

    /// Hands descriptors of its predecessor back to a daemon, and returns one ticket each,
    /// in their order.
    pub(crate) fn hand_back(&self, own: &[OwnedFd]) -> Result<Vec<Vec<u8>>, ClientError> {
        self.give(
            "hand descriptors back",
            true,
            own.iter().map(|fd| ("own".to_owned(), fd.as_fd())),
        )
    }

    /// Hands files over, and returns one ticket each, in their order.
    pub(crate) fn offer(&self, files: &[(String, &File)]) -> Result<Vec<Vec<u8>>, ClientError> {
        let files = files
            .iter()
            .map(|(name, file)| (name.clone(), file.as_fd()));
        self.give("offer files", false, files)
    }

    fn give<'a>(
        &self,
        what: &'static str,
        handed_back: bool,
        given: impl Iterator<Item = (String, BorrowedFd<'a>)>,
    ) -> Result<Vec<Vec<u8>>, ClientError> {
        let given: Vec<_> = given.collect();
        let mut tickets = Vec::with_capacity(given.len());
        for packet in given.chunks(limit::PACKET_DESCRIPTORS) {
            let offer = Request::Offer(Offer {
                file_names: packet.iter().map(|(name, _)| name.clone()).collect(),
                handed_back,
            });
            let descriptors: Vec<BorrowedFd<'_>> = packet.iter().map(|(_, fd)| *fd).collect();
            match self.exchange(what, offer, &descriptors)? {
                (Answer::Offered(offered), _) if offered.tickets.len() == packet.len() => {
                    tickets.extend(offered.tickets);
                }
                _ => return Err(unexpected(what)),
            }
        }
        Ok(tickets)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Connection>> {
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn exchange(
        &self,
        what: &'static str,
        request: Request,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(Answer, Vec<OwnedFd>), ClientError> {
        let mut guard = self.lock();
        let connection = connected(&mut guard, &self.path)?;
        let answer = ask(&connection.socket, what, request, descriptors)?;
        // it answered in order, so it can be used again, refused or not
        *guard = Some(connection);
        match answer {
            (Answer::Refused(refused), _) => Err(refusal(refused).into()),
            answered => Ok(answered),
        }
    }
}

fn refusal(refused: Refused) -> Failure {
    let kind = Kind::parse(&refused.kind).unwrap_or(Kind::Internal);
    let details = [
        ("field", refused.field),
        ("value", refused.value),
        ("rule", refused.rule),
    ];
    let failure = Failure::new(kind, Origin::Client, refused.message);
    // an older daemon says less
    let said = details.into_iter().filter(|(_, text)| !text.is_empty());
    said.fold(failure, |failure, (name, text)| failure.with(name, text))
}

/// The connection, taken out while it is used, or a new one.
fn connected(slot: &mut Option<Connection>, path: &Path) -> Result<Connection, ClientError> {
    match slot.take() {
        Some(connection) if !has_ended(&connection.socket) => Ok(connection),
        _ => greet(path),
    }
}

/// Connects and says hello.
fn greet(path: &Path) -> Result<Connection, ClientError> {
    let socket = descriptor::connect_to(path, PACKET_LIMIT)
        .map_err(|error| unreachable(path, &error.source))?;
    let hello = Request::Hello(Hello {
        protocol: PROTOCOL.1,
    });
    match ask(&socket, "say hello", hello, &[])? {
        (Answer::Welcome(welcome), _) => Ok(Connection {
            socket,
            generation: welcome.daemon_generation,
        }),
        (Answer::Refused(refused), _) => Err(refusal(refused).into()),
        _ => Err(unexpected("say hello")),
    }
}

/// Sends one request and waits for its answer.
fn ask(
    connection: &OwnedFd,
    what: &'static str,
    request: Request,
    descriptors: &[BorrowedFd<'_>],
) -> Result<(Answer, Vec<OwnedFd>), ClientError> {
    let request = ChannelRequest {
        request: Some(request),
    };
    let packet = request.encode_to_vec();
    if packet.len() > limit::PACKET_BYTES {
        return Err(ClientError::Range {
            what: format!("packet to {what}"),
            value: packet.len() as u64,
            rule: format!("over the limit of {} bytes", limit::PACKET_BYTES),
        });
    }
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::WouldBlock => ClientError::Deadline {
            what: format!("descriptor channel: {what}"),
            limit: PACKET_LIMIT,
        },
        _ => ClientError::Channel {
            what,
            reason: error.to_string(),
        },
    };
    descriptor::send(connection.as_fd(), &packet, descriptors).map_err(failed)?;
    let (packet, descriptors) = loop {
        match descriptor::receive(connection.as_fd()) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            received => break received.map_err(failed)?,
        }
    };
    if packet.is_empty() {
        return Err(ClientError::Channel {
            what,
            reason: "the daemon closed the connection".to_owned(),
        });
    }
    let answer = ChannelAnswer::decode(packet.as_slice())
        .ok()
        .and_then(|answer| answer.answer)
        .ok_or_else(|| unexpected(what))?;
    Ok((answer, descriptors))
}

/// Whether the other side has closed (the daemon restarted since the last exchange), or
/// sent what nobody asked for.
fn has_ended(connection: &OwnedFd) -> bool {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let mut polled = [PollFd::new(connection.as_fd(), PollFlags::POLLIN)];
    matches!(poll(&mut polled, PollTimeout::ZERO), Ok(ready) if ready > 0)
}

fn unexpected(what: &'static str) -> ClientError {
    ClientError::Protocol {
        call: what,
        reason: "unexpected answer on the descriptor channel".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use flextensord_proto::v1::{Offered, Redeemed, Welcome};

    use super::*;

    /// Serves one connection with a fixed list of answers, each to one request.
    fn serve(
        path: &Path,
        answers: Vec<(Answer, Option<File>)>,
    ) -> std::thread::JoinHandle<Vec<usize>> {
        let listener = descriptor::bind_listener(path).unwrap();
        std::thread::spawn(move || {
            let connection = loop {
                match descriptor::accept(listener.as_fd()) {
                    Ok(connection) => break connection,
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            };
            let mut counts = Vec::new();
            for (answer, file) in answers {
                let (_, descriptors) = loop {
                    match descriptor::receive(connection.as_fd()) {
                        Ok(received) => break received,
                        Err(_) => std::thread::sleep(Duration::from_millis(1)),
                    }
                };
                counts.push(descriptors.len());
                let answer = ChannelAnswer {
                    answer: Some(answer),
                };
                let files: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
                descriptor::send(connection.as_fd(), &answer.encode_to_vec(), &files).unwrap();
            }
            counts
        })
    }

    fn welcome() -> (Answer, Option<File>) {
        (Answer::Welcome(Welcome::default()), None)
    }

    #[test]
    fn a_ticket_becomes_a_descriptor_and_a_refusal_keeps_the_connection() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fd.sock");
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"weights").unwrap();
        std::io::Seek::rewind(&mut file).unwrap();
        let refused = Answer::Refused(Refused {
            kind: "NOT_FOUND".to_owned(),
            message: "no such ticket".to_owned(),
            ..Refused::default()
        });
        let redeemed = Answer::Redeemed(Redeemed { bytes: 7 });
        let served = serve(
            &path,
            vec![welcome(), (refused, None), (redeemed, Some(file))],
        );
        let channel = DescriptorChannel::new(&path);
        channel.hello().unwrap();
        assert_eq!(
            channel.redeem(b"x").unwrap_err().kind(),
            Some(Kind::NotFound)
        );
        let mut text = String::new();
        let mut got = File::from(channel.redeem(b"t").unwrap());
        got.read_to_string(&mut text).unwrap();
        assert_eq!(text, "weights");
        served.join().unwrap();
    }

    #[test]
    fn many_files_travel_in_several_packets() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fd.sock");
        let offered = |count: usize| {
            let tickets = vec![vec![1]; count];
            (Answer::Offered(Offered { tickets }), None)
        };
        let served = serve(&path, vec![welcome(), offered(64), offered(6)]);
        let channel = DescriptorChannel::new(&path);
        channel.hello().unwrap();
        let file = tempfile::tempfile().unwrap();
        let files: Vec<_> = (0..70)
            .map(|n| (format!("{n}.safetensors"), &file))
            .collect();
        assert_eq!(channel.offer(&files).unwrap().len(), 70);
        assert_eq!(served.join().unwrap(), [0, 64, 6]);
    }

    #[test]
    fn a_socket_without_a_daemon_is_unreachable() {
        let directory = tempfile::tempdir().unwrap();
        let error = DescriptorChannel::new(&directory.path().join("fd.sock"))
            .hello()
            .unwrap_err();
        assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
    }
}
