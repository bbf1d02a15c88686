//! Judges what the kernel can do.

use super::{probe::KernelFacts, report::Check};

/// Whether the kernel has what the daemon stands on.
#[must_use]
pub fn judge(facts: &KernelFacts) -> Vec<Check> {
    let release = &facts.release;
    let needed = |name, outcome: &Result<(), String>, found: &str, remedy: &str| match outcome {
        Ok(()) => Check::ok(name, found),
        Err(error) => Check::fail(name, format!("{error} (Linux {release})"), remedy),
    };
    let peer = match &facts.peer_pidfd {
        Ok(()) => Check::ok("peer process", "a socket tells its peer's process"),
        Err(error) => Check::warn(
            "peer process",
            format!("{error} (Linux {release}, 6.5 can); the peer's pid is used instead"),
            "a newer kernel; else a client in a process namespace of its own is known to be \
             dead only by its connection",
        ),
    };
    vec![
        needed(
            "/proc",
            &facts.proc,
            "mounted",
            "mount -t proc proc /proc: descriptors are given away through it",
        ),
        needed(
            "process references",
            &facts.pidfd,
            "a process can be referred to",
            "Linux 5.3 or newer, and a seccomp profile that allows pidfd_open",
        ),
        peer,
        needed(
            "sealed memory",
            &facts.seals,
            "a sealed memfd keeps its size",
            "Linux 5.1 or newer, and a seccomp profile that allows memfd_create and fcntl",
        ),
        needed(
            "memory holders",
            &facts.lease,
            "whether a client still holds memory can be told",
            "allow fcntl F_SETLEASE (it needs /proc/sys/fs/leases-enable = 1)",
        ),
    ]
}
