//! `flextensorctl status`.

use bytesize::ByteSize;
use flextensord_client::{
    blocking::Client,
    v1::{DeviceStatus, StatusResponse},
};
use serde_json::{Value, json};

use crate::{
    exit::Failed,
    managers,
    output::{Output, Table, bytes, duration_ms},
    weights,
};

pub(crate) fn show(client: &Client, output: &Output) -> Result<(), Failed> {
    let status = client.status()?;
    if output.json {
        return Ok(output.value(&document(&status))?);
    }
    output.line(&format!(
        "flextensord {} instance {}: {}, pid {}, up {}, generation {}, protocol {} to {}",
        status.version,
        status.instance,
        status.phase,
        status.pid,
        duration_ms(status.uptime_ms),
        status.daemon_generation,
        status.protocol_lowest,
        status.protocol_highest,
    ))?;
    if let Some(host) = &status.host {
        output.line(&format!(
            "host: {} of {} for weight sets (limited by {}), {} reserved, {} free in {}",
            bytes(host.segment_bytes),
            bytes(host.budget_bytes),
            host.budget_limited_by,
            bytes(host.reserved_bytes),
            bytes(host.shm_free_bytes),
            host.shm_dir,
        ))?;
        output.line(&format!(
            "pinned: {}{}",
            bytes(host.pinned_bytes),
            if host.degraded {
                "; degraded: copies from what is not pinned are slow"
            } else {
                ""
            },
        ))?;
    }
    if let Some(host) = status.host.as_ref().filter(|host| host.stuck_bytes > 0) {
        output.line(&format!(
            "stuck: {} of dropped weight sets, which the driver does not let go of",
            bytes(host.stuck_bytes)
        ))?;
    }
    output.line("devices")?;
    output.table(&devices(&status.devices))?;
    for line in status.devices.iter().flat_map(troubles) {
        output.line(&line)?;
    }
    output.line("managers")?;
    output.table(&managers::table(&status.managers))?;
    output.line("weight sets")?;
    Ok(output.table(&weights::table(&status.weight_sets))?)
}

fn devices(devices: &[DeviceStatus]) -> Table {
    let mut table = Table::new(&[
        "DEVICE",
        "TOTAL",
        "FREE",
        "ALLOCATED",
        "RESIDENT",
        "RING",
        "RECLAIMING",
        "RESERVED",
        "LINK",
        "STREAMED",
        "QUEUED",
        "ENGINE",
    ]);
    for device in devices {
        let link = match device.link_limit {
            0 => "not limited".to_owned(),
            limit => format!("{}/s", ByteSize(limit).display().si()),
        };
        let streamed = device
            .transfer
            .map_or(0, |transfer| transfer.streamed_bytes);
        table.row([
            device.name.clone(),
            bytes(device.total_bytes),
            bytes(device.free_bytes),
            bytes(device.allocated_bytes),
            bytes(device.resident_bytes),
            bytes(device.ring_bytes),
            bytes(device.reclaiming_bytes),
            bytes(device.reserved_bytes),
            link,
            bytes(streamed),
            bytes(device.queued_bytes),
            if device.engine_asleep {
                "asleep"
            } else {
                "awake"
            }
            .to_owned(),
        ]);
    }
    table
}

/// What is wrong with a device, a line each.
fn troubles(device: &DeviceStatus) -> Vec<String> {
    let name = &device.name;
    let mut lines = Vec::new();
    if !device.failure.is_empty() {
        lines.push(format!("{name} has failed: {}", device.failure));
    }
    if device.failed_drops > 0 {
        lines.push(format!(
            "{name}: {} resources could not be given back",
            device.failed_drops
        ));
        let reasons = device.failed_drop_reasons.iter();
        lines.extend(reasons.map(|reason| format!("{name}: {reason}")));
    }
    lines
}

fn document(status: &StatusResponse) -> Value {
    let managers: Vec<Value> = status.managers.iter().map(managers::document).collect();
    let weight_sets: Vec<Value> = status.weight_sets.iter().map(weights::document).collect();
    let devices: Vec<Value> = status.devices.iter().map(device_document).collect();
    let host = status.host.as_ref().map(|host| {
        json!({
            "budget_bytes": host.budget_bytes,
            "budget_limited_by": host.budget_limited_by,
            "segment_bytes": host.segment_bytes,
            "reserved_bytes": host.reserved_bytes,
            "shm_dir": host.shm_dir,
            "shm_free_bytes": host.shm_free_bytes,
            "pinned_bytes": host.pinned_bytes,
            "degraded": host.degraded,
            "stuck_bytes": host.stuck_bytes,
        })
    });
    json!({
        "version": status.version,
        "instance": status.instance,
        "pid": status.pid,
        "daemon_generation": status.daemon_generation,
        "phase": status.phase,
        "uptime_ms": status.uptime_ms,
        "protocol_lowest": status.protocol_lowest,
        "protocol_highest": status.protocol_highest,
        "managers": managers,
        "weight_sets": weight_sets,
        "devices": devices,
        "host": host,
    })
}

fn device_document(device: &DeviceStatus) -> Value {
    json!({
        "name": device.name,
        "uuid": device.uuid,
        "kind": device.kind,
        "total_bytes": device.total_bytes,
        "allocated_bytes": device.allocated_bytes,
        "resident_bytes": device.resident_bytes,
        "ring_bytes": device.ring_bytes,
        "reclaiming_bytes": device.reclaiming_bytes,
        "reserved_bytes": device.reserved_bytes,
        "link_limit": device.link_limit,
        "transfer": managers::counters(device.transfer.as_ref()),
        "queued_bytes": device.queued_bytes,
        "engine_asleep": device.engine_asleep,
        "free_bytes": device.free_bytes,
        "numa_node": device.numa_node,
        "failure": device.failure,
        "failed_drops": device.failed_drops,
        "failed_drop_reasons": device.failed_drop_reasons,
    })
}
