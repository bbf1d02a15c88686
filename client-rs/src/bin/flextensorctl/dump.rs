//! `flextensorctl dump [NAME]`.

use flextensord_client::blocking::Client;
use serde_json::{Value, json};

use crate::{exit::Failed, output::Output};

/// Prints all records as one JSON document; it is JSON with and without `--json`.
pub(crate) fn print(client: &Client, output: &Output, name: Option<&str>) -> Result<(), Failed> {
    let records = client.dump(name)?.into_iter().map(|record| {
        // a record that is not JSON is shown as the text that it is
        let body: Value = serde_json::from_str(&record.json).unwrap_or(Value::String(record.json));
        json!({ "kind": record.kind, "name": record.name, "body": body })
    });
    let records: Vec<Value> = records.collect();
    Ok(output.value(&json!({ "records": records }))?)
}
