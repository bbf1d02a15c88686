//! Error kinds and how a failure travels: from the place where it happens through
//! a gRPC status (as `google.rpc.ErrorInfo`) to the client's language.

use std::{collections::HashMap, fmt};

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

/// Most bytes of a message and of a detail: a status travels in headers, which clients
/// take up to 8 KiB of.
const TEXT_BYTES: usize = 768;
const DETAIL_BYTES: usize = 512;

/// The `domain` of every `ErrorInfo` that the daemon sends.
pub const DOMAIN: &str = "flextensord";

macro_rules! kinds {
    ($($(#[doc = $doc:literal])* $name:ident = $text:literal, $code:ident, $retry:literal;)*) => {
        /// What went wrong, as a stable machine-readable name.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Kind { $($(#[doc = $doc])* $name,)* }

        impl Kind {
            /// All kinds, in the order of the catalogue.
            pub const ALL: &[Kind] = &[$(Kind::$name,)*];

            /// The name on the wire.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Kind::$name => $text,)* }
            }

            /// The gRPC code that carries it.
            #[must_use]
            pub fn code(self) -> Code {
                match self { $(Kind::$name => Code::$code,)* }
            }

            /// Whether the same call may succeed later without a change.
            #[must_use]
            pub fn retryable(self) -> bool {
                match self { $(Kind::$name => $retry,)* }
            }

            /// What it means, from the catalogue.
            #[must_use]
            pub fn meaning(self) -> &'static str {
                match self { $(Kind::$name => concat!($($doc),*),)* }
            }
        }
    };
}

kinds! {
    /// A field of the request breaks a rule; the message names field, value and rule.
    InvalidArgument = "INVALID_ARGUMENT", InvalidArgument, false;
    /// The checkpoint is not a valid safetensors file or set of shards.
    CheckpointInvalid = "CHECKPOINT_INVALID", InvalidArgument, false;
    /// The checkpoint changed while it was read.
    CheckpointChanged = "CHECKPOINT_CHANGED", Aborted, true;
    /// No such weight set, layer, tensor, manager or ticket (or it is not the caller's to see).
    NotFound = "NOT_FOUND", NotFound, false;
    /// The manager's name is owned by a living process.
    ManagerTaken = "MANAGER_TAKEN", AlreadyExists, false;
    /// A live weight set of that name has other content.
    ContentDiffers = "CONTENT_DIFFERS", AlreadyExists, false;
    /// The token does not own a manager, or no longer does.
    LeaseLost = "LEASE_LOST", FailedPrecondition, false;
    /// The hold is unknown or was given back already.
    UnknownHold = "UNKNOWN_HOLD", FailedPrecondition, false;
    /// A part would overlap one that is held.
    HoldConflict = "HOLD_CONFLICT", FailedPrecondition, false;
    /// The object is in a state that does not allow the call.
    FailedPrecondition = "FAILED_PRECONDITION", FailedPrecondition, false;
    /// The weight set is attached by a manager.
    InUse = "IN_USE", FailedPrecondition, true;
    /// The device has too little memory left for the plan.
    DeviceMemory = "DEVICE_MEMORY", ResourceExhausted, true;
    /// The budget is under the least in which the model can run.
    BudgetInfeasible = "BUDGET_INFEASIBLE", ResourceExhausted, false;
    /// The host budget for weight sets is spent.
    HostMemory = "HOST_MEMORY", ResourceExhausted, true;
    /// The shared memory file system is full.
    SharedMemoryFull = "SHARED_MEMORY_FULL", ResourceExhausted, true;
    /// A limit on the number of objects or queued calls is reached.
    TooMany = "TOO_MANY", ResourceExhausted, true;
    /// The caller's user may not do this.
    PermissionDenied = "PERMISSION_DENIED", PermissionDenied, false;
    /// The two sides speak no common protocol version.
    ProtocolVersion = "PROTOCOL_VERSION", FailedPrecondition, false;
    /// The call did not finish within its deadline.
    DeadlineExceeded = "DEADLINE_EXCEEDED", DeadlineExceeded, true;
    /// The work was discarded before it was complete.
    Aborted = "ABORTED", Aborted, true;
    /// The daemon has no such call, or does not speak the encoding of the request.
    Unimplemented = "UNIMPLEMENTED", Unimplemented, false;
    /// The daemon drains or stops.
    Draining = "DRAINING", Unavailable, true;
    /// The manager is being taken over from a daemon that ended.
    Recovering = "RECOVERING", Unavailable, true;
    /// A system call failed.
    Kernel = "KERNEL", Internal, false;
    /// The driver refuses to pin host memory.
    Pinning = "PINNING", ResourceExhausted, true;
    /// The device or its driver failed.
    Device = "DEVICE", Internal, false;
    /// A fault of the daemon itself.
    Internal = "INTERNAL", Internal, false;
}

impl Kind {
    /// The kind with that name on the wire.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.as_str() == text)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Where a failure has its cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The caller's request.
    Client,
    /// The daemon's own state.
    Daemon,
    /// The GPU driver.
    Driver,
    /// The operating system.
    Kernel,
}

impl Origin {
    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Daemon => "daemon",
            Self::Driver => "driver",
            Self::Kernel => "kernel",
        }
    }

    /// The origin with that name on the wire.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Client, Self::Daemon, Self::Driver, Self::Kernel]
            .into_iter()
            .find(|origin| origin.as_str() == text)
    }
}

/// A failure as both sides see it. Its message is lower case and names the thing,
/// its size and the limit; `details` hold the same figures for machines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What went wrong.
    pub kind: Kind,
    /// Where the cause lies.
    pub origin: Origin,
    /// Whether the same call may succeed later without a change.
    pub retryable: bool,
    /// For a person.
    pub message: String,
    /// Figures by name, such as `wanted`, `available`, `limit`, `remedy`.
    pub details: HashMap<String, String>,
}

impl Failure {
    /// A failure with the kind's own verdict on retrying.
    #[must_use]
    pub fn new(kind: Kind, origin: Origin, message: impl Into<String>) -> Self {
        Self {
            kind,
            origin,
            retryable: kind.retryable(),
            message: message.into(),
            details: HashMap::new(),
        }
    }

    /// Adds a figure.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.details.insert(name.to_owned(), value.to_string());
        self
    }

    /// Reads a failure back from a status; `None` when the status was not made by a
    /// daemon of this project (a transport error, say).
    #[must_use]
    pub fn from_status(status: &Status) -> Option<Self> {
        let details = status.get_error_details();
        let info = details.error_info().filter(|info| info.domain == DOMAIN)?;
        let kind = Kind::parse(&info.reason)?;
        let mut details = info.metadata.clone();
        let origin = details.remove("origin").and_then(|o| Origin::parse(&o))?;
        let retryable = details.remove("retryable").is_some_and(|r| r == "true");
        Some(Self {
            kind,
            origin,
            retryable,
            message: status.message().to_owned(),
            details,
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        let mut metadata = failure.details;
        metadata
            .values_mut()
            .for_each(|value| cut(value, DETAIL_BYTES));
        metadata.insert("origin".to_owned(), failure.origin.as_str().to_owned());
        metadata.insert("retryable".to_owned(), failure.retryable.to_string());
        let details = ErrorDetails::with_error_info(failure.kind.as_str(), DOMAIN, metadata);
        let mut message = failure.message;
        cut(&mut message, TEXT_BYTES);
        Status::with_error_details(failure.kind.code(), message, details)
    }
}

/// Shortens a text that is over the limit, between two characters.
fn cut(text: &mut String, limit: usize) {
    const MARK: &str = "…";
    if text.len() > limit {
        text.truncate(text.floor_char_boundary(limit - MARK.len()));
        text.push_str(MARK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_the_way_through_a_status() {
        for &kind in Kind::ALL {
            let sent = Failure::new(kind, Origin::Kernel, "no room").with("wanted", 7);
            let status = Status::from(sent.clone());
            assert_eq!(status.code(), kind.code());
            assert_eq!(Failure::from_status(&status), Some(sent));
            assert!(!kind.meaning().trim().is_empty());
        }
    }

    #[test]
    fn a_status_stays_within_the_headers_that_clients_take() {
        let long = "ä".repeat(100_000);
        let sent = Failure::new(Kind::NotFound, Origin::Client, long.clone());
        let sent = ["value", "layer", "tensor", "rule"]
            .iter()
            .fold(sent, |failure, name| failure.with(name, &long));
        let status = Status::from(sent);
        let got = Failure::from_status(&status).unwrap();
        assert!(got.message.len() <= TEXT_BYTES && got.message.ends_with("ä…"));
        assert!(
            got.details
                .values()
                .all(|value| value.len() <= DETAIL_BYTES)
        );
        // a byte of text may take three in its header, four thirds in the details
        assert!(3 * got.message.len() + status.details().len() * 4 / 3 < 8000);
    }

    #[test]
    fn a_transport_error_is_not_taken_for_a_failure_of_the_daemon() {
        assert_eq!(
            Failure::from_status(&Status::unavailable("tcp connect error")),
            None
        );
    }
}
