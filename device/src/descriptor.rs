//! Packets with file descriptors over a unix socket of type SOCK_SEQPACKET.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
    path::Path,
    time::Duration,
};

use flextensord_proto::limit;
use nix::sys::{
    socket::{
        AddressFamily, Backlog, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, bind,
        connect, listen, sendmsg, setsockopt, socket,
        sockopt::{ReceiveTimeout, SendTimeout},
    },
    time::{TimeVal, TimeValLike as _},
};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

use crate::kernel::KernelError;

/// Binds and listens at `path`, which must not exist. The socket is non-blocking.
///
/// # Errors
/// When the path is too long, exists, or its directory is not writable.
pub fn bind_listener(path: &Path) -> Result<OwnedFd, KernelError> {
    let operation = || format!("listen at {}", path.display());
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let listener = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)
        .map_err(|e| KernelError::new(operation(), e))?;
    let address = UnixAddr::new(path).map_err(|e| KernelError::new(operation(), e))?;
    bind(listener.as_raw_fd(), &address).map_err(|e| KernelError::new(operation(), e))?;
    listen(&listener, Backlog::MAXCONN).map_err(|e| KernelError::new(operation(), e))?;
    Ok(listener)
}

/// Accepts one connection, non-blocking.
///
/// # Errors
/// `WouldBlock` when none waits, or what the kernel says.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let accepted = nix::sys::socket::accept4(listener.as_raw_fd(), flags)?;
    // SAFETY: accept4 has just made this descriptor for us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(accepted) })
}

/// Connects to `path`; every later send and receive is bounded by `limit`.
///
/// # Errors
/// When nobody listens there or the rights do not allow it.
pub fn connect_to(path: &Path, limit: Duration) -> Result<OwnedFd, KernelError> {
    let operation = || format!("connect to {}", path.display());
    let connection = socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC,
        None,
    )
    .map_err(|e| KernelError::new(operation(), e))?;
    let limit = TimeVal::milliseconds(i64::try_from(limit.as_millis().max(1)).unwrap_or(i64::MAX));
    setsockopt(&connection, ReceiveTimeout, &limit)
        .and_then(|()| setsockopt(&connection, SendTimeout, &limit))
        .map_err(|e| KernelError::new(operation(), e))?;
    let address = UnixAddr::new(path).map_err(|e| KernelError::new(operation(), e))?;
    connect(connection.as_raw_fd(), &address).map_err(|e| KernelError::new(operation(), e))?;
    Ok(connection)
}

/// Sends one packet with descriptors.
///
/// # Errors
/// `WouldBlock` on a full non-blocking socket, or what the kernel says. A gone peer
/// is an error, never a signal.
pub fn send(
    socket: BorrowedFd<'_>,
    packet: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let raw: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control: &[ControlMessage<'_>] = if raw.is_empty() { &[] } else { &rights };
    let slices = [IoSlice::new(packet)];
    let sent = sendmsg::<()>(
        socket.as_raw_fd(),
        &slices,
        control,
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    if sent == packet.len() {
        Ok(())
    } else {
        Err(io::Error::other(format!(
            "sent {sent} of {} bytes of a packet",
            packet.len()
        )))
    }
}

/// Receives one packet and the descriptors that came with it, close-on-exec. An
/// empty packet means that the peer is gone.
///
/// # Errors
/// `WouldBlock` when none waits; `InvalidData` when the packet or its descriptors
/// are over the limit, `EMFILE` when this process may not open as many as came (what came
/// of them is closed then).
pub fn receive(socket: BorrowedFd<'_>) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    const SPACE: usize = rustix::cmsg_space!(ScmRights(limit::PACKET_DESCRIPTORS));
    let mut packet = vec![0; limit::PACKET_BYTES];
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(&mut packet)];
    let message = match recvmsg(socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
        // a reset connection is a gone peer as well
        Err(rustix::io::Errno::CONNRESET) => return Ok((Vec::new(), Vec::new())),
        other => other?,
    };
    let rights = control.drain().filter_map(|part| match part {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    let descriptors: Vec<OwnedFd> = rights.flatten().collect();
    let cut = message.flags.contains(ReturnFlags::CTRUNC);
    // there was space for more: the kernel ran out of descriptors to give
    if cut && descriptors.len() < limit::PACKET_DESCRIPTORS {
        return Err(rustix::io::Errno::MFILE.into());
    }
    // the space has a little slack
    let over = descriptors.len() > limit::PACKET_DESCRIPTORS;
    if over || cut || message.flags.contains(ReturnFlags::TRUNC) {
        let text = "packet or its descriptors are over the limit";
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    packet.truncate(message.bytes);
    Ok((packet, descriptors))
}

/// Both ends of a connection, for tests.
///
/// # Errors
/// When the kernel has no descriptors.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(nix::sys::socket::socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?)
}

/// Whether `descriptor` is a regular file open for reading (an `O_PATH` descriptor
/// is not).
#[must_use]
pub fn is_readable_regular_file(descriptor: BorrowedFd<'_>) -> bool {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    use nix::sys::stat::{SFlag, fstat};
    let regular = fstat(descriptor).is_ok_and(|stat| {
        SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits()) == SFlag::S_IFREG
    });
    let readable = fcntl(descriptor.as_fd(), FcntlArg::F_GETFL).is_ok_and(|flags| {
        let flags = OFlag::from_bits_truncate(flags);
        flags & OFlag::O_ACCMODE != OFlag::O_WRONLY && !flags.contains(OFlag::O_PATH)
    });
    regular && readable
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read as _};

    use super::*;

    #[test]
    fn descriptors_over_the_limit_are_closed() {
        let (one, two) = pair().unwrap();
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let file = tempfile::tempfile().unwrap();
        let many = vec![file.as_fd(); limit::PACKET_DESCRIPTORS + 1];
        let before = open();
        for _ in 0..20 {
            send(one.as_fd(), b"x", &many).unwrap();
            let error = receive(two.as_fd()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        // other tests open a few meanwhile
        assert!(open() < before + 20 * limit::PACKET_DESCRIPTORS);
    }

    #[test]
    fn a_packet_arrives_whole_with_its_descriptor() {
        let (one, two) = pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, b"weights").unwrap();
        send(one.as_fd(), b"hello", &[file.as_fd()]).unwrap();
        let (packet, mut descriptors) = receive(two.as_fd()).unwrap();
        assert_eq!(packet, b"hello");
        let mut text = String::new();
        let mut received = File::from(descriptors.remove(0));
        std::io::Seek::rewind(&mut received).unwrap();
        received.read_to_string(&mut text).unwrap();
        assert_eq!(text, "weights");
    }

    #[test]
    fn a_gone_peer_reads_as_an_empty_packet() {
        let (one, two) = pair().unwrap();
        drop(one);
        assert!(receive(two.as_fd()).unwrap().0.is_empty());
        assert!(send(two.as_fd(), b"x", &[]).is_err());
    }

    #[test]
    fn only_regular_files_open_for_reading_are_taken() {
        let directory = tempfile::tempdir().unwrap();
        let open = |path: &Path| File::open(path).unwrap();
        assert!(!is_readable_regular_file(open(directory.path()).as_fd()));
        assert!(!is_readable_regular_file(
            open(Path::new("/dev/null")).as_fd()
        ));
        let path = directory.path().join("w");
        std::fs::write(&path, b"x").unwrap();
        assert!(is_readable_regular_file(open(&path).as_fd()));
        let write_only = File::options().append(true).open(&path).unwrap();
        assert!(!is_readable_regular_file(write_only.as_fd()));
    }
}
