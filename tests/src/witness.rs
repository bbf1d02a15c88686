//! Looks at all that a daemon shows and keeps, to see that a refusal changed nothing.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::Path,
    time::{Duration, Instant},
};

use flextensord_client::{
    ClientError,
    blocking::Client,
    kind::{Failure, Kind},
    v1::{DeviceStatus, DumpRecord, ManagerStatus, WeightSet},
};
use serde_json::Value;
use tokio::runtime::{Builder, Runtime};
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use crate::{SceneError, daemon::Daemon};

/// How long what a refused call had taken may take to come back.
const SETTLE: Duration = Duration::from_secs(5);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(10);
/// Figures of a dump that change by themselves.
const RESTLESS: [&str; 5] = [
    "uptime_ms",
    "budget_bytes",
    "shm_free_bytes",
    "queued_bytes",
    "engine_asleep",
];

/// Everything that is to stay as it was.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    managers: Vec<ManagerStatus>,
    devices: Vec<DeviceStatus>,
    sets: Vec<WeightSet>,
    listed: Vec<WeightSet>,
    host: (u64, u64),
    dump: Vec<DumpRecord>,
    shm: Vec<(String, u64, u64)>,
    state: Vec<(String, Vec<u8>)>,
    runtime: Vec<String>,
    descriptors: usize,
}

impl Snapshot {
    /// The lines in which the two differ.
    fn difference(&self, now: &Self) -> String {
        let [before, now] = [self, now].map(|it| format!("{it:#?}"));
        let lines = |one: &str, two: &str, sign: char| -> Vec<String> {
            let others: Vec<&str> = two.lines().collect();
            let own = one.lines().filter(|line| !others.contains(line));
            own.map(|line| format!("{sign}{}", line.trim())).collect()
        };
        [lines(&before, &now, '-'), lines(&now, &before, '+')]
            .concat()
            .join(" ")
    }
}

/// Watches a daemon over connections of its own.
#[derive(Debug)]
pub struct Witness<'a> {
    daemon: &'a Daemon,
    client: Client,
    runtime: Runtime,
    health: HealthClient<Channel>,
}

impl<'a> Witness<'a> {
    /// Connects.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn new(daemon: &'a Daemon) -> Result<Self, SceneError> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| SceneError::io("start a runtime", e))?;
        let address = format!("unix:{}", daemon.socket().display());
        let endpoint = Endpoint::try_from(address).map_err(|e| ill(&e))?;
        let health = runtime
            .block_on(endpoint.connect())
            .map(HealthClient::new)
            .map_err(|e| ill(&e))?;
        Ok(Self {
            daemon,
            client: daemon.client()?,
            runtime,
            health,
        })
    }

    /// All as it is once it has come to rest.
    ///
    /// # Errors
    /// When the daemon does not answer, or does not come to rest.
    pub fn snapshot(&self) -> Result<Snapshot, SceneError> {
        let deadline = Instant::now() + SETTLE;
        let mut before = self.look()?;
        loop {
            std::thread::sleep(PAUSE);
            let now = self.look()?;
            if now == before {
                return Ok(now);
            }
            if Instant::now() > deadline {
                let what = before.difference(&now);
                return Err(SceneError::Unexpected(format!("no rest: {what}")));
            }
            before = now;
        }
    }

    /// Checks that all is as it was, and the daemon healthy.
    ///
    /// # Errors
    /// When something changed, with both.
    pub fn unchanged(&self, before: &Snapshot) -> Result<(), SceneError> {
        let deadline = Instant::now() + SETTLE;
        loop {
            let mut now = self.look()?;
            // a connection that was closing when the snapshot was taken
            now.descriptors = now.descriptors.max(before.descriptors);
            if now == *before {
                break;
            }
            if Instant::now() > deadline {
                let what = before.difference(&now);
                return Err(SceneError::Unexpected(format!("not as before: {what}")));
            }
            std::thread::sleep(PAUSE);
        }
        if self.is_serving()? {
            return Ok(());
        }
        Err(SceneError::Unexpected(
            "the daemon does not serve".to_owned(),
        ))
    }

    /// What `grpc.health.v1` says of the whole.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn is_serving(&self) -> Result<bool, SceneError> {
        let mut health = self.health.clone();
        let asked = health.check(HealthCheckRequest::default());
        let answer = self.runtime.block_on(asked).map_err(|e| ill(&e))?;
        Ok(answer.get_ref().status() == ServingStatus::Serving)
    }

    fn look(&self) -> Result<Snapshot, SceneError> {
        let mut status = self.client.status()?;
        for device in &mut status.devices {
            device.queued_bytes = 0;
            device.engine_asleep = false;
        }
        let host = status.host.unwrap_or_default();
        Ok(Snapshot {
            managers: status.managers,
            devices: status.devices,
            sets: status.weight_sets,
            listed: self.client.weight_sets()?,
            host: (host.segment_bytes, host.reserved_bytes),
            dump: self.client.dump(None)?.into_iter().map(at_rest).collect(),
            shm: entries(self.daemon.shm()),
            state: contents(&self.daemon.instance_dir().join("state")),
            runtime: names(&self.daemon.instance_dir()),
            descriptors: self.daemon.descriptors(),
        })
    }
}

fn ill(error: &dyn std::fmt::Display) -> SceneError {
    SceneError::Unexpected(format!("health: {error}"))
}

/// A dump's record without what changes by itself.
fn at_rest(mut record: DumpRecord) -> DumpRecord {
    fn still(value: &mut Value) {
        match value {
            Value::Object(map) => {
                map.retain(|key, _| !RESTLESS.contains(&key.as_str()));
                map.values_mut().for_each(still);
            }
            Value::Array(list) => list.iter_mut().for_each(still),
            _ => {}
        }
    }
    if let Ok(mut body) = serde_json::from_str::<Value>(&record.json) {
        still(&mut body);
        record.json = body.to_string();
    }
    record
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Names, inodes and sizes.
fn entries(directory: &Path) -> Vec<(String, u64, u64)> {
    let look = |name: String| {
        let found = fs::symlink_metadata(directory.join(&name)).ok()?;
        Some((name, found.ino(), found.len()))
    };
    names(directory).into_iter().filter_map(look).collect()
}

fn contents(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let read = |name: String| {
        let bytes = fs::read(directory.join(&name)).unwrap_or_default();
        (name, bytes)
    };
    names(directory).into_iter().map(read).collect()
}

/// The daemon's refusal behind an error, if it is of that kind, and details and message
/// name field, value and rule; `field` and `rule` are parts of theirs.
///
/// # Errors
/// When it is not.
pub fn typed<'e>(
    error: &'e ClientError,
    kind: Kind,
    field: &str,
    rule: &str,
) -> Result<&'e Failure, SceneError> {
    let other = || SceneError::Unexpected(format!("{error:?} instead of {kind}, {field}, {rule}"));
    let ClientError::Refused(failure) = error else {
        return Err(other());
    };
    let detail = |name: &str| failure.details.get(name).map_or("", String::as_str);
    let named = detail("field").contains(field)
        && detail("rule").contains(rule)
        && !detail("field").is_empty()
        && !detail("value").is_empty()
        && !detail("rule").is_empty();
    if failure.kind == kind && named && !failure.message.is_empty() {
        Ok(failure)
    } else {
        Err(other())
    }
}
