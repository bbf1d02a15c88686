//! Waiting until a dead predecessor moves no byte any more.
//!
//! On a GPU its copies may go on after it has died, until the driver has closed what it had
//! open; only then may a ring be touched (design section 8). Slot words it writes itself, so
//! none changes after its end.

use std::{
    thread,
    time::{Duration, Instant},
};

use flextensord_device::process::Process;

/// How long a dying process may take until it is gone.
const GONE: Duration = Duration::from_secs(10);
/// How long copies are given after its end, and where nobody knows of that: longer than the
/// 128 MiB that are queued at most take on a slow link (1 GB/s).
const STILL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// Pause between two looks.
const LOOK: Duration = Duration::from_millis(2);

/// Waits until the process `pid`, who held the instance before, is gone, and what it had
/// queued with it. Bounded.
pub(super) fn let_come_to_rest(pid: Option<u32>) {
    let begin = Instant::now();
    let is_gone = |pid: u32| pid == std::process::id() || Process::is_gone(pid);
    let rest = loop {
        match pid {
            Some(pid) if is_gone(pid) => break STILL.0,
            // it lies dead and nobody has waited for it: all that it had is closed
            Some(pid) if Process::open(pid).is_some_and(|process| process.has_exited()) => {
                break STILL.0;
            }
            Some(_) if begin.elapsed() < GONE => thread::sleep(LOOK),
            _ => break STILL.1,
        }
    };
    tracing::debug!(?pid, waited = ?begin.elapsed(), ?rest, "the daemon before is at rest");
    thread::sleep(rest);
}
