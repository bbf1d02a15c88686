//! The matrix of faults: for each fail point, the daemon or client is killed there, and its
//! step fails once and always. Prints the matrix; a point that was never reached fails it.
#![forbid(unsafe_code)]

mod cell;
mod operator;
mod reading;
mod scene;
mod table;
mod verdict;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::{Command, ExitCode},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::Instant,
};

use cell::{Cell, Machine};
use clap::Parser;
use flextensord_device::failpoint::{self, Point};
use flextensord_tests::{SceneError, daemon::directory, figures::Figures, process::binary};
use scene::{Played, play};

/// Plays the matrix of faults.
#[derive(Debug, Parser)]
struct Flags {
    /// Only cells whose name (point, action, device) contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Cells at a time.
    #[arg(long, default_value_t = 8)]
    jobs: usize,
}

fn main() -> ExitCode {
    match run(&Flags::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("faults: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(flags: &Flags) -> Result<bool, SceneError> {
    let version = Command::new(binary("flextensord")?)
        .arg("--version")
        .output();
    let version = version.map_err(|e| SceneError::io("run flextensord", e))?;
    if !failpoint::COMPILED_IN || !version.stdout.ends_with(b"(failpoints)\n") {
        let text = "built without the feature failpoints: make test-faults builds with it";
        return Err(SceneError::Unexpected(text.to_owned()));
    }
    let begin = Instant::now();
    let records = directory()?;
    let mut limits = BTreeMap::new();
    for machine in [Machine::Cpu, Machine::Fake] {
        let record = records.path().join(format!("{machine:?}"));
        let played = play(machine, None, None, &record)?;
        // the connection that asks is one more
        let descriptors = played.figures.descriptors + 2;
        let limit = Figures {
            descriptors,
            ..played.figures
        };
        limits.insert(machine, limit);
    }
    let mut cells = Cell::all();
    cells.retain(|cell| cell.to_string().contains(&flags.only));
    let results = play_all(&cells, &limits, records.path(), flags.jobs);
    let mut findings: Vec<String> = Vec::new();
    for (cell, result) in cells.iter().zip(&results) {
        if let Some(Err(error)) = result {
            findings.push(format!("{cell}: {error}"));
        }
    }
    println!("{}", table::matrix(&cells, &results));
    if flags.only.is_empty() {
        let hit = hits(records.path());
        let missed = Point::ALL.iter().filter(|p| !hit.contains(p.name()));
        findings.extend(missed.map(|point| format!("{}: never reached", point.name())));
    }
    for finding in &findings {
        println!("FAILED {finding}");
    }
    println!(
        "{} cells, {} failed, {} points, {:.0} s",
        cells.len(),
        findings.len(),
        Point::ALL.len(),
        begin.elapsed().as_secs_f64()
    );
    Ok(findings.is_empty())
}

/// How a cell went, once it was played.
type Ended = Option<Result<Played, SceneError>>;

/// Plays cells, several at a time.
fn play_all(
    cells: &[Cell],
    limits: &BTreeMap<Machine, Figures>,
    records: &Path,
    jobs: usize,
) -> Vec<Ended> {
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<Ended>> = Mutex::new(cells.iter().map(|_| None).collect());
    let work = || {
        while let Some((number, cell)) = {
            let number = next.fetch_add(1, SeqCst);
            cells.get(number).map(|cell| (number, *cell))
        } {
            let record = records.join(number.to_string());
            let limit = limits.get(&cell.machine).copied();
            let played = play(cell.machine, Some(cell), limit, &record)
                .and_then(|played| acted(cell, &record).map(|()| played));
            results.lock().unwrap_or_else(PoisonError::into_inner)[number] = Some(played);
        }
    };
    thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(work);
        }
    });
    results.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Checks that the rule of a cell was obeyed.
fn acted(cell: Cell, record: &Path) -> Result<(), SceneError> {
    let text = fs::read_to_string(record).unwrap_or_default();
    let verb = if cell.action.kills() { "kill" } else { "fail" };
    let line = format!("{verb} {} ", cell.point.name());
    match text.lines().any(|found| found.starts_with(&line)) {
        true => Ok(()),
        false => Err(SceneError::Unexpected(
            "its rule never came true".to_owned(),
        )),
    }
}

/// Names of all points that any process passed.
fn hits(records: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(records).into_iter().flatten().flatten();
    let texts = entries.filter_map(|entry| fs::read_to_string(entry.path()).ok());
    let mut hit = BTreeSet::new();
    for text in texts {
        let lines = text.lines().filter_map(|line| line.strip_prefix("hit "));
        hit.extend(lines.filter_map(|line| Some(line.split(' ').next()?.to_owned())));
    }
    hit
}
