//! The client for programs without an asynchronous runtime. It has one of its own, with
//! one worker thread: the lease is followed while the program computes.

use std::{path::Path, sync::Arc, time::Duration};

use flextensord_device::{cuda::stream::CallerStream, fork::ForkMark};
use flextensord_proto::v1::{DumpRecord, RegisterModelResponse, StatusResponse, WeightSet};
use tokio::runtime::{Builder, Handle, Runtime};

use crate::{
    connection::{self, ConnectOptions},
    error::ClientError,
    hold::Hold,
    lease::LeaseState,
    locate::Location,
    manager::{self, OpenOptions},
    plan::{LayerId, Plan, TensorPlace},
    registration::{Budget, LayerSpec},
    upload::UploadTensor,
    weights::{LoadOptions, LoadStep, LoadedSet, WeightSetDetail},
};

/// How long a dropped manager waits for the daemon to take it back.
const DROP_LIMIT: Duration = Duration::from_secs(2);

/// A runtime that a forked child leaves alone.
#[derive(Debug)]
struct OwnRuntime {
    /// Taken only on drop.
    runtime: Option<Runtime>,
    mark: ForkMark,
}

impl OwnRuntime {
    fn new() -> Result<Self, ClientError> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("flextensord-client")
            .enable_all()
            .build()
            .map_err(|error| {
                flextensord_device::kernel::KernelError::new("start a runtime thread", error)
            })?;
        Ok(Self {
            runtime: Some(runtime),
            mark: ForkMark::new(),
        })
    }

    fn run<T>(&self, work: impl Future<Output = Result<T, ClientError>>) -> Result<T, ClientError> {
        connection::check_process(&self.mark)?;
        if Handle::try_current().is_ok() {
            return Err(ClientError::State(
                "the blocking client was called inside an asynchronous runtime; use the \
                 asynchronous client there",
            ));
        }
        let closed = ClientError::State("the connection is closed");
        self.runtime.as_ref().ok_or(closed)?.block_on(work)
    }
}

impl Drop for OwnRuntime {
    fn drop(&mut self) {
        let runtime = self.runtime.take();
        if self.mark.in_child() {
            // its threads are not in the child: waiting for them would never end
            std::mem::forget(runtime);
        } else if let Some(runtime) = runtime {
            // also legal where blocking is not
            runtime.shutdown_background();
        }
    }
}

/// A connection to the daemon; see [`crate::Client`].
#[derive(Debug, Clone)]
pub struct Client {
    inner: connection::Client,
    runtime: Arc<OwnRuntime>,
}

impl Client {
    /// Connects.
    ///
    /// # Errors
    /// As [`crate::Client::connect`], and when no thread can be started.
    pub fn connect(options: ConnectOptions) -> Result<Self, ClientError> {
        let runtime = OwnRuntime::new()?;
        let inner = runtime.run(connection::Client::connect(options))?;
        Ok(Self {
            inner,
            runtime: Arc::new(runtime),
        })
    }

    /// The asynchronous client behind it.
    #[must_use]
    pub fn asynchronous(&self) -> &connection::Client {
        &self.inner
    }

    /// The sockets that it is connected to.
    #[must_use]
    pub fn location(&self) -> &Location {
        self.inner.location()
    }

    /// Loads a checkpoint; see [`crate::weights::Weights::load`].
    ///
    /// # Errors
    /// As there.
    pub fn load(
        &self,
        path: &Path,
        name: &str,
        options: &LoadOptions,
        progress: impl FnMut(LoadStep) + Send,
    ) -> Result<LoadedSet, ClientError> {
        self.runtime
            .run(self.inner.weights().load(path, name, options, progress))
    }

    /// Stores tensors of this process; see [`crate::weights::Weights::put`].
    ///
    /// # Errors
    /// As there.
    pub fn put(
        &self,
        name: &str,
        tensors: &[UploadTensor<'_>],
        options: &LoadOptions,
    ) -> Result<LoadedSet, ClientError> {
        self.runtime
            .run(self.inner.weights().put(name, tensors, options))
    }

    /// A weight set with its tensors.
    ///
    /// # Errors
    /// `NOT_FOUND`, and those of the connection.
    pub fn weight_set(&self, name: &str) -> Result<WeightSetDetail, ClientError> {
        self.runtime.run(self.inner.weights().get(name))
    }

    /// All weight sets that the caller may see.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn weight_sets(&self) -> Result<Vec<WeightSet>, ClientError> {
        self.runtime.run(self.inner.weights().list())
    }

    /// Removes a weight set, and returns the bytes that were given back.
    ///
    /// # Errors
    /// `IN_USE`, `NOT_FOUND`, `PERMISSION_DENIED`, and those of the connection.
    pub fn drop_weight_set(&self, name: &str) -> Result<u64, ClientError> {
        self.runtime.run(self.inner.weights().drop(name))
    }

    /// What the daemon does now.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn status(&self) -> Result<StatusResponse, ClientError> {
        self.runtime.run(self.inner.admin().status())
    }

    /// The records of everything, or of one manager.
    ///
    /// # Errors
    /// `NOT_FOUND`, and those of the connection.
    pub fn dump(&self, manager: Option<&str>) -> Result<Vec<DumpRecord>, ClientError> {
        self.runtime.run(self.inner.admin().dump(manager))
    }

    /// Ends a manager; see [`crate::admin::Admin::terminate`].
    ///
    /// # Errors
    /// As there.
    pub fn terminate(&self, name: &str, uid: Option<u32>) -> Result<u64, ClientError> {
        self.runtime.run(self.inner.admin().terminate(name, uid))
    }

    /// Drains the daemon; see [`crate::admin::Admin::drain`].
    ///
    /// # Errors
    /// As there.
    pub fn drain(&self, deadline: Option<Duration>) -> Result<u32, ClientError> {
        self.runtime.run(self.inner.admin().drain(deadline))
    }

    /// Opens a manager; see [`crate::Manager::open`].
    ///
    /// # Errors
    /// As there.
    pub fn open(&self, options: OpenOptions) -> Result<Manager, ClientError> {
        let opened = self
            .runtime
            .run(manager::Manager::open(&self.inner, options))?;
        Ok(Manager {
            inner: Some(opened),
            runtime: self.runtime.clone(),
        })
    }
}

/// A manager that this process owns; see [`crate::Manager`]. Dropped, it is closed.
#[derive(Debug)]
pub struct Manager {
    /// Taken only on close and drop.
    inner: Option<manager::Manager>,
    runtime: Arc<OwnRuntime>,
}

impl Manager {
    /// Registers the model; see [`crate::Manager::register`].
    ///
    /// # Errors
    /// As there.
    pub fn register(
        &mut self,
        weight_set: &str,
        layers: &[LayerSpec],
        budget: Budget,
    ) -> Result<&RegisterModelResponse, ClientError> {
        let inner = self.inner.as_mut().ok_or(CLOSED)?;
        self.runtime.run(inner.register(weight_set, layers, budget))
    }

    /// The asynchronous manager behind it, with all its accessors.
    ///
    /// # Errors
    /// [`ClientError::State`] never in practice: the manager is there until it is closed,
    /// which takes it.
    pub fn asynchronous(&self) -> Result<&manager::Manager, ClientError> {
        self.inner.as_ref().ok_or(CLOSED)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.inner.as_ref().map_or("", manager::Manager::name)
    }

    /// How its lease stands.
    #[must_use]
    pub fn lease_state(&self) -> LeaseState {
        let inner = self.inner.as_ref();
        inner.map_or(LeaseState::Ended, manager::Manager::lease_state)
    }

    /// The plan in force.
    ///
    /// # Errors
    /// [`ClientError::State`] before a model is registered.
    pub fn plan(&self) -> Result<&Plan, ClientError> {
        self.asynchronous()?.plan()
    }

    /// The layer `name`, to be looked up once and acquired often.
    ///
    /// # Errors
    /// [`ClientError::Unknown`], [`ClientError::State`].
    pub fn layer(&self, name: &str) -> Result<LayerId, ClientError> {
        self.asynchronous()?.layer(name)
    }

    /// Holds a layer through the fast path; see [`crate::Manager::acquire`].
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn acquire(&self, layer: LayerId) -> Result<Hold, ClientError> {
        self.asynchronous()?.acquire(layer)
    }

    /// As [`Manager::acquire`], with a limit of its own.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn acquire_within(&self, layer: LayerId, limit: Duration) -> Result<Hold, ClientError> {
        self.asynchronous()?.acquire_within(layer, limit)
    }

    /// Holds a layer on a stream; see [`crate::Manager::acquire_on`].
    ///
    /// # Errors
    /// As there.
    pub fn acquire_on(&self, layer: LayerId, stream: CallerStream) -> Result<Hold, ClientError> {
        self.asynchronous()?.acquire_on(layer, stream)
    }

    /// Holds a layer on a stream until it is released by name; see
    /// [`crate::Manager::hold_on`].
    ///
    /// # Errors
    /// As there.
    pub fn hold_on(&self, layer: LayerId, stream: CallerStream) -> Result<(), ClientError> {
        self.asynchronous()?.hold_on(layer, stream)
    }

    /// Gives a layer back on a stream; see [`crate::Manager::release_on`].
    ///
    /// # Errors
    /// As there.
    pub fn release_on(&self, layer: LayerId, stream: CallerStream) -> Result<(), ClientError> {
        self.asynchronous()?.release_on(layer, stream)
    }

    /// The address of a tensor; see [`crate::Manager::tensor_address`].
    ///
    /// # Errors
    /// As there.
    pub fn tensor_address(&self, place: &TensorPlace) -> Result<Option<usize>, ClientError> {
        self.asynchronous()?.tensor_address(place)
    }

    /// Whether layers are acquired on streams; see [`crate::Manager::is_on_gpu`].
    #[must_use]
    pub fn is_on_gpu(&self) -> bool {
        let inner = self.inner.as_ref();
        inner.is_some_and(manager::Manager::is_on_gpu)
    }

    /// Holds a layer by RPC; see [`crate::Manager::acquire_rpc`].
    ///
    /// # Errors
    /// As there.
    pub fn acquire_rpc(&self, layer: LayerId) -> Result<Hold, ClientError> {
        self.runtime.run(self.asynchronous()?.acquire_rpc(layer))
    }

    /// Gives a hold over RPC back and waits for the daemon's answer.
    ///
    /// # Errors
    /// As [`Hold::release_rpc`].
    pub fn release_rpc(&self, hold: Hold) -> Result<(), ClientError> {
        self.runtime.run(hold.release_rpc())
    }

    /// Says that passes have ended; see [`crate::Manager::report_pass`].
    ///
    /// # Errors
    /// As there.
    pub fn report_pass(&self, passes: u64) -> Result<u64, ClientError> {
        self.runtime.run(self.asynchronous()?.report_pass(passes))
    }

    /// Time that all acquires so far waited for bytes.
    #[must_use]
    pub fn waited(&self) -> Duration {
        let inner = self.inner.as_ref();
        inner.map_or(Duration::ZERO, manager::Manager::waited)
    }

    /// Makes the calling thread the manager's thread.
    ///
    /// # Errors
    /// As [`crate::Manager::rebind_thread`].
    pub fn rebind_thread(&self) -> Result<(), ClientError> {
        self.asynchronous()?.rebind_thread()
    }

    /// How long [`Manager::acquire`] waits.
    pub fn set_acquire_limit(&mut self, limit: Duration) {
        if let Some(inner) = &mut self.inner {
            inner.set_acquire_limit(limit);
        }
    }

    /// Closes the manager: its memory goes back and its name is free.
    ///
    /// # Errors
    /// As [`crate::Manager::close`].
    pub fn close(mut self) -> Result<(), ClientError> {
        match self.inner.take() {
            Some(inner) => self.runtime.run(inner.close()),
            None => Ok(()),
        }
    }
}

const CLOSED: ClientError = ClientError::State("the manager is closed");

impl Drop for Manager {
    fn drop(&mut self) {
        let Some(inner) = self.inner.take() else {
            return;
        };
        // in a child, and inside another runtime, nothing may be waited for: the
        // asynchronous manager sees to that itself
        if !self.runtime.mark.in_child() && Handle::try_current().is_err() {
            let _: Result<(), ClientError> = self.runtime.run(async {
                // what a GPU has queued has its own time
                let queued = if inner.is_on_gpu() {
                    manager::CLOSE_LIMIT
                } else {
                    Duration::ZERO
                };
                let closing = inner.close_within(queued, DROP_LIMIT);
                let closed = tokio::time::timeout(queued + DROP_LIMIT, closing).await;
                closed.unwrap_or(Ok(()))
            });
        }
    }
}
