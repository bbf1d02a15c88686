//! The history check: many clients do random things under random kills of clients and of
//! the daemon, and every answer is checked against a small model of what may be true. Prints
//! its seed. The last third of the time the daemon lives, and must not grow.
#![forbid(unsafe_code)]

mod actor;
mod holdings;
mod model;
mod random;
mod record;
mod round;

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use actor::ActorFlags;
use clap::{Args, Parser, Subcommand};
use flextensord_tests::{
    SceneError, checkpoint,
    daemon::Daemon,
    figures::{Figures, at_rest},
    supervisor::Supervisor,
};
use random::Random;
use round::{Round, Tally, play};

/// Checks random histories.
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct CommandLine {
    #[command(subcommand)]
    command: Option<Role>,
    #[command(flatten)]
    flags: Flags,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// One of the clients
    Actor(ActorFlags),
}

#[derive(Debug, Clone, Args)]
struct Flags {
    /// How long, in seconds.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Tells everything that is random; 0 takes the time.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Clients at a time.
    #[arg(long, default_value_t = 10)]
    actors: u64,
    /// Most kills of the daemon in a round.
    #[arg(long, default_value_t = 3)]
    crashes: u64,
    /// Whether a successor takes over what a dead daemon left.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set)]
    adopts: bool,
}

/// How long a round takes.
const ROUND: Duration = Duration::from_secs(8);

fn main() -> ExitCode {
    let CommandLine { command, flags } = CommandLine::parse();
    let outcome = match &command {
        Some(Role::Actor(flags)) => actor::act(flags).map(|()| true),
        None => run(&flags),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("history: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(flags: &Flags) -> Result<bool, SceneError> {
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seed = match flags.seed {
        0 => clock.unwrap_or_default().as_secs(),
        seed => seed,
    };
    println!("seed {seed}");
    let directory = flextensord_tests::daemon::directory()?;
    write_contents(directory.path())?;
    let mut daemon = Daemon::start(&[
        "--log",
        "error",
        "--resume-grace",
        "500ms",
        "--client-patience",
        "5s",
        "--cpu-memory",
        "16MiB",
        "--poison-released",
        "true",
    ])?;
    let begin = Instant::now();
    let length = Duration::from_secs(flags.seconds);
    let mut random = Random::new(seed);
    let mut total = Tally::default();
    let mut calm: Vec<Figures> = Vec::new();
    loop {
        // what a daemon gains while it lives can only be seen in one that does
        let is_calm = begin.elapsed() * 3 >= length * 2;
        let round = Round {
            seed: random.next(),
            actors: flags.actors,
            length: ROUND.min(length),
            crashes: if is_calm {
                0
            } else {
                random.below(flags.crashes + 1)
            },
            adopts: flags.adopts,
        };
        let supervisor = Supervisor::new(daemon);
        let played = play(round, &supervisor, directory.path());
        daemon = supervisor.release()?;
        let tally = played.map_err(|error| {
            SceneError::Unexpected(format!("seed {seed}, round {}: {error}", round.seed))
        })?;
        for violation in &tally.violations {
            println!("VIOLATION seed {seed}, round {}: {violation}", round.seed);
        }
        total.calls += tally.calls;
        total.killed += tally.killed;
        total.crashes += tally.crashes;
        total.violations.extend(tally.violations);
        let figures = rest(&daemon)?;
        if is_calm {
            calm.push(figures);
        }
        if begin.elapsed() >= length {
            break;
        }
    }
    println!(
        "{} calls, {} clients and {} daemons killed, {} violations, {:.0} s",
        total.calls,
        total.killed,
        total.crashes,
        total.violations.len(),
        begin.elapsed().as_secs_f64(),
    );
    let is_flat = flat(&calm);
    Ok(total.violations.is_empty() && is_flat)
}

/// Two contents under the same names.
fn write_contents(directory: &std::path::Path) -> Result<(), SceneError> {
    for content in 0..2 {
        let mut tensors = checkpoint::layered(8, 2, 6000);
        for (number, tensor) in (1..).zip(&mut tensors) {
            tensor.data = checkpoint::pattern(number + content * 1000, tensor.data.len());
        }
        checkpoint::write(&actor::file(directory, content), &tensors)?;
    }
    Ok(())
}

/// Waits until everybody is gone, drops what is left, and returns what the daemon has.
fn rest(daemon: &Daemon) -> Result<Figures, SceneError> {
    let client = daemon.client()?;
    flextensord_tests::process::eventually(
        "all sets are dropped",
        Duration::from_secs(20),
        || {
            let sets = client.weight_sets().ok()?;
            let dropped = sets
                .iter()
                .filter(|set| client.drop_weight_set(&set.name).is_ok());
            (dropped.count() == sets.len()).then_some(())
        },
    )?;
    drop(client);
    at_rest(daemon, None)
}

/// Whether what was measured at rest after each calm round has not grown by more than 2 %, or
/// by what one connection or one idle thread takes. The first rounds warm up what stays.
fn flat(calm: &[Figures]) -> bool {
    let [_, _, first, .., last] = calm else {
        println!("at rest {calm:?}: too few calm rounds to tell growth");
        return true;
    };
    println!(
        "at rest {first:?}, {} rounds later {last:?}",
        calm.len() - 3
    );
    let within = |first: u64, last: u64, least: u64| last <= first + (first / 50).max(least);
    let count = |figure: usize| figure as u64;
    within(first.private_kib, last.private_kib, 512)
        && within(count(first.descriptors), count(last.descriptors), 2)
        && within(count(first.threads), count(last.threads), 2)
}
