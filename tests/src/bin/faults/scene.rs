//! What is played in each cell: loads, two clients that compare every byte while a set
//! comes and goes, a stop; then the same once more without faults, and a look at what is
//! left.

use std::{
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use flextensord_device::failpoint::{Point, Stage};
use flextensord_tests::{
    SceneError, checkpoint,
    daemon::Daemon,
    figures::{Figures, at_rest, nothing_left},
    supervisor::Supervisor,
};
use nix::sys::signal::Signal;

use crate::{
    cell::{Action, Cell, Machine},
    operator::Operator,
    reading::{self, Reading},
    verdict::{Outcome, Role},
};

/// How a cell went.
#[derive(Debug)]
pub(crate) struct Played {
    /// How each client ended.
    pub(crate) outcomes: Vec<Outcome>,
    /// What the daemon had once everybody was gone.
    pub(crate) figures: Figures,
}

/// The checkpoints of a cell.
pub(crate) struct Files {
    pub(crate) model: PathBuf,
    pub(crate) other: PathBuf,
}

impl Files {
    fn write(directory: &Path) -> Result<Self, SceneError> {
        let files = Self {
            model: directory.join("model.safetensors"),
            other: directory.join("other.safetensors"),
        };
        checkpoint::write(&files.model, &checkpoint::layered(8, 2, 400_000))?;
        checkpoint::write(&files.other, &checkpoint::layered(2, 1, 50_000))?;
        Ok(files)
    }
}

/// Plays a cell, or the same without a fault; what a daemon has at the end must be within
/// `limit`. The record of the points passed goes to `record`.
pub(crate) fn play(
    machine: Machine,
    cell: Option<Cell>,
    limit: Option<Figures>,
    record: &Path,
) -> Result<Played, SceneError> {
    let mut daemon = start(machine)?;
    let files = Files::write(daemon.scratch())?;
    let stage = cell.map(|cell| cell.point.stage());
    let operator = Operator::new(&daemon, cell);
    let mut reading = Reading::new(machine, cell, &operator.socket, &files.model, record);
    if stage == Some(Stage::Adopt) {
        operator.load(&files.model, "model")?;
        reading.begin(Role::Neighbour, &reading::STEADY);
        reading.until_registered()?;
    }
    daemon.crash()?;
    let rules = cell.filter(|cell| !cell.is_of_client()).map(Cell::rule);
    daemon.rearm(&rules.unwrap_or_default(), record)?;
    let supervisor = Supervisor::new(daemon);
    // a set that cannot be had is one that nobody can read
    if operator.load(&files.model, "model")? {
        reading.begin(Role::Neighbour, &reading::STEADY);
        reading.begin(Role::Neighbour, &reading::OVER_RPC);
        if cell.is_some_and(Cell::is_of_client) {
            reading.begin(Role::Victim, &reading::VICTIM);
        }
        let resumes = [Some(Point::ClientResume), Some(Point::ClientResumed)];
        if resumes.contains(&cell.map(|cell| cell.point)) {
            reading.until_registered()?;
            supervisor.crash()?;
        }
        if operator.load(&files.other, "other")? {
            operator.drop_set("other")?;
        }
    }
    let outcomes = reading.finish()?;
    let (_, codes) = supervisor.ends();
    // one that cannot start says so; every other end but that of the rule is a finding
    if stage != Some(Stage::Start) && !codes.is_empty() {
        let text = format!("the daemon ended by itself with {codes:?}");
        return Err(SceneError::Unexpected(text));
    }
    let mut daemon = supervisor.release()?;
    let always = cell.is_some_and(|cell| cell.action == Action::FailsAlways);
    if stage == Some(Stage::Stop) || always && cell.is_some_and(|cell| !cell.is_of_client()) {
        stop(&mut daemon, stage == Some(Stage::Stop))?;
        daemon.respawn()?;
    }
    let figures = once_more(&mut daemon, machine, &files, limit)?;
    Ok(Played { outcomes, figures })
}

fn start(machine: Machine) -> Result<Daemon, SceneError> {
    let common = [
        "--log",
        "error",
        "--client-patience",
        "10s",
        "--resume-grace",
        "500ms",
    ];
    match machine {
        Machine::Cpu => {
            let own = ["--poison-released", "true", "--cpu-memory", "32MiB"];
            Daemon::start(&[&common[..], &own[..]].concat())
        }
        Machine::Fake => Daemon::start_on_fake("gpus=1,memory=64MiB", &common),
    }
}

/// Stops the daemon, which leaves nothing unless it was to be killed while it stopped.
fn stop(daemon: &mut Daemon, may_be_killed: bool) -> Result<(), SceneError> {
    daemon.signal(Signal::SIGTERM)?;
    let end = daemon.wait()?;
    if may_be_killed && end.signal() == Some(9) {
        return Ok(());
    }
    if !end.success() {
        return Err(SceneError::Unexpected(format!("a stop ended with {end}")));
    }
    nothing_left(daemon)
}

/// The same without faults: all is right, all comes back, and nothing stays.
fn once_more(
    daemon: &mut Daemon,
    machine: Machine,
    files: &Files,
    limit: Option<Figures>,
) -> Result<Figures, SceneError> {
    let operator = Operator::new(daemon, None);
    operator.load(&files.model, "model")?;
    let mut reading = Reading::new(machine, None, &operator.socket, &files.model, Path::new(""));
    reading.begin(Role::Victim, &reading::VICTIM);
    reading.finish()?;
    for set in operator.sets()? {
        operator.drop_set(&set)?;
    }
    // what is closing now is no leak
    thread::sleep(Duration::from_millis(20));
    let figures = at_rest(daemon, limit)?;
    stop(daemon, false)?;
    Ok(figures)
}
