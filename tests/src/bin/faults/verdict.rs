//! What a client may come to. The one place that knows whether a successor takes over.

use flextensord_device::failpoint::Stage;
use serde_json::Value;

use crate::cell::{Action, Cell};

/// Whether a successor takes over what a dead daemon left.
pub(crate) const ADOPTS: bool = true;

/// How a reader ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All passes, all bytes right.
    Done,
    /// `LEASE_LOST` or `DAEMON_LOST`.
    Lost(String),
    /// Another error of a kind that a program can act on.
    Refused(String),
    /// It was killed.
    Killed,
    /// Wrong bytes, or an end that says nothing.
    Wrong(String),
}

impl Outcome {
    /// From the last that a reader said.
    pub(crate) fn of(last: &Value) -> Self {
        let text = last["error"].as_str().unwrap_or_default().to_owned();
        match (last["event"].as_str(), last["why"].as_str()) {
            (Some("done"), _) => Self::Done,
            (Some("failed"), Some("lost")) => Self::Lost(text),
            (Some("failed"), Some("refused" | "connection" | "late" | "kernel")) => {
                Self::Refused(text)
            }
            _ => Self::Wrong(last.to_string()),
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Lost(_) => "lost",
            Self::Refused(_) => "refused",
            Self::Killed => "killed",
            Self::Wrong(_) => "wrong",
        }
    }
}

/// Which part a reader plays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Its own process has the fail point.
    Victim,
    /// Every other.
    Neighbour,
}

/// Whether an error says that a rule was obeyed.
pub(crate) fn is_injected(text: &str) -> bool {
    text.contains("fail point") || text.contains("os error 5)")
}

/// Whether a reader that had registered may have come to this. Before it has, any error but
/// wrong bytes lets it begin again.
pub(crate) fn may(cell: Option<Cell>, role: Role, outcome: &Outcome) -> bool {
    let Some(cell) = cell else {
        return *outcome == Outcome::Done;
    };
    match (role, outcome) {
        (_, Outcome::Done) => true,
        (_, Outcome::Wrong(_)) => false,
        (Role::Victim, Outcome::Killed) => cell.action.kills(),
        (Role::Neighbour, Outcome::Killed) => false,
        // its own step failed, and it was told
        (Role::Victim, _) => !cell.action.kills(),
        // another client's end is nobody's business, unless the daemon was killed for it
        (Role::Neighbour, _) if cell.is_of_client() => !ADOPTS,
        (Role::Neighbour, outcome) => match (cell.point.stage(), cell.action) {
            // what cannot be taken over is lost, and is said to be
            (Stage::Adopt, Action::FailsOnce | Action::FailsAlways) => true,
            (_, Action::FailsOnce | Action::FailsAlways) => match outcome {
                Outcome::Refused(text) => is_injected(text) || cell.action == Action::FailsAlways,
                _ => false,
            },
            _ => !ADOPTS,
        },
    }
}
