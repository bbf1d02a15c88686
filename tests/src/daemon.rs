//! A daemon of the real binary, in directories of its own.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    time::Duration,
};

use flextensord_client::{
    Address, ConnectOptions,
    blocking::Client,
    v1::StatusResponse,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

use crate::{
    SceneError,
    process::{Guarded, binary, eventually},
};

/// How long anything that should happen at once may take on a loaded machine.
pub const SOON: Duration = Duration::from_secs(20);

/// A running daemon; dropped, it is killed and its directories are removed.
#[derive(Debug)]
pub struct Daemon {
    process: Guarded,
    directory: TempDir,
}

impl Daemon {
    /// Starts the binary of this build on a CPU device, with more flags, and waits until
    /// it serves.
    ///
    /// # Errors
    /// When it does not come to serve.
    pub fn start(flags: &[&str]) -> Result<Self, SceneError> {
        let directory =
            tempfile::tempdir().map_err(|e| SceneError::io("make a directory", e))?;
        // other users of the tests must come through to the sockets
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755))
            .and_then(|()| fs::create_dir(directory.path().join("shm")))
            .map_err(|e| SceneError::io("prepare a directory", e))?;
        Self::start_in(directory, &binary("flextensord")?, flags)
    }

    /// Starts `binary` in a directory that has a folder `shm`.
    ///
    /// # Errors
    /// When it does not come to serve.
    pub fn start_in(
        directory: TempDir,
        binary: &Path,
        flags: &[&str],
    ) -> Result<Self, SceneError> {
        let child = Command::new(binary)
            .arg("serve")
            .args(["--device", "cpu", "--drain-grace", "200ms", "--runtime-dir"])
            .arg(directory.path().join("run"))
            .arg("--shm-dir")
            .arg(directory.path().join("shm"))
            .args(flags)
            .stdin(Stdio::null())
            .spawn()
            .map_err(|e| SceneError::io(binary.display().to_string(), e))?;
        let daemon = Self { process: Guarded(child), directory };
        eventually("the daemon serves", SOON, || daemon.client().ok())?;
        Ok(daemon)
    }

    /// Where its gRPC socket is.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.runtime_dir().join("default").join("flextensord.sock")
    }

    /// Its runtime directory.
    #[must_use]
    pub fn runtime_dir(&self) -> PathBuf {
        self.directory.path().join("run")
    }

    /// The directory of its segments.
    #[must_use]
    pub fn shm(&self) -> PathBuf {
        self.directory.path().join("shm")
    }

    /// A directory for files of the test.
    #[must_use]
    pub fn scratch(&self) -> &Path {
        self.directory.path()
    }

    /// Names of its segments.
    #[must_use]
    pub fn segments(&self) -> Vec<String> {
        let entries = fs::read_dir(self.shm()).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// Names of the files in its state directory.
    #[must_use]
    pub fn state(&self) -> Vec<String> {
        let path = self.runtime_dir().join("default").join("state");
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// A new connection.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn client(&self) -> Result<Client, SceneError> {
        Ok(Client::connect(options(&self.socket()))?)
    }

    /// What it says of itself.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn status(&self) -> Result<StatusResponse, SceneError> {
        Ok(self.client()?.status()?)
    }

    /// `flextensorctl` of this build, told where this daemon is.
    ///
    /// # Errors
    /// When it was not built.
    pub fn ctl(&self, arguments: &[&str]) -> Result<Command, SceneError> {
        let mut command = Command::new(binary("flextensorctl")?);
        command.arg("--runtime-dir").arg(self.runtime_dir()).args(arguments);
        Ok(command)
    }

    /// Open descriptors of its process.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid())).map_or(0, Iterator::count)
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// When it is gone.
    pub fn signal(&self, signal: Signal) -> Result<(), SceneError> {
        let pid = Pid::from_raw(i32::try_from(self.pid()).unwrap_or(i32::MAX));
        kill(pid, signal).map_err(|e| SceneError::io("signal the daemon", e.into()))
    }

    /// Stops it with SIGTERM and returns how it ended.
    ///
    /// # Errors
    /// When it does not end.
    pub fn stop(&mut self) -> Result<ExitStatus, SceneError> {
        self.signal(Signal::SIGTERM)?;
        self.process.wait(SOON)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it does not end.
    pub fn wait(&mut self) -> Result<ExitStatus, SceneError> {
        self.process.wait(SOON)
    }

    /// Kills it with SIGKILL and gives its directories back.
    ///
    /// # Errors
    /// When it cannot be killed.
    pub fn kill(mut self) -> Result<TempDir, SceneError> {
        self.process.kill()?;
        Ok(self.directory)
    }
}

/// Options to connect to a socket.
#[must_use]
pub fn options(socket: &Path) -> ConnectOptions {
    ConnectOptions {
        address: Address { socket: Some(socket.to_owned()), ..Address::default() },
        ..ConnectOptions::default()
    }
}
