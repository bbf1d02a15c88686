//! One cell of the matrix: a point, a device, and what happens there.

use std::fmt;

use flextensord_device::failpoint::{Point, Stage, Way};

/// Where the daemon copies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Machine {
    /// The CPU device.
    Cpu,
    /// A GPU of the driver in host memory.
    Fake,
}

/// What happens at the point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Action {
    /// The process is killed at its first passage.
    Killed,
    /// The process is killed at a later passage.
    KilledLater,
    /// The first passage fails.
    FailsOnce,
    /// All passages fail.
    FailsAlways,
}

impl Action {
    pub(crate) const ALL: [Self; 4] = [
        Self::Killed,
        Self::KilledLater,
        Self::FailsOnce,
        Self::FailsAlways,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::KilledLater => "killed later",
            Self::FailsOnce => "fails once",
            Self::FailsAlways => "fails always",
        }
    }

    /// Whether it ends the process.
    pub(crate) fn kills(self) -> bool {
        matches!(self, Self::Killed | Self::KilledLater)
    }
}

/// A cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) machine: Machine,
    pub(crate) point: Point,
    pub(crate) action: Action,
}

/// Points that are passed often: there a later passage is another state, with copies,
/// words and holds of every kind about.
const OFTEN: [Point; 14] = [
    Point::Save,
    Point::SaveRename,
    Point::Saved,
    Point::Issue,
    Point::Submit,
    Point::Submitted,
    Point::Slot,
    Point::SlotWritten,
    Point::Acquire,
    Point::Acquired,
    Point::Release,
    Point::Released,
    Point::ClientAcquired,
    Point::ClientReleased,
];

impl Cell {
    /// All cells.
    pub(crate) fn all() -> Vec<Self> {
        let mut cells = Vec::new();
        for machine in [Machine::Cpu, Machine::Fake] {
            for &point in Point::ALL {
                for action in Action::ALL {
                    let cell = Self {
                        machine,
                        point,
                        action,
                    };
                    if cell.is_there() {
                        cells.push(cell);
                    }
                }
            }
        }
        cells
    }

    fn is_there(self) -> bool {
        // nobody waits on the host for a GPU
        let waits = (self.machine, self.point) != (Machine::Fake, Point::ClientWait);
        let acts = match self.action {
            Action::Killed => true,
            Action::KilledLater => OFTEN.contains(&self.point),
            Action::FailsOnce | Action::FailsAlways => self.point.way() == Way::Fail,
        };
        waits && acts
    }

    /// The rule for the process that it is about.
    pub(crate) fn rule(self) -> String {
        let action = match (self.action, self.point) {
            (Action::Killed, _) => "kill",
            // the second record is a manager's, the first a weight set's
            (Action::KilledLater, Point::Save | Point::SaveRename | Point::Saved) => "kill@2",
            (Action::KilledLater, _) => "kill@7",
            (Action::FailsOnce, _) => "fail",
            (Action::FailsAlways, _) => "fail*",
        };
        format!("{}={action}", self.point.name())
    }

    /// Whether it is about a client.
    pub(crate) fn is_of_client(self) -> bool {
        self.point.stage() == Stage::Client
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (machine, point) = (self.machine, self.point.name());
        write!(f, "{point} {} on {machine:?}", self.action.name())
    }
}
