//! A manager: a named offload context that this process owns.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use flextensord_device::{
    cuda::context::Context,
    failpoint::{self, Point},
};
use flextensord_proto::{
    PROTOCOL,
    kind::Kind,
    v1::{
        CloseManagerRequest, OpenManagerRequest, ProtocolRange, RegisterModelResponse,
        ReportPassRequest, offload_client::OffloadClient,
    },
};
use tokio::task::JoinHandle;

use crate::{
    connection::{Client, check_process, request},
    error::ClientError,
    gpu::attach,
    hold::Hold,
    lease::{self, Lease, LeaseState},
    plan::{LayerId, Plan},
    plane::Plane,
    registration::{self, Budget, LayerSpec},
    request_id,
};

/// How long an acquire waits unless told otherwise.
pub const ACQUIRE_LIMIT: Duration = Duration::from_secs(30);
/// Limit of closing a manager that is dropped, and of waiting for what it has queued.
pub(crate) const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// How to open a manager.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// Its name; empty gives "default", or "default-2" and so on when that is taken.
    pub name: String,
    /// "cpu:0" for example; empty gives the first device.
    pub device: String,
    /// Share of the link in proportion to other managers, 1 to 1000; 0 means 100.
    pub link_weight: u32,
    /// The program, for Status; empty names this library.
    pub client: String,
}

/// A manager that this process owns. Its acquires and releases form one order, so they
/// belong to one thread: the one that registered the model, or that was bound later.
/// Dropped, it is closed.
#[derive(Debug)]
pub struct Manager {
    client: Client,
    lease: Arc<Lease>,
    /// Follows the lease's stream; taken on close and drop.
    follower: Option<JoinHandle<()>>,
    plane: Option<Arc<Plane>>,
    /// Of its GPU.
    context: Option<Arc<Context>>,
    registered: Option<RegisterModelResponse>,
    acquire_limit: Duration,
}

impl Manager {
    /// Opens a manager: its name is this process's until it is closed or the process is
    /// gone.
    ///
    /// # Errors
    /// `MANAGER_TAKEN` when a living process owns the name, `DRAINING`,
    /// `PROTOCOL_VERSION`, `NOT_FOUND` for the device, and those of the connection. On a
    /// GPU [`ClientError::GpuNotVisible`] and what its driver says.
    pub async fn open(client: &Client, options: OpenOptions) -> Result<Self, ClientError> {
        let (lowest, highest) = PROTOCOL;
        let message = OpenManagerRequest {
            request_id: request_id::fresh()?,
            name: options.name,
            protocol: Some(ProtocolRange { lowest, highest }),
            client: if options.client.is_empty() {
                concat!("flextensord-client ", env!("CARGO_PKG_VERSION")).to_owned()
            } else {
                options.client
            },
            resume_token: Vec::new(),
            device: options.device,
            link_weight: options.link_weight,
            handed_back: Vec::new(),
            holds: Vec::new(),
            nothing_mapped: false,
        };
        // where the daemon can have no pidfd, this connection's end is our death: it
        // stands before the lease does
        client.descriptors(|channel| channel.hello()).await?;
        failpoint::pass(Point::ClientOpen)?;
        let limit = client.options().call_timeout;
        let (opened, stream) = lease::open_stream(client, message.clone(), limit).await?;
        if !(lowest..=highest).contains(&opened.protocol) {
            return Err(ClientError::Protocol {
                call: "OpenManager",
                reason: format!(
                    "it chose protocol {}, spoken here are {lowest} to {highest}",
                    opened.protocol
                ),
            });
        }
        failpoint::pass(Point::ClientOpened)?;
        let bell = match lease::fetch_bell(client, &opened).await {
            // tickets go when the lease ends
            Err(ClientError::Refused(failure)) if failure.kind == Kind::NotFound => {
                return Err(ClientError::LeaseLost {
                    manager: opened.name,
                    reason: format!("it ended while it was opened: {}", failure.message),
                    context_lost: false,
                });
            }
            fetched => fetched?,
        };
        let lease = Arc::new(Lease::new(opened, bell, client.options().patience));
        let follow = lease::follow(client.clone(), lease.clone(), message, stream);
        let mut manager = Self {
            follower: Some(client.runtime()?.spawn(follow)),
            client: client.clone(),
            lease,
            plane: None,
            context: None,
            registered: None,
            acquire_limit: ACQUIRE_LIMIT,
        };
        // when it fails the manager is dropped, and so closed
        manager.context = attach::attach(client, &manager.lease).await?;
        Ok(manager)
    }

    /// Registers the model: `layers` in the order of a pass, with tensors of
    /// `weight_set`, to run within `budget`. Maps the plan's memory; the thread that
    /// this is awaited on becomes the manager's thread.
    ///
    /// # Errors
    /// `BUDGET_INFEASIBLE` with the least feasible budget, `DEVICE_MEMORY`, `NOT_FOUND`,
    /// `INVALID_ARGUMENT`, and [`ClientError::State`] when a model is registered.
    pub async fn register(
        &mut self,
        weight_set: &str,
        layers: &[LayerSpec],
        budget: Budget,
    ) -> Result<&RegisterModelResponse, ClientError> {
        self.check()?;
        if self.plane.is_some() {
            return Err(ClientError::State("the manager has a model already"));
        }
        failpoint::pass(Point::ClientRegister)?;
        loop {
            let generation = self.lease.generation();
            let (answer, mapped) = self.register_once(weight_set, layers, budget).await?;
            let plane = match mapped {
                Ok(plane) => Arc::new(plane),
                // what a daemon has registered is forgotten with it unless it was mapped
                Err(_) if self.lease.generation() != generation => continue,
                Err(error) => return Err(self.explain(error)),
            };
            let possessions = Arc::downgrade(&plane);
            if self.lease.owns(possessions) {
                self.plane = Some(plane);
                self.registered = Some(answer);
                break;
            }
        }
        failpoint::pass(Point::ClientMapped)?;
        let none = ClientError::State("no model is registered with the manager");
        self.registered.as_ref().ok_or(none)
    }

    /// Registers, and maps what that gave.
    async fn register_once(
        &self,
        weight_set: &str,
        layers: &[LayerSpec],
        budget: Budget,
    ) -> Result<(RegisterModelResponse, Result<Plane, ClientError>), ClientError> {
        let answer = registration::register(&self.client, &self.lease, weight_set, layers, budget);
        let answer = answer.await.map_err(|error| self.explain(error))?;
        self.lease.expects();
        failpoint::pass(Point::ClientRegistered)?;
        let map = || registration::map_plan(&self.client, &self.lease, self.context.as_ref());
        let mapped = match map().await {
            // tickets go when the lease ends or a daemon does: the next call says which
            Err(ClientError::Refused(failure)) if failure.kind == Kind::NotFound => map().await,
            mapped => mapped,
        };
        Ok((answer, mapped))
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.lease.name
    }

    /// Its device, such as "cpu:0".
    #[must_use]
    pub fn device(&self) -> &str {
        &self.lease.device
    }

    /// Whether its layers are acquired on streams of a GPU ([`Manager::acquire_on`]).
    #[must_use]
    pub fn is_on_gpu(&self) -> bool {
        self.context.is_some()
    }

    /// Grows whenever the manager changes its owner.
    #[must_use]
    pub fn lease_epoch(&self) -> u64 {
        self.lease.epoch
    }

    /// How its lease stands.
    #[must_use]
    pub fn lease_state(&self) -> LeaseState {
        self.lease.state()
    }

    /// Until when the manager may go on, in milliseconds as the daemon said, while the
    /// daemon drains.
    #[must_use]
    pub fn draining(&self) -> Option<u64> {
        self.lease.draining()
    }

    /// What the registration granted, once a model is registered.
    #[must_use]
    pub fn registered(&self) -> Option<&RegisterModelResponse> {
        self.registered.as_ref()
    }

    /// The plan in force.
    ///
    /// # Errors
    /// [`ClientError::State`] before a model is registered.
    pub fn plan(&self) -> Result<&Plan, ClientError> {
        self.plane().map(|plane| &plane.plan)
    }

    /// The layer `name`, to be looked up once and acquired often.
    ///
    /// # Errors
    /// [`ClientError::Unknown`], [`ClientError::State`].
    pub fn layer(&self, name: &str) -> Result<LayerId, ClientError> {
        self.plan()?.layer_id(name)
    }

    /// How long [`Manager::acquire`] waits; at first [`ACQUIRE_LIMIT`].
    pub fn set_acquire_limit(&mut self, limit: Duration) {
        self.acquire_limit = limit;
    }

    /// Holds a layer through the fast path: returns when all its parts are on the device.
    /// All or nothing. Blocks the thread while it waits, and makes no system call when
    /// the bytes are there.
    ///
    /// # Errors
    /// [`ClientError::HoldConflict`] before anything is touched,
    /// [`ClientError::Deadline`], [`ClientError::LeaseLost`],
    /// [`ClientError::DaemonLost`], [`ClientError::WrongThread`],
    /// [`ClientError::OrderBroken`], [`ClientError::Forked`], and on a GPU
    /// [`ClientError::WrongDevice`]: see [`Manager::acquire_on`].
    #[inline]
    pub fn acquire(&self, layer: LayerId) -> Result<Hold, ClientError> {
        self.acquire_within(layer, self.acquire_limit)
    }

    /// As [`Manager::acquire`], with a limit of its own.
    ///
    /// # Errors
    /// As [`Manager::acquire`].
    #[inline]
    pub fn acquire_within(&self, layer: LayerId, limit: Duration) -> Result<Hold, ClientError> {
        self.plane()?.acquire(layer, limit)
    }

    /// Holds a layer by RPC, for the same bytes at a higher price (about 100 µs).
    ///
    /// # Errors
    /// As [`Manager::acquire`], and those of the connection.
    pub async fn acquire_rpc(&self, layer: LayerId) -> Result<Hold, ClientError> {
        let acquired = self.plane()?.acquire_rpc(layer, self.acquire_limit).await;
        acquired.map_err(|error| self.explain(error))
    }

    /// Parts that are held now.
    ///
    /// # Errors
    /// [`ClientError::State`] before a model is registered.
    pub fn held_parts(&self) -> Result<Vec<u32>, ClientError> {
        let mut held = self.plane()?.table().held().to_vec();
        held.sort_unstable();
        Ok(held)
    }

    /// Time that all acquires so far waited for bytes; for those over RPC, all of the call.
    #[must_use]
    pub fn waited(&self) -> Duration {
        let waited = self
            .plane
            .as_ref()
            .map(|plane| plane.waited.load(Ordering::Relaxed));
        Duration::from_nanos(waited.unwrap_or(0))
    }

    /// Makes the calling thread the manager's thread. The caller must see to it that the
    /// one before acquires and releases no more.
    ///
    /// # Errors
    /// [`ClientError::State`] before a model is registered, [`ClientError::Forked`].
    pub fn rebind_thread(&self) -> Result<(), ClientError> {
        let plane = self.plane()?;
        check_process(&plane.mark)?;
        // an acquire of the old owner is over when the table is free
        let table = plane.table();
        plane.owner.rebind();
        drop(table);
        Ok(())
    }

    /// Says that `passes` passes of the model have ended, with the time waited since the
    /// last report. Returns the number of passes so far.
    ///
    /// # Errors
    /// [`ClientError::LeaseLost`], and those of the connection.
    pub async fn report_pass(&self, passes: u64) -> Result<u64, ClientError> {
        self.check()?;
        let plane = self.plane()?;
        let waited = plane.waited.load(Ordering::Relaxed);
        let reported = plane.waited_reported.load(Ordering::Relaxed);
        let limit = self.client.options().call_timeout;
        let message = ReportPassRequest {
            request_id: request_id::fresh()?,
            token: self.lease.token.0.clone(),
            passes,
            waited_ns: waited.saturating_sub(reported),
        };
        let answer = self
            .lease
            .call(&self.client, "ReportPass", limit, |channel| {
                let message = request(message.clone(), limit);
                async move {
                    Ok(OffloadClient::new(channel)
                        .report_pass(message)
                        .await?
                        .into_inner())
                }
            });
        let answer = answer.await.map_err(|error| self.explain(error))?;
        plane.waited_reported.fetch_max(waited, Ordering::Relaxed);
        Ok(answer.passes)
    }

    /// The first error of a release that nobody was told of, since this was asked last.
    #[must_use]
    pub fn take_release_error(&self) -> Option<ClientError> {
        self.lease.take_release_error()
    }

    /// Closes the manager: its memory goes back and its name is free. Holds that are
    /// left keep their bytes mapped, but acquires fail. On a GPU it first waits until what
    /// is queued is done; launches of graphs the caller must have waited for.
    ///
    /// # Errors
    /// Those of the connection. A lease that is over already is no error. On a GPU
    /// [`ClientError::LeaseLost`] when queued work did not end within the limit of a call:
    /// it was ended, with the process's context.
    pub async fn close(self) -> Result<(), ClientError> {
        let limit = self.client.options().call_timeout;
        self.close_within(limit, limit).await
    }

    /// As [`Manager::close`], with limits for what is queued and for the call.
    pub(crate) async fn close_within(
        mut self,
        queued: Duration,
        limit: Duration,
    ) -> Result<(), ClientError> {
        self.client.check_process()?;
        if self.lease.check().is_err() {
            return Ok(());
        }
        failpoint::pass(Point::ClientClose)?;
        let finished = let_go(&self.client, self.plane.take(), queued).await;
        let closed = close(self.client.clone(), self.lease.clone(), limit).await;
        failpoint::cross(Point::ClientClosed);
        if let Some(follower) = self.follower.take() {
            follower.abort();
        }
        finished.and(closed)
    }

    /// Whether the process is the right one and the lease goes on.
    fn check(&self) -> Result<(), ClientError> {
        self.client.check_process()?;
        self.lease.check()
    }

    pub(crate) fn plane(&self) -> Result<&Arc<Plane>, ClientError> {
        let none = ClientError::State("no model is registered with the manager");
        self.plane.as_ref().ok_or(none)
    }

    /// A refusal for want of the lease is [`ClientError::LeaseLost`].
    fn explain(&self, error: ClientError) -> ClientError {
        match error {
            ClientError::Refused(failure) if failure.kind == Kind::LeaseLost => {
                // the stream may have said why
                self.lease.check().err().unwrap_or(ClientError::LeaseLost {
                    manager: self.lease.name.clone(),
                    reason: failure.message,
                    context_lost: false,
                })
            }
            other => other,
        }
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let Some(follower) = self.follower.take() else {
            return;
        };
        // in a forked child the manager is the parent's
        if self.client.check_process().is_err() {
            std::mem::forget(follower);
            std::mem::forget(self.context.take());
            return;
        }
        if let Ok(runtime) = self.client.runtime()
            && self.lease.check().is_ok()
        {
            let (client, plane) = (self.client.clone(), self.plane.take());
            let close = close(self.client.clone(), self.lease.clone(), CLOSE_LIMIT);
            // the stream is let go after the close, which needs the lease
            runtime.spawn(async move {
                let _ = let_go(&client, plane, CLOSE_LIMIT).await;
                let _ = close.await;
                follower.abort();
            });
        } else {
            follower.abort();
        }
    }
}

/// Lets the plan go. On a GPU its memory is unmapped here, once what is queued is done.
async fn let_go(
    client: &Client,
    plane: Option<Arc<Plane>>,
    queued: Duration,
) -> Result<(), ClientError> {
    let Some(plane) = plane else {
        return Ok(());
    };
    let Some(gpu) = &plane.gpu else {
        return Ok(());
    };
    let finished = gpu.close(queued).await;
    // the driver takes its time; a runtime that ends does it in the task's end
    let unmapped = client.runtime()?.spawn_blocking(move || drop(plane));
    let _ = unmapped.await;
    finished
}

async fn close(client: Client, lease: Arc<Lease>, limit: Duration) -> Result<(), ClientError> {
    let message = CloseManagerRequest {
        request_id: request_id::fresh()?,
        token: lease.token.0.clone(),
    };
    // from here on nobody acquires any more
    lease.end("it was closed");
    let answer = client.call("CloseManager", limit, |channel| {
        let message = request(message.clone(), limit);
        async move { OffloadClient::new(channel).close_manager(message).await }
    });
    match answer.await {
        // a daemon that died after it closed the manager, before it could say so
        Err(ClientError::Refused(failure)) if failure.kind == Kind::LeaseLost => Ok(()),
        closed => closed.map(drop),
    }
}

#[cfg(test)]
mod tests;
