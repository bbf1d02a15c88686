//! `flextensorctl managers`.

use std::time::{SystemTime, UNIX_EPOCH};

use flextensord_client::{
    blocking::Client,
    v1::{ManagerStatus, TransferCounters},
};
use serde_json::{Value, json};

use crate::{
    exit::Failed,
    output::{Output, Table, bytes, duration_ms},
};

pub(crate) fn list(client: &Client, output: &Output) -> Result<(), Failed> {
    let managers = client.status()?.managers;
    if output.json {
        let managers: Vec<Value> = managers.iter().map(document).collect();
        return Ok(output.value(&json!({ "managers": managers }))?);
    }
    Ok(output.table(&table(&managers))?)
}

pub(crate) fn table(managers: &[ManagerStatus]) -> Table {
    let mut table = Table::new(&[
        "NAME",
        "OWNER",
        "LEASE",
        "PHASE",
        "DEVICE",
        "WEIGHTS",
        "LAYERS",
        "RESIDENT",
        "RING",
        "STREAMED",
        "PASSES",
        "WAITED",
        "WAITS FOR",
    ]);
    for manager in managers {
        let waits = match manager.waits_for_part {
            Some(part) => format!(
                "part {part} ({}) for {} ms",
                manager.waits_for_tensor,
                milliseconds_since(manager.waits_since_ms)
            ),
            None => "-".to_owned(),
        };
        let streamed = manager
            .transfer
            .map_or(0, |transfer| transfer.streamed_bytes);
        table.row([
            manager.name.clone(),
            format!("uid {} pid {}", manager.owner_uid, manager.owner_pid),
            manager.lease.clone(),
            manager.phase.clone(),
            manager.device.clone(),
            manager.weight_set.clone(),
            manager.layers.to_string(),
            bytes(manager.resident_bytes),
            bytes(manager.ring_bytes),
            bytes(streamed),
            manager.passes.to_string(),
            duration_ms(manager.waited_ns / 1_000_000),
            waits,
        ]);
    }
    table
}

/// Milliseconds since a moment that is given in milliseconds since the Unix epoch.
fn milliseconds_since(moment: u64) -> u128 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    now.as_millis().saturating_sub(moment.into())
}

pub(crate) fn document(manager: &ManagerStatus) -> Value {
    json!({
        "name": manager.name,
        "owner_uid": manager.owner_uid,
        "owner_pid": manager.owner_pid,
        "since_ms": manager.since_ms,
        "phase": manager.phase,
        "lease": manager.lease,
        "lease_epoch": manager.lease_epoch,
        "client": manager.client,
        "device": manager.device,
        "weight_set": manager.weight_set,
        "plan_version": manager.plan_version,
        "layers": manager.layers,
        "parts_resident": manager.parts_resident,
        "parts_streamed": manager.parts_streamed,
        "granted_bytes": manager.granted_bytes,
        "resident_bytes": manager.resident_bytes,
        "ring_bytes": manager.ring_bytes,
        "planned_stream_bytes": manager.planned_stream_bytes,
        "rpc_holds": manager.rpc_holds,
        "parts_in_use": manager.parts_in_use,
        "waits_for_part": manager.waits_for_part,
        "waits_for_tensor": manager.waits_for_part.map(|_| &manager.waits_for_tensor),
        "waits_since_ms": manager.waits_for_part.map(|_| manager.waits_since_ms),
        "transfer": counters(manager.transfer.as_ref()),
        "passes": manager.passes,
        "waited_ns": manager.waited_ns,
    })
}

pub(crate) fn counters(counters: Option<&TransferCounters>) -> Value {
    let counters = counters.copied().unwrap_or_default();
    json!({
        "streamed_bytes": counters.streamed_bytes,
        "resident_fill_bytes": counters.resident_fill_bytes,
        "parts_filled": counters.parts_filled,
        "parts_revoked": counters.parts_revoked,
        "parts_out_of_order": counters.parts_out_of_order,
        "protocol_violations": counters.protocol_violations,
        "link_ran_dry": counters.link_ran_dry,
    })
}
