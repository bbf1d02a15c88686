//! The one place where errors of all rooms become what travels to a client.

mod managers;

use flextensord_device::{kernel::KernelError, segment::SegmentError};
use flextensord_proto::kind::{Failure, Kind, Origin};

pub use managers::device;

use crate::{channel::ticket::TicketError, weights::error::WeightError};

/// A field of a request that breaks a rule.
#[must_use]
pub fn invalid_argument(field: &str, value: impl std::fmt::Debug, rule: &str) -> Failure {
    WeightError::argument(field, value, rule).into()
}

impl From<WeightError> for Failure {
    fn from(error: WeightError) -> Self {
        let message = error.to_string();
        let client = |kind| Failure::new(kind, Origin::Client, message.clone());
        let daemon = |kind| Failure::new(kind, Origin::Daemon, message.clone());
        let kernel = |kind| Failure::new(kind, Origin::Kernel, message.clone());
        match error {
            WeightError::Argument { field, value, rule } => client(Kind::InvalidArgument)
                .with("field", field)
                .with("value", value)
                .with("rule", rule),
            WeightError::Checkpoint { file, problem } => client(Kind::CheckpointInvalid)
                .with("field", "files")
                .with("value", file)
                .with("rule", problem),
            WeightError::CheckpointChanged { file, .. } => client(Kind::CheckpointChanged)
                .with("field", "files")
                .with("value", &file)
                .with("rule", "files that do not change while they are read")
                .with("file", file),
            WeightError::Read { file, .. } => kernel(Kind::Kernel).with("file", file),
            WeightError::NotFound { name } => client(Kind::NotFound)
                .with("field", "name")
                .with("value", &name)
                .with("rule", "the name of a weight set that this user may see")
                .with("name", &name),
            WeightError::NotOwner { name } => client(Kind::PermissionDenied)
                .with("field", "name")
                .with("value", &name)
                .with("rule", "the name of a weight set of this user")
                .with("name", name),
            WeightError::ContentDiffers { name, tensor, .. } => client(Kind::ContentDiffers)
                .with("name", name)
                .with("tensor", tensor),
            WeightError::InUse { name, managers } => client(Kind::InUse)
                .with("name", name)
                .with("managers", managers)
                .with("remedy", "close or terminate the managers"),
            WeightError::HostMemory {
                wanted,
                available,
                limit,
                limited_by,
            } => daemon(Kind::HostMemory)
                .with("wanted", wanted)
                .with("available", available)
                .with("limit", limit)
                .with("limited_by", limited_by)
                .with("remedy", "drop weight sets, or raise the limit"),
            WeightError::TooMany { what, limit } => daemon(Kind::TooMany)
                .with("what", what)
                .with("limit", limit)
                .with("remedy", "try again later"),
            WeightError::Draining => daemon(Kind::Draining)
                .with("remedy", "try again when the daemon's successor serves"),
            WeightError::Aborted { .. } => daemon(Kind::Aborted),
            WeightError::Timeout { seconds, .. } => {
                daemon(Kind::DeadlineExceeded).with("limit", format!("{seconds} s"))
            }
            WeightError::Segment(SegmentError::Full { wanted, free, .. }) => {
                kernel(Kind::SharedMemoryFull)
                    .with("wanted", wanted)
                    .with("available", free)
                    .with(
                        "remedy",
                        "enlarge it (mount -o remount,size=…, docker run --shm-size=…) or drop \
                         weight sets",
                    )
            }
            WeightError::Segment(SegmentError::GivenUp { .. }) => daemon(Kind::Aborted),
            WeightError::Segment(SegmentError::Unlike { .. }) => daemon(Kind::Internal),
            WeightError::Segment(SegmentError::Size { bytes }) => {
                client(Kind::InvalidArgument).with("wanted", bytes)
            }
            WeightError::Segment(SegmentError::Kernel(error)) | WeightError::Kernel(error) => {
                kernel_failure(&error)
            }
            WeightError::Device(error) => device(error),
            WeightError::State(_) => kernel(Kind::Kernel),
            WeightError::Range(_) | WeightError::Internal(_) => daemon(Kind::Internal),
        }
    }
}

impl From<TicketError> for Failure {
    fn from(error: TicketError) -> Self {
        let (kind, origin) = match error {
            TicketError::Unknown => (Kind::NotFound, Origin::Client),
            TicketError::Kind => (Kind::InvalidArgument, Origin::Client),
            TicketError::TooMany { .. } => (Kind::TooMany, Origin::Client),
            TicketError::Random => (Kind::Internal, Origin::Kernel),
        };
        let failure = Failure::new(kind, origin, error.to_string());
        match error {
            TicketError::TooMany { limit, .. } => failure.with("limit", limit).with(
                "remedy",
                "redeem the tickets, or wait a minute until they expire",
            ),
            TicketError::Unknown | TicketError::Kind => failure
                .with("field", "files")
                .with("value", "(not shown)")
                .with(
                    "rule",
                    "tickets of files that this user offered, each used once",
                ),
            TicketError::Random => failure,
        }
    }
}

/// A failed system call. What the kernel has run out of may come back.
#[must_use]
pub fn kernel_failure(error: &KernelError) -> Failure {
    let kind = if error.is_exhausted() {
        Kind::TooMany
    } else {
        Kind::Kernel
    };
    let failure = Failure::new(kind, Origin::Kernel, error.to_string());
    match error.source.raw_os_error() {
        Some(code) => failure.with("errno", code),
        None => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_and_rules_are_there_for_machines() {
        let failure: Failure = WeightError::HostMemory {
            wanted: 3,
            available: 1,
            limit: 2,
            limited_by: "configured limit".to_owned(),
        }
        .into();
        assert_eq!(failure.kind, Kind::HostMemory);
        for (name, value) in [("wanted", "3"), ("available", "1"), ("limit", "2")] {
            assert_eq!(failure.details[name], value);
        }
        assert!(failure.details.contains_key("remedy"));
        let failure = invalid_argument("name", "a/b", "no slash");
        for name in ["field", "value", "rule"] {
            assert!(failure.details.contains_key(name), "{name}");
        }
        let full = SegmentError::Full {
            wanted: 16,
            free: 8,
            directory: "/dev/shm".into(),
        };
        let failure: Failure = WeightError::from(full).into();
        assert_eq!(failure.kind, Kind::SharedMemoryFull);
        assert_eq!(failure.details["available"], "8");
        assert!(failure.retryable);
    }
}
