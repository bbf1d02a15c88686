//! A plan as pages of at most about a mebibyte.

use std::time::Duration;

use flextensord_device::process::Peer;
use flextensord_proto::{
    kind::Failure,
    limit,
    v1::{self, PlanForecast, PlanLayer, PlanMemory, PlanPage, PlanPart},
};
use prost::Message as _;

use super::{failure, weights::tensor_message};
use crate::{
    channel::ticket::{Gift, Tickets},
    managers::{
        error::ManagerError,
        manager::Manager,
        model::{Model, Structure},
    },
    plan::{Place, Plan},
    transfer::memory::Allocation,
    weights::manifest::Manifest,
};

/// Most bytes of a layer's parts in an answer: a message without its other fields.
const LAYER_BYTES: usize = limit::MESSAGE_BYTES - 256;
/// Bytes after which a page is full.
const PAGE_BYTES: usize = 768 << 10;

/// All pages of a manager's plan: memory first, then parts, then layers.
///
/// # Errors
/// When descriptors for the tickets cannot be made.
pub fn pages(
    manager: &Manager,
    model: &Model,
    tickets: Option<(&Tickets, Peer)>,
) -> Result<Vec<PlanPage>, Failure> {
    let memory = memory(manager, model, tickets)?;
    let mut pages = vec![PlanPage {
        memory: Some(memory),
        ..PlanPage::default()
    }];
    let mut page = PlanPage::default();
    let mut bytes = 0;
    let parts = u32::try_from(model.structure.parts.len()).unwrap_or(u32::MAX);
    for part in (0..parts).map(|part| part_message(model, part)) {
        turn(&mut pages, &mut page, &mut bytes, part.encoded_len());
        page.parts.push(part);
    }
    for layer in &model.structure.layers {
        let layer = PlanLayer {
            name: layer.name.clone(),
            parts: layer.parts.clone(),
        };
        turn(&mut pages, &mut page, &mut bytes, layer.encoded_len());
        page.layers.push(layer);
    }
    pages.push(page);
    Ok(pages)
}

/// One part of a plan.
#[must_use]
pub fn part(model: &Model, part: u32) -> PlanPart {
    part_message(model, part)
}

fn turn(pages: &mut Vec<PlanPage>, page: &mut PlanPage, bytes: &mut usize, more: usize) {
    if *bytes + more > PAGE_BYTES && *bytes > 0 {
        pages.push(std::mem::take(page));
        *bytes = 0;
    }
    *bytes += more + 8;
}

fn memory(
    manager: &Manager,
    model: &Model,
    tickets: Option<(&Tickets, Peer)>,
) -> Result<PlanMemory, Failure> {
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let ticket = |gift: Gift| match tickets {
        Some((tickets, peer)) => tickets.give(peer, gift).map_err(Failure::from),
        None => Ok(Vec::new()),
    };
    let allocation = |allocation: &Allocation, ring| {
        let bytes = allocation.memory.bytes();
        let ticket = match tickets {
            Some(_) => {
                let descriptor = allocation.memory.export().map_err(failure::device)?;
                ticket(Gift {
                    descriptor,
                    bytes,
                    manager: Some(manager.id),
                })?
            }
            None => Vec::new(),
        };
        Ok::<_, Failure>(v1::Allocation {
            id: allocation.label.allocation,
            bytes,
            ticket,
            ring,
        })
    };
    let mut allocations = Vec::with_capacity(model.blocks.len() + 1);
    for block in &model.blocks {
        allocations.push(allocation(block.allocation(), false)?);
    }
    if let Some(ring) = &model.ring {
        allocations.push(allocation(ring, true)?);
    }
    let parts = model.control.identity().parts;
    let control_bytes = flextensord_proto::layout::control_bytes(parts) as u64;
    let control_ticket = match tickets {
        Some(_) => {
            let descriptor = model
                .control
                .export()
                .map_err(|e| failure::kernel_failure(&e))?;
            ticket(Gift {
                descriptor,
                bytes: control_bytes,
                manager: Some(manager.id),
            })?
        }
        None => Vec::new(),
    };
    Ok(PlanMemory {
        plan_version: model.plan_version,
        parts,
        layers: number(model.structure.layers.len()),
        allocations,
        control_ticket,
        control_bytes,
        stream_order: model.plan.stream_order.clone(),
        forecast: Some(forecast(&model.plan)),
    })
}

/// What a plan promises.
#[must_use]
pub fn forecast(plan: &Plan) -> PlanForecast {
    let nanoseconds = |seconds: f64| {
        let time = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
    };
    let promised = &plan.forecast;
    PlanForecast {
        strategy: plan.choice.strategy.name().to_owned(),
        compute_known: promised.compute_s > 0.0,
        link_bytes_per_second: promised.link.bytes_per_second,
        step_ns: nanoseconds(promised.step_s),
        budget_bound_ns: nanoseconds(promised.budget_bound_s),
        plan_floor_ns: nanoseconds(promised.plan_floor_s),
        weight_bytes: plan.weight_bytes,
    }
}

fn part_message(model: &Model, part: u32) -> PlanPart {
    let manifest = model.attachment.set().manifest();
    planned_part(&model.structure, &model.plan, manifest, part)
}

/// Refuses a layer of which an answer would not fit into one message.
///
/// # Errors
/// [`ManagerError::Field`] naming the first such layer.
pub fn check_layers(
    structure: &Structure,
    plan: &Plan,
    manifest: &Manifest,
) -> Result<(), ManagerError> {
    let length = |part: u32| {
        let bytes = planned_part(structure, plan, manifest, part).encoded_len();
        // the field's tag
        1 + prost::length_delimiter_len(bytes) + bytes
    };
    let parts = u32::try_from(structure.parts.len()).unwrap_or(u32::MAX);
    let lengths: Vec<usize> = (0..parts).map(length).collect();
    for layer in &structure.layers {
        let length = |part: &u32| lengths.get(*part as usize).copied().unwrap_or(0);
        let bytes: usize = layer.parts.iter().map(length).sum();
        if bytes > LAYER_BYTES {
            return Err(ManagerError::Field {
                field: "layers.tensors",
                value: format!("{bytes} bytes as an answer about layer {:?}", layer.name),
                rule: format!("at most {LAYER_BYTES} bytes a layer; make smaller layers"),
            });
        }
    }
    Ok(())
}

fn planned_part(structure: &Structure, plan: &Plan, manifest: &Manifest, part: u32) -> PlanPart {
    let index = part as usize;
    let Some(entry) = structure.parts.get(index) else {
        return PlanPart::default();
    };
    let ring = u32::try_from(plan.blocks.len()).unwrap_or(u32::MAX);
    let (streamed, allocation, offset) = match plan.places.get(index) {
        Some(Place::Resident { block, offset }) => (false, *block, *offset),
        Some(Place::Streamed { offset }) => (true, ring, *offset),
        Some(Place::Nowhere) | None => (false, flextensord_proto::limit::NO_ALLOCATION, 0),
    };
    let tensors = manifest.tensors();
    PlanPart {
        part,
        streamed,
        allocation,
        offset,
        stored_bytes: entry.bytes,
        logical_bytes: entry.bytes,
        tensors: entry
            .tensors
            .iter()
            .filter_map(|at| tensors.get(*at))
            .map(tensor_message)
            .collect(),
    }
}
