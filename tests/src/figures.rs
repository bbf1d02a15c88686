//! What a daemon has, and what it must have once everybody is gone.

use std::{fs, fs::File, time::Duration};

use flextensord_client::v1::StatusResponse;

use crate::{SceneError, daemon::Daemon, process::eventually};

/// How long what a dead client had may take to come back.
const SETTLE: Duration = Duration::from_secs(15);
/// The one file of a state directory that stays for ever.
const GENERATION: &str = "generation";

/// What of a daemon's process must stay as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Figures {
    /// Open descriptors.
    pub descriptors: usize,
    /// Threads.
    pub threads: usize,
    /// Private memory, in KiB.
    pub private_kib: u64,
}

impl Figures {
    /// Those of a running daemon.
    #[must_use]
    pub fn of(daemon: &Daemon) -> Self {
        let status = format!("/proc/{}/status", daemon.pid());
        let status = fs::read_to_string(status).unwrap_or_default();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let word = line.and_then(|line| line.split_ascii_whitespace().next());
        Self {
            descriptors: daemon.descriptors(),
            threads: daemon.threads(),
            private_kib: word.and_then(|word| word.parse().ok()).unwrap_or(0),
        }
    }
}

/// What is there that should not be, in words; empty when all is gone.
fn left(daemon: &Daemon, status: &StatusResponse) -> String {
    let mut left = Vec::new();
    let mut check = |what: &str, figure: u64| {
        if figure > 0 {
            left.push(format!("{what} {figure}"));
        }
    };
    check("managers", status.managers.len() as u64);
    check("weight sets", status.weight_sets.len() as u64);
    check("segments", daemon.segments().len() as u64);
    for device in &status.devices {
        check("bytes allocated", device.allocated_bytes);
        check("bytes reserved", device.reserved_bytes);
        check("bytes reclaiming", device.reclaiming_bytes);
        check("failed drops", device.failed_drops);
        let moved = device.transfer.unwrap_or_default();
        check("protocol violations", moved.protocol_violations);
    }
    let host = status.host.clone().unwrap_or_default();
    check("bytes of segments", host.segment_bytes);
    check("bytes of loads", host.reserved_bytes);
    let state = daemon.state().into_iter();
    left.extend(state.filter(|name| name != GENERATION));
    left.join(", ")
}

/// Waits until a daemon that nobody uses any more has given everything back, and no more
/// descriptors than `limit`.
///
/// # Errors
/// When something is left, with what it is.
pub fn at_rest(daemon: &Daemon, limit: Option<Figures>) -> Result<Figures, SceneError> {
    let mut seen = String::new();
    let rested = eventually("everything is back", SETTLE, || {
        let status = match daemon.status() {
            Ok(status) => status,
            Err(error) => {
                seen = error.to_string();
                return None;
            }
        };
        let now = Figures::of(daemon);
        seen = left(daemon, &status);
        if let Some(limit) = limit.filter(|limit| now.descriptors > limit.descriptors) {
            seen += &format!(" {} descriptors of {}", now.descriptors, limit.descriptors);
        }
        seen.is_empty().then_some(now)
    });
    rested.map_err(|error| SceneError::Unexpected(format!("{error}: {seen}")))
}

/// Checks that a daemon that was told to stop, and to keep nothing, has left nothing.
///
/// # Errors
/// When it has, with what it is.
pub fn nothing_left(daemon: &Daemon) -> Result<(), SceneError> {
    let mut left = daemon.segments();
    left.extend(daemon.state().into_iter().filter(|n| n != GENERATION));
    let instance = daemon.instance_dir();
    for name in ["flextensord.sock", "fd.sock"] {
        if fs::symlink_metadata(instance.join(name)).is_ok() {
            left.push(name.to_owned());
        }
    }
    let lock = File::open(instance.join("lock"));
    let lock = lock.map_err(|e| SceneError::io("open the lock", e))?;
    if lock.try_lock().is_err() {
        left.push("a held lock".to_owned());
    }
    match left.is_empty() {
        true => Ok(()),
        false => Err(SceneError::Unexpected(format!("left behind: {left:?}"))),
    }
}
