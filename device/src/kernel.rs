//! The error of a system call, with what was tried.

use std::{fmt, io};

/// A system call that failed.
#[derive(Debug)]
pub struct KernelError {
    /// The operation and its object, lower case, such as "map 4096 bytes".
    pub operation: String,
    /// What the kernel said.
    pub source: io::Error,
}

impl KernelError {
    /// Wraps what the kernel said about `operation`.
    pub fn new(operation: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self {
            operation: operation.into(),
            source: source.into(),
        }
    }

    /// Whether the kernel had no memory, space or quota for the operation.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        matches!(
            self.source.raw_os_error(),
            Some(libc::ENOSPC | libc::ENOMEM | libc::EDQUOT | libc::EMFILE | libc::ENFILE)
        )
    }
}

impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operation, self.source)
    }
}

impl std::error::Error for KernelError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}
