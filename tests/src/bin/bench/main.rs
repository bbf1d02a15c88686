//! Figures of this machine: each is measured beside its reference in the same run. Judged
//! by people, never by a test.
#![forbid(unsafe_code)]

mod control;
mod figures;
mod idle;
mod loading;
mod planner;
mod prediction;
mod streaming;

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use flextensord_tests::SceneError;

use figures::Figures;

/// What to measure, and with what.
#[derive(Debug, Parser)]
struct Flags {
    /// The daemon's binary.
    #[arg(long)]
    daemon: PathBuf,
    /// File that gets one JSON line a figure.
    #[arg(long)]
    results: PathBuf,
    /// Idle for 3 s instead of 60 s before the wake-up.
    #[arg(long)]
    quick: bool,
}

fn main() -> ExitCode {
    match run(&Flags::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(flags: &Flags) -> Result<(), SceneError> {
    let mut figures = Figures::new();
    control::measure(&flags.daemon, &mut figures)?;
    streaming::measure(&flags.daemon, &mut figures)?;
    loading::measure(&flags.daemon, &mut figures)?;
    planner::measure(&mut figures)?;
    prediction::measure(&flags.daemon, &mut figures)?;
    idle::measure(&flags.daemon, flags.quick, &mut figures)?;
    figures.write(&flags.results)?;
    println!("{}", figures.table());
    Ok(())
}
