//! The state directory: what a successor of this daemon needs, one small file an
//! object, complete or not there at all.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{
        DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
    },
    path::{Path, PathBuf},
};

use flextensord_device::failpoint::{self, Point};
use flextensord_proto::name;
use nix::fcntl::OFlag;
use serde::{Serialize, de::DeserializeOwned};

/// Ending of the name of a file that is being written.
const TEMPORARY: &str = ".new";

/// Why the state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// A name that is no plain file name.
    #[error("state file name {name:?} is not legal")]
    Name {
        /// The name.
        name: String,
    },
    /// A system call failed.
    #[error("{operation}: {source}")]
    Io {
        /// What was tried, with the path.
        operation: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file that does not say what it should.
    #[error("state file {name:?}: {source}")]
    Content {
        /// The file's name.
        name: String,
        /// Where it goes wrong.
        source: serde_json::Error,
    },
}

/// Most bytes of a file: the record of a set with the largest header that is taken.
const FILE_BYTES: u64 = 512 << 20;

/// The bytes of a file, of nothing but a regular one of bounded size: what somebody else put
/// there must not hold the daemon up.
fn contents(path: &Path) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
        .open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    if found.len() > FILE_BYTES {
        let text = format!(
            "it has {} bytes, over the limit of {FILE_BYTES}",
            found.len()
        );
        return Err(io::Error::other(text));
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A directory of mode 0700 with one JSON file an object.
#[derive(Debug, Clone)]
pub struct StateDirectory {
    path: PathBuf,
}

impl StateDirectory {
    /// Opens the directory, made if it is not there; files that a dead daemon left half
    /// written go. To be called under the instance lock.
    ///
    /// # Errors
    /// When it cannot be made or is none.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, StateError> {
        let path = path.into();
        let failed = |source| StateError::Io {
            operation: format!("open state directory {}", path.display()),
            source,
        };
        match DirBuilder::new().mode(0o700).create(&path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(failed(e)),
            _ => {}
        }
        let found = fs::symlink_metadata(&path).map_err(failed)?;
        if !found.is_dir() {
            return Err(failed(io::ErrorKind::NotADirectory.into()));
        }
        if found.mode() & 0o777 != 0o700 {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).map_err(failed)?;
        }
        discard_half_written(&path).map_err(failed)?;
        Ok(Self { path })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes `value` as the file `name`, in place of an older one. When this returns
    /// the file is on its medium; should the daemon die before, the older one is there.
    ///
    /// # Errors
    /// When the name is not legal or the kernel refuses; the older file stays then.
    pub fn write(&self, name: &str, value: &impl Serialize) -> Result<(), StateError> {
        let target = self.file(name)?;
        let temporary = self.path.join(format!("{name}{TEMPORARY}"));
        let text = serde_json::to_vec(value).map_err(|source| StateError::Content {
            name: name.to_owned(),
            source,
        })?;
        let older = fs::read(&target).ok();
        let refused = |point| failpoint::pass(point).map_err(|error| error.source);
        let begun = refused(Point::Save);
        let written = begun
            .and_then(|()| {
                OpenOptions::new()
                    .write(true)
                    .create(true)
                    .truncate(true)
                    .mode(0o600)
                    .open(&temporary)
            })
            .and_then(|mut file| {
                file.write_all(&text)?;
                file.sync_all()?;
                refused(Point::SaveRename)
            })
            .and_then(|()| fs::rename(&temporary, &target))
            .and_then(|()| {
                refused(Point::Saved)?;
                File::open(&self.path)?.sync_all()
            });
        written.map_err(|source| {
            // one that is in place, and may be gone after a crash, is none that was written
            let undone = match older {
                Some(older) => {
                    fs::write(&temporary, older).and_then(|()| fs::rename(&temporary, &target))
                }
                None => fs::remove_file(&target),
            };
            drop(undone);
            // half a file under the temporary name helps nobody; the error is reported
            let _: io::Result<()> = fs::remove_file(&temporary);
            StateError::Io {
                operation: format!("write state file {}", target.display()),
                source,
            }
        })
    }

    /// Reads the file `name`; `None` when it is not there.
    ///
    /// # Errors
    /// When it cannot be read, or does not hold a `T`.
    pub fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, StateError> {
        let path = self.file(name)?;
        let bytes = match contents(&path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => {
                let operation = format!("read state file {}", path.display());
                return Err(StateError::Io { operation, source });
            }
        };
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|source| StateError::Content {
                name: name.to_owned(),
                source,
            })
    }

    /// Removes the file `name`; it is no error when it is not there.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn remove(&self, name: &str) -> Result<(), StateError> {
        let path = self.file(name)?;
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(StateError::Io {
                operation: format!("remove state file {}", path.display()),
                source,
            }),
            _ => Ok(()),
        }
    }

    /// Names of all complete files, in order. Files that a writer left half written are
    /// not among them.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub fn list(&self) -> Result<Vec<String>, StateError> {
        let failed = |source| StateError::Io {
            operation: format!("list state directory {}", self.path.display()),
            source,
        };
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.path).map_err(failed)? {
            if let Ok(name) = entry.map_err(failed)?.file_name().into_string()
                && name::check(&name).is_ok()
                && !name.ends_with(TEMPORARY)
            {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    fn file(&self, name: &str) -> Result<PathBuf, StateError> {
        if name::check(name).is_err() || name.ends_with(TEMPORARY) {
            let name = name.to_owned();
            return Err(StateError::Name { name });
        }
        Ok(self.path.join(name))
    }
}

/// Nobody but the holder of the instance lock writes here, so they are nobody's.
fn discard_half_written(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let is_half = |name: &str| name::check(name).is_ok() && name.ends_with(TEMPORARY);
        if entry.file_name().to_str().is_some_and(is_half) && entry.file_type()?.is_file() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_gone_after_remove() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(root.path().join("state")).unwrap();
        let mode = fs::metadata(state.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        state.write("a.json", &[1, 2]).unwrap();
        state.write("a.json", &[3]).unwrap();
        assert_eq!(state.read::<Vec<u8>>("a.json").unwrap(), Some(vec![3]));
        fs::write(state.path().join("b.json.new"), b"{").unwrap();
        assert_eq!(state.list().unwrap(), ["a.json"]);
        StateDirectory::open(state.path()).unwrap();
        assert!(!state.path().join("b.json.new").exists());
        state.remove("a.json").unwrap();
        state.remove("a.json").unwrap();
        assert_eq!(state.read::<Vec<u8>>("a.json").unwrap(), None);
    }

    #[test]
    fn a_name_that_leaves_the_directory_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(root.path()).unwrap();
        for name in ["../a", "a/b", "", ".a", "a.new"] {
            assert!(state.write(name, &1).is_err(), "{name}");
            assert!(state.read::<u8>(name).is_err(), "{name}");
            assert!(state.remove(name).is_err(), "{name}");
        }
    }

    #[test]
    fn garbage_is_an_error_that_names_the_file() {
        let root = tempfile::tempdir().unwrap();
        let state = StateDirectory::open(root.path()).unwrap();
        fs::write(root.path().join("x.json"), b"{\"a\":").unwrap();
        let error = state.read::<Vec<u8>>("x.json").unwrap_err();
        assert!(error.to_string().contains("x.json"), "{error}");
        fs::write(root.path().join("file"), b"").unwrap();
        assert!(StateDirectory::open(root.path().join("file")).is_err());
    }
}
