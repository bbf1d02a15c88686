//! `flextensorctl drain`.

use std::{
    thread,
    time::{Duration, Instant},
};

use flextensord_client::{ClientError, blocking::Client, v1::StatusResponse};
use serde_json::json;

use crate::{exit::Failed, output::Output};

/// Pause between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// How long a daemon whose deadline is over may take to stop.
const STOP_LIMIT: Duration = Duration::from_secs(15);
/// How long a drain is watched whose deadline only the daemon knows.
const UNKNOWN_LIMIT: Duration = Duration::from_secs(600);

pub(crate) fn drain(
    client: &Client,
    output: &Output,
    deadline: Option<Duration>,
) -> Result<(), Failed> {
    let begin = Instant::now();
    let managers = client.drain(deadline)?;
    let limit = deadline.map_or(UNKNOWN_LIMIT, |deadline| deadline + STOP_LIMIT);
    let mut said = String::new();
    loop {
        let waits = match client.status() {
            Ok(status) => what_is_left(&status),
            Err(
                ClientError::Unreachable { .. }
                | ClientError::Transport { .. }
                | ClientError::Channel { .. },
            ) => break,
            Err(error) if error.retryable() => "the daemon stops".to_owned(),
            Err(error) => return Err(error.into()),
        };
        if waits != said {
            output.note(&format!("draining: {waits}"));
            said.clone_from(&waits);
        }
        if begin.elapsed() > limit {
            return Err(Failed::Unfinished(format!(
                "the daemon still runs {} s after the drain began: {waits}",
                begin.elapsed().as_secs()
            )));
        }
        thread::sleep(LOOK_EVERY);
    }
    let seconds = begin.elapsed().as_secs_f64();
    if output.json {
        let value = json!({ "managers": managers, "stopped": true, "seconds": seconds });
        return Ok(output.value(&value)?);
    }
    Ok(output.line(&format!("drained: the daemon stopped after {seconds:.1} s"))?)
}

fn what_is_left(status: &StatusResponse) -> String {
    let names: Vec<String> = status
        .managers
        .iter()
        .map(|manager| format!("{} (pid {})", manager.name, manager.owner_pid))
        .collect();
    match names.len() {
        0 => format!("no manager is left, the daemon is {}", status.phase),
        1 => format!("1 manager goes on: {}", names.join(", ")),
        many => format!("{many} managers go on: {}", names.join(", ")),
    }
}
