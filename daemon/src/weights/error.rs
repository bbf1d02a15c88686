//! Why an operation on weight sets fails.

use std::io;

use flextensord_device::{
    device::DeviceError, kernel::KernelError, mapping::RangeError, segment::SegmentError,
};
use flextensord_proto::name::NameError;

use crate::state::StateError;

/// Most characters of a caller's value that a message repeats.
const VALUE_CHARACTERS: usize = 96;

/// Why an operation on weight sets fails. Names are the caller's own or those of sets
/// that it may see; file names are those that the caller gave.
#[derive(Debug, thiserror::Error)]
pub enum WeightError {
    /// A field of the request breaks a rule.
    #[error("{field} is {value}: {rule}")]
    Argument {
        /// The field, such as `name` or `tensors[w].shape`.
        field: String,
        /// Its value, shortened.
        value: String,
        /// The rule it breaks.
        rule: String,
    },
    /// A file is not a valid checkpoint, or the files do not belong together.
    #[error("checkpoint file {file:?}: {problem}")]
    Checkpoint {
        /// The file's name as the caller gave it.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// A file changed while it was read.
    #[error("checkpoint file {file:?} changed while it was read: {change}")]
    CheckpointChanged {
        /// The file's name as the caller gave it.
        file: String,
        /// Size, time of change, or its end.
        change: String,
    },
    /// A file could not be read.
    #[error("read checkpoint file {file:?}: {source}")]
    Read {
        /// The file's name as the caller gave it.
        file: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// No set of that name, or none that the caller may see.
    #[error("no weight set {name:?}")]
    NotFound {
        /// The name asked for.
        name: String,
    },
    /// The set is shared with the caller, but not the caller's.
    #[error("weight set {name:?} belongs to another user")]
    NotOwner {
        /// The set's name.
        name: String,
    },
    /// A live set of that name has other content.
    #[error("weight set {name:?} is live with other content: {difference}")]
    ContentDiffers {
        /// The set's name.
        name: String,
        /// The first tensor that differs, in natural order; empty when the sets
        /// cannot be compared by tensor.
        tensor: String,
        /// How it differs.
        difference: String,
    },
    /// Managers are attached.
    #[error("weight set {name:?} is attached by {managers} managers")]
    InUse {
        /// The set's name.
        name: String,
        /// How many attachments there are.
        managers: usize,
    },
    /// The host budget has no room.
    #[error(
        "{wanted} bytes are wanted for a weight set, {available} of {limit} are left; the limit is the {limited_by}"
    )]
    HostMemory {
        /// Bytes asked for.
        wanted: u64,
        /// Bytes left.
        available: u64,
        /// Most bytes that all sets may take.
        limit: u64,
        /// What sets the limit.
        limited_by: String,
    },
    /// The daemon takes nothing new.
    #[error("the daemon drains and takes no new weights")]
    Draining,
    /// Too many objects or calls.
    #[error("{what}: {limit} are there, the limit")]
    TooMany {
        /// What there are too many of.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// The work was given up before it was complete; nothing is left of it.
    #[error("{what} was discarded: {reason}")]
    Aborted {
        /// What was under way.
        what: &'static str,
        /// Why it was given up.
        reason: String,
    },
    /// Another load of the same set did not end in time.
    #[error("weight set {name:?} is still being loaded by another call after {seconds} s")]
    Timeout {
        /// The set's name.
        name: String,
        /// How long was waited.
        seconds: u64,
    },
    /// The segment cannot be made.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The segment cannot be pinned, or the device is broken.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A system call failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A fault of ours: a place outside the segment.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The state directory refuses.
    #[error(transparent)]
    State(#[from] StateError),
    /// A fault of ours, in words.
    #[error("internal: {0}")]
    Internal(&'static str),
}

impl WeightError {
    /// A field that breaks a rule; a long value is shortened.
    pub fn argument(
        field: impl Into<String>,
        value: impl std::fmt::Debug,
        rule: impl Into<String>,
    ) -> Self {
        Self::Argument {
            field: field.into(),
            value: shorten(&format!("{value:?}")),
            rule: rule.into(),
        }
    }

    /// A name that breaks a rule.
    pub fn name(field: impl Into<String>, value: &str, rule: &NameError) -> Self {
        Self::argument(field, value, rule.to_string())
    }

    /// Work whose caller is gone or has given up.
    #[must_use]
    pub fn gone(what: &'static str) -> Self {
        let reason = "the caller is gone or has given up".to_owned();
        Self::Aborted { what, reason }
    }

    /// Work that the end of the daemon cuts short.
    #[must_use]
    pub fn stopping() -> Self {
        let reason = "the daemon stops".to_owned();
        let what = "load";
        Self::Aborted { what, reason }
    }

    /// A file that is not what it should be.
    pub fn checkpoint(file: &str, problem: impl std::fmt::Display) -> Self {
        Self::Checkpoint {
            file: file.to_owned(),
            problem: shorten_to(&problem.to_string(), 4 * VALUE_CHARACTERS),
        }
    }

    /// A failed read: an early end means that the file was cut under us.
    pub fn read(file: &str, source: io::Error) -> Self {
        let file = file.to_owned();
        if source.kind() == io::ErrorKind::UnexpectedEof {
            let change = "it ends earlier than it did".to_owned();
            return Self::CheckpointChanged { file, change };
        }
        Self::Read { file, source }
    }
}

/// `text` cut to what a message may repeat.
fn shorten(text: &str) -> String {
    shorten_to(text, VALUE_CHARACTERS)
}

fn shorten_to(text: &str, characters: usize) -> String {
    match text.char_indices().nth(characters) {
        Some((cut, _)) => format!("{}… ({} bytes)", &text[..cut], text.len()),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_value_is_shortened_at_a_character_in_messages() {
        let error = WeightError::argument("name", "ä".repeat(5000), "too long");
        let text = error.to_string();
        assert!(text.len() < 300, "{text}");
        assert!(text.starts_with("name is \"ää"), "{text}");
    }

    #[test]
    fn an_early_end_is_a_change_of_the_file() {
        let eof = io::Error::from(io::ErrorKind::UnexpectedEof);
        assert!(matches!(
            WeightError::read("f", eof),
            WeightError::CheckpointChanged { .. }
        ));
    }
}
