//! The load test: many managers in processes of their own, run passes over small layers
//! and compare every byte, while some of them are killed at any moment and started again
//! under the same name. Afterwards everything must have come back. Prints its seed.
#![forbid(unsafe_code)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use flextensord_client::LoadOptions;
use flextensord_tests::{
    SceneError, checkpoint,
    daemon::Daemon,
    process::{binary, eventually},
    reader::{Reader, ReaderPlan},
    supervisor::Supervisor,
};

/// Plays the load test.
#[derive(Debug, Parser)]
struct Flags {
    /// The daemon's binary; without it, the one beside this program.
    #[arg(long)]
    daemon: Option<PathBuf>,
    /// Processes at a time, each with a manager of its own.
    #[arg(long, default_value_t = 64)]
    managers: u64,
    /// Passes that each must complete without being killed.
    #[arg(long, default_value_t = 1000)]
    passes: u64,
    /// Go on with new seeds for so many seconds; 0 plays once.
    #[arg(long, default_value_t = 0)]
    seconds: u64,
    /// Tells everything that is random; 0 takes the time.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Of a hundred processes, so many are killed.
    #[arg(long, default_value_t = 40)]
    killed: u64,
    /// How often the daemon is killed, at random moments; a successor takes over.
    #[arg(long, default_value_t = 0)]
    crashes: u64,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let mut seed = match flags.seed {
        0 => clock.unwrap_or_default().as_secs(),
        seed => seed,
    };
    let begin = Instant::now();
    loop {
        match play(&flags, seed) {
            Ok(summary) => println!("seed {seed}: {summary}"),
            Err(error) => {
                eprintln!("soak: seed {seed}: {error}");
                return ExitCode::FAILURE;
            }
        }
        if begin.elapsed() >= Duration::from_secs(flags.seconds) {
            return ExitCode::SUCCESS;
        }
        seed += 1;
    }
}

/// What of the daemon must be as it was at the start.
#[derive(Debug, Clone, Copy)]
struct Footprint {
    descriptors: usize,
    threads: u64,
    private_kib: u64,
}

fn footprint(daemon: &Daemon) -> Footprint {
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap_or_default();
    let number = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name));
        let word = line.and_then(|line| line.split_ascii_whitespace().nth(1));
        word.and_then(|word| word.parse().ok()).unwrap_or(0)
    };
    Footprint {
        descriptors: daemon.descriptors(),
        threads: number("Threads:"),
        private_kib: number("RssAnon:"),
    }
}

fn play(flags: &Flags, seed: u64) -> Result<String, SceneError> {
    let begin = Instant::now();
    let program = flags
        .daemon
        .clone()
        .map_or_else(|| binary("flextensord"), Ok)?;
    let options = [
        "--log",
        "warn",
        "--poison-released",
        "true",
        "--cpu-memory",
        "16MiB",
    ];
    let mut daemon = Daemon::start_with(&program, Path::new("/dev/shm"), &options)?;
    let path = daemon.scratch().join("model.safetensors");
    checkpoint::write(&path, &checkpoint::layered(12, 2, 6000))?;
    daemon
        .client()?
        .load(&path, "model", &LoadOptions::default(), |_| ())?;
    // one of everything first: threads and buffers that stay are there then
    run_one(
        &daemon.socket(),
        &path,
        &Slot {
            flags,
            name: "warm",
            seed,
        },
        None,
    )?;
    let before = settle(&daemon, None)?;
    let (kills, passes) = (AtomicU64::new(0), AtomicU64::new(0));
    let supervisor = Supervisor::new(daemon);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let slot = |index: u64| {
            let mut next = random(seed, index);
            let name = format!("m-{index}");
            loop {
                let killed = next(100) < flags.killed;
                let after = killed.then(|| Duration::from_millis(next(3000)));
                let slot = Slot {
                    flags,
                    name: &name,
                    seed: next(1 << 40),
                };
                if run_one(supervisor.socket(), &path, &slot, after)? {
                    passes.fetch_add(flags.passes, Relaxed);
                    return Ok::<(), SceneError>(());
                }
                kills.fetch_add(1, Relaxed);
            }
        };
        let threads: Vec<_> = (0..flags.managers)
            .map(|index| scope.spawn(move || slot(index)))
            .collect();
        scope.spawn(|| {
            let mut next = random(seed, flags.managers);
            for _ in 0..flags.crashes {
                thread::sleep(Duration::from_millis(500 + next(4000)));
                // a daemon that cannot be killed is one that its readers complain of
                if is_over.load(Relaxed) || supervisor.crash().is_err() {
                    return;
                }
            }
        });
        let ended = |_| SceneError::Unexpected("a thread of the test ended".to_owned());
        let all: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        is_over.store(true, Relaxed);
        all.into_iter().try_for_each(|end| end.map_err(ended)?)
    })?;
    let (crashes, _) = supervisor.ends();
    daemon = supervisor.release()?;
    let after = settle(&daemon, Some(before))?;
    let moved = daemon
        .status()?
        .devices
        .first()
        .and_then(|d| d.transfer)
        .unwrap_or_default();
    if moved.protocol_violations > 0 || crashes == 0 && moved.parts_revoked == 0 {
        return Err(SceneError::Unexpected(format!("{moved:?}")));
    }
    Ok(format!(
        "{} managers, {} passes, {} killed, {crashes} daemons killed, {} parts filled, {} revoked, private memory {} -> {} KiB, {:.0} s",
        flags.managers,
        passes.into_inner(),
        kills.into_inner(),
        moved.parts_filled,
        moved.parts_revoked,
        before.private_kib,
        after.private_kib,
        begin.elapsed().as_secs_f64(),
    ))
}

/// xorshift, for the process of that number.
fn random(seed: u64, index: u64) -> impl FnMut(u64) -> u64 {
    let mut random = seed.wrapping_mul(0x9e37_79b9).wrapping_add(index * 7919) | 1;
    move |bound: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 20) % bound.max(1)
    }
}

/// One manager's process.
struct Slot<'a> {
    flags: &'a Flags,
    name: &'a str,
    seed: u64,
}

/// Runs a process to its end, or kills it after a while. Returns whether it came to its
/// end.
fn run_one(
    socket: &Path,
    path: &Path,
    slot: &Slot<'_>,
    kill_after: Option<Duration>,
) -> Result<bool, SceneError> {
    let order = if slot.seed.is_multiple_of(3) {
        "registered"
    } else {
        "random"
    };
    let plan = ReaderPlan::new("model", path)
        .with("--manager", slot.name)
        // three layers of twelve: nearly everything streams
        .with("--budget", 40_000)
        .with("--order", order)
        .with("--seed", slot.seed)
        .with("--passes", slot.flags.passes);
    // the name of a killed process is free at once, but not before it is dead
    let mut reader = Reader::start_at(socket, &plan)?;
    match kill_after {
        None => {
            let registered = reader.expect("registered")?;
            if registered["streamed_bytes"].as_u64().unwrap_or(0) == 0 {
                return Err(SceneError::Unexpected("nothing streams".to_owned()));
            }
            reader.finish().map(|_| true)
        }
        Some(after) => {
            thread::sleep(after);
            // one that failed before it could be killed is a finding
            if reader.has_failed()? {
                return Err(SceneError::Unexpected("a reader failed".to_owned()));
            }
            reader.kill().map(|()| false)
        }
    }
}

/// Waits until everything that managers had is back, and returns what the daemon has
/// left, which must be what it had `before`.
fn settle(daemon: &Daemon, before: Option<Footprint>) -> Result<Footprint, SceneError> {
    let limit = Duration::from_secs(30);
    let mut seen = String::new();
    let settled = eventually("everything is back", limit, || {
        let status = daemon.status().ok()?;
        let device = status.devices.first()?;
        let now = footprint(daemon);
        seen = format!("{now:?} before {before:?}, {device:?}");
        let empty = status.managers.is_empty()
            && device.allocated_bytes == 0
            && device.reserved_bytes == 0
            && status.weight_sets.first()?.attached_by.is_empty()
            && !daemon
                .state()
                .iter()
                .any(|name| name.starts_with("manager-"));
        let same = before.is_none_or(|before| {
            now.descriptors <= before.descriptors
                // threads for blocking work come with the load and go after ten idle seconds
                && now.threads <= before.threads + 2
        });
        (empty && same).then_some(now)
    });
    settled.map_err(|error| SceneError::Unexpected(format!("{error}: {seen}")))
}
