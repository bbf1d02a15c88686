//! Which keys the configuration has.

/// A key of the configuration; the same name serves in the file, in the environment
/// (`FLEXTENSORD_` and upper case) and on the command line (`--`, dashes).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// Name of this daemon among those of the machine.
    Instance,
    /// Directory of all instances' sockets and state.
    RuntimeDir,
    /// Directory of the segments.
    ShmDir,
    /// What kind of device the daemon moves weights to.
    Device,
    /// Number of devices in host memory.
    CpuDevices,
    /// Memory of each of them.
    CpuMemory,
    /// Bandwidth that copies to each of them are held to.
    CpuLink,
    /// Whether segments are pinned for the device.
    PinnedMemory,
    /// Whether a segment that cannot be pinned is refused.
    RequirePinned,
    /// Most bytes that are pinned in one call of the driver.
    PinChunk,
    /// Most bytes of weight sets in host memory.
    HostMemory,
    /// Threads that read a checkpoint.
    LoadThreads,
    /// Most managers open at the same time.
    MaxManagers,
    /// How long a living owner whose stream ended may come back.
    ResumeGrace,
    /// How long a stop waits for calls in progress.
    DrainGrace,
    /// How long managers of a dead daemon are kept for their owners.
    ClientPatience,
    /// Whether a stop keeps weight sets and managers for a successor.
    OnStop,
    /// Whether the bytes of sets that are taken over are hashed.
    VerifyAdopted,
    /// Whether ring ranges that clients gave back are overwritten, to find readers of them.
    PoisonReleased,
    /// Which events are logged.
    Log,
    /// How they are written.
    LogFormat,
}

impl Key {
    /// All keys, in the order of their listing.
    pub const ALL: [Self; 21] = [
        Self::Instance,
        Self::RuntimeDir,
        Self::ShmDir,
        Self::Device,
        Self::CpuDevices,
        Self::CpuMemory,
        Self::CpuLink,
        Self::PinnedMemory,
        Self::RequirePinned,
        Self::PinChunk,
        Self::HostMemory,
        Self::LoadThreads,
        Self::MaxManagers,
        Self::ResumeGrace,
        Self::DrainGrace,
        Self::ClientPatience,
        Self::OnStop,
        Self::VerifyAdopted,
        Self::PoisonReleased,
        Self::Log,
        Self::LogFormat,
    ];

    /// Its name in the file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Instance => "instance",
            Self::RuntimeDir => "runtime_dir",
            Self::ShmDir => "shm_dir",
            Self::Device => "device",
            Self::CpuDevices => "cpu_devices",
            Self::CpuMemory => "cpu_memory",
            Self::CpuLink => "cpu_link",
            Self::PinnedMemory => "pinned_memory",
            Self::RequirePinned => "require_pinned",
            Self::PinChunk => "pin_chunk",
            Self::HostMemory => "host_memory",
            Self::LoadThreads => "load_threads",
            Self::MaxManagers => "max_managers",
            Self::ResumeGrace => "resume_grace",
            Self::DrainGrace => "drain_grace",
            Self::ClientPatience => "client_patience",
            Self::OnStop => "on_stop",
            Self::VerifyAdopted => "verify_adopted",
            Self::PoisonReleased => "poison_released",
            Self::Log => "log",
            Self::LogFormat => "log_format",
        }
    }

    /// Its environment variable.
    #[must_use]
    pub fn variable(self) -> String {
        format!("FLEXTENSORD_{}", self.name().to_ascii_uppercase())
    }

    /// Its flag.
    #[must_use]
    pub fn flag(self) -> String {
        format!("--{}", self.name().replace('_', "-"))
    }

    /// The key of that name in a file.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|key| key.name() == name)
    }
}

/// The one of `names` that `name` was most likely meant to be, if any is close.
pub(super) fn nearest(name: &str, names: impl Iterator<Item = String>) -> Option<String> {
    names
        .map(|candidate| (strsim::jaro_winkler(name, &candidate), candidate))
        .filter(|(likeness, _)| *likeness > 0.8)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, candidate)| candidate)
}
