//! The connection to a daemon: deadlines, one retry, and what a fork does to it.

use std::{
    future::Future,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use flextensord_device::{cuda::driver::Driver, fork::ForkMark};
use tokio::runtime::Handle;
use tonic::{
    Request, Status,
    transport::{Channel, Endpoint},
};

use crate::{
    channel::DescriptorChannel,
    error::{self, ClientError},
    locate::{Address, Location},
};

/// Pause before a call whose connection failed is sent once more.
const AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Where to connect, and how long things may take.
#[derive(Debug, Clone)]
pub struct ConnectOptions {
    /// Where the daemon is; the default asks the environment.
    pub address: Address,
    /// Limit of the connect itself.
    pub connect_timeout: Duration,
    /// Limit of an ordinary call.
    pub call_timeout: Duration,
    /// Limit of a call that moves many bytes (registering a model); for a load or an
    /// upload, of each step of its progress.
    pub long_timeout: Duration,
    /// How long a manager whose daemon is gone waits for a successor.
    pub patience: Duration,
    /// The CUDA driver for managers on a GPU. `None`, as it should be, is that of the
    /// system, loaded once a manager is opened on one; tests give another.
    pub driver: Option<Arc<dyn Driver>>,
}

impl Default for ConnectOptions {
    /// The environment's daemon; 5 s, 30 s, 600 s and 30 s.
    fn default() -> Self {
        Self {
            address: Address::default(),
            connect_timeout: Duration::from_secs(5),
            call_timeout: Duration::from_secs(30),
            long_timeout: Duration::from_secs(600),
            patience: Duration::from_secs(30),
            driver: None,
        }
    }
}

/// A connection to the daemon, cheap to clone. It reconnects by itself when the daemon
/// was restarted. Its calls run on the tokio runtime that it was connected on; that
/// runtime must go on while a manager is open, so take one with a worker thread (or
/// [`crate::blocking`], which has its own).
#[derive(Debug, Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Taken only on drop.
    live: Option<Live>,
    mark: ForkMark,
    location: Location,
    options: ConnectOptions,
}

#[derive(Debug)]
struct Live {
    channel: Channel,
    descriptors: Arc<DescriptorChannel>,
    runtime: Handle,
}

impl Client {
    /// Connects.
    ///
    /// # Errors
    /// [`ClientError::Locate`] when no socket can be named, [`ClientError::Unreachable`]
    /// when nobody answers there, [`ClientError::Deadline`].
    pub async fn connect(options: ConnectOptions) -> Result<Self, ClientError> {
        let location = options.address.locate()?;
        let channel = dial(&location.socket, options.connect_timeout).await?;
        let descriptors = DescriptorChannel::new(&location.descriptor_socket);
        Ok(Self {
            inner: Arc::new(Inner {
                live: Some(Live {
                    channel,
                    descriptors: Arc::new(descriptors),
                    runtime: Handle::current(),
                }),
                mark: ForkMark::new(),
                location,
                options,
            }),
        })
    }

    /// The sockets that it is connected to.
    #[must_use]
    pub fn location(&self) -> &Location {
        &self.inner.location
    }

    /// The options that it was connected with.
    #[must_use]
    pub fn options(&self) -> &ConnectOptions {
        &self.inner.options
    }

    /// Refuses a forked child, before anything of the runtime is touched: its threads
    /// are not in the child, and a call would wait for ever.
    pub(crate) fn check_process(&self) -> Result<(), ClientError> {
        check_process(&self.inner.mark)
    }

    /// The runtime that its calls run on.
    pub(crate) fn runtime(&self) -> Result<&Handle, ClientError> {
        self.live().map(|live| &live.runtime)
    }

    /// Runs `work` with the descriptor channel on a thread that may block.
    pub(crate) async fn descriptors<T, F>(&self, work: F) -> Result<T, ClientError>
    where
        T: Send + 'static,
        F: FnOnce(&DescriptorChannel) -> Result<T, ClientError> + Send + 'static,
    {
        let live = self.live()?;
        let channel = live.descriptors.clone();
        let work = live.runtime.spawn_blocking(move || work(&channel));
        work.await.unwrap_or_else(|error| {
            Err(ClientError::Channel {
                what: "run",
                reason: error.to_string(),
            })
        })
    }

    /// The gRPC channel, for a stream that outlives one call.
    pub(crate) fn channel(&self) -> Result<Channel, ClientError> {
        self.live().map(|live| live.channel.clone())
    }

    /// Makes a call within `limit`; one whose connection failed is sent once more, so
    /// `send` must build the same request, request id included, each time.
    pub(crate) async fn call<T, F>(
        &self,
        call: &'static str,
        limit: Duration,
        send: impl Fn(Channel) -> F,
    ) -> Result<T, ClientError>
    where
        F: Future<Output = Result<T, Status>>,
    {
        match self.call_once(call, limit, &send).await {
            Err(ClientError::Transport { .. } | ClientError::Unreachable { .. }) => {
                tokio::time::sleep(AGAIN_AFTER).await;
                self.call_once(call, limit, send).await
            }
            answered => answered,
        }
    }

    /// As [`Client::call`], sent once.
    pub(crate) async fn call_once<T, F>(
        &self,
        call: &'static str,
        limit: Duration,
        send: impl FnOnce(Channel) -> F,
    ) -> Result<T, ClientError>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let channel = self.channel()?;
        let begin = Instant::now();
        match tokio::time::timeout(limit, send(channel)).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(status)) => Err(match self.failed(call, limit, &status) {
                // a connection that ends under a call cancels it as a deadline does
                ClientError::Deadline { .. } if begin.elapsed() + AGAIN_AFTER < limit => {
                    ClientError::Transport {
                        call,
                        reason: status.message().to_owned(),
                    }
                }
                error => error,
            }),
            Err(_) => Err(ClientError::Deadline {
                what: call.to_owned(),
                limit,
            }),
        }
    }

    /// The error behind a status.
    pub(crate) fn failed(
        &self,
        call: &'static str,
        limit: Duration,
        status: &Status,
    ) -> ClientError {
        error::from_status(call, &self.inner.location.socket, limit, status)
    }

    fn live(&self) -> Result<&Live, ClientError> {
        self.check_process()?;
        self.inner
            .live
            .as_ref()
            .ok_or(ClientError::State("the connection is closed"))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // in a child the runtime's threads and locks are those of the moment of the
        // fork: touching them may wait for ever, so they are left behind
        if self.mark.in_child() {
            std::mem::forget(self.live.take());
        }
    }
}

/// [`ClientError::Forked`] in a child of the process that made `mark`.
pub(crate) fn check_process(mark: &ForkMark) -> Result<(), ClientError> {
    if mark.in_child() {
        return Err(ClientError::Forked {
            made_in: mark.made_in(),
            called_in: std::process::id(),
        });
    }
    Ok(())
}

/// A request that tells the daemon its deadline.
pub(crate) fn request<T>(message: T, limit: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(limit);
    request
}

async fn dial(socket: &Path, limit: Duration) -> Result<Channel, ClientError> {
    let failed = |error: tonic::transport::Error| match error::connect_error(&error) {
        Some(io) => error::unreachable(socket, io),
        None => error::unreachable(socket, &std::io::Error::other(error.to_string())),
    };
    let endpoint = Endpoint::try_from(format!("unix://{}", socket.display()))
        .map_err(failed)?
        .connect_timeout(limit);
    match tokio::time::timeout(limit, endpoint.connect()).await {
        Ok(connected) => connected.map_err(failed),
        Err(_) => Err(ClientError::Deadline {
            what: format!("connect to {}", socket.display()),
            limit,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_missing_daemon_is_unreachable_and_says_what_to_do() {
        let directory = tempfile::tempdir().unwrap();
        let options = ConnectOptions {
            address: Address::from(directory.path().join("flextensord.sock").as_path()),
            ..ConnectOptions::default()
        };
        let error = Client::connect(options).await.unwrap_err();
        assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
        assert!(error.remedy().unwrap().contains("flextensord serve"));
    }

    #[tokio::test]
    async fn a_daemon_that_ended_is_told_from_one_that_never_was() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("flextensord.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let options = ConnectOptions {
            address: Address::from(path.as_path()),
            ..ConnectOptions::default()
        };
        let error = Client::connect(options).await.unwrap_err();
        assert!(error.remedy().unwrap().contains("has ended"), "{error}");
    }
}
