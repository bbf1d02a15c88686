//! The model of a manager of a dead daemon, from its record and from what its client hands
//! back: nothing of either is believed that the other, the weight set or a label contradicts.

use std::{os::fd::AsFd as _, sync::Arc};

use flextensord_device::{
    control::ControlPage,
    device::Label,
    failpoint::{self, Point},
    journal::JournalFile,
};
use flextensord_proto::layout::LABEL_BYTES;

use super::{
    adoption::HandedBack,
    manager::Manager,
    model::{Layer, Model, Part, Structure},
    record::{self, AllocationRecord, PlanRecord},
    registration,
    registry::Managers,
};
use crate::{
    plan::Place,
    transfer::memory::Allocation,
    weights::{manifest::Manifest, registry::Attachment},
};

/// The model of a plan, from its record and what was handed back; the reason when the two
/// do not agree.
pub(super) fn model(
    manager: &Manager,
    record: &PlanRecord,
    attachment: Attachment,
    handed: &mut HandedBack,
    managers: &Managers,
) -> Result<(Model, Option<JournalFile>), String> {
    let text = |error: &dyn std::error::Error| error.to_string();
    let structure = structure(record, attachment.set().manifest())?;
    check_plan(&structure, record)?;
    let identity = registration::identity(manager, &structure, record.version);
    let control = handed
        .controls
        .remove(&record.version)
        .ok_or("its control page was not handed back")?;
    let control = ControlPage::take_back(control.as_fd(), identity).map_err(|e| text(&e))?;
    let device = &manager.device;
    let mut take = |memory: &AllocationRecord| -> Result<Allocation, String> {
        failpoint::pass(Point::AdoptMemory).map_err(|e| text(&e))?;
        let descriptor = handed
            .memory
            .remove(&memory.id)
            .ok_or_else(|| format!("allocation {} was not handed back", memory.id))?;
        let label = Label {
            instance: device.memory.instance().to_owned(),
            allocation: memory.id,
            random: record::unhex(&memory.random).ok_or("a label is not legal")?,
        };
        let taken = device
            .memory
            .device()
            .take_back(descriptor, memory.bytes, &label);
        taken
            .map(|memory| Allocation { memory, label })
            .map_err(|e| text(&e))
    };
    let set = attachment.set();
    let keys = registration::block_keys(manager.owner.uid, set, &structure, &record.plan);
    if keys.len() != record.blocks.len() {
        return Err("its plan has other blocks".to_owned());
    }
    let mut blocks = Vec::with_capacity(keys.len());
    for (key, memory) in keys.into_iter().zip(&record.blocks) {
        blocks.push(device.residents.adopt(key, memory.id, || take(memory))?);
    }
    let ring = record.ring.as_ref().map(&mut take).transpose()?;
    let journal = match &ring {
        Some(_) => {
            let path = managers.state().path().join(&record.journal);
            Some(JournalFile::open(&path, identity).map_err(|e| text(&e))?)
        }
        None => None,
    };
    let model = Model {
        attachment,
        plan_version: record.version,
        control: Arc::new(control),
        blocks,
        ring,
        requested: record.requested,
        granted: record.granted,
        shared_bytes: record.shared_bytes,
        least_feasible: record.plan.least_feasible,
        structure,
        plan: record.plan.clone(),
    };
    Ok((model, journal))
}

/// Whether every place of a plan lies in the memory that its record names.
fn check_plan(structure: &Structure, record: &PlanRecord) -> Result<(), String> {
    let plan = &record.plan;
    if plan.places.len() != structure.parts.len() {
        return Err("its plan is of other parts".to_owned());
    }
    let ring = record.ring.as_ref().map_or(0, |ring| ring.bytes);
    let inside = |offset: u64, bytes: u64, whole: u64| {
        let end = offset.checked_add(bytes);
        offset >= LABEL_BYTES && end.is_some_and(|end| end <= whole)
    };
    for (part, place) in structure.parts.iter().zip(&plan.places) {
        let fits = match *place {
            Place::Nowhere => true,
            Place::Streamed { offset } => inside(offset, part.bytes, ring),
            Place::Resident { block, offset } => record
                .blocks
                .get(block as usize)
                .is_some_and(|block| inside(offset, part.bytes, block.bytes)),
        };
        if !fits {
            return Err("a part lies outside of its memory".to_owned());
        }
    }
    let is_streamed = |part: &u32| {
        let place = plan.places.get(*part as usize);
        matches!(place, Some(Place::Streamed { .. }))
    };
    if !plan.stream_order.iter().all(is_streamed) {
        return Err("its order of copies has a part that does not stream".to_owned());
    }
    let of_blocks = plan.blocks.iter().flat_map(|block| &block.parts);
    let known = |part: &u32| (*part as usize) < structure.parts.len();
    if !of_blocks.into_iter().all(known) {
        return Err("a block has a part that is not there".to_owned());
    }
    let held: u64 = record
        .allocations()
        .fold(0, |sum, memory| sum.saturating_add(memory.bytes));
    if plan.resident_bytes.saturating_add(plan.ring_bytes) > held {
        return Err("its plan holds more than its memory".to_owned());
    }
    Ok(())
}

/// Layers and parts as they were registered.
fn structure(record: &PlanRecord, manifest: &Manifest) -> Result<Structure, String> {
    let mut structure = Structure {
        unregistered: record.unregistered,
        ..Structure::default()
    };
    for part in &record.parts {
        let storage = manifest.storages().get(part.storage as usize);
        let storage = storage.ok_or("a part is of no storage")?;
        if part
            .tensors
            .iter()
            .any(|at| *at >= manifest.tensors().len())
        {
            return Err("a part has a tensor that is not there".to_owned());
        }
        structure.parts.push(Part {
            storage: part.storage,
            segment_offset: storage.offset,
            bytes: storage.bytes,
            tensors: part.tensors.clone(),
        });
    }
    for (name, parts) in &record.layers {
        if parts
            .iter()
            .any(|part| *part as usize >= structure.parts.len())
        {
            return Err(format!("layer {name:?} has a part that is not there"));
        }
        structure.index.insert(name.clone(), structure.layers.len());
        structure.layers.push(Layer {
            name: name.clone(),
            parts: parts.clone(),
        });
    }
    Ok(structure)
}
