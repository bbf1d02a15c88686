//! A daemon of the real binary, in directories of its own.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use flextensord_client::{Address, ConnectOptions, blocking::Client, v1::StatusResponse};
use flextensord_device::{
    cuda::fake::{FakeDriver, FakeSettings},
    failpoint,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;

use crate::{
    SceneError,
    process::{Guarded, binary},
};

/// The variable that describes the driver in host memory to the binaries of the tests.
pub const FAKE_DRIVER: &str = "TEST_FAKE_CUDA_DRIVER";
/// How long anything that should happen at once may take on a loaded machine.
pub const SOON: Duration = Duration::from_secs(20);

/// A running daemon; dropped, it is killed and its directories are removed.
#[derive(Debug)]
pub struct Daemon {
    process: Guarded,
    command: Command,
    directory: TempDir,
    leftovers: Leftovers,
    shm: PathBuf,
    instance: String,
}

/// Segments of an instance in a directory that outlives the test; dropped, they go.
#[derive(Debug)]
struct Leftovers {
    shm: PathBuf,
    prefix: String,
}

impl Leftovers {
    /// An id holds no dash: another instance's name may begin with this one's.
    fn holds(&self, name: &str) -> bool {
        let id = name.strip_prefix(&self.prefix);
        id.is_some_and(|id| !id.contains('-'))
    }
}

impl Drop for Leftovers {
    fn drop(&mut self) {
        for name in names(&self.shm) {
            if self.holds(&name) {
                // the daemon may have removed it by now
                let _: std::io::Result<()> = fs::remove_file(self.shm.join(name));
            }
        }
    }
}

impl Daemon {
    /// Starts the binary of this build on a CPU device, with more flags, and waits until
    /// it serves. Its segments lie in a directory of its own.
    ///
    /// # Errors
    /// When it does not come to serve.
    pub fn start(flags: &[&str]) -> Result<Self, SceneError> {
        let directory = directory()?;
        let shm = directory.path().join("shm");
        fs::create_dir(&shm).map_err(|e| SceneError::io("make a directory", e))?;
        Self::start_in(directory, shm, &binary("flextensord")?, flags)
    }

    /// Starts `binary` with its segments in `shm`.
    ///
    /// # Errors
    /// When it does not come to serve.
    pub fn start_with(binary: &Path, shm: &Path, flags: &[&str]) -> Result<Self, SceneError> {
        Self::start_in(directory()?, shm.to_owned(), binary, flags)
    }

    /// Starts `binary` in the directory of an earlier daemon, under the instance name that
    /// the directory gives it.
    ///
    /// # Errors
    /// When it does not come to serve.
    pub fn start_in(
        directory: TempDir,
        shm: PathBuf,
        binary: &Path,
        flags: &[&str],
    ) -> Result<Self, SceneError> {
        // an instance name of its own: segments of several runs may share /dev/shm
        let instance = directory
            .path()
            .file_name()
            .map_or_else(String::new, |name| {
                name.to_string_lossy().trim_start_matches('.').to_owned()
            });
        Self::start_as(&instance, directory, shm, binary, flags)
    }

    /// Starts `binary` as the instance of that name.
    ///
    /// # Errors
    /// When it does not come to serve.
    pub fn start_as(
        instance: &str,
        directory: TempDir,
        shm: PathBuf,
        binary: &Path,
        flags: &[&str],
    ) -> Result<Self, SceneError> {
        let mut command = Command::new(binary);
        command.args(["serve", "--device", "cpu"]);
        Self::launch(instance, directory, shm, command, flags)
    }

    /// Starts a daemon with a GPU of the driver in host memory that `driver` describes
    /// (see `FakeSettings::from_text`).
    ///
    /// # Errors
    /// When it does not come to serve.
    pub fn start_on_fake(driver: &str, flags: &[&str]) -> Result<Self, SceneError> {
        let directory = directory()?;
        let shm = directory.path().join("shm");
        fs::create_dir(&shm).map_err(|e| SceneError::io("make a directory", e))?;
        Self::start_on_fake_in(directory, shm, driver, flags)
    }

    /// As [`Daemon::start_on_fake`], in the directory of an earlier daemon.
    ///
    /// # Errors
    /// When it does not come to serve.
    pub fn start_on_fake_in(
        directory: TempDir,
        shm: PathBuf,
        driver: &str,
        flags: &[&str],
    ) -> Result<Self, SceneError> {
        let name = directory.path().file_name().unwrap_or_default();
        let instance = name.to_string_lossy().trim_start_matches('.').to_owned();
        let mut command = Command::new(binary("flextensord-on-fake")?);
        command.env(FAKE_DRIVER, driver);
        command.args(["serve", "--device", "cuda"]);
        Self::launch(&instance, directory, shm, command, flags)
    }

    fn launch(
        instance: &str,
        directory: TempDir,
        shm: PathBuf,
        mut command: Command,
        flags: &[&str],
    ) -> Result<Self, SceneError> {
        // tests that are not about a successor leave nothing to one
        if !flags.contains(&"--on-stop") {
            command.args(["--on-stop", "remove"]);
        }
        command
            .args(["--drain-grace", "200ms", "--instance", instance])
            .arg("--runtime-dir")
            .arg(directory.path().join("run"))
            .arg("--shm-dir")
            .arg(&shm)
            .args(flags)
            .stdin(Stdio::null());
        let mut daemon = Self {
            process: Guarded(spawn(&mut command)?),
            command,
            directory,
            leftovers: Leftovers {
                shm: shm.clone(),
                prefix: format!("flextensord-{instance}-"),
            },
            shm,
            instance: instance.to_owned(),
        };
        daemon.until_it_serves()?;
        Ok(daemon)
    }

    /// Starts it once more after its end, as a supervisor does, and waits until it serves.
    ///
    /// # Errors
    /// When it does not come to serve.
    pub fn restart(&mut self) -> Result<(), SceneError> {
        self.process = Guarded(spawn(&mut self.command)?);
        self.until_it_serves()
    }

    /// As [`Daemon::restart`], with another value of a flag that it was started with.
    ///
    /// # Errors
    /// When it was not, and as [`Daemon::restart`].
    pub fn restart_with(&mut self, flag: &str, value: &str) -> Result<(), SceneError> {
        let mut arguments: Vec<_> = self.command.get_args().map(ToOwned::to_owned).collect();
        let at = arguments.iter().position(|argument| argument == flag);
        let unset = || SceneError::Unexpected(format!("it was started without {flag}"));
        *at.and_then(|at| arguments.get_mut(at + 1))
            .ok_or_else(unset)? = value.into();
        let mut command = Command::new(self.command.get_program());
        let set = self.command.get_envs();
        command.envs(set.filter_map(|(name, value)| Some((name, value?))));
        command.args(arguments).stdin(Stdio::null());
        self.command = command;
        self.restart()
    }

    /// Kills it with SIGKILL, and waits for its end.
    ///
    /// # Errors
    /// When it cannot be killed.
    pub fn crash(&mut self) -> Result<(), SceneError> {
        self.process.kill()
    }

    /// Starts it once more with fail points as `rules` say, and their record in `record`;
    /// its later starts have none. Does not wait: it may end before it serves.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn rearm(&mut self, rules: &str, record: &Path) -> Result<(), SceneError> {
        self.command.env(failpoint::RULES, rules);
        self.command.env(failpoint::HITS, record);
        let spawned = spawn(&mut self.command);
        self.command.env_remove(failpoint::RULES);
        self.process = Guarded(spawned?);
        Ok(())
    }

    /// Starts it once more, and does not wait.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn respawn(&mut self) -> Result<(), SceneError> {
        self.process = Guarded(spawn(&mut self.command)?);
        Ok(())
    }

    /// How it has ended, if it has.
    ///
    /// # Errors
    /// When it cannot be looked at.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>, SceneError> {
        let ended = self.process.0.try_wait();
        ended.map_err(|e| SceneError::io("look at the daemon", e))
    }

    fn until_it_serves(&mut self) -> Result<(), SceneError> {
        let deadline = Instant::now() + SOON;
        // its sockets take connections before it serves
        while !self.status().is_ok_and(|status| status.phase == "serving") {
            let ended = self.process.0.try_wait();
            let ended = ended.map_err(|e| SceneError::io("wait", e))?;
            if ended.is_some() || Instant::now() > deadline {
                return Err(SceneError::Unexpected(format!(
                    "the daemon does not serve within {SOON:?}: {ended:?}"
                )));
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Where its gRPC socket is.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.instance_dir().join("flextensord.sock")
    }

    /// Its runtime directory.
    #[must_use]
    pub fn runtime_dir(&self) -> PathBuf {
        self.directory.path().join("run")
    }

    /// The directory of its sockets and state.
    #[must_use]
    pub fn instance_dir(&self) -> PathBuf {
        self.runtime_dir().join(&self.instance)
    }

    /// The directory of its segments.
    #[must_use]
    pub fn shm(&self) -> &Path {
        &self.shm
    }

    /// A directory for files of the test.
    #[must_use]
    pub fn scratch(&self) -> &Path {
        self.directory.path()
    }

    /// Names of its segments.
    #[must_use]
    pub fn segments(&self) -> Vec<String> {
        let all = names(&self.shm).into_iter();
        all.filter(|name| self.leftovers.holds(name)).collect()
    }

    /// Names of the files in its state directory.
    #[must_use]
    pub fn state(&self) -> Vec<String> {
        names(&self.instance_dir().join("state"))
    }

    /// Lets every user of the machine come through to its sockets; an operator would add
    /// the user to their group.
    ///
    /// # Errors
    /// When a mode cannot be changed.
    pub fn open_to_all(&self) -> Result<(), SceneError> {
        let instance = self.instance_dir();
        let modes = [
            (self.runtime_dir(), 0o755),
            (instance.clone(), 0o755),
            (instance.join("flextensord.sock"), 0o666),
            (instance.join("fd.sock"), 0o666),
        ];
        modes.into_iter().try_for_each(|(path, mode)| {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))
                .map_err(|e| SceneError::io(path.display().to_string(), e))
        })
    }

    /// Its instance's name.
    #[must_use]
    pub fn instance(&self) -> &str {
        &self.instance
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
        // a driver of its own, as another process has; not looked at for a CPU device
        let driver = FakeDriver::new(FakeSettings::default());
        let options = ConnectOptions {
            driver: Some(driver),
            ..options(&self.socket())
        };
        Ok(Client::connect(options)?)
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
        Ok(self.ctl_of(&binary("flextensorctl")?, arguments))
    }

    /// A `flextensorctl`, told where this daemon is.
    #[must_use]
    pub fn ctl_of(&self, ctl: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new(ctl);
        command.arg("--runtime-dir").arg(self.runtime_dir());
        command.args(["--instance", &self.instance]).args(arguments);
        command
    }

    /// Open descriptors of its process.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid())).map_or(0, Iterator::count)
    }

    /// Its threads.
    #[must_use]
    pub fn threads(&self) -> usize {
        fs::read_dir(format!("/proc/{}/task", self.pid())).map_or(0, Iterator::count)
    }

    /// Bytes of its resident memory that are no shared memory.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()));
        let status = status.unwrap_or_default();
        let of = |key: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            let figure = line.and_then(|line| line.split_whitespace().next());
            figure.and_then(|kib| kib.parse().ok()).unwrap_or(0)
        };
        (of("RssAnon:") + of("RssFile:")) * 1024
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
    pub fn kill(mut self) -> Result<(TempDir, PathBuf), SceneError> {
        self.process.kill()?;
        // what it leaves is its successor's
        std::mem::forget(self.leftovers);
        Ok((self.directory, self.shm))
    }
}

fn spawn(command: &mut Command) -> Result<Child, SceneError> {
    command.spawn().map_err(|e| {
        let program = command.get_program().to_string_lossy().into_owned();
        SceneError::io(program, e)
    })
}

/// A directory that other users of the tests can come through.
///
/// # Errors
/// When it cannot be made.
pub fn directory() -> Result<TempDir, SceneError> {
    let failed = |e| SceneError::io("make a directory", e);
    let directory = tempfile::Builder::new()
        .prefix("ft")
        .tempdir()
        .map_err(failed)?;
    let mode = fs::Permissions::from_mode(0o755);
    fs::set_permissions(directory.path(), mode).map_err(failed)?;
    Ok(directory)
}

/// Names in a directory.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// Options to connect to a socket.
#[must_use]
pub fn options(socket: &Path) -> ConnectOptions {
    ConnectOptions {
        address: Address {
            socket: Some(socket.to_owned()),
            ..Address::default()
        },
        ..ConnectOptions::default()
    }
}
