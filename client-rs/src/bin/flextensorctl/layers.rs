//! `flextensorctl layers NAME`.

use flextensord_client::{blocking::Client, v1::DumpRecord};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    exit::Failed,
    output::{Output, Table, bytes},
};

/// A layer, as the daemon's dump describes it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Layer {
    layer: String,
    /// How many parts; the dump may list them instead.
    parts: Count,
    resident_bytes: u64,
    streamed_bytes: u64,
    tensors: Count,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum Count {
    Number(u64),
    Indexes(Vec<u64>),
    Names(Vec<String>),
}

impl Count {
    fn count(&self) -> u64 {
        match self {
            Self::Number(number) => *number,
            Self::Indexes(list) => list.len() as u64,
            Self::Names(list) => list.len() as u64,
        }
    }
}

pub(crate) fn list(client: &Client, output: &Output, name: &str) -> Result<(), Failed> {
    let layers = read(&client.dump(Some(name))?, name)?;
    if output.json {
        return Ok(output.value(&json!({ "manager": name, "layers": layers }))?);
    }
    let mut table = Table::new(&["LAYER", "PARTS", "TENSORS", "RESIDENT", "STREAMED"]);
    for layer in &layers {
        table.row([
            layer.layer.clone(),
            layer.parts.count().to_string(),
            layer.tensors.count().to_string(),
            bytes(layer.resident_bytes),
            bytes(layer.streamed_bytes),
        ]);
    }
    Ok(output.table(&table)?)
}

/// The layers in a dump. They may come in several records, of at most 1 MiB each.
fn read(records: &[DumpRecord], name: &str) -> Result<Vec<Layer>, Failed> {
    let ours = |record: &&DumpRecord| record.kind == "layers" && record.name == name;
    let mut layers = Vec::new();
    for record in records.iter().filter(ours) {
        let part: Vec<Layer> = serde_json::from_str(&record.json).map_err(|error| {
            Failed::Answer(format!("the daemon's list of layers of {name}: {error}"))
        })?;
        layers.extend(part);
    }
    Ok(layers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_come_in_several_records_and_as_counts_or_lists() {
        let record = |kind: &str, json: &str| DumpRecord {
            kind: kind.to_owned(),
            name: "m".to_owned(),
            json: json.to_owned(),
        };
        let records = [
            record("manager", "{}"),
            record(
                "layers",
                r#"[{"layer":"a","parts":[0,3],"resident_bytes":1,"streamed_bytes":2,"tensors":["t","u","v"]}]"#,
            ),
            record(
                "layers",
                r#"[{"layer":"b","parts":1,"resident_bytes":0,"streamed_bytes":9,"tensors":4,"more":0}]"#,
            ),
        ];
        let layers = read(&records, "m").unwrap();
        let counts: Vec<_> = layers
            .iter()
            .map(|l| (l.parts.count(), l.tensors.count()))
            .collect();
        assert_eq!(counts, [(2, 3), (1, 4)]);
        assert!(read(&records, "other").unwrap().is_empty());
        assert!(read(&[record("layers", "7")], "m").is_err());
    }
}
