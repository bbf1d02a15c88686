//! Answers of the daemon as dictionaries, with the keys that `flextensorctl --json` uses.

use flextensord_client::v1::{
    DeviceStatus, HostStatus, ManagerStatus, RegisterModelResponse, StatusResponse,
    TransferCounters, WeightSet,
};
use pyo3::{prelude::*, types::PyDict};

/// A dictionary of the named fields of a message.
macro_rules! fields {
    ($py:ident, $message:ident, $($field:ident),* $(,)?) => {{
        let entries = PyDict::new($py);
        $(entries.set_item(stringify!($field), &$message.$field)?;)*
        entries
    }};
}

pub(crate) fn document<'py>(
    py: Python<'py>,
    status: &StatusResponse,
) -> PyResult<Bound<'py, PyDict>> {
    let entries = fields!(
        py,
        status,
        version,
        instance,
        pid,
        daemon_generation,
        phase,
        uptime_ms,
        protocol_lowest,
        protocol_highest,
    );
    entries.set_item("managers", each(py, &status.managers, manager)?)?;
    entries.set_item("weight_sets", each(py, &status.weight_sets, weight_set)?)?;
    entries.set_item("devices", each(py, &status.devices, device)?)?;
    let host = status.host.as_ref().map(|figures| host(py, figures));
    entries.set_item("host", host.transpose()?)?;
    Ok(entries)
}

pub(crate) fn weight_set<'py>(py: Python<'py>, set: &WeightSet) -> PyResult<Bound<'py, PyDict>> {
    Ok(fields!(
        py,
        set,
        name,
        id,
        digest,
        content_id,
        tensors,
        storages,
        logical_bytes,
        segment_bytes,
        pinned_bytes,
        attached_by,
        shared,
        owner_uid,
        loaded_at,
        unlinked,
    ))
}

pub(crate) fn registered<'py>(
    py: Python<'py>,
    answer: &RegisterModelResponse,
) -> PyResult<Bound<'py, PyDict>> {
    Ok(fields!(
        py,
        answer,
        plan_version,
        layers,
        parts,
        requested_bytes,
        granted_bytes,
        resident_bytes,
        resident_bytes_shared,
        streamed_bytes,
        ring_bytes,
        least_feasible_bytes,
        unregistered_tensors,
        unregistered_bytes,
    ))
}

fn each<'py, T>(
    py: Python<'py>,
    messages: &[T],
    write: impl Fn(Python<'py>, &T) -> PyResult<Bound<'py, PyDict>>,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    messages.iter().map(|message| write(py, message)).collect()
}

fn manager<'py>(py: Python<'py>, manager: &ManagerStatus) -> PyResult<Bound<'py, PyDict>> {
    let entries = fields!(
        py,
        manager,
        name,
        owner_uid,
        owner_pid,
        since_ms,
        phase,
        lease,
        lease_epoch,
        client,
        device,
        weight_set,
        plan_version,
        layers,
        parts_resident,
        parts_streamed,
        granted_bytes,
        resident_bytes,
        ring_bytes,
        planned_stream_bytes,
        rpc_holds,
        parts_in_use,
        waits_for_part,
        passes,
        waited_ns,
    );
    let waits = manager.waits_for_part;
    entries.set_item("waits_for_tensor", waits.map(|_| &manager.waits_for_tensor))?;
    entries.set_item("waits_since_ms", waits.map(|_| manager.waits_since_ms))?;
    entries.set_item("transfer", counters(py, manager.transfer)?)?;
    Ok(entries)
}

fn device<'py>(py: Python<'py>, device: &DeviceStatus) -> PyResult<Bound<'py, PyDict>> {
    let entries = fields!(
        py,
        device,
        name,
        uuid,
        kind,
        total_bytes,
        allocated_bytes,
        resident_bytes,
        ring_bytes,
        reclaiming_bytes,
        reserved_bytes,
        link_limit,
        queued_bytes,
        engine_asleep,
    );
    entries.set_item("transfer", counters(py, device.transfer)?)?;
    Ok(entries)
}

fn host<'py>(py: Python<'py>, host: &HostStatus) -> PyResult<Bound<'py, PyDict>> {
    Ok(fields!(
        py,
        host,
        budget_bytes,
        budget_limited_by,
        segment_bytes,
        reserved_bytes,
        shm_dir,
        shm_free_bytes,
    ))
}

fn counters(py: Python<'_>, counters: Option<TransferCounters>) -> PyResult<Bound<'_, PyDict>> {
    let counters = counters.unwrap_or_default();
    Ok(fields!(
        py,
        counters,
        streamed_bytes,
        resident_fill_bytes,
        parts_filled,
        parts_revoked,
        parts_out_of_order,
        protocol_violations,
        link_ran_dry,
    ))
}
