//! `flextensorctl terminate NAME`.

use flextensord_client::blocking::Client;
use serde_json::json;

use crate::{
    exit::Failed,
    output::{Output, bytes},
};

pub(crate) fn terminate(
    client: &Client,
    output: &Output,
    name: &str,
    uid: Option<u32>,
) -> Result<(), Failed> {
    let held = client.terminate(name, uid)?;
    if output.json {
        return Ok(output.value(&json!({ "name": name, "held_bytes": held }))?);
    }
    let text = format!(
        "terminated {name}: {} return when its process has ended",
        bytes(held)
    );
    Ok(output.line(&text)?)
}
