//! The layer of the command line.

use std::path::PathBuf;

use super::{
    key::Key,
    layer::{Layer, Origin},
};

/// Flags that every command of the daemon takes. Their values stay text here, so that
/// one set of rules judges flags, environment and file.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Flags {
    /// Configuration file [default: /etc/flextensord/INSTANCE.toml, if present]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Name of this daemon among those of the machine [default: default]
    #[arg(long, value_name = "NAME")]
    pub instance: Option<String>,
    /// Directory of sockets and state [default: /run/flextensord as root, else
    /// $XDG_RUNTIME_DIR/flextensord]
    #[arg(long, value_name = "DIR")]
    pub runtime_dir: Option<String>,
    /// Directory of the segments [default: /dev/shm]
    #[arg(long, value_name = "DIR")]
    pub shm_dir: Option<String>,
    /// Devices to move weights to: cpu, cuda for all GPUs, or a list of cuda:N and UUIDs;
    /// there is no default
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Number of cpu devices, 1 to 32 [default: 1]
    #[arg(long, value_name = "N")]
    pub cpu_devices: Option<String>,
    /// Memory of each cpu device, such as 64MiB [default: 1GiB]
    #[arg(long, value_name = "SIZE")]
    pub cpu_memory: Option<String>,
    /// Bandwidth of each cpu device, such as 8GB/s [default: not limited]
    #[arg(long, value_name = "RATE")]
    pub cpu_link: Option<String>,
    /// Whether to pin segments (true, false) [default: what the device needs]
    #[arg(long, value_name = "BOOL")]
    pub pinned_memory: Option<String>,
    /// Refuse a weight set that cannot be pinned (true), or take it unpinned, slower and
    /// shown as degraded (false) [default: true]
    #[arg(long, value_name = "BOOL")]
    pub require_pinned: Option<String>,
    /// Most bytes to pin in one call of the driver, such as 16GiB [default: 16GiB]
    #[arg(long, value_name = "SIZE")]
    pub pin_chunk: Option<String>,
    /// Most bytes of weight sets in host memory [default: what the machine allows]
    #[arg(long, value_name = "SIZE")]
    pub host_memory: Option<String>,
    /// Threads that read a checkpoint [default: one a core, at most 16]
    #[arg(long, value_name = "N")]
    pub load_threads: Option<String>,
    /// Most managers open at the same time [default: 1024]
    #[arg(long, value_name = "N")]
    pub max_managers: Option<String>,
    /// How long a living owner whose stream ended may come back [default: 5s]
    #[arg(long, value_name = "TIME")]
    pub resume_grace: Option<String>,
    /// How long a stop waits for calls in progress [default: 10s]
    #[arg(long, value_name = "TIME")]
    pub drain_grace: Option<String>,
    /// How long managers of a dead daemon are kept for their owners [default: 30s]
    #[arg(long, value_name = "TIME")]
    pub client_patience: Option<String>,
    /// Whether a stop keeps weight sets and managers for a successor or removes them
    /// (keep, remove) [default: keep]
    #[arg(long, value_name = "WHAT")]
    pub on_stop: Option<String>,
    /// Hash the bytes of weight sets that are taken over from a dead daemon
    /// [default: false]
    #[arg(long, value_name = "BOOL")]
    pub verify_adopted: Option<String>,
    /// Overwrite ring ranges that clients gave back, to find who still reads them; costs
    /// time [default: false]
    #[arg(long, value_name = "BOOL")]
    pub poison_released: Option<String>,
    /// Which events to log, such as info or flextensord=debug [default: info]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
    /// How to write them (human, json) [default: human]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
}

impl Flags {
    /// What was given for `key`.
    #[must_use]
    pub fn get(&self, key: Key) -> Option<&str> {
        match key {
            Key::Instance => &self.instance,
            Key::RuntimeDir => &self.runtime_dir,
            Key::ShmDir => &self.shm_dir,
            Key::Device => &self.device,
            Key::CpuDevices => &self.cpu_devices,
            Key::CpuMemory => &self.cpu_memory,
            Key::CpuLink => &self.cpu_link,
            Key::PinnedMemory => &self.pinned_memory,
            Key::RequirePinned => &self.require_pinned,
            Key::PinChunk => &self.pin_chunk,
            Key::HostMemory => &self.host_memory,
            Key::LoadThreads => &self.load_threads,
            Key::MaxManagers => &self.max_managers,
            Key::ResumeGrace => &self.resume_grace,
            Key::DrainGrace => &self.drain_grace,
            Key::ClientPatience => &self.client_patience,
            Key::OnStop => &self.on_stop,
            Key::VerifyAdopted => &self.verify_adopted,
            Key::PoisonReleased => &self.poison_released,
            Key::Log => &self.log,
            Key::LogFormat => &self.log_format,
        }
        .as_deref()
    }

    pub(super) fn layer(&self) -> Layer {
        let mut layer = Layer::default();
        for key in Key::ALL {
            if let Some(text) = self.get(key) {
                layer.set(key, text, Origin::Flag { flag: key.flag() });
            }
        }
        layer
    }
}
