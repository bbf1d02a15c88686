//! The Python module `flextensord._native`: a thin binding over the blocking client.
//!
//! Everything that may wait releases the interpreter's lock, acquires and releases
//! included: the driver may make a caller wait when a stream's queue is full.
#![forbid(unsafe_code)]

mod client;
mod error;
mod manager;
mod status;

use pyo3::prelude::*;

/// The module.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add(
        "FlextensordError",
        module.py().get_type::<error::FlextensordError>(),
    )?;
    module.add_class::<client::Client>()?;
    module.add_class::<manager::Manager>()
}
