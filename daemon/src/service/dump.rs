//! Everything the daemon knows, as JSON documents.

use flextensord_device::{handover::Cells as _, process::Peer};
use flextensord_proto::{kind::Failure, v1::DumpRecord};
use serde_json::{Value, json};

use super::{
    admin::{AdminService, device_status, manager_status},
    plan_pages,
};
use crate::{
    managers::{
        error::ManagerError,
        manager::Manager,
        model::{Layer, Model},
    },
    plan::Place,
};

/// Most bytes of the entries of a document, well under its limit of a mebibyte; each
/// entry is far smaller.
const ENTRIES_BYTES: usize = 512 << 10;

/// The records that a user may see; of one manager if `only` names it.
///
/// # Errors
/// When its name breaks a rule, or that manager is not there, or not the user's to see.
pub fn records(service: &AdminService, peer: Peer, only: &str) -> Result<Vec<DumpRecord>, Failure> {
    let mut managers = service.visible(peer);
    let mut records = Vec::new();
    if only.is_empty() {
        everything_else(service, peer, &mut records);
    } else {
        super::request::name("manager", only)?;
        managers.retain(|manager| manager.name == only);
        if managers.is_empty() {
            return Err(ManagerError::UnknownManager {
                field: "manager",
                name: super::request::cut(only),
            }
            .into());
        }
    }
    for manager in managers {
        of_manager(&manager, &mut records);
    }
    Ok(records)
}

fn record(kind: &str, name: &str, body: &Value) -> DumpRecord {
    DumpRecord {
        kind: kind.to_owned(),
        name: name.to_owned(),
        json: body.to_string(),
    }
}

fn paged(kind: &str, name: &str, entries: Vec<Value>, records: &mut Vec<DumpRecord>) {
    let mut push = |page: &mut String| {
        page.push(']');
        records.push(DumpRecord {
            kind: kind.to_owned(),
            name: name.to_owned(),
            json: std::mem::take(page),
        });
    };
    let mut page = String::new();
    for entry in entries.iter().map(Value::to_string) {
        if page.len() + entry.len() > ENTRIES_BYTES && !page.is_empty() {
            push(&mut page);
        }
        page.push(if page.is_empty() { '[' } else { ',' });
        page.push_str(&entry);
    }
    if !page.is_empty() {
        push(&mut page);
    }
}

fn everything_else(service: &AdminService, peer: Peer, records: &mut Vec<DumpRecord>) {
    let status = service.status_for(peer);
    let host = status.host.unwrap_or_default();
    records.push(record(
        "daemon",
        &status.instance,
        &json!({
            "version": status.version, "pid": status.pid, "phase": status.phase,
            "daemon_generation": status.daemon_generation, "uptime_ms": status.uptime_ms,
            "protocol": [status.protocol_lowest, status.protocol_highest],
            "host": {
                "budget_bytes": host.budget_bytes, "limited_by": host.budget_limited_by,
                "segment_bytes": host.segment_bytes, "reserved_bytes": host.reserved_bytes,
                "shm_dir": host.shm_dir, "shm_free_bytes": host.shm_free_bytes,
                "pinned_bytes": host.pinned_bytes, "degraded": host.degraded,
                "stuck_bytes": host.stuck_bytes,
            },
        }),
    ));
    for device in service.managers.devices() {
        let status = device_status(device, &service.managers);
        let moved = status.transfer.unwrap_or_default();
        records.push(record(
            "device",
            &status.name,
            &json!({
                "uuid": status.uuid, "kind": status.kind, "total_bytes": status.total_bytes,
                "allocated_bytes": status.allocated_bytes, "resident_bytes": status.resident_bytes,
                "ring_bytes": status.ring_bytes, "reclaiming_bytes": status.reclaiming_bytes,
                "reserved_bytes": status.reserved_bytes, "link_limit": status.link_limit,
                "queued_bytes": status.queued_bytes, "engine_asleep": status.engine_asleep,
                "streamed_bytes": moved.streamed_bytes,
                "failed_publications": device.memory.device().failed_publications(),
                "free_bytes": status.free_bytes, "numa_node": status.numa_node,
                "failure": status.failure, "failed_drops": status.failed_drops,
                "failed_drop_reasons": status.failed_drop_reasons,
            }),
        ));
    }
    for set in service.visible_sets(peer) {
        let message = super::weights::weight_set_message(&set);
        records.push(record(
            "weight_set",
            &message.name,
            &json!({
                "id": message.id, "digest": message.digest, "content_id": message.content_id,
                "tensors": message.tensors, "storages": message.storages,
                "logical_bytes": message.logical_bytes, "segment_bytes": message.segment_bytes,
                "pinned_bytes": message.pinned_bytes, "attached_by": message.attached_by,
                "shared": message.shared, "owner_uid": message.owner_uid,
                "unlinked": message.unlinked, "degraded": message.degraded,
            }),
        ));
        let tensors = set.manifest().tensors().iter().map(|tensor| {
            json!({
                "name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape,
                "stride": tensor.stride, "bytes": tensor.bytes, "storage": tensor.storage,
                "storage_offset": tensor.storage_offset,
            })
        });
        paged("tensors", &message.name, tensors.collect(), records);
    }
}

fn of_manager(manager: &Manager, records: &mut Vec<DumpRecord>) {
    let status = manager_status(manager);
    let moved = status.transfer.unwrap_or_default();
    records.push(record(
        "manager",
        &manager.name,
        &json!({
            "owner_uid": status.owner_uid, "owner_pid": status.owner_pid,
            "since_ms": status.since_ms, "phase": status.phase, "lease": status.lease,
            "lease_epoch": status.lease_epoch, "client": status.client, "device": status.device,
            "weight_set": status.weight_set, "plan_version": status.plan_version,
            "resident_bytes": status.resident_bytes, "ring_bytes": status.ring_bytes,
            "planned_stream_bytes": status.planned_stream_bytes,
            "granted_bytes": status.granted_bytes, "rpc_holds": status.rpc_holds,
            "parts_in_use": status.parts_in_use, "waits_for_part": status.waits_for_part,
            "waits_for_tensor": status.waits_for_tensor, "waits_since_ms": status.waits_since_ms,
            "passes": status.passes, "waited_ns": status.waited_ns,
            "transfer": {
                "streamed_bytes": moved.streamed_bytes,
                "resident_fill_bytes": moved.resident_fill_bytes,
                "parts_filled": moved.parts_filled, "parts_revoked": moved.parts_revoked,
                "parts_out_of_order": moved.parts_out_of_order,
                "protocol_violations": moved.protocol_violations,
                "link_ran_dry": moved.link_ran_dry,
            },
        }),
    ));
    let Ok(model) = manager.model() else { return };
    let promised = plan_pages::forecast(&model.plan);
    records.push(record(
        "plan",
        &manager.name,
        &json!({
            "plan_version": model.plan_version, "strategy": promised.strategy,
            "compute_known": promised.compute_known,
            "link_bytes_per_second": promised.link_bytes_per_second,
            "step_ns": promised.step_ns, "budget_bound_ns": promised.budget_bound_ns,
            "plan_floor_ns": promised.plan_floor_ns, "weight_bytes": promised.weight_bytes,
            "resident_bytes": model.plan.resident_bytes, "ring_bytes": model.plan.ring_bytes,
            "streamed_bytes": model.plan.streamed_bytes,
            "least_feasible_bytes": model.least_feasible,
        }),
    ));
    let layers = model
        .structure
        .layers
        .iter()
        .map(|layer| layer_entry(&model, layer));
    paged("layers", &manager.name, layers.collect(), records);
    let parts = model
        .structure
        .parts
        .iter()
        .zip(&model.plan.places)
        .enumerate();
    let parts = parts.map(|(index, (part, place))| {
        let number = u32::try_from(index).unwrap_or(u32::MAX);
        let word = model.control.load(number);
        let (placed, block, offset) = match place {
            Place::Nowhere => ("nowhere", None, None),
            Place::Resident { block, offset } => ("resident", Some(*block), Some(*offset)),
            Place::Streamed { offset } => ("streamed", None, Some(*offset)),
        };
        json!({
            "part": index, "bytes": part.bytes, "storage": part.storage, "place": placed,
            "block": block, "offset": offset, "sequence": word.sequence(),
            "state": word.state_bits(), "tensor": model.tensor_name(number),
        })
    });
    paged("parts", &manager.name, parts.collect(), records);
}

fn layer_entry(model: &Model, layer: &Layer) -> Value {
    let bytes = |streamed: bool| -> u64 {
        let counted = layer
            .parts
            .iter()
            .filter(|part| model.streams(**part) == streamed);
        counted
            .map(|part| model.structure.parts[*part as usize].bytes)
            .sum()
    };
    let tensors: usize = layer
        .parts
        .iter()
        .map(|part| model.structure.parts[*part as usize].tensors.len())
        .sum();
    json!({
        "layer": layer.name, "parts": layer.parts.len(), "tensors": tensors,
        "resident_bytes": bytes(false), "streamed_bytes": bytes(true),
    })
}
