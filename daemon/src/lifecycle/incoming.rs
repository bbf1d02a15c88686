//! The connections of the gRPC socket: so many and no more, and none that stays silent.

use std::{
    io::{self, IoSlice},
    os::fd::AsFd as _,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use flextensord_device::process;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{UnixListener, UnixStream},
    sync::mpsc,
    time::{self, Sleep},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::{Connected, UdsConnectInfo};

use crate::admission::{Backoff, Complaints, Limits, Place, Room};

/// Most connections at a time, before the limit of descriptors is looked at. A client has
/// one; a process of several clients has several.
pub const LIMITS: Limits = Limits {
    all: 4096,
    of_user: 256,
    of_process: 64,
};
/// How long a connection may take to say that it speaks HTTP/2. Later silence is legal: a
/// client that is stopped keeps its lease.
const GREETING: Duration = Duration::from_secs(10);
/// What it says first: the preface, then a frame of settings, at least its head.
const GREETING_BYTES: usize = 24 + 9;

/// Accepts connections for as long as the stream is there.
pub fn connections(
    listener: UnixListener,
    room: Arc<Room>,
) -> ReceiverStream<io::Result<Connection>> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(accept(listener, room, sender));
    ReceiverStream::new(receiver)
}

async fn accept(
    listener: UnixListener,
    room: Arc<Room>,
    sender: mpsc::Sender<io::Result<Connection>>,
) {
    let mut complaints = Complaints::about("flextensord.sock");
    let mut backoff = Backoff::default();
    loop {
        let accepted = tokio::select! {
            () = sender.closed() => return,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                complaints.add(&error);
                // it waits in the queue of the socket until there is a descriptor for it
                time::sleep(backoff.wait()).await;
                continue;
            }
        };
        backoff.reset();
        let entered = match process::peer(stream.as_fd()) {
            Ok(peer) => Room::enter(&room, peer),
            Err(error) => {
                complaints.add(&error);
                continue;
            }
        };
        match entered {
            Ok(place) => {
                let connection = Connection::new(stream, place, GREETING);
                if sender.send(Ok(connection)).await.is_err() {
                    return;
                }
            }
            // closed at once: the peer learns it now and not when a call never ends
            Err(refusal) => complaints.add(&refusal),
        }
    }
}

/// A connection that has a place, and a limited time to say its first words.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    greeting: Option<Greeting>,
    _place: Place,
}

#[derive(Debug)]
struct Greeting {
    missing: usize,
    deadline: Pin<Box<Sleep>>,
}

impl Connection {
    fn new(stream: UnixStream, place: Place, limit: Duration) -> Self {
        Self {
            stream,
            greeting: Some(Greeting {
                missing: GREETING_BYTES,
                deadline: Box::pin(time::sleep(limit)),
            }),
            _place: place,
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let polled = Pin::new(&mut this.stream).poll_read(context, buffer);
        let Some(greeting) = &mut this.greeting else {
            return polled;
        };
        greeting.missing = greeting
            .missing
            .saturating_sub(buffer.filled().len() - before);
        if greeting.missing == 0 {
            this.greeting = None;
            return polled;
        }
        if polled.is_ready() {
            return polled;
        }
        ready!(greeting.deadline.as_mut().poll(context));
        let text = "no preface of HTTP/2 in time";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, text)))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const SHORT: Duration = Duration::from_millis(50);

    fn pair() -> (UnixStream, Connection, Arc<Room>) {
        let (near, far) = UnixStream::pair().unwrap();
        let room = Room::new(LIMITS, 0);
        let peer = process::peer(far.as_fd()).unwrap();
        let place = Room::enter(&room, peer).unwrap();
        (near, Connection::new(far, place, SHORT), room)
    }

    #[tokio::test]
    async fn a_connection_without_a_whole_greeting_ends_however_it_drips() {
        let (mut near, mut connection, _room) = pair();
        let drip = async {
            for byte in &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0"[..] {
                near.write_all(std::slice::from_ref(byte)).await.unwrap();
                time::sleep(SHORT / 20).await;
            }
        };
        let mut buffer = [0; 64];
        let read = async {
            loop {
                match connection.read(&mut buffer).await {
                    Ok(count) => assert_ne!(count, 0),
                    Err(error) => return error.kind(),
                }
            }
        };
        let ((), ended) = tokio::join!(drip, read);
        assert_eq!(ended, io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_connection_that_has_said_its_greeting_may_be_silent() {
        let (mut near, mut connection, _room) = pair();
        near.write_all(&[b'x'; GREETING_BYTES]).await.unwrap();
        let mut buffer = [0; 64];
        assert_eq!(connection.read(&mut buffer).await.unwrap(), GREETING_BYTES);
        let read = connection.read(&mut buffer);
        assert!(time::timeout(SHORT * 4, read).await.is_err());
    }

    #[tokio::test]
    async fn connections_over_the_limit_are_closed_at_once_and_room_comes_back() {
        use tokio_stream::StreamExt as _;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let limits = Limits {
            of_process: 2,
            ..LIMITS
        };
        let mut stream = connections(listener, Room::new(limits, 0));
        let _one = UnixStream::connect(&path).await.unwrap();
        let first = stream.next().await.unwrap().unwrap();
        let _two = UnixStream::connect(&path).await.unwrap();
        let _second = stream.next().await.unwrap().unwrap();
        let mut three = UnixStream::connect(&path).await.unwrap();
        assert_eq!(three.read(&mut [0; 1]).await.unwrap(), 0);
        drop(first);
        let _four = UnixStream::connect(&path).await.unwrap();
        assert!(stream.next().await.unwrap().is_ok());
    }
}
