//! The sockets of an instance: bound where nobody listens, removed only while ours.

use std::{
    fs::{self, Permissions},
    io,
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{
            fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
            net::UnixListener,
        },
    },
    path::{Path, PathBuf},
};

use flextensord_device::{descriptor, process};
use nix::{
    errno::Errno,
    sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket},
};

use super::lock::InstanceLock;

/// Rights of a socket: the daemon's user and group.
const MODE: u32 = 0o660;

/// Why a socket cannot be bound.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// A daemon answers there, though we hold the lock: its lock file was removed.
    #[error(
        "another daemon answers at {}{}; its lock file has been removed",
        path.display(), holder(*pid)
    )]
    Answered {
        /// The socket.
        path: PathBuf,
        /// Who answers, when the kernel tells.
        pid: Option<u32>,
    },
    /// Something that is no socket has its name.
    #[error("{} is {found}, not a socket; it is left alone: move it away", path.display())]
    InTheWay {
        /// The path.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },
    /// A system call failed.
    #[error("cannot {operation} {}: {source}", path.display())]
    Kernel {
        /// What was tried.
        operation: &'static str,
        /// The socket.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

fn holder(pid: Option<u32>) -> String {
    pid.map_or_else(String::new, |pid| format!(": process {pid}"))
}

/// What stands at the path of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Occupant {
    /// Nothing.
    Nobody,
    /// A socket that nobody listens at.
    Stale,
    /// A socket that somebody listens at.
    Listener {
        /// Who, when the kernel tells.
        pid: Option<u32>,
    },
    /// Something that is no socket.
    Other(&'static str),
}

/// Which of the two sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// gRPC: a stream.
    Grpc,
    /// Descriptor passing: packets.
    Channel,
}

impl Purpose {
    fn kind(self) -> SockType {
        match self {
            Self::Grpc => SockType::Stream,
            Self::Channel => SockType::SeqPacket,
        }
    }
}

/// Looks at `path` without changing anything and without waiting.
///
/// # Errors
/// When the rights do not allow it, or a socket of another kind is there.
pub fn occupant(path: &Path, purpose: Purpose) -> Result<Occupant, SocketError> {
    let kernel = |operation| {
        move |source| SocketError::Kernel {
            operation,
            path: path.to_owned(),
            source,
        }
    };
    let kind = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Occupant::Nobody),
        Err(error) => return Err(kernel("look at")(error)),
    };
    // connecting to a regular file is refused just as to a stale socket
    if !kind.is_socket() {
        return Ok(Occupant::Other(if kind.is_symlink() {
            "a symbolic link"
        } else if kind.is_dir() {
            "a directory"
        } else {
            "a file"
        }));
    }
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let probe = socket(AddressFamily::Unix, purpose.kind(), flags, None)
        .map_err(|errno| kernel("make a socket for")(errno.into()))?;
    let address = UnixAddr::new(path).map_err(|errno| kernel("name")(errno.into()))?;
    match connect(probe.as_raw_fd(), &address) {
        Ok(()) => Ok(Occupant::Listener {
            pid: listener_pid(&probe),
        }),
        // its queue is full: hung perhaps, but alive
        Err(Errno::EAGAIN) => Ok(Occupant::Listener { pid: None }),
        Err(Errno::ECONNREFUSED) => Ok(Occupant::Stale),
        Err(Errno::ENOENT) => Ok(Occupant::Nobody),
        Err(errno) => Err(kernel("connect to")(errno.into())),
    }
}

fn listener_pid(connected: &OwnedFd) -> Option<u32> {
    use std::os::fd::AsFd as _;
    let peer = process::peer(connected.as_fd()).ok()?;
    (peer.pid != 0).then_some(peer.pid)
}

/// The name of a bound socket; dropped, it is removed if it is still that socket.
#[derive(Debug)]
pub struct BoundPath {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl BoundPath {
    fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::symlink_metadata(path)?;
        Ok(Self {
            path: path.to_owned(),
            device: metadata.dev(),
            inode: metadata.ino(),
        })
    }

    /// Whether the name still means the socket that was bound.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        fs::symlink_metadata(&self.path)
            .is_ok_and(|there| there.dev() == self.device && there.ino() == self.inode)
    }
}

impl Drop for BoundPath {
    fn drop(&mut self) {
        if self.is_ours()
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "socket not removed");
        }
    }
}

/// Binds the gRPC socket. The lock makes sure that a stale socket stays stale until it
/// is removed.
///
/// # Errors
/// When a daemon answers there or something is in the way; that is left as it is.
pub fn bind_grpc(
    path: &Path,
    lock: &InstanceLock,
) -> Result<(UnixListener, BoundPath), SocketError> {
    bind(path, Purpose::Grpc, lock, |path| {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    })
}

/// Binds the socket of the descriptor channel, as [`bind_grpc`] does.
///
/// # Errors
/// As [`bind_grpc`].
pub fn bind_channel(path: &Path, lock: &InstanceLock) -> Result<(OwnedFd, BoundPath), SocketError> {
    bind(path, Purpose::Channel, lock, |path| {
        descriptor::bind_listener(path).map_err(|error| error.source)
    })
}

fn bind<L>(
    path: &Path,
    purpose: Purpose,
    _lock: &InstanceLock,
    listen: impl FnOnce(&Path) -> io::Result<L>,
) -> Result<(L, BoundPath), SocketError> {
    let kernel = |operation| {
        move |source| SocketError::Kernel {
            operation,
            path: path.to_owned(),
            source,
        }
    };
    match occupant(path, purpose)? {
        Occupant::Nobody => {}
        Occupant::Stale => {
            tracing::info!(path = %path.display(), "remove the socket of a dead daemon");
            fs::remove_file(path).map_err(kernel("remove"))?;
        }
        Occupant::Listener { pid } => {
            let path = path.to_owned();
            return Err(SocketError::Answered { path, pid });
        }
        Occupant::Other(found) => {
            let path = path.to_owned();
            return Err(SocketError::InTheWay { path, found });
        }
    }
    let listener = listen(path).map_err(kernel("listen at"))?;
    let bound = BoundPath::of(path).map_err(kernel("look at"))?;
    // until here the umask's mode held; the directory keeps others out meanwhile
    fs::set_permissions(path, Permissions::from_mode(MODE)).map_err(kernel("set the mode of"))?;
    Ok((listener, bound))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Place {
        directory: tempfile::TempDir,
        lock: InstanceLock,
    }

    impl Place {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let lock = InstanceLock::take(&directory.path().join("lock")).unwrap();
            Self { directory, lock }
        }

        fn path(&self) -> PathBuf {
            self.directory.path().join("s.sock")
        }
    }

    #[test]
    fn a_stale_socket_is_taken_over_and_the_new_one_is_removed_at_the_end() {
        let place = Place::new();
        drop(UnixListener::bind(place.path()).unwrap());
        assert_eq!(
            occupant(&place.path(), Purpose::Grpc).unwrap(),
            Occupant::Stale
        );
        let (_listener, bound) = bind_grpc(&place.path(), &place.lock).unwrap();
        let mode = fs::metadata(place.path()).unwrap().mode();
        assert_eq!(mode & 0o777, 0o660);
        drop(bound);
        assert!(!place.path().exists());
    }

    #[test]
    fn a_socket_that_answers_is_left_alone_and_its_process_named() {
        let place = Place::new();
        let _living = UnixListener::bind(place.path()).unwrap();
        let refusal = bind_grpc(&place.path(), &place.lock).unwrap_err();
        let pid = std::process::id();
        assert!(matches!(refusal, SocketError::Answered { pid: Some(found), .. } if found == pid));
        assert!(place.path().exists());
    }

    #[test]
    fn whatever_is_no_socket_is_named_and_left_alone() {
        let place = Place::new();
        let file = place.directory.path().join("file");
        fs::write(&file, b"precious").unwrap();
        let link = place.directory.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let folder = place.directory.path().join("folder");
        fs::create_dir(&folder).unwrap();
        for (path, found) in [
            (&file, "a file"),
            (&link, "a symbolic link"),
            (&folder, "a directory"),
        ] {
            let refusals = [
                bind_grpc(path, &place.lock).unwrap_err(),
                bind_channel(path, &place.lock).unwrap_err(),
            ];
            for refusal in refusals {
                let message = refusal.to_string();
                assert!(message.contains(found), "{message}");
            }
            assert!(fs::symlink_metadata(path).is_ok());
        }
        assert_eq!(fs::read(&file).unwrap(), b"precious");
    }

    #[test]
    fn a_name_that_means_another_socket_by_now_is_not_removed() {
        let place = Place::new();
        let (listener, bound) = bind_grpc(&place.path(), &place.lock).unwrap();
        // the other socket exists before the first is gone, so it has another inode
        let other = place.directory.path().join("other.sock");
        let _other = UnixListener::bind(&other).unwrap();
        fs::rename(&other, place.path()).unwrap();
        drop((listener, bound));
        assert!(place.path().exists());
    }

    #[test]
    fn the_channel_takes_over_from_a_dead_daemon_too() {
        let place = Place::new();
        drop(descriptor::bind_listener(&place.path()).unwrap());
        let (_listener, _bound) = bind_channel(&place.path(), &place.lock).unwrap();
        let there = occupant(&place.path(), Purpose::Channel).unwrap();
        assert!(matches!(there, Occupant::Listener { pid: Some(_) }));
    }
}
