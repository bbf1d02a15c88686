//! What can go wrong between a program and the daemon.

use std::{error::Error as _, io, path::PathBuf, time::Duration};

use flextensord_device::{
    control::ControlError,
    cuda::{error::CudaError, registration::RegistrationError},
    kernel::KernelError,
};
use flextensord_proto::kind::{Failure, Kind};
use tonic::{Code, Status};

use crate::{checkpoint::CheckpointError, locate::LocateError};

/// An error of the client. Messages are lower case and name thing, size and limit.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The daemon refused the call; its kind, figures and remedy are in the failure.
    #[error(transparent)]
    Refused(#[from] Failure),
    /// Nobody answers at the socket.
    #[error("flextensord is not reachable at {}: {reason}", socket.display())]
    Unreachable {
        /// The socket that was tried.
        socket: PathBuf,
        /// What the kernel said.
        reason: String,
        /// What to do.
        remedy: String,
    },
    /// The connection failed in the middle of a call, also on the second try.
    #[error("{call}: the connection failed: {reason}")]
    Transport {
        /// The call.
        call: &'static str,
        /// What the transport said.
        reason: String,
    },
    /// The lease of the manager is over.
    #[error("manager {manager} lost its lease: {reason}; {}", way_on(*context_lost))]
    LeaseLost {
        /// The manager.
        manager: String,
        /// Why.
        reason: String,
        /// Whether work that was queued on a GPU was ended: only a new process helps.
        context_lost: bool,
    },
    /// The daemon is gone, and no successor took the manager over in time.
    #[error(
        "the daemon of manager {manager} is gone and no successor came within {patience:?}; {}",
        way_on(*context_lost)
    )]
    DaemonLost {
        /// The manager.
        manager: String,
        /// How long it was waited for.
        patience: Duration,
        /// Whether work that was queued on a GPU was ended: only a new process helps.
        context_lost: bool,
    },
    /// A part would overlap one that is held: release that one first.
    #[error("part {part} ({tensor}) overlaps part {held}, which is held; release that one first")]
    HoldConflict {
        /// The part asked for.
        part: u32,
        /// A tensor in it.
        tensor: String,
        /// The part that is held.
        held: u32,
    },
    /// Something did not come to pass in its time.
    #[error("{what} did not finish within {limit:?}")]
    Deadline {
        /// What was waited for.
        what: String,
        /// The limit.
        limit: Duration,
    },
    /// The process was forked after the object was made; a child owns nothing.
    #[error(
        "made in process {made_in} and used in its forked child {called_in}; connect again in the child"
    )]
    Forked {
        /// The process that made it.
        made_in: u32,
        /// The process that called.
        called_in: u32,
    },
    /// A manager is used by one thread: all its acquires and releases form one order.
    #[error("the manager belongs to {owner} and was called from {caller}; see rebind_thread")]
    WrongThread {
        /// The thread that opened it or was bound to it.
        owner: String,
        /// The thread that called.
        caller: String,
    },
    /// An acquire while one over RPC is under way: they must form one order.
    #[error(
        "layer {layer} was acquired while an acquire over RPC is under way; await that one first"
    )]
    OrderBroken {
        /// The layer asked for.
        layer: String,
    },
    /// The call is one for another kind of device.
    #[error("{call} does not fit device {device}: call {instead}")]
    WrongDevice {
        /// The call.
        call: &'static str,
        /// The manager's device.
        device: String,
        /// What to call there.
        instead: &'static str,
    },
    /// The manager's GPU is none of those that this process may use.
    #[error(
        "device {device} is GPU {uuid}, which this process does not see; it sees {seen}; see \
         CUDA_VISIBLE_DEVICES"
    )]
    GpuNotVisible {
        /// The device as the daemon names it.
        device: String,
        /// The GPU's UUID.
        uuid: String,
        /// The GPUs that this process sees.
        seen: String,
    },
    /// A hold that is taken outside a capture of a stream ends outside, one that is taken
    /// inside ends inside: a graph must leave every count as it was.
    #[error("{held} {edge}")]
    CaptureEdge {
        /// The layers that are held.
        held: String,
        /// Which edge their holds cross.
        edge: &'static str,
    },
    /// A release of a layer that is not held.
    #[error("layer {layer} is not held, and cannot be released")]
    NotHeld {
        /// The layer.
        layer: String,
    },
    /// The descriptor channel failed.
    #[error("descriptor channel: {what}: {reason}")]
    Channel {
        /// The operation.
        what: &'static str,
        /// What went wrong.
        reason: String,
    },
    /// A size or number is out of range.
    #[error("{what} is {value}, {rule}")]
    Range {
        /// The thing.
        what: String,
        /// Its value.
        value: u64,
        /// The rule, with the limit.
        rule: String,
    },
    /// There is no such layer or tensor in the plan.
    #[error("no {what} {name:?} in {place}")]
    Unknown {
        /// "layer" or "tensor".
        what: &'static str,
        /// The name.
        name: String,
        /// Where it was looked for.
        place: String,
    },
    /// The call does not fit the state of the object.
    #[error("{0}")]
    State(&'static str),
    /// The daemon's answer breaks the protocol.
    #[error("{call}: the daemon's answer breaks the protocol: {reason}")]
    Protocol {
        /// The call or object.
        call: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// No socket can be named.
    #[error(transparent)]
    Locate(#[from] LocateError),
    /// The checkpoint cannot be opened.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The GPU or its driver refused.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The daemon's device memory cannot be mapped in this process.
    #[error("device memory of {bytes} bytes cannot be mapped in this process: {source}")]
    Import {
        /// Its bytes.
        bytes: u64,
        /// What the driver said.
        source: CudaError,
    },
    /// A page cannot be registered with the driver.
    #[error(transparent)]
    Pinning(#[from] RegistrationError),
    /// A page that was handed over is not usable.
    #[error(transparent)]
    Page(#[from] ControlError),
    /// A system call failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl ClientError {
    /// Whether a call may have met a daemon that ended, or one that is not ready yet.
    pub(crate) fn is_of_a_restart(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Transport { .. } => true,
            // who stops may have a successor; who is not kept for one learns it by the lease
            Self::Refused(failure) => matches!(failure.kind, Kind::Recovering | Kind::Draining),
            _ => false,
        }
    }

    /// What to do about it, where there is an answer.
    #[must_use]
    pub fn remedy(&self) -> Option<&str> {
        match self {
            Self::Refused(failure) => failure.details.get("remedy").map(String::as_str),
            Self::Unreachable { remedy, .. } => Some(remedy),
            Self::LeaseLost {
                context_lost: true, ..
            }
            | Self::DaemonLost {
                context_lost: true, ..
            } => Some("restart the process"),
            Self::Import { .. } => Some(
                "client and daemon need the same driver and GPU: in a container, give it the GPU \
                 (--gpus, the same UUID) and the driver of the host; no other namespace has to be \
                 shared",
            ),
            Self::GpuNotVisible { .. } => {
                Some("let the process see that GPU, or open the manager on another device")
            }
            _ => None,
        }
    }

    /// Whether the same call may succeed later without a change.
    #[must_use]
    pub fn retryable(&self) -> bool {
        match self {
            Self::Refused(failure) => failure.retryable,
            Self::Deadline { .. } | Self::Transport { .. } | Self::Unreachable { .. } => true,
            _ => false,
        }
    }

    /// The daemon's kind, when it was the daemon who refused.
    #[must_use]
    pub fn kind(&self) -> Option<Kind> {
        match self {
            Self::Refused(failure) => Some(failure.kind),
            _ => None,
        }
    }
}

/// What is left to do once a lease is over.
fn way_on(context_lost: bool) -> &'static str {
    if context_lost {
        "its queued work was ended with the process's CUDA context, which is unusable now: \
         restart the process"
    } else {
        "open it again"
    }
}

/// Whether the connection failed before the daemon could answer: such a call may be
/// sent once more.
pub(crate) fn is_transport(status: &Status) -> bool {
    let timed = matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled);
    let local = status.code() == Code::Unavailable || status.source().is_some();
    Failure::from_status(status).is_none() && !timed && local
}

/// The error behind a status; `limit` is the deadline that the call had.
pub(crate) fn from_status(
    call: &'static str,
    socket: &std::path::Path,
    limit: Duration,
    status: &Status,
) -> ClientError {
    if let Some(failure) = Failure::from_status(status) {
        return ClientError::Refused(failure);
    }
    if let Some(error) = connect_error(status) {
        return unreachable(socket, error);
    }
    match status.code() {
        Code::DeadlineExceeded | Code::Cancelled => ClientError::Deadline {
            what: call.to_owned(),
            limit,
        },
        code if is_transport(status) => ClientError::Transport {
            call,
            reason: deepest(status).unwrap_or_else(|| format!("{code:?}: {}", status.message())),
        },
        code => ClientError::Protocol {
            call,
            reason: format!("status {code:?} without details: {}", status.message()),
        },
    }
}

/// The error behind a failed connect, with a remedy that fits.
pub(crate) fn unreachable(socket: &std::path::Path, error: &io::Error) -> ClientError {
    let remedy = match error.kind() {
        io::ErrorKind::NotFound => {
            "start the daemon with `flextensord serve`, or name its instance with --instance, \
             --runtime-dir or --socket"
        }
        io::ErrorKind::ConnectionRefused => {
            "the daemon that made the socket has ended; start it again with `flextensord serve`"
        }
        io::ErrorKind::PermissionDenied => {
            "the socket is open to its owner and its group only; run as that user or join the group"
        }
        _ => "see the daemon's log",
    };
    ClientError::Unreachable {
        socket: socket.to_owned(),
        reason: error.to_string(),
        remedy: remedy.to_owned(),
    }
}

/// The error of connect(2) in the chain of causes.
pub(crate) fn connect_error<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> Option<&'a io::Error> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(io) = error.downcast_ref::<io::Error>()
            && matches!(
                io.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::ConnectionRefused
                    | io::ErrorKind::PermissionDenied
            )
        {
            return Some(io);
        }
        cause = error.source();
    }
    None
}

/// The message of the innermost cause.
fn deepest(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    let mut innermost = error.source()?;
    while let Some(cause) = innermost.source() {
        innermost = cause;
    }
    Some(innermost.to_string())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use flextensord_proto::kind::Origin;

    use super::*;

    fn read(status: &Status) -> ClientError {
        from_status("Get", Path::new("/s"), Duration::from_secs(30), status)
    }

    #[test]
    fn a_refusal_keeps_its_kind_and_remedy() {
        let sent = Failure::new(Kind::HostMemory, Origin::Daemon, "full").with("remedy", "drop x");
        let error = read(&Status::from(sent));
        assert_eq!(error.kind(), Some(Kind::HostMemory));
        assert_eq!(error.remedy(), Some("drop x"));
        assert!(error.retryable());
    }

    #[test]
    fn only_failures_of_the_connection_are_sent_again() {
        assert!(is_transport(&Status::unavailable("gone")));
        let refused = io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(is_transport(&Status::from_error(Box::new(refused))));
        let draining = Failure::new(Kind::Draining, Origin::Daemon, "drains");
        assert!(!is_transport(&Status::from(draining)));
        assert!(!is_transport(&Status::deadline_exceeded("slow")));
        assert!(!is_transport(&Status::internal("bug")));
    }

    #[test]
    fn a_missing_socket_is_told_from_a_failed_call() {
        let missing = io::Error::from(io::ErrorKind::NotFound);
        let error = read(&Status::from_error(Box::new(missing)));
        assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
        assert!(error.remedy().is_some_and(|text| text.contains("serve")));
        let error = read(&Status::deadline_exceeded("x"));
        assert!(matches!(error, ClientError::Deadline { .. }), "{error}");
    }
}
