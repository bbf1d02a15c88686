//! Facts about a machine, and who tells them.

use std::path::PathBuf;

use crate::lifecycle::socket::Occupant;

/// Tells facts; a test tells what it likes.
pub trait Probe {
    /// Directories and sockets of the instance.
    fn instance(&self) -> InstanceFacts;
    /// The file system of the segments.
    fn shared_memory(&self) -> SharedMemoryFacts;
    /// Limits of this process.
    fn limits(&self) -> LimitFacts;
    /// Memory that weights may take.
    fn memory(&self) -> MemoryFacts;
    /// What the kernel can do, tried out.
    fn kernel(&self) -> KernelFacts;
    /// Who we are to the login manager.
    fn login(&self) -> LoginFacts;
}

/// Directories and sockets of the instance.
#[derive(Debug, Clone)]
pub struct InstanceFacts {
    /// Its name.
    pub name: String,
    /// Its directory.
    pub directory: PathBuf,
    /// What a daemon that wanted to start would object to; `None` when nothing.
    pub objection: Option<String>,
    /// Whether the directory is there.
    pub exists: bool,
    /// The gRPC socket and what stands there, or why that cannot be told.
    pub grpc: (PathBuf, Result<Occupant, String>),
    /// The same of the descriptor channel.
    pub channel: (PathBuf, Result<Occupant, String>),
    /// The version of the daemon that answers, if one does and tells.
    pub version: Option<String>,
    /// Our own version.
    pub own_version: &'static str,
}

/// The file system of the segments.
#[derive(Debug, Clone)]
pub struct SharedMemoryFacts {
    /// The directory.
    pub directory: PathBuf,
    /// Its file system, or why it cannot be looked at.
    pub mount: Result<MountFacts, String>,
    /// Why a segment cannot be made, filled, published and read back; `None` when it can.
    pub segment_failure: Option<String>,
}

/// A mounted file system.
#[derive(Debug, Clone)]
pub struct MountFacts {
    /// "tmpfs" for example.
    pub kind: String,
    /// Where it is mounted.
    pub point: PathBuf,
    /// Its bytes.
    pub total: u64,
    /// Bytes free for us.
    pub free: u64,
    /// Mode of the directory.
    pub mode: u32,
}

/// Limits of this process; `u64::MAX` is unlimited.
#[derive(Debug, Clone, Copy)]
pub struct LimitFacts {
    /// Bytes that may be locked: soft.
    pub memlock: u64,
    /// Open descriptors: soft and hard.
    pub descriptors: (u64, u64),
    /// Managers that may be open at the same time.
    pub max_managers: usize,
}

/// Memory that weights may take.
#[derive(Debug, Clone)]
pub struct MemoryFacts {
    /// Bytes that the machine can give, and its bytes in all; or why nobody knows.
    pub machine: Result<(u64, u64), String>,
    /// The tightest limit of our control groups.
    pub group: Option<GroupFacts>,
    /// The configured limit for weight sets.
    pub configured: Option<u64>,
}

/// A control group with a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupFacts {
    /// Its path.
    pub path: PathBuf,
    /// Most bytes.
    pub limit: u64,
    /// Bytes used.
    pub used: u64,
}

/// What the kernel can do, tried out; an error says how it failed.
#[derive(Debug, Clone)]
pub struct KernelFacts {
    /// Its release.
    pub release: String,
    /// `/proc` shows this process.
    pub proc: Result<(), String>,
    /// A process can be referred to.
    pub pidfd: Result<(), String>,
    /// So can the peer of a socket (Linux 6.5).
    pub peer_pidfd: Result<(), String>,
    /// A memfd can be sealed, and then keeps its size.
    pub seals: Result<(), String>,
    /// Whether somebody else holds a memfd can be told.
    pub lease: Result<(), String>,
}

/// Who we are to the login manager.
#[derive(Debug, Clone, Copy)]
pub struct LoginFacts {
    /// Our user.
    pub uid: u32,
    /// Highest user id of system users.
    pub last_system_uid: u32,
    /// Whether a login manager runs.
    pub managed: bool,
    /// Whether it removes shared memory of users who log out.
    pub removes: bool,
    /// Whether our user stays logged in for ever.
    pub lingers: bool,
}
