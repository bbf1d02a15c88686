//! Facts about a machine, and who tells them.

use std::{path::PathBuf, time::Duration};

use flextensord_device::cuda::{error::CudaError, gpu::Gpu};

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
    /// The CUDA driver and what came of trying its GPUs.
    fn gpus(&self) -> GpuFacts;
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
    /// What the kernel says of huge pages for shared memory, if it says anything.
    pub shmem_enabled: Option<String>,
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

/// The CUDA driver, its GPUs, and what stands around them.
#[derive(Debug, Clone)]
pub struct GpuFacts {
    /// Whether the configuration names GPUs as devices.
    pub asked: bool,
    /// The driver, or why there is none.
    pub driver: Result<DriverFacts, DriverTrouble>,
    /// `CUDA_VISIBLE_DEVICES`, where it is set.
    pub visible: Option<String>,
    /// The MPS server that this process would use.
    pub mps: Option<MpsFacts>,
    /// NUMA nodes of the machine; `None` when the kernel does not tell.
    pub nodes: Option<usize>,
}

/// Why there is no driver.
#[derive(Debug, Clone)]
pub enum DriverTrouble {
    /// It cannot be loaded or started.
    Refused(CudaError),
    /// It did not come back within this time.
    Hung(Duration),
}

/// A driver that has started.
#[derive(Debug, Clone)]
pub struct DriverFacts {
    /// The version of the API: 13000 for 13.0.
    pub version: i32,
    /// The version of the kernel module.
    pub module: Option<String>,
    /// The GPUs that the configuration names, all when it names none; an error for each
    /// that there is not.
    pub gpus: Result<Vec<Result<OneGpu, CudaError>>, CudaError>,
}

/// A GPU, and what came of trying it.
#[derive(Debug, Clone)]
pub struct OneGpu {
    /// What it is.
    pub gpu: Gpu,
    /// 2 prohibited, 3 exclusive process.
    pub compute_mode: Option<i32>,
    /// How it is attached, as the kernel says.
    pub bus: Option<String>,
    /// What came of trying it.
    pub trial: Trial,
}

/// What came of trying a GPU.
#[derive(Debug, Clone)]
pub enum Trial {
    /// Not tried: it lacks something.
    Unfit(CudaError),
    /// Not over within this time.
    Hung(Duration),
    /// A step failed.
    Failed(TrialFailure),
    /// All works.
    Passed {
        /// How long it took, without the measurement.
        took: Duration,
        /// The measured link, or why it could not be measured.
        link: Result<Link, String>,
    },
}

/// A step of a trial that failed.
#[derive(Debug, Clone)]
pub struct TrialFailure {
    /// Which.
    pub step: Step,
    /// The driver's number, where it refused.
    pub code: Option<u32>,
    /// Whether host memory could not be pinned.
    pub pinning: bool,
    /// Whether the GPU has too little memory left.
    pub exhausted: bool,
    /// What was said.
    pub error: String,
}

/// A step of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A context on the GPU.
    Context,
    /// Shared host memory.
    HostMemory,
    /// Memory of the GPU.
    Memory,
    /// Its export as a descriptor, and import.
    Sharing,
    /// Pinning of host memory.
    Pinning,
    /// A part that a stream waits for, takes and gives back.
    HandOver,
    /// The bytes of the part.
    Bytes,
}

impl Step {
    /// What is done in it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Context => "making a context",
            Self::HostMemory => "making 64 MiB of shared host memory",
            Self::Memory => "making 2 MiB of GPU memory",
            Self::Sharing => "sharing GPU memory as a descriptor",
            Self::Pinning => "pinning host memory",
            Self::HandOver => "the hand-over of a part",
            Self::Bytes => "comparing the bytes of a part",
        }
    }
}

/// The measured link from pinned host memory to a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// Bytes per second, the median.
    pub rate: u64,
    /// Copies that were timed.
    pub copies: usize,
}

/// The MPS server of `CUDA_MPS_PIPE_DIRECTORY`, or of the place that is used without it.
#[derive(Debug, Clone)]
pub struct MpsFacts {
    /// Its directory.
    pub pipe: PathBuf,
    /// Whether its control pipe is there.
    pub serves: bool,
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
