//! One daemon of an instance: a lock on a file that is never unlinked.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Seek as _, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use flextensord_device::process::start_time;
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg, OFlag},
};

/// Why the lock cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another daemon has it.
    #[error("another daemon holds {}{}", path.display(), holder(*pid))]
    Held {
        /// The lock file.
        path: PathBuf,
        /// The holder, when it has written itself down.
        pid: Option<u32>,
    },
    /// The file cannot be opened, locked or written.
    #[error("cannot lock {}: {source}", path.display())]
    Kernel {
        /// The lock file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

fn holder(pid: Option<u32>) -> String {
    pid.map_or_else(String::new, |pid| format!(": process {pid}"))
}

/// The right to serve an instance, until dropped. The kernel takes it back when the
/// process ends, however that happens.
#[derive(Debug)]
pub struct InstanceLock {
    file: Flock<File>,
    path: PathBuf,
    predecessor: Option<u32>,
}

impl InstanceLock {
    /// Takes the lock at `path`, without waiting.
    ///
    /// # Errors
    /// [`LockError::Held`] when another daemon has it.
    pub fn take(path: &Path) -> Result<Self, LockError> {
        let kernel = |source| LockError::Kernel {
            path: path.to_owned(),
            source,
        };
        loop {
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                // whoever can open the file can lock it, and so keep the daemon out
                .mode(0o600)
                // a pipe in its place must not hold the start up
                .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
                .open(path)
                .map_err(kernel)?;
            if !file.metadata().map_err(kernel)?.is_file() {
                return Err(kernel(io::Error::other("it is no regular file")));
            }
            // whoever held it before; read while nobody writes it anew
            let mut reader = file.try_clone().map_err(kernel)?;
            let lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => lock,
                Err((refused, Errno::EWOULDBLOCK)) => {
                    file = refused;
                    let path = path.to_owned();
                    let pid = holder_soon(&mut file);
                    return Err(LockError::Held { path, pid });
                }
                Err((_, errno)) => return Err(kernel(errno.into())),
            };
            let taken = Self {
                file: lock,
                path: path.to_owned(),
                predecessor: read_holder(&mut reader),
            };
            // somebody may have replaced the file between open and lock
            if taken.is_in_place() {
                taken.write_holder().map_err(kernel)?;
                return Ok(taken);
            }
        }
    }

    /// The process that held the instance before, if it wrote itself down. The kernel takes
    /// the lock back before it has closed all that a dying process had open, a GPU among it.
    #[must_use]
    pub fn predecessor(&self) -> Option<u32> {
        self.predecessor
    }

    /// Whether the file that is locked is the one that others would try to lock.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        match (self.file.metadata(), fs::symlink_metadata(&self.path)) {
            (Ok(ours), Ok(there)) => ours.dev() == there.dev() && ours.ino() == there.ino(),
            _ => false,
        }
    }

    /// Writes pid and start time down, for the message of whoever comes second.
    fn write_holder(&self) -> io::Result<()> {
        let pid = std::process::id();
        let started = start_time(pid).unwrap_or(0);
        self.file.set_len(0)?;
        (&*self.file).rewind()?;
        (&*self.file).write_all(format!("{pid} {started}\n").as_bytes())
    }
}

/// As [`read_holder`], given a moment: who has just locked the file may not have written yet.
fn holder_soon(file: &mut File) -> Option<u32> {
    for _ in 0..20 {
        if let Some(pid) = read_holder(file) {
            return Some(pid);
        }
        thread::sleep(Duration::from_millis(5));
    }
    None
}

/// The pid in a lock file, unless that process is visibly another one by now.
fn read_holder(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(64).read_to_string(&mut text).ok()?;
    let mut fields = text.split_ascii_whitespace();
    let pid = fields.next()?.parse().ok()?;
    let started: u64 = fields.next()?.parse().ok()?;
    match start_time(pid) {
        Some(now) if now != started && started != 0 => None,
        _ => Some(pid),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_is_told_the_first_ones_pid() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let first = InstanceLock::take(&path).unwrap();
        let refusal = InstanceLock::take(&path).unwrap_err();
        let pid = std::process::id();
        assert!(matches!(refusal, LockError::Held { pid: Some(found), .. } if found == pid));
        assert!(refusal.to_string().contains(&format!("process {pid}")));
        assert_eq!(first.predecessor(), None);
        drop(first);
        assert!(path.exists());
        let second = InstanceLock::take(&path).unwrap();
        assert_eq!(second.predecessor(), Some(pid));
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(&format!("{pid} ")), "{text:?}");
    }

    #[test]
    fn a_pid_that_was_given_to_another_process_is_not_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let _first = InstanceLock::take(&path).unwrap();
        fs::write(&path, format!("{} 1\n", std::process::id())).unwrap();
        let refusal = InstanceLock::take(&path).unwrap_err();
        assert!(matches!(refusal, LockError::Held { pid: None, .. }));
    }

    #[test]
    fn a_lock_whose_file_was_removed_knows_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let first = InstanceLock::take(&path).unwrap();
        assert!(first.is_in_place());
        fs::remove_file(&path).unwrap();
        assert!(!first.is_in_place());
    }

    #[test]
    fn a_symbolic_link_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let target = directory.path().join("target");
        std::os::unix::fs::symlink(&target, &path).unwrap();
        assert!(InstanceLock::take(&path).is_err());
        assert!(!target.exists());
    }
}
