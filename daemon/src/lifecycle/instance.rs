//! What one daemon of an instance holds from start to stop.

use std::{io, os::fd::OwnedFd, path::PathBuf};

use flextensord_device::{cuda::error::CudaError, device::DeviceError};
use tokio::net::UnixListener;

use super::{
    directory::{Directory, DirectoryError},
    exit::Exit,
    generation::{self, GenerationError},
    lock::{InstanceLock, LockError},
    socket::{self, BoundPath, Occupant, Purpose, SocketError},
};
use crate::configuration::{ConfigurationError, Settings};

/// Why a daemon does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is wrong.
    #[error(transparent)]
    Configuration(#[from] ConfigurationError),
    /// The directory of the segments is none.
    #[error("shm_dir {}: {source}", path.display())]
    SharedMemory {
        /// The directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A directory of the instance is refused.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The lock cannot be had.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// A socket cannot be bound.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The start cannot be counted.
    #[error(transparent)]
    Generation(#[from] GenerationError),
    /// The device that was asked for cannot be used; no other is taken in its place.
    #[error("the device cannot be used: {source}")]
    Device {
        /// Why not.
        source: DeviceError,
    },
    /// A part of the daemon cannot be set up.
    #[error("cannot {operation}: {source}")]
    Setup {
        /// What was tried.
        operation: &'static str,
        /// Why not.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl StartError {
    /// A part of the daemon that cannot be set up.
    pub fn setup(
        operation: &'static str,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::Setup {
            operation,
            source: source.into(),
        }
    }

    /// The exit status that tells a supervisor whether a restart can help.
    #[must_use]
    pub fn exit(&self) -> Exit {
        let of_kernel = |error: &io::Error| match error.kind() {
            io::ErrorKind::PermissionDenied => Exit::NotAllowed,
            _ => Exit::Internal,
        };
        match self {
            Self::Lock(LockError::Held { .. }) | Self::Socket(SocketError::Answered { .. }) => {
                Exit::InstanceExists
            }
            Self::Configuration(_)
            | Self::SharedMemory { .. }
            | Self::Directory(DirectoryError::NoDirectory { .. })
            | Self::Socket(SocketError::InTheWay { .. })
            | Self::Generation(GenerationError::NoNumber { .. }) => Exit::Configuration,
            Self::Directory(DirectoryError::Kernel { source, .. })
                if matches!(
                    source.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                Exit::Configuration
            }
            Self::Directory(DirectoryError::Owner { .. } | DirectoryError::Writable { .. }) => {
                Exit::NotAllowed
            }
            Self::Directory(DirectoryError::Kernel { source, .. })
            | Self::Lock(LockError::Kernel { source, .. })
            | Self::Socket(SocketError::Kernel { source, .. })
            | Self::Generation(GenerationError::Kernel { source, .. }) => of_kernel(source),
            // no restart changes what two names stand for
            Self::Device {
                source: DeviceError::Cuda(CudaError::Twice { .. }),
            } => Exit::Configuration,
            Self::Device { .. } => Exit::Unavailable,
            Self::Setup { .. } => Exit::Internal,
        }
    }
}

/// The bound sockets of an instance.
#[derive(Debug)]
pub struct Sockets {
    /// gRPC.
    pub grpc: UnixListener,
    /// Descriptor passing, non-blocking.
    pub channel: OwnedFd,
}

/// Directory, lock and names of the sockets of one daemon; dropped, the sockets' names
/// go and then the lock.
#[derive(Debug)]
pub struct Instance {
    // before the lock, so that it is dropped before it
    bound: Vec<BoundPath>,
    /// The configuration.
    pub settings: Settings,
    /// The directories.
    pub directory: Directory,
    /// How often this instance has been started.
    pub generation: u64,
    /// The right to serve it.
    pub lock: InstanceLock,
}

impl Instance {
    /// Takes the instance: makes and checks its directories, takes its lock, makes sure
    /// that nobody answers at its socket, counts the start. A second daemon changes
    /// nothing of the first's.
    ///
    /// # Errors
    /// When any of that is refused.
    pub fn prepare(settings: &Settings) -> Result<Self, StartError> {
        check_shm_dir(settings)?;
        let directory = Directory::prepare(&settings.runtime_dir, &settings.instance)?;
        let lock = InstanceLock::take(&directory.path.join("lock"))?;
        refuse_living(settings)?;
        let generation = generation::next(&directory.state, &lock)?;
        Ok(Self {
            bound: Vec::new(),
            settings: settings.clone(),
            directory,
            generation,
            lock,
        })
    }

    /// Binds both sockets; call it within a tokio runtime.
    ///
    /// # Errors
    /// When one cannot be bound; then neither is left behind.
    pub fn bind(&mut self) -> Result<Sockets, StartError> {
        let (grpc, grpc_path) = socket::bind_grpc(&self.settings.grpc_socket(), &self.lock)?;
        let (channel, channel_path) =
            socket::bind_channel(&self.settings.channel_socket(), &self.lock)?;
        let grpc = UnixListener::from_std(grpc)
            .map_err(|error| StartError::setup("serve the gRPC socket", error))?;
        self.bound = vec![grpc_path, channel_path];
        Ok(Sockets { grpc, channel })
    }

    /// Ends it: removes the sockets' names that are still ours, then gives up the lock.
    pub fn close(self) {
        drop(self);
    }
}

/// Refuses while a daemon answers at the instance's sockets: a lock file that was removed
/// under it locks nobody out.
///
/// # Errors
/// [`SocketError::Answered`], and when a socket cannot be looked at.
pub(super) fn refuse_living(settings: &Settings) -> Result<(), StartError> {
    let sockets = [
        (settings.grpc_socket(), Purpose::Grpc),
        (settings.channel_socket(), Purpose::Channel),
    ];
    for (path, purpose) in sockets {
        if let Occupant::Listener { pid } = socket::occupant(&path, purpose)? {
            return Err(SocketError::Answered { path, pid }.into());
        }
    }
    Ok(())
}

fn check_shm_dir(settings: &Settings) -> Result<(), StartError> {
    let path = settings.shm_dir.clone();
    match std::fs::metadata(&path) {
        Ok(metadata) if metadata.is_dir() => Ok(()),
        Ok(_) => Err(StartError::SharedMemory {
            path,
            source: io::ErrorKind::NotADirectory.into(),
        }),
        Err(source) => Err(StartError::SharedMemory { path, source }),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;
    use crate::configuration::{Flags, Sources, load};

    fn settings(runtime_dir: &Path) -> Settings {
        let flags = Flags {
            device: Some("cpu".to_owned()),
            runtime_dir: Some(runtime_dir.to_string_lossy().into_owned()),
            ..Flags::default()
        };
        let mut sources = Sources::of_process(&flags);
        sources.etc = runtime_dir.to_owned();
        load(&sources).unwrap()
    }

    #[tokio::test]
    async fn a_second_daemon_is_refused_and_the_first_keeps_its_sockets() {
        let runtime = tempfile::tempdir().unwrap();
        let settings = settings(runtime.path());
        let mut first = Instance::prepare(&settings).unwrap();
        let sockets = first.bind().unwrap();
        for lock_removed in [false, true] {
            if lock_removed {
                fs::remove_file(settings.directory().join("lock")).unwrap();
            }
            let refusal = Instance::prepare(&settings).unwrap_err();
            assert_eq!(refusal.exit(), Exit::InstanceExists, "{refusal}");
            let pid = format!("process {}", std::process::id());
            assert!(refusal.to_string().contains(&pid), "{refusal}");
        }
        assert!(settings.grpc_socket().exists() && settings.channel_socket().exists());
        drop(sockets);
        first.close();
        assert!(!settings.grpc_socket().exists() && !settings.channel_socket().exists());
        assert_eq!(Instance::prepare(&settings).unwrap().generation, 2);
    }

    #[tokio::test]
    async fn a_start_that_fails_at_the_second_socket_leaves_no_first() {
        let runtime = tempfile::tempdir().unwrap();
        let settings = settings(runtime.path());
        let mut instance = Instance::prepare(&settings).unwrap();
        fs::write(settings.channel_socket(), b"x").unwrap();
        let refusal = instance.bind().unwrap_err();
        assert_eq!(refusal.exit(), Exit::Configuration);
        assert!(!settings.grpc_socket().exists());
        assert_eq!(fs::read(settings.channel_socket()).unwrap(), b"x");
    }

    #[test]
    fn instances_of_one_machine_do_not_meet() {
        let runtime = tempfile::tempdir().unwrap();
        let one = settings(runtime.path());
        let two = Settings {
            instance: "default-2".to_owned(),
            ..one.clone()
        };
        let _one = Instance::prepare(&one).unwrap();
        let _two = Instance::prepare(&two).unwrap();
    }

    #[test]
    fn a_missing_shm_dir_is_named_before_anything_is_made() {
        let runtime = tempfile::tempdir().unwrap();
        let mut settings = settings(runtime.path());
        settings.shm_dir = runtime.path().join("absent");
        let refusal = Instance::prepare(&settings).unwrap_err();
        assert_eq!(refusal.exit(), Exit::Configuration);
        assert!(refusal.to_string().contains("shm_dir"));
        assert!(!settings.directory().exists());
    }
}
