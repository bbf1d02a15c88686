//! The configuration that the daemon runs by: complete, and every value checked.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use flextensord_device::cuda::gpu;

use super::{
    Sources, environment,
    error::ConfigurationError,
    key::Key,
    layer::{Layer, Origin},
    value::{self, bad},
};

/// Most bytes of a unix socket's path: what `sun_path` holds beside its NUL.
const SOCKET_PATH_BYTES: usize = 107;
/// Most threads that a checkpoint is read with when nobody says how many.
const LOAD_THREADS: usize = 16;

/// What kind of device the daemon moves weights to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceKind {
    /// Devices in host memory.
    Cpu,
    /// GPUs: "cuda:N" or UUIDs; none means all that the process sees.
    Cuda(Vec<String>),
}

/// Whether and how segments are pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pinning {
    /// `None`: as the device needs.
    pub wanted: Option<bool>,
    /// Whether a segment that cannot be pinned is refused.
    pub required: bool,
    /// Most bytes of one call of the driver.
    pub chunk: u64,
}

/// Bytes that are pinned in one call unless told otherwise. Drivers from r580 on refuse
/// calls whose table of pages passes 2 GiB, at 512 GiB (NVIDIA/open-gpu-kernel-modules
/// 1234), and a chunk is what progress and a stop wait for.
const PIN_CHUNK: u64 = 16 << 30;

/// The devices in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuSettings {
    /// How many, 1 to 32.
    pub devices: u32,
    /// Bytes of memory of each.
    pub memory: u64,
    /// Bytes per second that copies to each are held to; `None`: not limited.
    pub link: Option<u64>,
}

/// How events are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For a person.
    Human,
    /// One JSON object a line.
    Json,
}

/// The effective configuration.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Name of this daemon among those of the machine.
    pub instance: String,
    /// Directory of all instances.
    pub runtime_dir: PathBuf,
    /// Directory of the segments.
    pub shm_dir: PathBuf,
    /// Kind of device.
    pub device: DeviceKind,
    /// The devices, when they are cpu devices.
    pub cpu: CpuSettings,
    /// Whether and how segments are pinned.
    pub pinning: Pinning,
    /// Most bytes of weight sets; `None`: what the machine allows.
    pub host_memory: Option<u64>,
    /// Threads that read a checkpoint, at least 1.
    pub load_threads: usize,
    /// Most managers open at the same time.
    pub max_managers: usize,
    /// How long a living owner whose stream ended may come back.
    pub resume_grace: Duration,
    /// How long a stop waits for calls in progress.
    pub drain_grace: Duration,
    /// How long managers of a dead daemon are kept for their owners.
    pub client_patience: Duration,
    /// Whether a stop keeps weight sets and managers for a successor.
    pub keep_on_stop: bool,
    /// Whether the bytes of sets that are taken over are hashed.
    pub verify_adopted: bool,
    /// Whether ring ranges that clients gave back are overwritten.
    pub poison_released: bool,
    /// Which events are logged, in the syntax of `EnvFilter`.
    pub log: String,
    /// How they are written.
    pub log_format: LogFormat,
    /// Where each value came from.
    pub origins: BTreeMap<Key, Origin>,
}

impl Settings {
    /// Checks `layer`, the layers put together.
    ///
    /// # Errors
    /// For the first value that breaks its rule, or a missing one.
    pub fn new(layer: &Layer, sources: &Sources<'_>) -> Result<Self, ConfigurationError> {
        let origin = |key| layer.get(key).map_or(Origin::Default, |g| g.origin.clone());
        let count = |key, range, default: u32| {
            value::optional(layer, key, value::number(range)).map(|n| n.unwrap_or(default))
        };
        let time = |key, seconds| {
            let parsed = value::optional(layer, key, value::time);
            parsed.map(|time| time.unwrap_or(Duration::from_secs(seconds)))
        };
        let shm_dir = value::optional(layer, Key::ShmDir, value::directory)?;
        let load_threads = count(Key::LoadThreads, 0..=256, 0)?;
        let truth = |key, default| {
            value::optional(layer, key, value::truth).map(|given| given.unwrap_or(default))
        };
        let device = device(layer)?;
        let settings = Self {
            instance: value::instance(layer)?,
            runtime_dir: runtime_dir(layer, sources)?,
            shm_dir: shm_dir.unwrap_or_else(|| PathBuf::from("/dev/shm")),
            pinning: Pinning {
                wanted: pinned_memory(layer, &device)?,
                required: truth(Key::RequirePinned, true)?,
                chunk: value::optional(layer, Key::PinChunk, value::size)?.unwrap_or(PIN_CHUNK),
            },
            device,
            cpu: CpuSettings {
                devices: count(Key::CpuDevices, 1..=32, 1)?,
                memory: value::optional(layer, Key::CpuMemory, value::size)?.unwrap_or(1 << 30),
                link: value::unless_none(layer, Key::CpuLink, value::rate)?,
            },
            host_memory: value::unless_none(layer, Key::HostMemory, value::size)?,
            load_threads: match usize::try_from(load_threads) {
                Ok(0) | Err(_) => sources.cores.clamp(1, LOAD_THREADS),
                Ok(threads) => threads,
            },
            max_managers: usize::try_from(count(Key::MaxManagers, 1..=65_536, 1024)?)
                .unwrap_or(usize::MAX),
            resume_grace: time(Key::ResumeGrace, 5)?,
            drain_grace: time(Key::DrainGrace, 10)?,
            client_patience: time(Key::ClientPatience, 30)?,
            keep_on_stop: value::optional(layer, Key::OnStop, on_stop)?.unwrap_or(true),
            verify_adopted: truth(Key::VerifyAdopted, false)?,
            poison_released: truth(Key::PoisonReleased, false)?,
            log: value::optional(layer, Key::Log, value::filter)?
                .unwrap_or_else(|| "info".to_owned()),
            log_format: value::optional(layer, Key::LogFormat, log_format)?
                .unwrap_or(LogFormat::Human),
            origins: Key::ALL.into_iter().map(|key| (key, origin(key))).collect(),
        };
        settings.check_socket_paths()?;
        Ok(settings)
    }

    /// The directory of this instance.
    #[must_use]
    pub fn directory(&self) -> PathBuf {
        self.runtime_dir.join(&self.instance)
    }

    /// Where gRPC is served.
    #[must_use]
    pub fn grpc_socket(&self) -> PathBuf {
        self.directory().join("flextensord.sock")
    }

    /// Where descriptors are passed.
    #[must_use]
    pub fn channel_socket(&self) -> PathBuf {
        self.directory().join("fd.sock")
    }

    fn check_socket_paths(&self) -> Result<(), ConfigurationError> {
        for path in [self.grpc_socket(), self.channel_socket()] {
            let length = path.as_os_str().len();
            if length > SOCKET_PATH_BYTES {
                let limit = SOCKET_PATH_BYTES;
                return Err(ConfigurationError::SocketPath {
                    path,
                    length,
                    limit,
                });
            }
        }
        Ok(())
    }
}

fn runtime_dir(layer: &Layer, sources: &Sources<'_>) -> Result<PathBuf, ConfigurationError> {
    let missing = |rule: &str| ConfigurationError::Missing {
        key: Key::RuntimeDir,
        rule: rule.to_owned(),
    };
    if let Some(path) = value::optional(layer, Key::RuntimeDir, value::directory)? {
        return Ok(path);
    }
    if sources.uid == 0 {
        return Ok(PathBuf::from("/run/flextensord"));
    }
    match environment::value(sources.environment, "XDG_RUNTIME_DIR")? {
        Some(text) if text.starts_with('/') => Ok(PathBuf::from(text).join("flextensord")),
        Some(text) if !text.is_empty() => Err(missing(
            "XDG_RUNTIME_DIR is no absolute path; give --runtime-dir",
        )),
        _ => Err(missing(
            "not root, and XDG_RUNTIME_DIR is not set; give --runtime-dir",
        )),
    }
}

fn device(layer: &Layer) -> Result<DeviceKind, ConfigurationError> {
    let parsed = value::optional(layer, Key::Device, |text| match text {
        "cpu" => Ok(DeviceKind::Cpu),
        "cuda" => Ok(DeviceKind::Cuda(Vec::new())),
        list => gpus(list),
    })?;
    parsed.ok_or_else(|| ConfigurationError::Missing {
        key: Key::Device,
        rule: "there is no default, so that nobody gets another device than expected; \
               give --device cuda or --device cpu"
            .to_owned(),
    })
}

/// A list of GPUs.
fn gpus(list: &str) -> Result<DeviceKind, String> {
    let names: Vec<String> = list.split(',').map(|name| name.trim().to_owned()).collect();
    let named = |name: &String| {
        let number = name.strip_prefix("cuda:").map(str::parse::<u16>);
        let uuid = ["GPU-", "MIG-"]
            .iter()
            .any(|prefix| name.starts_with(prefix));
        uuid || matches!(number, Some(Ok(_)))
    };
    if !names.iter().all(named) {
        return Err(
            "must be cpu, cuda for all GPUs, or a list of cuda:N and UUIDs (GPU-…, MIG-…)"
                .to_owned(),
        );
    }
    for (at, second) in names.iter().enumerate() {
        let mut earlier = names.iter().take(at);
        if let Some(first) = earlier.find(|first| gpu::is_same_name(first, second)) {
            return Err(format!(
                "{first} and {second} name the same GPU: name it once"
            ));
        }
    }
    Ok(DeviceKind::Cuda(names))
}

fn pinned_memory(layer: &Layer, device: &DeviceKind) -> Result<Option<bool>, ConfigurationError> {
    let pinned = value::optional(layer, Key::PinnedMemory, value::truth)?;
    match (pinned, layer.get(Key::PinnedMemory)) {
        (Some(true), Some(given)) if *device == DeviceKind::Cpu => Err(bad(
            Key::PinnedMemory,
            given,
            "the cpu device copies by threads and has no driver to pin memory for; \
             leave it unset or say false",
        )),
        _ => Ok(pinned),
    }
}

fn on_stop(text: &str) -> Result<bool, String> {
    match text {
        "keep" => Ok(true),
        "remove" => Ok(false),
        _ => Err("must be keep or remove".to_owned()),
    }
}

fn log_format(text: &str) -> Result<LogFormat, String> {
    match text {
        "human" => Ok(LogFormat::Human),
        "json" => Ok(LogFormat::Json),
        _ => Err("must be human or json".to_owned()),
    }
}
