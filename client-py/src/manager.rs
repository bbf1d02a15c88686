//! A manager that this process owns.

use std::sync::{PoisonError, RwLock};

use flextensord_client::{Budget, ClientError, LayerId, LayerSpec, LeaseState, blocking};
use flextensord_device::cuda::stream::CallerStream;
use pyo3::{
    exceptions::PyValueError,
    prelude::*,
    types::{PyDict, PyList},
};

use crate::{error::raise, status};

/// A manager with what it has registered.
struct Open {
    manager: blocking::Manager,
    /// The plan's layers: Python names them by their index here.
    layers: Vec<LayerId>,
}

impl Open {
    fn layer(&self, index: usize) -> Result<LayerId, ClientError> {
        let known = self.layers.get(index).copied();
        known.ok_or_else(|| ClientError::Unknown {
            what: "layer",
            name: format!("#{index}"),
            place: format!("the {} layers of the manager", self.layers.len()),
        })
    }
}

/// A named offload context that this process owns. Its acquires and releases form one order
/// and belong to one thread: the one that registers. Dropped, it is closed.
#[pyclass(frozen, module = "flextensord._native")]
pub(crate) struct Manager {
    /// Taken on close. Locked only without the interpreter's lock, so the two never wait for
    /// each other.
    open: RwLock<Option<Open>>,
}

const CLOSED: ClientError = ClientError::State("the manager is closed");

impl Manager {
    pub(crate) fn new(manager: blocking::Manager) -> Self {
        let layers = Vec::new();
        Self {
            open: RwLock::new(Some(Open { manager, layers })),
        }
    }

    /// Runs `work` with the manager and without the interpreter's lock.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Open) -> Result<T, ClientError> + Send,
    ) -> PyResult<T> {
        let done = py.detach(|| {
            let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
            open.as_ref().ok_or(CLOSED).and_then(work)
        });
        done.map_err(|error| raise(py, &error))
    }

    fn take(&self) -> Option<Open> {
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        open.take()
    }
}

#[pymethods]
impl Manager {
    /// Its name.
    #[getter]
    fn name(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |open| Ok(open.manager.name().to_owned()))
    }

    /// Its device, such as "cuda:0".
    #[getter]
    fn device(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |open| {
            Ok(open.manager.asynchronous()?.device().to_owned())
        })
    }

    /// How its lease stands: "live", "detached", "ended" or "daemon_lost".
    #[getter]
    fn lease_state(&self, py: Python<'_>) -> &'static str {
        let state = self.with(py, |open| Ok(open.manager.lease_state()));
        match state.unwrap_or(LeaseState::Ended) {
            LeaseState::Live => "live",
            LeaseState::Detached => "detached",
            LeaseState::Ended => "ended",
            LeaseState::DaemonLost => "daemon_lost",
        }
    }

    /// Registers the model: `layers` in the order of a pass, each a name and the names of its
    /// tensors, to run within `budget_bytes` or within a share of the device's memory. The
    /// calling thread becomes the manager's. Returns what was granted.
    #[pyo3(signature = (weight_set, layers, budget_bytes=None, memory_fraction=None))]
    fn register<'py>(
        &self,
        py: Python<'py>,
        weight_set: &str,
        layers: Vec<(String, Vec<String>)>,
        budget_bytes: Option<u64>,
        memory_fraction: Option<f64>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let budget = match (budget_bytes, memory_fraction) {
            (Some(bytes), None) => Budget::Bytes(bytes),
            (None, Some(share)) => Budget::Fraction(share),
            _ => {
                return Err(PyValueError::new_err(
                    "give either budget_bytes or memory_fraction",
                ));
            }
        };
        let layers: Vec<LayerSpec> = layers
            .into_iter()
            .map(|(name, tensors)| LayerSpec { name, tensors })
            .collect();
        let registered = py.detach(|| {
            let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
            let open = open.as_mut().ok_or(CLOSED)?;
            let answer = *open.manager.register(weight_set, &layers, budget)?;
            open.layers = open.manager.plan()?.layer_ids().collect();
            Ok(answer)
        });
        let answer = registered.map_err(|error: ClientError| raise(py, &error))?;
        status::registered(py, &answer)
    }

    /// The number of a layer, to be looked up once and acquired often.
    fn layer(&self, py: Python<'_>, name: &str) -> PyResult<usize> {
        self.with(py, |open| {
            let id = open.manager.layer(name)?;
            // they are in rising order
            open.layers.binary_search(&id).map_err(|_| CLOSED)
        })
    }

    /// Holds a layer for what is queued on `stream` (a CUstream as a number) from here on.
    fn acquire(&self, py: Python<'_>, layer: usize, stream: usize) -> PyResult<()> {
        self.with(py, |open| {
            let layer = open.layer(layer)?;
            open.manager.hold_on(layer, CallerStream::from_raw(stream))
        })
    }

    /// Gives a layer back behind what is queued on `stream`.
    fn release(&self, py: Python<'_>, layer: usize, stream: usize) -> PyResult<()> {
        self.with(py, |open| {
            let layer = open.layer(layer)?;
            open.manager
                .release_on(layer, CallerStream::from_raw(stream))
        })
    }

    /// All tensors of the plan: name, dtype, shape, stride, address on the GPU (None without
    /// bytes), bytes, part, and whether it streams. Bytes of streamed ones are there only
    /// while a layer with them is held.
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let places = self.with(py, |open| {
            let plan = open.manager.plan()?;
            let place = |tensor: &flextensord_client::plan::TensorPlace| {
                let streamed = plan
                    .parts()
                    .get(tensor.part as usize)
                    .is_some_and(|part| part.streamed);
                let address = open.manager.tensor_address(tensor)?;
                Ok((tensor.clone(), address, streamed))
            };
            plan.tensors()
                .iter()
                .map(place)
                .collect::<Result<Vec<_>, ClientError>>()
        })?;
        let list = PyList::empty(py);
        for (tensor, address, streamed) in places {
            let entry = PyDict::new(py);
            entry.set_item("name", tensor.name)?;
            entry.set_item("dtype", tensor.dtype)?;
            entry.set_item("shape", tensor.shape)?;
            entry.set_item("stride", tensor.stride)?;
            entry.set_item("address", address)?;
            entry.set_item("bytes", tensor.bytes)?;
            entry.set_item("part", tensor.part)?;
            entry.set_item("streamed", streamed)?;
            list.append(entry)?;
        }
        Ok(list)
    }

    /// Says that passes of the model have ended; returns how many there were so far.
    #[pyo3(signature = (passes=1))]
    fn report_pass(&self, py: Python<'_>, passes: u64) -> PyResult<u64> {
        self.with(py, |open| open.manager.report_pass(passes))
    }

    /// Makes the calling thread the manager's; the one before must use it no more.
    fn rebind_thread(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, |open| open.manager.rebind_thread())
    }

    /// Closes the manager: its memory goes back and its name is free. A second time is no
    /// error.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let closed = py.detach(|| match self.take() {
            Some(open) => open.manager.close(),
            None => Ok(()),
        });
        closed.map_err(|error| raise(py, &error))
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (_kind, _error, _traceback))]
    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close(py)
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let Some(open) = self.take() else {
            return;
        };
        // closing waits for the daemon; while the interpreter ends there is no lock to let go
        let mut open = Some(open);
        Python::try_attach(|py| {
            let open = open.take();
            py.detach(|| drop(open));
        });
    }
}
