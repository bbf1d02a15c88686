//! The clients of a cell: each in a process of its own, begun again as long as it has not
//! registered, and judged by how it ended after that.

use std::{
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    sync::mpsc,
    thread::{self, JoinHandle},
    time::Duration,
};

use flextensord_tests::{
    SceneError,
    reader::{Reader, ReaderPlan},
};

use crate::{
    cell::{Action, Cell, Machine},
    verdict::{Outcome, Role, is_injected, may},
};

/// Longest silence of a client: each of its waits is bounded below that.
const SILENCE: Duration = Duration::from_secs(60);
/// How often one begins again.
const BEGINNINGS: usize = 40;
/// Before it does.
const PAUSE: Duration = Duration::from_millis(100);

/// Flags of a reader.
pub(crate) type Habit = [(&'static str, &'static str)];

/// Goes on for about a second, in any order.
pub(crate) const STEADY: [(&str, &str); 4] = [
    ("--order", "random"),
    ("--via", "mixed"),
    ("--passes", "15"),
    ("--rest", "40"),
];
/// Asks the daemon for each layer.
pub(crate) const OVER_RPC: [(&str, &str); 2] = [("--via", "rpc"), ("--passes", "3")];
/// Has a name that must be free again, whatever it dies of.
pub(crate) const VICTIM: [(&str, &str); 5] = [
    ("--manager", "victim"),
    ("--order", "random"),
    ("--via", "mixed"),
    ("--passes", "8"),
    ("--rest", "20"),
];

/// All clients of a cell.
pub(crate) struct Reading {
    client: Client,
    threads: Vec<JoinHandle<Result<Outcome, SceneError>>>,
    registered: Vec<mpsc::Receiver<()>>,
}

/// What is the same for all of them.
#[derive(Clone)]
struct Client {
    machine: Machine,
    cell: Option<Cell>,
    socket: PathBuf,
    model: PathBuf,
    record: PathBuf,
}

impl Reading {
    pub(crate) fn new(
        machine: Machine,
        cell: Option<Cell>,
        socket: &Path,
        model: &Path,
        record: &Path,
    ) -> Self {
        let client = Client {
            machine,
            cell,
            socket: socket.to_owned(),
            model: model.to_owned(),
            record: record.to_owned(),
        };
        Self {
            client,
            threads: Vec::new(),
            registered: Vec::new(),
        }
    }

    /// Starts one more.
    pub(crate) fn begin(&mut self, role: Role, habit: &'static Habit) {
        let client = self.client.clone();
        let (tell, told) = mpsc::channel();
        self.registered.push(told);
        self.threads
            .push(thread::spawn(move || client.live(role, habit, &tell)));
    }

    /// Waits until all have registered, or ended.
    pub(crate) fn until_registered(&self) -> Result<(), SceneError> {
        for told in &self.registered {
            match told.recv_timeout(SILENCE) {
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let text = "a client does not come to register".to_owned();
                    return Err(SceneError::Unexpected(text));
                }
                Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => {}
            }
        }
        Ok(())
    }

    /// Waits for the end of all, each one that it may come to.
    pub(crate) fn finish(self) -> Result<Vec<Outcome>, SceneError> {
        let ended = |_| SceneError::Unexpected("a thread of the test ended".to_owned());
        let all = self.threads.into_iter();
        all.map(|thread| thread.join().map_err(ended)?).collect()
    }
}

impl Client {
    fn live(
        &self,
        role: Role,
        habit: &Habit,
        registered: &mpsc::Sender<()>,
    ) -> Result<Outcome, SceneError> {
        let mut injected = 0;
        for beginning in 0..BEGINNINGS {
            let (outcome, has_registered) = self.run(role, habit, registered, beginning == 0)?;
            let told = matches!(&outcome, Outcome::Refused(text) if is_injected(text));
            injected += usize::from(told);
            let begins_again = match &outcome {
                Outcome::Refused(_) | Outcome::Lost(_) => !has_registered,
                _ => false,
            };
            let once = self
                .cell
                .is_some_and(|cell| cell.action == Action::FailsOnce);
            if !begins_again && !may(self.cell, role, &outcome) {
                let text = format!("{role:?}: {outcome:?}");
                return Err(SceneError::Unexpected(text));
            }
            // a step that failed once works the next time
            if !(begins_again || once && outcome != Outcome::Done) {
                return Ok(outcome);
            }
            if injected >= 3 && !once {
                return Ok(outcome);
            }
            thread::sleep(PAUSE);
        }
        let text = format!("{role:?} began {BEGINNINGS} times and never registered");
        Err(SceneError::Unexpected(text))
    }

    /// One process: how it ended, and whether it had registered.
    fn run(
        &self,
        role: Role,
        habit: &Habit,
        registered: &mpsc::Sender<()>,
        is_first: bool,
    ) -> Result<(Outcome, bool), SceneError> {
        let always = self
            .cell
            .is_some_and(|cell| cell.action == Action::FailsAlways);
        let mut plan = ReaderPlan::new("model", &self.model)
            // most of the model streams
            .with("--budget", 4 << 20)
            .with("--limit", if always { 3 } else { 20 });
        for (flag, value) in habit {
            plan = plan.with(flag, value);
        }
        if self.machine == Machine::Fake {
            plan.flags.push("--on-fake".to_owned());
        }
        if let Some(cell) = self.cell {
            let is_armed = role == Role::Victim && (is_first || always);
            let rules = Some(cell.rule()).filter(|_| is_armed);
            plan = plan.armed(&rules.unwrap_or_default(), &self.record);
        }
        let mut reader = Reader::start_at(&self.socket, &plan)?;
        let mut has_registered = false;
        while let Some(event) = reader.next_event(SILENCE)? {
            if event["event"] != "registered" {
                reader.wait(SILENCE)?;
                return Ok((Outcome::of(&event), has_registered));
            }
            if event["streamed_bytes"].as_u64().unwrap_or(0) == 0 {
                let text = "nothing streams".to_owned();
                return Err(SceneError::Unexpected(text));
            }
            has_registered = true;
            // nobody may listen
            let _: Result<(), mpsc::SendError<()>> = registered.send(());
        }
        let end = reader.wait(SILENCE)?;
        let outcome = match end.signal() {
            Some(9) => Outcome::Killed,
            _ => Outcome::Wrong(format!("ended with {end} and said nothing")),
        };
        Ok((outcome, has_registered))
    }
}
