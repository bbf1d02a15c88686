//! Waiting for a word in shared memory to change, across processes.

use std::{sync::atomic::AtomicU32, time::Duration};

use rustix::{
    io::Errno,
    thread::futex::{self, Flags, Timespec},
};

/// Sleeps until `word` is woken, while it still holds `seen`, at most for `limit`.
/// Returns early for any reason: the caller looks at the word again.
pub fn wait(word: &AtomicU32, seen: u32, limit: Duration) {
    let limit = Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(limit.subsec_nanos()),
    };
    // EAGAIN, EINTR and ETIMEDOUT all mean: look again
    let _: Result<(), Errno> = futex::wait(word, Flags::empty(), seen, Some(&limit)).map(drop);
}

/// Wakes all who sleep on `word`.
pub fn wake(word: &AtomicU32) {
    let everyone = u32::try_from(i32::MAX).unwrap_or(1);
    let _: Result<usize, Errno> = futex::wake(word, Flags::empty(), everyone);
}
