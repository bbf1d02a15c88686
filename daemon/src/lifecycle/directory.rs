//! The directories of an instance: ours alone, or refused.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io,
    os::unix::fs::{
        DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
    },
    path::{Path, PathBuf},
};

use nix::fcntl::OFlag;

/// Why a directory is refused.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// It can neither be made nor opened.
    #[error("cannot {operation} {}: {source}", path.display())]
    Kernel {
        /// What was tried.
        operation: &'static str,
        /// The directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Something else has its name.
    #[error("{} is {found}, not a directory", path.display())]
    NoDirectory {
        /// The path.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },
    /// It belongs to somebody else, who could replace what is in it.
    #[error("{} belongs to uid {owner}, this daemon runs as uid {uid}", path.display())]
    Owner {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Our user.
        uid: u32,
    },
    /// Others could replace what is in it.
    #[error(
        "{} has mode {mode:04o} and can be written by others; chmod go-w it or choose another",
        path.display()
    )]
    Writable {
        /// The directory.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
}

/// The directories of an instance.
#[derive(Debug, Clone)]
pub struct Directory {
    /// Sockets and lock.
    pub path: PathBuf,
    /// What a successor needs; readable by the daemon's user alone.
    pub state: PathBuf,
}

impl Directory {
    /// Makes the directories that do not exist, and checks all: `runtime_dir` (0750),
    /// `<runtime_dir>/<instance>` (0750) and its `state` (0700).
    ///
    /// # Errors
    /// When one cannot be made, belongs to another user, or can be written by others.
    pub fn prepare(runtime_dir: &Path, instance: &str) -> Result<Self, DirectoryError> {
        let path = runtime_dir.join(instance);
        let state = path.join("state");
        own(runtime_dir, 0o750)?;
        own(&path, 0o750)?;
        own(&state, 0o700)?;
        Ok(Self { path, state })
    }
}

/// Makes `path` with `mode` unless it exists, and checks that it is ours alone.
fn own(path: &Path, mode: u32) -> Result<(), DirectoryError> {
    match DirBuilder::new().mode(mode).create(path) {
        Ok(()) => {
            // the umask took bits away
            open(path)?
                .set_permissions(Permissions::from_mode(mode))
                .map_err(kernel("set the mode of", path))?;
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(kernel("make directory", path)(error)),
    }
    check(path)
}

/// Checks that `path` is a directory of ours that nobody else can write.
///
/// # Errors
/// When it is not, or cannot be looked at.
pub fn check(path: &Path) -> Result<(), DirectoryError> {
    // what is judged is what was opened, whatever its name means a moment later
    let metadata = open(path)?.metadata().map_err(kernel("look at", path))?;
    let uid = nix::unistd::geteuid().as_raw();
    let owner = metadata.uid();
    if owner != uid {
        let path = path.to_owned();
        return Err(DirectoryError::Owner { path, owner, uid });
    }
    let mode = metadata.mode() & 0o7777;
    if mode & 0o022 != 0 {
        let path = path.to_owned();
        return Err(DirectoryError::Writable { path, mode });
    }
    Ok(())
}

fn kernel(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DirectoryError {
    let path = path.to_owned();
    move |source| DirectoryError::Kernel {
        operation,
        path,
        source,
    }
}

fn open(path: &Path) -> Result<File, DirectoryError> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits())
        .open(path);
    opened.map_err(|error| match found(path) {
        Some(found) => DirectoryError::NoDirectory {
            path: path.to_owned(),
            found,
        },
        None => kernel("open directory", path)(error),
    })
}

/// What stands at `path`, when that is no directory.
fn found(path: &Path) -> Option<&'static str> {
    let kind = fs::symlink_metadata(path).ok()?.file_type();
    if kind.is_symlink() {
        Some("a symbolic link")
    } else if kind.is_dir() {
        None
    } else {
        Some("a file")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn new_directories_get_their_modes_and_old_ones_keep_theirs() {
        let root = tempfile::tempdir().unwrap();
        let runtime = root.path().join("run");
        let directory = Directory::prepare(&runtime, "default").unwrap();
        assert_eq!(mode(&runtime), 0o750);
        assert_eq!(mode(&directory.path), 0o750);
        assert_eq!(mode(&directory.state), 0o700);
        fs::set_permissions(&runtime, Permissions::from_mode(0o755)).unwrap();
        Directory::prepare(&runtime, "default").unwrap();
        assert_eq!(mode(&runtime), 0o755);
    }

    #[test]
    fn a_directory_that_others_can_write_is_refused() {
        let root = tempfile::tempdir().unwrap();
        for bits in [0o770, 0o707, 0o1777] {
            fs::set_permissions(root.path(), Permissions::from_mode(bits)).unwrap();
            let refusal = Directory::prepare(root.path(), "default").unwrap_err();
            assert!(matches!(refusal, DirectoryError::Writable { mode, .. } if mode == bits));
        }
        assert!(!root.path().join("default").exists());
    }

    #[test]
    fn a_symbolic_link_or_file_in_the_place_of_a_directory_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(elsewhere.path(), root.path().join("a")).unwrap();
        let refusal = Directory::prepare(root.path(), "a").unwrap_err();
        assert!(refusal.to_string().contains("is a symbolic link"));
        fs::write(root.path().join("b"), b"x").unwrap();
        let refusal = Directory::prepare(root.path(), "b").unwrap_err();
        assert!(refusal.to_string().contains("is a file"));
    }

    #[test]
    fn a_directory_of_another_user_is_refused() {
        // only root can give a directory away
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let root = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(root.path(), Some(12345), None).unwrap();
        let refusal = Directory::prepare(root.path(), "default").unwrap_err();
        assert!(refusal.to_string().contains("belongs to uid 12345"));
    }

    #[test]
    fn a_missing_parent_is_named() {
        let root = tempfile::tempdir().unwrap();
        let refusal = Directory::prepare(&root.path().join("a/b"), "default").unwrap_err();
        assert!(
            refusal.to_string().contains("/a/b: No such file"),
            "{refusal}"
        );
    }
}
