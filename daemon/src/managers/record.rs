//! What a successor needs to know of a manager: one small file in the state directory,
//! written before the client is told.

use flextensord_device::device::Label;
use serde::{Deserialize, Serialize};

use super::{manager::Manager, model::Model};
use crate::plan::Plan;

/// Version of the file's format.
pub const FORMAT: u32 = 2;

/// A manager with its live plans.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ManagerRecord {
    /// [`FORMAT`].
    pub format: u32,
    /// Unique for the instance.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Its owner's user.
    pub uid: u32,
    /// Its owner's process; 0 when that is invisible to the daemon.
    pub pid: u32,
    /// When that process started, in clock ticks since boot.
    pub pid_started: Option<u64>,
    /// The lease epoch.
    pub lease_epoch: u64,
    /// BLAKE3 of the token, as hex: enough to recognise it.
    pub token_digest: String,
    /// UUID of the device.
    pub device: String,
    /// Its share of the link.
    pub link_weight: u32,
    /// Milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// Every live plan version with its memory.
    pub plans: Vec<PlanRecord>,
}

/// One plan version.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanRecord {
    /// Its version.
    pub version: u64,
    /// Id of the weight set.
    pub weight_set: String,
    /// Name of its journal in the state directory.
    pub journal: String,
    /// Layers: name and parts.
    pub layers: Vec<(String, Vec<u32>)>,
    /// Parts: storage, and tensors.
    pub parts: Vec<PartRecord>,
    /// Tensors of the set that no layer names, and their bytes.
    pub unregistered: (u32, u64),
    /// The plan.
    pub plan: Plan,
    /// Allocations: residents by block, then the ring.
    pub blocks: Vec<AllocationRecord>,
    /// The ring, if anything streams.
    pub ring: Option<AllocationRecord>,
    /// Bytes asked for.
    pub requested: u64,
    /// Bytes granted.
    pub granted: u64,
    /// Bytes of residents that were on the device before.
    pub shared_bytes: u64,
}

/// One part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartRecord {
    /// Index of its storage in the weight set.
    pub storage: u32,
    /// Its tensors: indices into the manifest's.
    pub tensors: Vec<usize>,
}

/// One allocation, as its label names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocationRecord {
    /// Its id.
    pub id: u64,
    /// Its random value, as hex.
    pub random: String,
    /// Its bytes, label included.
    pub bytes: u64,
}

impl AllocationRecord {
    fn new(label: &Label, bytes: u64) -> Self {
        Self {
            id: label.allocation,
            random: hex(&label.random),
            bytes,
        }
    }
}

/// Name of a manager's record in the state directory.
#[must_use]
pub fn name(id: u64) -> String {
    format!("manager-{id:016x}.json")
}

/// Name of a plan's journal in the state directory.
#[must_use]
pub fn journal_name(id: u64, plan_version: u64) -> String {
    format!("manager-{id:016x}.{plan_version}.journal")
}

/// What a record keeps of a token: enough to recognise it.
#[must_use]
pub fn token_digest(token: &[u8]) -> String {
    blake3::hash(token).to_hex().to_string()
}

/// The id of the manager whose record or journal has that name.
#[must_use]
pub fn id_of(file: &str) -> Option<u64> {
    let id = file.strip_prefix("manager-")?.get(..16)?;
    u64::from_str_radix(id, 16).ok()
}

/// Whether a file of the state directory is a manager's record.
#[must_use]
pub fn is_record(file: &str) -> bool {
    file.starts_with("manager-") && file.ends_with(".json")
}

/// Whether a file of the state directory is a manager's record or journal.
#[must_use]
pub fn is_of_manager(file: &str) -> bool {
    is_record(file) || file.starts_with("manager-") && file.ends_with(".journal")
}

impl ManagerRecord {
    /// The record of a manager whose only plan is `model`'s, or that has none yet.
    #[must_use]
    pub fn new(manager: &Manager, model: Option<&Model>) -> Self {
        Self {
            format: FORMAT,
            id: manager.id,
            name: manager.name.clone(),
            uid: manager.owner.uid,
            pid: manager.owner.pid,
            pid_started: manager.owner_started,
            lease_epoch: manager.lease_epoch,
            token_digest: token_digest(manager.token()),
            device: manager.device.info().uuid.clone(),
            link_weight: manager.link_weight,
            since_ms: manager.since_ms,
            plans: model
                .map(|model| PlanRecord::new(manager.id, model))
                .into_iter()
                .collect(),
        }
    }
}

impl PlanRecord {
    fn new(manager: u64, model: &Model) -> Self {
        let layers = &model.structure.layers;
        let parts = model.structure.parts.iter();
        let block = |block: &std::sync::Arc<crate::transfer::residents::Block>| {
            let allocation = block.allocation();
            AllocationRecord::new(&allocation.label, allocation.memory.bytes())
        };
        Self {
            version: model.plan_version,
            weight_set: model.attachment.set().id().to_owned(),
            journal: journal_name(manager, model.plan_version),
            layers: layers
                .iter()
                .map(|l| (l.name.clone(), l.parts.clone()))
                .collect(),
            parts: parts
                .map(|part| PartRecord {
                    storage: part.storage,
                    tensors: part.tensors.clone(),
                })
                .collect(),
            unregistered: model.structure.unregistered,
            plan: model.plan.clone(),
            blocks: model.blocks.iter().map(block).collect(),
            ring: model
                .ring
                .as_ref()
                .map(|ring| AllocationRecord::new(&ring.label, ring.memory.bytes())),
            requested: model.requested,
            granted: model.granted,
            shared_bytes: model.shared_bytes,
        }
    }

    /// All its memory.
    pub fn allocations(&self) -> impl Iterator<Item = &AllocationRecord> {
        self.blocks.iter().chain(&self.ring)
    }
}

/// Bytes as lower-case hex.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The 16 bytes that were written as hex.
pub(super) fn unhex(text: &str) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    if text.len() != 2 * bytes.len() {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(bytes)
}
