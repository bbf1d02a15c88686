//! How often this instance has been started: a number that only grows.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

use nix::fcntl::OFlag;

use super::lock::InstanceLock;
use crate::managers::record;

/// Why the generation is not known.
#[derive(Debug, thiserror::Error)]
pub enum GenerationError {
    /// The file is not one that a daemon has written.
    #[error(
        "{} holds no generation; with none, clients cannot tell daemons apart: \
         end this instance's clients, then remove it",
        path.display()
    )]
    NoNumber {
        /// The file.
        path: PathBuf,
    },
    /// It cannot be read or written.
    #[error("cannot count the start in {}: {source}", path.display())]
    Kernel {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Counts one more start in `state` and returns the count, 1 for the first. On return
/// it is on the disk: a crash cannot give the same number twice.
///
/// # Errors
/// When the file is damaged or cannot be written.
pub fn next(state: &Path, _lock: &InstanceLock) -> Result<u64, GenerationError> {
    let path = state.join("generation");
    let kernel = |source| GenerationError::Kernel {
        path: path.clone(),
        source,
    };
    let last: u64 = match read(&path) {
        Ok(text) => text.trim().parse().ok(),
        // ids of managers hold the generation that gave them: they must not be given again
        Err(error) if error.kind() == io::ErrorKind::NotFound => Some(seen_in(state)),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => None,
        Err(error) => return Err(kernel(error)),
    }
    .ok_or_else(|| GenerationError::NoNumber { path: path.clone() })?;
    let generation = last
        .checked_add(1)
        .ok_or_else(|| GenerationError::NoNumber { path: path.clone() })?;
    write(state, &path, generation).map_err(kernel)?;
    Ok(generation)
}

/// The text of a small regular file.
fn read(path: &Path) -> io::Result<String> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut text = String::new();
    file.take(64).read_to_string(&mut text)?;
    Ok(text)
}

/// The highest generation that a file in `state` tells of; 0 when none does.
fn seen_in(state: &Path) -> u64 {
    let entries = fs::read_dir(state).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| record::id_of(entry.file_name().to_str()?))
        .map(|id| id >> 32)
        .max()
        .unwrap_or(0)
}

fn write(state: &Path, path: &Path, generation: u64) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .custom_flags(OFlag::O_NOFOLLOW.bits())
        .open(&temporary)?;
    writeln!(file, "{generation}")?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    File::open(state)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_grows_by_one_and_a_half_written_one_is_forgotten() {
        let state = tempfile::tempdir().unwrap();
        let lock = InstanceLock::take(&state.path().join("lock")).unwrap();
        assert_eq!(next(state.path(), &lock).unwrap(), 1);
        fs::write(state.path().join("generation.new"), b"9").unwrap();
        assert_eq!(next(state.path(), &lock).unwrap(), 2);
        assert_eq!(next(state.path(), &lock).unwrap(), 3);
    }

    #[test]
    fn a_damaged_count_is_refused_by_name_and_never_begins_anew() {
        let state = tempfile::tempdir().unwrap();
        let lock = InstanceLock::take(&state.path().join("lock")).unwrap();
        let path = state.path().join("generation");
        for damage in [&b""[..], b"-1", b"x", b"\xff", b"18446744073709551615"] {
            fs::write(&path, damage).unwrap();
            let refusal = next(state.path(), &lock).unwrap_err().to_string();
            assert!(refusal.contains("state") || refusal.contains("generation"));
            assert_eq!(fs::read(&path).unwrap(), damage);
        }
    }
}
