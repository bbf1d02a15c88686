//! Client processes that run passes over a model and compare every byte of every tensor
//! that they hold with the checkpoint.

use std::{
    ffi::OsString,
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Command, ExitStatus, Stdio},
    sync::mpsc,
    thread,
    time::Duration,
};

use flextensord_device::failpoint;
use serde_json::Value;

use crate::{
    SceneError,
    daemon::Daemon,
    process::{Guarded, binary},
};

/// How long a reader may be silent before it counts as stuck. It bounds each of its own
/// waits itself, so this is only for a machine that hardly lets it run.
pub const SILENCE: Duration = Duration::from_secs(600);

/// What a reader is told: the flags of the binary `reader`.
#[derive(Debug, Clone)]
pub struct ReaderPlan<'a> {
    /// The checkpoint to compare with.
    pub checkpoint: &'a Path,
    /// The weight set.
    pub weight_set: &'a str,
    /// More flags, such as `--passes 20`.
    pub flags: Vec<String>,
    /// Another user to run as.
    pub uid: Option<u32>,
    /// Variables of its environment.
    pub variables: Vec<(String, OsString)>,
}

impl<'a> ReaderPlan<'a> {
    /// A reader of `weight_set`.
    #[must_use]
    pub fn new(weight_set: &'a str, checkpoint: &'a Path) -> Self {
        Self {
            checkpoint,
            weight_set,
            flags: Vec::new(),
            uid: None,
            variables: Vec::new(),
        }
    }

    /// Arms fail points of its process, with their record in a file.
    #[must_use]
    pub fn armed(mut self, rules: &str, record: &Path) -> Self {
        self.variables
            .push((failpoint::RULES.to_owned(), rules.into()));
        self.variables
            .push((failpoint::HITS.to_owned(), record.into()));
        self
    }

    /// Adds a flag with its value.
    #[must_use]
    pub fn with(mut self, flag: &str, value: impl ToString) -> Self {
        self.flags.extend([flag.to_owned(), value.to_string()]);
        self
    }
}

/// A running reader.
#[derive(Debug)]
pub struct Reader {
    process: Guarded,
    events: mpsc::Receiver<Value>,
}

impl Reader {
    /// Starts a reader on `daemon`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(daemon: &Daemon, plan: &ReaderPlan<'_>) -> Result<Self, SceneError> {
        Self::start_at(&daemon.socket(), plan)
    }

    /// Starts a reader on whoever serves at `socket`.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_at(socket: &Path, plan: &ReaderPlan<'_>) -> Result<Self, SceneError> {
        let mut command = Command::new(binary("reader")?);
        command
            .envs(plan.variables.iter().cloned())
            .arg("--socket")
            .arg(socket)
            .arg("--checkpoint")
            .arg(plan.checkpoint)
            .args(["--weight-set", plan.weight_set])
            .args(&plan.flags)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if let Some(uid) = plan.uid {
            command.uid(uid);
        }
        let mut child = command
            .spawn()
            .map_err(|e| SceneError::io("start a reader", e))?;
        let (sender, events) = mpsc::channel();
        if let Some(output) = child.stdout.take() {
            thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if let Ok(event) = serde_json::from_str(&line)
                        && sender.send(event).is_err()
                    {
                        return;
                    }
                }
            });
        }
        Ok(Self {
            process: Guarded(child),
            events,
        })
    }

    /// Waits for the event of that name.
    ///
    /// # Errors
    /// When another one comes, the reader ends, or nothing comes for long.
    pub fn expect(&self, name: &str) -> Result<Value, SceneError> {
        let event = self.events.recv_timeout(SILENCE).map_err(|why| {
            let why = match why {
                mpsc::RecvTimeoutError::Timeout => "it is silent",
                mpsc::RecvTimeoutError::Disconnected => "it has ended",
            };
            SceneError::Unexpected(format!("reader {}: no event {name:?}: {why}", self.pid()))
        })?;
        if event["event"] == name {
            return Ok(event);
        }
        Err(SceneError::Unexpected(format!(
            "reader: {event} instead of {name:?}"
        )))
    }

    /// Waits until it says something more, or has ended.
    ///
    /// # Errors
    /// When nothing comes within `limit`.
    pub fn next_event(&self, limit: Duration) -> Result<Option<Value>, SceneError> {
        match self.events.recv_timeout(limit) {
            Ok(event) => Ok(Some(event)),
            Err(mpsc::RecvTimeoutError::Disconnected) => Ok(None),
            Err(mpsc::RecvTimeoutError::Timeout) => Err(SceneError::Unexpected(format!(
                "reader {} hangs: nothing within {limit:?}",
                self.pid()
            ))),
        }
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it does not end within `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus, SceneError> {
        self.process.wait(limit)
    }

    /// Waits until it has run all its passes, every byte right, and has ended.
    ///
    /// # Errors
    /// When it fails.
    pub fn finish(mut self) -> Result<Value, SceneError> {
        let done = self.expect("done")?;
        let status = self.process.wait(SILENCE)?;
        if status.success() {
            return Ok(done);
        }
        Err(SceneError::Unexpected(format!(
            "reader ended with {status}"
        )))
    }

    /// Ends its standard input, which it waits for.
    pub fn go_on(&mut self) {
        drop(self.process.0.stdin.take());
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Whether it has ended with a failure by itself.
    ///
    /// # Errors
    /// When it cannot be looked at.
    pub fn has_failed(&mut self) -> Result<bool, SceneError> {
        let ended = self
            .process
            .0
            .try_wait()
            .map_err(|e| SceneError::io("wait", e))?;
        Ok(ended.is_some_and(|status| !status.success()))
    }

    /// Ends it with SIGKILL.
    ///
    /// # Errors
    /// When it cannot be killed.
    pub fn kill(mut self) -> Result<(), SceneError> {
        self.process.kill()
    }
}
