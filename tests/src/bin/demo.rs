//! The demo: a real model is loaded once into shared memory; two processes run passes
//! over it through a device that is smaller than the model, and compare every byte; one
//! of them is killed in mid-pass; the other one finishes, and everything of the dead one
//! comes back. Prints one table, and exits 0 only if all of that held.
#![forbid(unsafe_code)]

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use clap::Parser;
use comfy_table::{Table, presets::UTF8_BORDERS_ONLY};
use flextensord_client::v1::StatusResponse;
use flextensord_tests::{
    SceneError, checkpoint,
    daemon::{Daemon, SOON},
    process::eventually,
    reader::{Reader, ReaderPlan},
};
use serde_json::Value;

/// Passes of each reader.
const PASSES: u64 = 20;
/// The pass in which one of them is killed.
const KILLED_IN: u64 = 10;
/// Memory of the device; the model is larger.
const DEVICE: &str = "64MiB";
/// Share of it that each manager may hold, the residents that both share included.
const SHARE: f64 = 0.85;
/// How soon everything of a dead process must have come back.
const RECLAIM: Duration = Duration::from_secs(1);

/// Plays the demo.
#[derive(Debug, Parser)]
struct Flags {
    /// The model, a safetensors file.
    #[arg(long)]
    model: PathBuf,
    /// The daemon's binary.
    #[arg(long)]
    daemon: PathBuf,
    /// The operator's tool.
    #[arg(long)]
    ctl: PathBuf,
}

fn main() -> ExitCode {
    match play(&Flags::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failed) => {
            eprintln!("demo: {failed} of its promises did not hold");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("demo: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The table: what was promised, what was seen, whether it held.
struct Verdicts {
    table: Table,
    failed: usize,
}

impl Verdicts {
    fn new() -> Self {
        let mut table = Table::new();
        table
            .load_style(UTF8_BORDERS_ONLY)
            .set_header(["what", "seen", "expected", ""]);
        Self { table, failed: 0 }
    }

    fn add(&mut self, what: &str, seen: impl ToString, expected: impl ToString, held: bool) {
        self.failed += usize::from(!held);
        let mark = if held { "ok" } else { "FAILED" };
        self.table
            .add_row([what, &seen.to_string(), &expected.to_string(), mark]);
    }
}

fn play(flags: &Flags) -> Result<usize, SceneError> {
    let tensors = checkpoint::read(&flags.model)?;
    let model_bytes: u64 = tensors.iter().map(|tensor| tensor.data.len() as u64).sum();
    println!("a daemon with a device of {DEVICE}, and a model of {model_bytes} bytes");
    let mut daemon = Daemon::start_with(
        &flags.daemon,
        Path::new("/dev/shm"),
        &["--cpu-memory", DEVICE, "--log", "warn"],
    )?;
    run(daemon.ctl_of(
        &flags.ctl,
        &["load", "minilm", &flags.model.display().to_string()],
    ))?;
    let before = daemon.status()?;
    let descriptors = daemon.descriptors();

    println!("two processes, {PASSES} passes each, every byte compared with the file");
    let plan = ReaderPlan::new("minilm", &flags.model)
        .with("--fraction", SHARE)
        .with("--passes", PASSES);
    // both stop half-way through the same pass, so that there are two when one is killed
    let plan = plan.with("--hold-in-pass", KILLED_IN);
    let mut survivor = Reader::start(&daemon, &plan.clone().with("--manager", "survivor"))?;
    let victim = Reader::start(&daemon, &plan.with("--manager", "victim"))?;
    let first = survivor.expect("registered")?;
    let second = victim.expect("registered")?;
    survivor.expect("holding")?;
    let held = victim.expect("holding")?;
    let during = daemon.status()?;
    run(daemon.ctl_of(&flags.ctl, &["managers"]))?;
    println!("kill -9 {} while it holds {}", victim.pid(), held["layer"]);
    let killed = Instant::now();
    victim.kill()?;
    survivor.go_on();
    let back = eventually("the dead one is gone", SOON, || {
        let status = daemon.status().ok()?;
        let gone = status
            .managers
            .iter()
            .all(|manager| manager.name != "victim");
        let device = status.devices.first()?;
        let rings: u64 = status
            .managers
            .iter()
            .map(|manager| manager.ring_bytes)
            .sum();
        let own = device.resident_bytes + rings;
        (gone && device.allocated_bytes == own && device.reclaiming_bytes == 0)
            .then_some(killed.elapsed())
    })?;
    let done = survivor.finish()?;
    eventually("the survivor's memory is back", SOON, || {
        let status = daemon.status().ok()?;
        (status.devices.first()?.allocated_bytes == 0).then_some(())
    })?;
    let after = daemon.status()?;
    let open = eventually("descriptors are back", SOON, || {
        (daemon.descriptors() <= descriptors).then(|| daemon.descriptors())
    });

    let mut verdicts = Verdicts::new();
    host(&mut verdicts, &before, model_bytes);
    device(&mut verdicts, &during, &first, &second);
    passes(
        &mut verdicts,
        &during,
        &after,
        [&first, &second],
        &done,
        model_bytes,
    );
    let reclaimed = format!("{:.0} ms", back.as_secs_f64() * 1e3);
    let limit = format!("within {} ms", RECLAIM.as_millis());
    verdicts.add(
        "everything of the dead process came back",
        reclaimed,
        limit,
        back <= RECLAIM,
    );
    let open = open.map_or_else(|error| error.to_string(), |count| count.to_string());
    let kept = open.parse().is_ok_and(|count: usize| count <= descriptors);
    verdicts.add(
        "descriptors of the daemon",
        open,
        format!("at most {descriptors}"),
        kept,
    );
    run(daemon.ctl_of(&flags.ctl, &["drop", "minilm"]))?;
    let stopped = daemon.stop()?;
    verdicts.add("clean stop", stopped, "exit status: 0", stopped.success());
    let left = daemon.segments().len();
    verdicts.add("segments left in shared memory", left, 0, left == 0);
    println!("{}", verdicts.table);
    Ok(verdicts.failed)
}

fn run(mut command: Command) -> Result<(), SceneError> {
    let status = command
        .status()
        .map_err(|e| SceneError::io("run flextensorctl", e))?;
    if status.success() {
        return Ok(());
    }
    Err(SceneError::Unexpected(format!(
        "flextensorctl ended with {status}"
    )))
}

fn host(verdicts: &mut Verdicts, status: &StatusResponse, model_bytes: u64) {
    let Some(set) = status.weight_sets.first() else {
        return verdicts.add("weight sets", 0, 1, false);
    };
    let once = set.logical_bytes == model_bytes;
    verdicts.add(
        "weight bytes on the host, once",
        set.logical_bytes,
        model_bytes,
        once,
    );
    let overhead = set.segment_bytes - set.logical_bytes;
    let most = 256 * u64::from(set.storages) + 4096;
    verdicts.add(
        "segment overhead",
        overhead,
        format!("at most {most}"),
        overhead <= most,
    );
}

fn device(verdicts: &mut Verdicts, during: &StatusResponse, first: &Value, second: &Value) {
    let figure = |event: &Value, name: &str| event[name].as_u64().unwrap_or(0);
    let Some(device) = during.devices.first() else {
        return;
    };
    let residents = figure(first, "resident_bytes") + figure(second, "resident_bytes")
        - figure(first, "shared_bytes")
        - figure(second, "shared_bytes");
    let shared = figure(first, "shared_bytes") + figure(second, "shared_bytes");
    verdicts.add(
        "residents on the device, both managers",
        device.resident_bytes,
        format!("{residents} ({shared} shared)"),
        device.resident_bytes == residents && shared > 0,
    );
    let rings = figure(first, "ring_bytes") + figure(second, "ring_bytes");
    verdicts.add(
        "rings, one a manager",
        device.ring_bytes,
        rings,
        device.ring_bytes == rings,
    );
    verdicts.add(
        "device memory",
        device.allocated_bytes,
        format!("{} of {}", residents + rings, device.total_bytes),
        device.allocated_bytes == residents + rings,
    );
}

fn passes(
    verdicts: &mut Verdicts,
    during: &StatusResponse,
    after: &StatusResponse,
    registered: [&Value; 2],
    done: &Value,
    model_bytes: u64,
) {
    let figure = |event: &Value, name: &str| event[name].as_u64().unwrap_or(0);
    let [first, second] = registered;
    let compared = figure(done, "compared_bytes");
    let all = PASSES * model_bytes;
    verdicts.add(
        "bytes compared by the survivor",
        compared,
        all,
        compared == all,
    );
    // the victim stands still in its pass, so its counter does too
    let victim = during
        .managers
        .iter()
        .find(|manager| manager.name == "victim");
    let of_victim = victim
        .and_then(|m| m.transfer)
        .map_or(0, |moved| moved.streamed_bytes);
    let total = after.devices.first().and_then(|device| device.transfer);
    let of_survivor = total.map_or(0, |moved| moved.streamed_bytes) - of_victim;
    let planned = PASSES * figure(first, "streamed_bytes");
    let ring = figure(first, "ring_bytes");
    verdicts.add(
        "bytes streamed to the survivor",
        of_survivor,
        format!("{planned} + at most {ring}"),
        planned > 0 && (planned..=planned + ring).contains(&of_survivor),
    );
    let whole = KILLED_IN * figure(second, "streamed_bytes");
    let part = (KILLED_IN + 1) * figure(second, "streamed_bytes") + figure(second, "ring_bytes");
    verdicts.add(
        "bytes streamed to the victim",
        of_victim,
        format!("{whole} to {part}"),
        whole > 0 && (whole..=part).contains(&of_victim),
    );
    let waited = figure(done, "waited_ns") / 1_000_000;
    verdicts.add(
        "time that the survivor waited",
        format!("{waited} ms"),
        "",
        true,
    );
}
