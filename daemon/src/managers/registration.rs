//! From a list of layers to a plan with memory: everything is made, and written down
//! for a successor, before the client is told.

use std::sync::{Arc, atomic::Ordering::SeqCst};

use flextensord_device::{
    control::{ControlIdentity, ControlPage},
    device::Source,
    failpoint::{self, Point},
    journal::JournalFile,
};

use super::{
    error::ManagerError,
    manager::Manager,
    model::{LayerSpec, Model, Structure},
    record::{self, ManagerRecord},
    registry::Managers,
};
use crate::{
    plan::{self, Goal, Input, Place, Plan, PlanError},
    transfer::{
        memory::{Allocation, MemoryError},
        residents::{BlockKey, BlockRequest},
        stream::{StreamPart, StreamSpec},
    },
    weights::{manifest::Manifest, set::WeightSet},
};

/// The version of a manager's first plan.
const FIRST_PLAN: u64 = 1;

/// What a manager may hold on its device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// A share of the device's total memory.
    Fraction(f64),
    /// Bytes.
    Bytes(u64),
}

impl Budget {
    /// The budget in bytes on a device of `total` bytes.
    ///
    /// # Errors
    /// When a share is not over 0 and up to 1, or bytes are 0.
    pub fn bytes(self, total: u64) -> Result<u64, ManagerError> {
        match self {
            Self::Fraction(fraction) if fraction > 0.0 && fraction <= 1.0 => {
                // in millionths: exact enough, and no float is cast to a size
                let millionths = format!("{:.0}", fraction * 1e6)
                    .parse::<u128>()
                    .unwrap_or(0);
                let bytes = u128::from(total) * millionths / 1_000_000;
                Ok(u64::try_from(bytes).unwrap_or(total).min(total))
            }
            Self::Fraction(fraction) => Err(ManagerError::Field {
                field: "memory_fraction",
                value: fraction.to_string(),
                rule: "must be over 0 and up to 1".to_owned(),
            }),
            Self::Bytes(0) => Err(ManagerError::Field {
                field: "budget_bytes",
                value: "0".to_owned(),
                rule: "must be over 0".to_owned(),
            }),
            Self::Bytes(bytes) => Ok(bytes),
        }
    }
}

/// Judges what was planned before anything is allocated for it.
pub type Check = fn(&Structure, &Plan, &Manifest) -> Result<(), ManagerError>;

/// What a client registers.
#[derive(Debug, Clone, PartialEq)]
pub struct Registration {
    /// Name of the weight set.
    pub weight_set: String,
    /// Layers in the order of a pass.
    pub layers: Vec<LayerSpec>,
    /// What may be held on the device.
    pub budget: Budget,
}

/// Registers a model for `manager`: plans, asks `check`, allocates, fills residents, writes the
/// record, and sets the engine to work. Blocks the thread.
///
/// # Errors
/// Whatever stands in the way; nothing is left behind then, and the manager may try
/// again.
pub fn register(
    managers: &Managers,
    manager: &Arc<Manager>,
    registration: &Registration,
    check: Check,
) -> Result<Arc<Model>, ManagerError> {
    let _busy = Busy::begin(manager)?;
    if manager.model_slot().is_some() {
        return Err(ManagerError::Registered {
            name: manager.name.clone(),
        });
    }
    failpoint::pass(Point::Register)?;
    let model = Arc::new(prepare(managers, manager, registration, check)?);
    let journal = match write_down(managers, manager, &model) {
        Ok(journal) => journal,
        Err(error) => {
            retire(manager, &model);
            return Err(error);
        }
    };
    failpoint::cross(Point::Install);
    install(managers, manager, &model, journal)?;
    failpoint::cross(Point::Registered);
    Ok(model)
}

fn prepare(
    managers: &Managers,
    manager: &Arc<Manager>,
    registration: &Registration,
    check: Check,
) -> Result<Model, ManagerError> {
    let attachment =
        managers
            .weights()
            .attach(manager.owner.uid, &registration.weight_set, &manager.name)?;
    let set = Arc::clone(attachment.set());
    let structure = Structure::resolve(
        &registration.weight_set,
        set.manifest(),
        &registration.layers,
    )?;
    manager.device.memory.device().start()?;
    let requested = registration
        .budget
        .bytes(manager.device.info().total_bytes)?;
    failpoint::pass(Point::Plan)?;
    let (granted, plan, requests) = fit(manager, &set, &structure, requested)?;
    check(&structure, &plan, set.manifest())?;
    failpoint::pass(Point::Planned)?;
    let ring_bytes = manager.device.memory.whole(plan.ring_bytes);
    let mut given = manager.device.residents.get(&requests, ring_bytes)?;
    let filled = plan.resident_bytes.saturating_sub(given.shared_bytes);
    manager
        .counters
        .count(|counters| &counters.resident_fill_bytes, filled);
    let ring: Option<Allocation> = match ring_bytes {
        0 => None,
        bytes => Some(given.reservation.allocate(bytes)?),
    };
    failpoint::pass(Point::Allocated)?;
    let control = ControlPage::create(identity(manager, &structure, FIRST_PLAN))?;
    Ok(Model {
        attachment,
        plan_version: FIRST_PLAN,
        control: Arc::new(control),
        blocks: given.blocks,
        ring,
        requested,
        granted,
        shared_bytes: given.shared_bytes,
        least_feasible: plan.least_feasible,
        structure,
        plan,
    })
}

/// The best plan that fits into what is free now: budget, plan, and its blocks. Residents
/// that are on the device already count in full but need no new memory, so the budget
/// that can be granted depends on the plan: it is lowered until both agree.
fn fit(
    manager: &Manager,
    set: &WeightSet,
    structure: &Structure,
    requested: u64,
) -> Result<(u64, Plan, Vec<BlockRequest>), ManagerError> {
    let memory = &manager.device.memory;
    let residents = &manager.device.residents;
    memory.sweep();
    let there = residents.bytes_of(manager.owner.uid, set.id());
    let mut granted = requested.min(memory.available().saturating_add(there));
    let mut input = planner_input(manager, structure);
    loop {
        input.goal = Goal::Memory { budget: granted };
        let plan = plan::plan(&input).map_err(|error| match error {
            PlanError::Infeasible { least, .. } if least <= requested => {
                ManagerError::Memory(MemoryError::Exhausted {
                    device: manager.device.info().name.clone(),
                    wanted: least,
                    available: granted,
                    total: manager.device.info().total_bytes,
                    reclaiming: memory.reclaiming_bytes(),
                })
            }
            other => other.into(),
        })?;
        let mut requests = block_requests(manager.owner.uid, set, structure, &plan);
        for request in &mut requests {
            request.bytes = memory.whole(request.bytes);
        }
        let ring = memory.whole(plan.ring_bytes);
        let wanted = residents.missing(&requests).saturating_add(ring);
        match wanted
            .checked_sub(memory.available())
            .filter(|over| *over > 0)
        {
            Some(over) => granted = granted.min(plan.held_bytes()).saturating_sub(over),
            None => return Ok((granted, plan, requests)),
        }
    }
}

/// What is known before anything was timed: sizes, and how fast a link is that is held.
fn planner_input(manager: &Manager, structure: &Structure) -> Input {
    let sizes: Vec<u64> = structure.parts.iter().map(|part| part.bytes).collect();
    let uses: Vec<Vec<u32>> = structure
        .layers
        .iter()
        .map(|layer| layer.parts.clone())
        .collect();
    let mut input = Input::of_sizes(&sizes, &uses, 0);
    input.granularity = manager.device.memory.device().granularity();
    if let Some(limit) = manager.device.info().link_limit {
        input.link.bytes_per_second = limit.max(1);
    }
    input
}

/// Which page and journal belong to a plan.
pub(super) fn identity(
    manager: &Manager,
    structure: &Structure,
    plan_version: u64,
) -> ControlIdentity {
    ControlIdentity {
        lease_epoch: manager.lease_epoch,
        plan_version,
        // the structure numbers its parts in 32 bits
        parts: u32::try_from(structure.parts.len()).unwrap_or(u32::MAX),
    }
}

fn block_requests(
    uid: u32,
    set: &WeightSet,
    structure: &Structure,
    plan: &Plan,
) -> Vec<BlockRequest> {
    let segment = set.segment();
    let offset = |part: u32| match plan.places.get(part as usize) {
        Some(Place::Resident { offset, .. }) => *offset,
        _ => 0,
    };
    let contents = |part: &u32| {
        let place = &structure.parts[*part as usize];
        let source = Source {
            segment: Arc::clone(segment.mapping()),
            offset: place.segment_offset,
            bytes: place.bytes,
        };
        (offset(*part), source)
    };
    plan.blocks
        .iter()
        .zip(block_keys(uid, set, structure, plan))
        .map(|(block, key)| BlockRequest {
            key,
            bytes: block.bytes,
            contents: block.parts.iter().map(contents).collect(),
        })
        .collect()
}

/// What the blocks of a plan are known by.
pub(super) fn block_keys(
    uid: u32,
    set: &WeightSet,
    structure: &Structure,
    plan: &Plan,
) -> Vec<BlockKey> {
    let storage = |part: &u32| Some(structure.parts.get(*part as usize)?.storage);
    plan.blocks
        .iter()
        .map(|block| BlockKey {
            uid,
            weight_set: set.id().to_owned(),
            storages: block.parts.iter().filter_map(storage).collect(),
        })
        .collect()
}

/// Writes the journal and the record.
fn write_down(
    managers: &Managers,
    manager: &Manager,
    model: &Model,
) -> Result<Option<JournalFile>, ManagerError> {
    let journal = match model.ring {
        Some(_) => {
            let name = record::journal_name(manager.id, model.plan_version);
            let path = managers.state().path().join(&name);
            failpoint::pass(Point::Journal)?;
            Some(JournalFile::create(
                &path,
                identity(manager, &model.structure, model.plan_version),
            )?)
        }
        None => None,
    };
    let record = || ManagerRecord::new(manager, Some(model));
    let written = failpoint::pass(Point::Journaled)
        .map_err(ManagerError::from)
        .and_then(|()| {
            let name = record::name(manager.id);
            Ok(managers.state().write(&name, &record())?)
        });
    if let Err(error) = written {
        // the record without a plan stands
        if let Some(journal) = journal {
            journal.remove()?;
        }
        return Err(error);
    }
    Ok(journal)
}

/// Gives the model to its manager and the ring to the engine, unless the lease ended
/// meanwhile.
pub(super) fn install(
    managers: &Managers,
    manager: &Arc<Manager>,
    model: &Arc<Model>,
    journal: Option<JournalFile>,
) -> Result<(), ManagerError> {
    // under the lock, so that an end either finds the model or is found here
    let mut slot = manager.model_slot();
    if manager.ended.is_cancelled() {
        drop(slot);
        if let Some(journal) = journal {
            journal.remove()?;
        }
        managers.state().remove(&record::name(manager.id))?;
        retire(manager, model);
        return Err(ManagerError::LeaseLost);
    }
    *slot = Some(Arc::clone(model));
    if let (Some(journal), Some(ring)) = (journal, &model.ring) {
        let segment = model.attachment.set().segment();
        manager.device.engine.attach(StreamSpec {
            manager: manager.id,
            weight: manager.link_weight,
            control: Arc::clone(&model.control),
            journal,
            ring: Arc::clone(&ring.memory),
            segment: Arc::clone(segment.mapping()),
            parts: stream_parts(model),
            order: model.plan.stream_order.clone(),
            doorbell: Arc::clone(&manager.doorbell),
            counters: Arc::clone(&manager.counters),
            arrived: Arc::clone(&manager.arrived),
            rpc_waits: Arc::clone(&manager.rpc_waits),
            poison: managers.settings().poison_released,
        });
    }
    Ok(())
}

fn stream_parts(model: &Model) -> Vec<StreamPart> {
    let parts = model.structure.parts.iter().zip(&model.plan.places);
    parts
        .map(|(part, place)| match *place {
            Place::Streamed { offset } => StreamPart {
                segment_offset: part.segment_offset,
                ring_offset: offset,
                bytes: part.bytes,
            },
            Place::Nowhere | Place::Resident { .. } => StreamPart {
                segment_offset: part.segment_offset,
                ring_offset: 0,
                bytes: 0,
            },
        })
        .collect()
}

/// Takes a model apart whose manager is over: the engine lets go of the ring, memory
/// waits for its last holder, files go. Blocks the thread until the last copy is done.
pub(super) fn dismantle(managers: &Managers, manager: &Manager, model: Option<&Arc<Model>>) {
    if model.is_some_and(|model| model.ring.is_some())
        && let Some(detached) = manager.device.engine.detach(manager.id)
        && let Err(error) = detached.journal.remove()
    {
        tracing::warn!(manager = manager.name, %error, "journal left behind");
    }
    failpoint::cross(Point::Detached);
    if let Err(error) = managers.state().remove(&record::name(manager.id)) {
        tracing::warn!(manager = manager.name, %error, "record left behind");
    }
    failpoint::cross(Point::Retire);
    if let Some(model) = model {
        retire(manager, model);
    }
}

fn retire(manager: &Manager, model: &Model) {
    let memory = &manager.device.memory;
    let owner = || {
        manager
            .process
            .as_ref()
            .and_then(|process| process.try_clone().ok())
    };
    if let Some(ring) = &model.ring {
        memory.retire_memory(Arc::clone(&ring.memory), owner().into_iter().collect());
    }
    for block in &model.blocks {
        if let Some(owner) = owner() {
            block.note_owner(owner);
        }
    }
    memory.retire_control(Arc::clone(&model.control), owner());
}

/// At most one registration of a manager at a time.
struct Busy<'a>(&'a Manager);

impl<'a> Busy<'a> {
    fn begin(manager: &'a Manager) -> Result<Self, ManagerError> {
        if manager.registering.swap(true, SeqCst) {
            return Err(ManagerError::Registering {
                name: manager.name.clone(),
            });
        }
        Ok(Self(manager))
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.registering.store(false, SeqCst);
    }
}
