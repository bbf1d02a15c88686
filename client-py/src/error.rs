//! Errors of the client as one Python exception with attributes.

use flextensord_client::ClientError;
use pyo3::{create_exception, exceptions::PyRuntimeError, prelude::*};

create_exception!(
    flextensord._native,
    FlextensordError,
    PyRuntimeError,
    "What the daemon or the client refused. `kind` is a stable name, `retryable` says whether \
     the same call may succeed later, `remedy` what to do, if there is an answer."
);

/// The exception for an error.
pub(crate) fn raise(py: Python<'_>, error: &ClientError) -> PyErr {
    let raised = FlextensordError::new_err(error.to_string());
    let value = raised.value(py);
    let attributes = value
        .setattr("kind", kind(error))
        .and_then(|()| value.setattr("retryable", error.retryable()))
        .and_then(|()| value.setattr("remedy", error.remedy()));
    // out of memory, say: then that is what there is to tell
    attributes.err().unwrap_or(raised)
}

/// A stable name: the daemon's where it refused, else one of the client's own.
fn kind(error: &ClientError) -> &'static str {
    if let Some(kind) = error.kind() {
        return kind.as_str();
    }
    match error {
        ClientError::Unreachable { .. } => "UNREACHABLE",
        ClientError::Transport { .. } => "TRANSPORT",
        ClientError::LeaseLost { .. } => "LEASE_LOST",
        ClientError::DaemonLost { .. } => "DAEMON_LOST",
        ClientError::HoldConflict { .. } => "HOLD_CONFLICT",
        ClientError::Deadline { .. } => "DEADLINE_EXCEEDED",
        ClientError::Forked { .. } => "FORKED",
        ClientError::WrongThread { .. } => "WRONG_THREAD",
        ClientError::OrderBroken { .. } => "ORDER_BROKEN",
        ClientError::WrongDevice { .. } => "WRONG_DEVICE",
        ClientError::GpuNotVisible { .. } => "GPU_NOT_VISIBLE",
        ClientError::CaptureEdge { .. } => "CAPTURE_EDGE",
        ClientError::NotHeld { .. } => "NOT_HELD",
        ClientError::Channel { .. } => "CHANNEL",
        ClientError::Range { .. } => "INVALID_ARGUMENT",
        ClientError::Unknown { .. } => "NOT_FOUND",
        ClientError::State(_) => "FAILED_PRECONDITION",
        ClientError::Protocol { .. } => "PROTOCOL",
        ClientError::Locate(_) => "LOCATE",
        ClientError::Checkpoint(_) => "CHECKPOINT_INVALID",
        ClientError::Cuda(_) | ClientError::Pinning(_) => "DEVICE",
        ClientError::Page(_) => "PAGE",
        ClientError::Kernel(_) => "KERNEL",
        _ => "CLIENT",
    }
}
