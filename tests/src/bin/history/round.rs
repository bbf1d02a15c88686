//! A round: many actors for a while, under kills of everything; then all of them end, and
//! every answer is checked.

use std::{
    io::{BufRead as _, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU64, Ordering::SeqCst},
    thread,
    time::{Duration, Instant},
};

use flextensord_tests::{SceneError, process::Guarded, supervisor::Supervisor};
use serde_json::Value;

use crate::{
    model::{Deeds, violations},
    random::Random,
    record::{self, Call, now},
};

/// How long an actor may take to end once it was told to.
const ENDING: Duration = Duration::from_secs(60);

/// What a round is to be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Round {
    pub(crate) seed: u64,
    pub(crate) actors: u64,
    pub(crate) length: Duration,
    /// How often the daemon is killed.
    pub(crate) crashes: u64,
    pub(crate) adopts: bool,
}

/// What a round came to.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) calls: usize,
    pub(crate) killed: usize,
    pub(crate) crashes: usize,
    pub(crate) violations: Vec<String>,
}

/// Numbers actors over all rounds.
static NEXT: AtomicU64 = AtomicU64::new(1);

struct Ended {
    calls: Vec<Call>,
    killed: Vec<(u64, u64, u64)>,
}

/// Plays a round.
pub(crate) fn play(
    round: Round,
    supervisor: &Supervisor,
    directory: &Path,
) -> Result<Tally, SceneError> {
    let end = Instant::now() + round.length;
    let mut deeds = Deeds {
        adopts: round.adopts,
        ..Deeds::default()
    };
    let ended: Vec<Ended> = thread::scope(|scope| {
        let seat = |number: u64| {
            let random = Random::new(round.seed ^ number << 20);
            move || sit(random, supervisor, directory, end)
        };
        let seats: Vec<_> = (0..round.actors).map(|n| scope.spawn(seat(n))).collect();
        let mut random = Random::new(round.seed);
        let mut moments: Vec<u64> = (0..round.crashes)
            .map(|_| random.below(u64::try_from(round.length.as_millis()).unwrap_or(1)))
            .collect();
        moments.sort_unstable();
        let begin = Instant::now();
        for moment in moments {
            thread::sleep(Duration::from_millis(moment).saturating_sub(begin.elapsed()));
            deeds.crashes.push(now());
            supervisor.crash()?;
        }
        let ended = |_| SceneError::Unexpected("a thread of the test ended".to_owned());
        let all = seats.into_iter().map(|seat| seat.join().map_err(ended)?);
        all.collect::<Result<_, SceneError>>()
    })?;
    let mut calls = Vec::new();
    for seat in ended {
        calls.extend(seat.calls);
        deeds.killed.extend(seat.killed);
    }
    Ok(Tally {
        violations: violations(&calls, &deeds),
        calls: calls.len(),
        killed: deeds.killed.len(),
        crashes: deeds.crashes.len(),
    })
}

/// One actor after the other, until the end; most of them are killed.
fn sit(
    mut random: Random,
    supervisor: &Supervisor,
    directory: &Path,
    end: Instant,
) -> Result<Ended, SceneError> {
    let mut ended = Ended {
        calls: Vec::new(),
        killed: Vec::new(),
    };
    while Instant::now() < end {
        let who = NEXT.fetch_add(1, SeqCst);
        let mut child = start(supervisor, directory, random.next())?;
        let output = child.stdout.take();
        let listen = thread::spawn(move || -> Vec<Value> {
            let lines = output.map(BufReader::new).into_iter();
            let lines = lines.flat_map(|output| output.lines().map_while(Result::ok));
            // a line that was cut by a kill says nothing
            lines
                .filter_map(|line| serde_json::from_str(&line).ok())
                .collect()
        });
        let mut process = Guarded(child);
        let life = Duration::from_millis(300 + random.below(6000));
        let left = end.saturating_duration_since(Instant::now());
        let is_killed = life < left && random.below(3) > 0;
        thread::sleep(life.min(left));
        if let Some(status) = process
            .0
            .try_wait()
            .map_err(|e| SceneError::io("wait", e))?
        {
            let text = format!("actor {who} ended by itself with {status}");
            return Err(SceneError::Unexpected(text));
        }
        let before = now();
        if is_killed {
            process.kill()?;
            ended.killed.push((who, before, now()));
        } else {
            drop(process.0.stdin.take());
            let status = process.wait(ENDING)?;
            if !status.success() {
                let text = format!("actor {who} ended with {status}");
                return Err(SceneError::Unexpected(text));
            }
        }
        let failed = |_| SceneError::Unexpected("a thread of the test ended".to_owned());
        let lines = listen.join().map_err(failed)?;
        let calls = record::read(who, &lines, now()).map_err(SceneError::Unexpected)?;
        ended.calls.extend(calls);
    }
    Ok(ended)
}

fn start(supervisor: &Supervisor, directory: &Path, seed: u64) -> Result<Child, SceneError> {
    let program = std::env::current_exe().map_err(|e| SceneError::io("find this program", e))?;
    Command::new(program)
        .arg("actor")
        .arg("--socket")
        .arg(supervisor.socket())
        .arg("--directory")
        .arg(directory)
        .args(["--seed", &seed.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| SceneError::io("start an actor", e))
}
