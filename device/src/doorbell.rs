//! An eventfd that wakes a thread, also across processes.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::Duration,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, ppoll},
    sys::{
        eventfd::{EfdFlags, EventFd},
        time::TimeSpec,
    },
    unistd,
};

use crate::kernel::KernelError;

/// A doorbell. Ringing never blocks, and rings before the next [`Doorbell::clear`]
/// count as one.
#[derive(Debug)]
pub struct Doorbell(OwnedFd);

impl Doorbell {
    /// A new doorbell.
    ///
    /// # Errors
    /// When the kernel has no descriptors.
    pub fn new() -> Result<Self, KernelError> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let bell = EventFd::from_value_and_flags(0, flags)
            .map_err(|e| KernelError::new("create a doorbell", e))?;
        Ok(Self(bell.into()))
    }

    /// A doorbell that was handed over.
    #[must_use]
    pub fn from_descriptor(descriptor: OwnedFd) -> Self {
        Self(descriptor)
    }

    /// Wakes whoever waits.
    pub fn ring(&self) {
        // a full counter (EAGAIN) means that it rings already
        let _: Result<usize, Errno> = unistd::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Forgets rings so far.
    pub fn clear(&self) {
        let _: Result<usize, Errno> = unistd::read(&self.0, &mut [0u8; 8]);
    }

    /// A descriptor of the same doorbell, to give away.
    ///
    /// # Errors
    /// When the kernel has no descriptors.
    pub fn export(&self) -> Result<OwnedFd, KernelError> {
        self.0
            .try_clone()
            .map_err(|e| KernelError::new("duplicate a doorbell", e))
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sleeps until one of `bells` rings or `limit` is over. `false` when none rings.
pub fn wait_any(bells: &[&Doorbell], limit: Duration) -> bool {
    let mut polled: Vec<PollFd<'_>> = bells
        .iter()
        .map(|bell| PollFd::new(bell.as_fd(), PollFlags::POLLIN))
        .collect();
    let limit = TimeSpec::from_duration(limit);
    // EINTR means the same as a ring: look again
    ppoll(&mut polled, Some(limit), None) != Ok(0)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_ring_before_the_wait_is_not_lost() {
        let bell = Doorbell::new().unwrap();
        let far = Doorbell::from_descriptor(bell.export().unwrap());
        far.ring();
        far.ring();
        let begin = Instant::now();
        wait_any(&[&bell], Duration::from_secs(5));
        assert!(begin.elapsed() < Duration::from_secs(4));
        bell.clear();
        wait_any(&[&bell], Duration::from_millis(1));
    }
}
