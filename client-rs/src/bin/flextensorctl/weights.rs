//! `flextensorctl weights` and `flextensorctl drop`.

use flextensord_client::{blocking::Client, v1::WeightSet};
use serde_json::{Value, json};

use crate::{
    exit::Failed,
    output::{Output, Table, bytes},
};

pub(crate) fn list(client: &Client, output: &Output) -> Result<(), Failed> {
    let sets = client.weight_sets()?;
    if output.json {
        let sets: Vec<Value> = sets.iter().map(document).collect();
        return Ok(output.value(&json!({ "weight_sets": sets }))?);
    }
    Ok(output.table(&table(&sets))?)
}

pub(crate) fn drop(client: &Client, output: &Output, name: &str) -> Result<(), Failed> {
    let freed = client.drop_weight_set(name)?;
    if output.json {
        return Ok(output.value(&json!({ "name": name, "freed_bytes": freed }))?);
    }
    Ok(output.line(&format!("dropped {name}: {} given back", bytes(freed)))?)
}

pub(crate) fn table(sets: &[WeightSet]) -> Table {
    let mut table = Table::new(&[
        "NAME",
        "TENSORS",
        "LOGICAL",
        "SEGMENT",
        "PINNED",
        "CONTENT",
        "OWNER",
        "SHARED",
        "ATTACHED BY",
    ]);
    for set in sets {
        let content = if set.digest.is_empty() {
            format!("id {}", set.content_id)
        } else {
            set.digest.chars().take(12).collect()
        };
        let attached = if set.attached_by.is_empty() {
            "-".to_owned()
        } else {
            set.attached_by.join(", ")
        };
        table.row([
            if set.unlinked {
                format!("{} (unlinked)", set.name)
            } else {
                set.name.clone()
            },
            set.tensors.to_string(),
            bytes(set.logical_bytes),
            bytes(set.segment_bytes),
            if set.degraded.is_empty() {
                bytes(set.pinned_bytes)
            } else {
                format!("{} (degraded)", bytes(set.pinned_bytes))
            },
            content,
            format!("uid {}", set.owner_uid),
            if set.shared { "yes" } else { "no" }.to_owned(),
            attached,
        ]);
    }
    table
}

pub(crate) fn document(set: &WeightSet) -> Value {
    json!({
        "name": set.name,
        "id": set.id,
        "digest": set.digest,
        "content_id": set.content_id,
        "tensors": set.tensors,
        "storages": set.storages,
        "logical_bytes": set.logical_bytes,
        "segment_bytes": set.segment_bytes,
        "pinned_bytes": set.pinned_bytes,
        "degraded": set.degraded,
        "attached_by": set.attached_by,
        "shared": set.shared,
        "owner_uid": set.owner_uid,
        "loaded_at": set.loaded_at,
        "unlinked": set.unlinked,
    })
}
