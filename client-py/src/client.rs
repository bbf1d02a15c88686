//! A connection to the daemon.

use std::{path::PathBuf, time::Duration};

use flextensord_client::{Address, ConnectOptions, LoadOptions, OpenOptions, blocking};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyDict};

use crate::{error::raise, manager::Manager, status};

/// A connection to the daemon. What is not named comes from the environment:
/// FLEXTENSORD_SOCKET, FLEXTENSORD_RUNTIME_DIR, FLEXTENSORD_INSTANCE. `patience` is how many
/// seconds a manager whose daemon is gone waits for a successor.
#[pyclass(frozen, module = "flextensord._native")]
pub(crate) struct Client {
    inner: blocking::Client,
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (socket=None, runtime_dir=None, instance=None, patience=None))]
    fn new(
        py: Python<'_>,
        socket: Option<PathBuf>,
        runtime_dir: Option<PathBuf>,
        instance: Option<String>,
        patience: Option<f64>,
    ) -> PyResult<Self> {
        let mut options = ConnectOptions {
            address: Address {
                socket,
                runtime_dir,
                instance,
            },
            ..ConnectOptions::default()
        };
        if let Some(seconds) = patience {
            options.patience = Duration::try_from_secs_f64(seconds).map_err(|error| {
                PyValueError::new_err(format!("patience is {seconds} seconds: {error}"))
            })?;
        }
        let connected = py.detach(|| blocking::Client::connect(options));
        let inner = connected.map_err(|error| raise(py, &error))?;
        Ok(Self { inner })
    }

    /// The socket that it is connected to.
    #[getter]
    fn socket(&self) -> PathBuf {
        self.inner.location().socket.clone()
    }

    /// Loads a checkpoint: a .safetensors file, the index of a sharded one, or a folder with
    /// either. Returns what the weight set is, and whether it was there already.
    #[pyo3(signature = (path, name, content_id=None, share=false))]
    fn load<'py>(
        &self,
        py: Python<'py>,
        path: PathBuf,
        name: &str,
        content_id: Option<String>,
        share: bool,
    ) -> PyResult<Bound<'py, PyDict>> {
        let options = LoadOptions { content_id, share };
        let loaded = py
            .detach(|| self.inner.load(&path, name, &options, |_| ()))
            .map_err(|error| raise(py, &error))?;
        let answer = status::weight_set(py, &loaded.set)?;
        answer.set_item("attached", loaded.attached)?;
        Ok(answer)
    }

    /// Removes a weight set, and returns the bytes that were given back.
    fn drop_weights(&self, py: Python<'_>, name: &str) -> PyResult<u64> {
        py.detach(|| self.inner.drop_weight_set(name))
            .map_err(|error| raise(py, &error))
    }

    /// What the daemon does now, as `flextensorctl status --json` says it.
    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let answer = py
            .detach(|| self.inner.status())
            .map_err(|error| raise(py, &error))?;
        status::document(py, &answer)
    }

    /// Opens a manager: the name is this process's until it is closed or the process ends.
    #[pyo3(signature = (name="", device="", link_weight=0))]
    fn open_manager(
        &self,
        py: Python<'_>,
        name: &str,
        device: &str,
        link_weight: u32,
    ) -> PyResult<Manager> {
        let options = OpenOptions {
            name: name.to_owned(),
            device: device.to_owned(),
            link_weight,
            client: concat!("flextensord-py ", env!("CARGO_PKG_VERSION")).to_owned(),
        };
        py.detach(|| self.inner.open(options))
            .map(Manager::new)
            .map_err(|error| raise(py, &error))
    }
}
