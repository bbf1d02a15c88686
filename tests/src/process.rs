//! Binaries of this build, and processes that are always waited for.

use std::{
    path::PathBuf,
    process::{Child, ExitStatus},
    time::{Duration, Instant},
};

use crate::SceneError;

/// The path of a binary of this build: it lies beside the running test or program.
///
/// # Errors
/// When it was not built.
pub fn binary(name: &str) -> Result<PathBuf, SceneError> {
    let here = std::env::current_exe().map_err(|e| SceneError::io("find this program", e))?;
    let beside = here.ancestors().skip(1).take(2).map(|directory| directory.join(name));
    beside.into_iter().find(|path| path.is_file()).ok_or_else(|| {
        SceneError::Unexpected(format!(
            "binary {name} is not built; run cargo build --workspace --bins first"
        ))
    })
}

/// A child that is killed and waited for when dropped.
#[derive(Debug)]
pub struct Guarded(pub Child);

impl Guarded {
    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Ends it with SIGKILL and waits for its end.
    ///
    /// # Errors
    /// When it cannot be killed or waited for.
    pub fn kill(&mut self) -> Result<(), SceneError> {
        self.0.kill().and_then(|()| self.0.wait()).map_err(|e| SceneError::io("kill", e))?;
        Ok(())
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it does not end within `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus, SceneError> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.0.try_wait().map_err(|e| SceneError::io("wait", e))? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                let text = format!("process {} did not end within {limit:?}", self.pid());
                return Err(SceneError::Unexpected(text));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // it may have ended by itself
        let _: std::io::Result<()> = self.0.kill();
        let _: std::io::Result<ExitStatus> = self.0.wait();
    }
}

/// Tries `look` until it gives something, at most for `limit`.
///
/// # Errors
/// When the time is over; `what` says what was waited for.
pub fn eventually<T>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> Option<T>,
) -> Result<T, SceneError> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = look() {
            return Ok(found);
        }
        if Instant::now() > deadline {
            return Err(SceneError::Unexpected(format!("{what}: not within {limit:?}")));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
