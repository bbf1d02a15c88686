//! This machine's facts.

use std::{
    fs,
    os::{
        fd::AsFd as _,
        unix::{fs::MetadataExt as _, net::UnixStream},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use flextensord_device::{memfd, process::Process, segment::SegmentBuilder};
use flextensord_proto::v1::{StatusRequest, admin_client::AdminClient};
use nix::sys::{
    resource::{Resource, getrlimit},
    statfs::{self, FsType},
    statvfs::statvfs,
};
use tonic::transport::Endpoint;

use super::{
    memory::tightest_group,
    probe::{
        GpuFacts, InstanceFacts, KernelFacts, LimitFacts, LoginFacts, MemoryFacts, MountFacts,
        Probe, SharedMemoryFacts,
    },
    trial,
};
use crate::{
    configuration::Settings,
    lifecycle::{
        devices::Drivers,
        directory,
        socket::{Occupant, Purpose, occupant},
    },
};

/// How long a daemon has to tell its version.
const ANSWER: Duration = Duration::from_secs(2);
/// Bytes of the segment that is tried.
const TRIED: u64 = 64 << 10;
/// Where the kernel says when shared memory comes in huge pages.
const SHMEM_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// This machine, as the daemon of these settings would find it.
#[derive(Debug)]
pub struct Machine<'a> {
    settings: &'a Settings,
    drivers: &'a Drivers,
}

impl<'a> Machine<'a> {
    /// Looks with the eyes of a daemon of `settings`, at GPUs through `drivers`.
    #[must_use]
    pub fn new(settings: &'a Settings, drivers: &'a Drivers) -> Self {
        Self { settings, drivers }
    }
}

impl Probe for Machine<'_> {
    fn instance(&self) -> InstanceFacts {
        let settings = self.settings;
        let look = |path: PathBuf, purpose| {
            let there = occupant(&path, purpose).map_err(|error| error.to_string());
            (path, there)
        };
        let grpc = look(settings.grpc_socket(), Purpose::Grpc);
        let answers = matches!(grpc.1, Ok(Occupant::Listener { .. }));
        let directory = settings.directory();
        let objection = [&settings.runtime_dir, &directory]
            .into_iter()
            .filter(|path| fs::symlink_metadata(path).is_ok())
            .find_map(|path| directory::check(path).err())
            .map(|error| error.to_string());
        InstanceFacts {
            name: settings.instance.clone(),
            objection,
            exists: directory.is_dir(),
            directory,
            channel: look(settings.channel_socket(), Purpose::Channel),
            version: answers.then(|| ask_version(&grpc.0)).flatten(),
            own_version: env!("CARGO_PKG_VERSION"),
            grpc,
        }
    }

    fn shared_memory(&self) -> SharedMemoryFacts {
        let directory = self.settings.shm_dir.clone();
        let mount = mount(&directory);
        SharedMemoryFacts {
            segment_failure: match &mount {
                Ok(_) => try_segment(&directory).err(),
                Err(_) => None,
            },
            mount,
            directory,
        }
    }

    fn limits(&self) -> LimitFacts {
        // the kernel knows both limits; were one unknown, nothing could be said against it
        let limit = |resource| getrlimit(resource).unwrap_or((u64::MAX, u64::MAX));
        LimitFacts {
            memlock: limit(Resource::RLIMIT_MEMLOCK).0,
            descriptors: limit(Resource::RLIMIT_NOFILE),
            max_managers: self.settings.max_managers,
        }
    }

    fn memory(&self) -> MemoryFacts {
        let machine = sysinfo::System::new().map(|mut system| {
            system.refresh_memory();
            (system.available_memory(), system.total_memory())
        });
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let read = |path: &Path| fs::read_to_string(path).ok();
        MemoryFacts {
            machine: machine.map_err(|error| error.to_string()),
            group: tightest_group(&groups, Path::new("/sys/fs/cgroup"), &read),
            configured: self.settings.host_memory,
            shmem_enabled: read(Path::new(SHMEM_ENABLED)).map(|text| text.trim().to_owned()),
        }
    }

    fn kernel(&self) -> KernelFacts {
        let own = std::process::id();
        let there = |seen: bool, text: &str| if seen { Ok(()) } else { Err(text.to_owned()) };
        let peer = UnixStream::pair()
            .ok()
            .and_then(|(one, _two)| Process::of_peer(one.as_fd()));
        KernelFacts {
            release: nix::sys::utsname::uname().map_or_else(
                |_| "unknown".to_owned(),
                |name| name.release().to_string_lossy().into_owned(),
            ),
            proc: there(
                Path::new("/proc/self/fd").is_dir(),
                "/proc does not show this process",
            ),
            pidfd: there(Process::open(own).is_some(), "pidfd_open is refused"),
            peer_pidfd: there(peer.is_some(), "SO_PEERPIDFD is refused"),
            seals: try_seals(),
            lease: try_lease(),
        }
    }

    fn gpus(&self) -> GpuFacts {
        trial::facts(self.settings, self.drivers)
    }

    fn login(&self) -> LoginFacts {
        let uid = nix::unistd::geteuid();
        LoginFacts {
            uid: uid.as_raw(),
            last_system_uid: 999,
            managed: Path::new("/run/systemd/seats").is_dir(),
            removes: removes_ipc(),
            lingers: nix::unistd::User::from_uid(uid)
                .ok()
                .flatten()
                .is_some_and(|user| {
                    Path::new("/var/lib/systemd/linger")
                        .join(user.name)
                        .exists()
                }),
        }
    }
}

fn ask_version(socket: &Path) -> Option<String> {
    let endpoint = Endpoint::try_from(format!("unix://{}", socket.display()))
        .ok()?
        .timeout(ANSWER);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .ok()?;
    let asked = async {
        let mut admin = AdminClient::new(endpoint.connect().await.ok()?);
        let status = admin.status(StatusRequest {}).await.ok()?;
        Some(status.into_inner().version)
    };
    runtime
        .block_on(async { tokio::time::timeout(ANSWER, asked).await })
        .ok()
        .flatten()
}

fn mount(directory: &Path) -> Result<MountFacts, String> {
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", directory.display());
    let metadata = fs::metadata(directory).map_err(|error| named(&error))?;
    if !metadata.is_dir() {
        return Err(named(&"not a directory"));
    }
    let system = statfs::statfs(directory).map_err(|error| named(&error))?;
    let figures = statvfs(directory).map_err(|error| named(&error))?;
    let unit = figures.fragment_size();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let real = fs::canonicalize(directory).map_err(|error| named(&error))?;
    Ok(MountFacts {
        kind: kind_name(system.filesystem_type()),
        point: mount_point(&mounts, &real),
        total: figures.blocks().saturating_mul(unit),
        free: figures.blocks_available().saturating_mul(unit),
        mode: metadata.mode() & 0o7777,
    })
}

fn kind_name(kind: FsType) -> String {
    /// linux/magic.h, RAMFS_MAGIC: nix has no name for it.
    const RAMFS: u64 = 0x8584_58f6;
    if kind == statfs::TMPFS_MAGIC {
        "tmpfs".to_owned()
    } else if u64::try_from(kind.0) == Ok(RAMFS) {
        "ramfs".to_owned()
    } else {
        format!("file system {:#x}", kind.0)
    }
}

/// The mount point that `directory` lies under, from `/proc/self/mountinfo`.
fn mount_point(mounts: &str, directory: &Path) -> PathBuf {
    mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        // the kernel writes blanks in a path as octal
        .map(|point| PathBuf::from(point.replace("\\040", " ")))
        .filter(|point| directory.starts_with(point))
        .max_by_key(|point| point.as_os_str().len())
        .unwrap_or_else(|| PathBuf::from("/"))
}

/// Makes a segment as the daemon does, reads it back, and removes it.
fn try_segment(directory: &Path) -> Result<(), String> {
    let name = format!("flextensord-doctor-{}", std::process::id());
    let mut builder = SegmentBuilder::new(directory, &name, TRIED).map_err(|e| e.to_string())?;
    builder.bytes_mut().map_err(|e| e.to_string())?.fill(0xa5);
    let segment = builder.publish().map_err(|e| e.to_string())?;
    let path = segment.path().to_owned();
    let outcome = match fs::metadata(&path).map(|metadata| metadata.mode() & 0o7777) {
        Ok(0o400) => match segment.mapping().equals(0, &[0xa5; 4096]) {
            Ok(true) => Ok(()),
            Ok(false) => Err("a segment does not hold what was written".to_owned()),
            Err(error) => Err(error.to_string()),
        },
        Ok(mode) => Err(format!("a segment of mode 0400 has mode {mode:04o}")),
        Err(error) => Err(format!("{}: {error}", path.display())),
    };
    drop(segment);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            outcome.and(Err(format!("cannot remove {}: {error}", path.display())))
        }
        _ => outcome,
    }
}

fn try_seals() -> Result<(), String> {
    let page = memfd::create("doctor", 4096).map_err(|e| e.to_string())?;
    memfd::seal_size_and_future_writes(page.as_fd()).map_err(|e| e.to_string())?;
    match memfd::size_is_sealed(page.as_fd()) {
        Ok(true) => {}
        Ok(false) => return Err("seals were taken and do not hold".to_owned()),
        Err(error) => return Err(error.to_string()),
    }
    match memfd::file(&page).map_err(|e| e.to_string())?.set_len(0) {
        Ok(()) => Err("a sealed memfd could be truncated".to_owned()),
        Err(_) => Ok(()),
    }
}

fn try_lease() -> Result<(), String> {
    let page = memfd::create("doctor", 4096).map_err(|e| e.to_string())?;
    let alone = memfd::held_elsewhere(&page);
    let given = memfd::reopen(page.as_fd(), false).map_err(|e| e.to_string())?;
    let held = memfd::held_elsewhere(&page);
    drop(given);
    match (alone, held) {
        (Some(false), Some(true)) => Ok(()),
        (None, _) | (_, None) => Err("fcntl F_SETLEASE is refused".to_owned()),
        _ => Err("a write lease does not tell who holds a memfd".to_owned()),
    }
}

/// What logind.conf and its drop-ins say, the last word wins; yes when they are silent.
fn removes_ipc() -> bool {
    let mut files = vec![PathBuf::from("/etc/systemd/logind.conf")];
    if let Ok(entries) = fs::read_dir("/etc/systemd/logind.conf.d") {
        let mut dropped: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
        dropped.sort();
        files.extend(dropped);
    }
    files
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .filter_map(|text| said_of_ipc(&text))
        .next_back()
        .unwrap_or(true)
}

fn said_of_ipc(text: &str) -> Option<bool> {
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("RemoveIPC="))
        .map(|word| {
            !matches!(
                word.trim().to_ascii_lowercase().as_str(),
                "no" | "false" | "0" | "off" | "n" | "f"
            )
        })
        .next_back()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_mount_above_a_directory_is_its_mount() {
        let mounts = "1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / /dev rw - devtmpfs x rw\n\
                      3 2 0:3 / /dev/shm rw - tmpfs x rw\n4 1 0:4 / /a\\040b rw - tmpfs x rw\n";
        let point = |path: &str| mount_point(mounts, Path::new(path));
        assert_eq!(point("/dev/shm/x"), Path::new("/dev/shm"));
        assert_eq!(point("/dev/shmem"), Path::new("/dev"));
        assert_eq!(point("/a b/c"), Path::new("/a b"));
        assert_eq!(point("/home"), Path::new("/"));
    }

    #[test]
    fn the_login_managers_last_word_wins() {
        assert_eq!(said_of_ipc("#RemoveIPC=no\n[Login]\n"), None);
        assert_eq!(said_of_ipc("[Login]\n RemoveIPC=no\n"), Some(false));
        assert_eq!(said_of_ipc("RemoveIPC=no\nRemoveIPC=yes\n"), Some(true));
    }

    #[test]
    fn the_self_tests_pass_where_the_project_is_tested() {
        assert_eq!(try_seals(), Ok(()));
        assert_eq!(try_lease(), Ok(()));
        assert_eq!(try_segment(Path::new("/dev/shm")), Ok(()));
        let left = format!("/dev/shm/flextensord-doctor-{}", std::process::id());
        assert!(!Path::new(&left).exists());
    }
}
