//! Waiting for a descriptor on a tokio runtime.

use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use tokio::io::unix::AsyncFd;

/// A non-blocking descriptor whose readiness a tokio runtime watches.
#[derive(Debug)]
pub struct Watched(AsyncFd<OwnedFd>);

impl Watched {
    /// Watches `descriptor`. Must be called within a runtime with I/O.
    ///
    /// # Errors
    /// When the runtime cannot watch it (a regular file, for example).
    pub fn new(descriptor: OwnedFd) -> io::Result<Self> {
        // SAFETY: an OwnedFd is open and names the same file description for its whole
        // life, and the AsyncFd owns it.
        let watched = unsafe { AsyncFd::register(descriptor) };
        watched
            .map(Self)
            .map_err(|error| io::Error::other(error.to_string()))
    }

    /// Waits until it is readable; stays readable until somebody reads.
    ///
    /// # Errors
    /// When the runtime is shutting down.
    pub async fn readable(&self) -> io::Result<()> {
        self.0.readable().await?.retain_ready();
        Ok(())
    }

    /// Tries `attempt` each time that the descriptor becomes readable, until it does not
    /// say `WouldBlock`.
    ///
    /// # Errors
    /// What the attempt says.
    pub async fn read<T>(
        &self,
        mut attempt: impl FnMut(BorrowedFd<'_>) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            let mut guard = self.0.readable().await?;
            if let Ok(result) = guard.try_io(|inner| attempt(inner.get_ref().as_fd())) {
                return result;
            }
        }
    }

    /// As [`Watched::read`], each time that the descriptor becomes writable.
    ///
    /// # Errors
    /// What the attempt says.
    pub async fn write<T>(
        &self,
        mut attempt: impl FnMut(BorrowedFd<'_>) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            let mut guard = self.0.writable().await?;
            if let Ok(result) = guard.try_io(|inner| attempt(inner.get_ref().as_fd())) {
                return result;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::process::Process;

    #[tokio::test]
    async fn the_end_of_a_process_is_noticed() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let process = Process::open(child.id()).unwrap();
        let watched = Watched::new(process.into_descriptor()).unwrap();
        let early = tokio::time::timeout(Duration::from_millis(20), watched.readable()).await;
        assert!(early.is_err());
        child.kill().unwrap();
        tokio::time::timeout(Duration::from_secs(10), watched.readable())
            .await
            .unwrap()
            .unwrap();
        child.wait().unwrap();
    }
}
