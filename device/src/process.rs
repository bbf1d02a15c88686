//! Who is at the other end of a socket, and whether it still lives.

use std::{
    fs, io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{getsockopt, sockopt::PeerCredentials},
};
use rustix::process::{Pid, PidfdFlags};

use crate::kernel::KernelError;

/// A peer as the kernel vouches for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// Its process, or 0 when that is in a namespace that we cannot see.
    pub pid: u32,
}

/// The peer of a connected unix socket.
///
/// # Errors
/// When it is no such socket.
pub fn peer(socket: BorrowedFd<'_>) -> Result<Peer, KernelError> {
    let credentials = getsockopt(&socket, PeerCredentials)
        .map_err(|e| KernelError::new("read peer credentials", e))?;
    Ok(Peer {
        uid: credentials.uid(),
        gid: credentials.gid(),
        pid: u32::try_from(credentials.pid()).unwrap_or(0),
    })
}

/// A reference to a process that no other process can take the place of.
#[derive(Debug)]
pub struct Process(OwnedFd);

impl Process {
    /// The process `pid`, if it lives and is visible to us.
    #[must_use]
    pub fn open(pid: u32) -> Option<Self> {
        let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
        rustix::process::pidfd_open(pid, PidfdFlags::empty())
            .ok()
            .map(Self)
    }

    /// Whether there is no process `pid` any more. `false` also when that cannot be told.
    #[must_use]
    pub fn is_gone(pid: u32) -> bool {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        pid.is_some_and(|pid| {
            let opened = rustix::process::pidfd_open(pid, PidfdFlags::empty());
            opened.is_err_and(|error| error == rustix::io::Errno::SRCH)
        })
    }

    /// The process at the other end of a connected unix socket (SO_PEERPIDFD, since
    /// Linux 6.5). `None` on older kernels, or when it is gone or invisible.
    #[must_use]
    pub fn of_peer(socket: BorrowedFd<'_>) -> Option<Self> {
        const SO_PEERPIDFD: libc::c_int = 77;
        let mut descriptor: libc::c_int = -1;
        let mut length = libc::socklen_t::try_from(size_of::<libc::c_int>()).ok()?;
        // SAFETY: descriptor and length outlive the call and length is the size of the
        // buffer, as getsockopt(2) asks.
        let got = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_PEERPIDFD,
                (&raw mut descriptor).cast(),
                &raw mut length,
            )
        };
        if got != 0 || descriptor < 0 {
            return None;
        }
        // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
        Some(Self(unsafe { OwnedFd::from_raw_fd(descriptor) }))
    }

    /// Whether it has ended.
    #[must_use]
    pub fn has_exited(&self) -> bool {
        let mut polled = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        matches!(poll(&mut polled, PollTimeout::ZERO), Ok(ready) if ready > 0)
    }

    /// Another reference to the same process.
    ///
    /// # Errors
    /// When the kernel has no descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// The pidfd itself, which becomes readable when the process ends.
    #[must_use]
    pub fn into_descriptor(self) -> OwnedFd {
        self.0
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Process {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.0.as_raw_fd()
    }
}

/// When process `pid` started, in clock ticks since boot (proc_pid_stat(5), field
/// 22): with the pid it names a process for ever. `None` when it is not visible.
#[must_use]
pub fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // the command name may hold spaces and parentheses; fields follow the last one
    let fields = stat.get(stat.rfind(')')? + 1..)?;
    fields.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixStream, process::Command};

    use super::*;

    #[test]
    fn a_process_is_seen_to_live_and_to_end() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::open(child.id()).unwrap();
        assert!(start_time(child.id()).is_some());
        assert!(!process.has_exited());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.has_exited());
        assert!(Process::is_gone(child.id()));
        assert!(!Process::is_gone(std::process::id()) && !Process::is_gone(0));
    }

    #[test]
    fn the_peer_of_a_socket_pair_is_this_process() {
        let (one, _two) = UnixStream::pair().unwrap();
        assert_eq!(peer(one.as_fd()).unwrap().pid, std::process::id());
    }
}
