//! A memory file system of a given size, as a container's `/dev/shm` is one.

use std::{path::Path, process::Command};

use tempfile::TempDir;

use crate::{SceneError, daemon::directory};

/// A mounted tmpfs; dropped, it is unmounted.
#[derive(Debug)]
pub struct Tmpfs(TempDir);

impl Tmpfs {
    /// Mounts one of `mebibytes`; `None`, with a line that says so, where this user may not.
    ///
    /// # Errors
    /// When root may not.
    pub fn mount(mebibytes: u64) -> Result<Option<Self>, SceneError> {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIPPED: needs root to mount a tmpfs");
            return Ok(None);
        }
        let directory = directory()?;
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={mebibytes}M"), "none"])
            .arg(directory.path())
            .status()
            .map_err(|e| SceneError::io("run mount", e))?;
        if mounted.success() {
            return Ok(Some(Self(directory)));
        }
        Err(SceneError::Unexpected(format!(
            "mount ended with {mounted}"
        )))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // lazily: a daemon that is being killed may have it in use
        let _: std::io::Result<_> = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}
