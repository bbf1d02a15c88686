//! Figures with their reach, as a table and as JSON lines.

use std::{
    fs,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use comfy_table::{Table, presets::UTF8_BORDERS_ONLY};
use flextensord_tests::SceneError;
use serde_json::json;

/// One figure.
struct Figure {
    what: &'static str,
    seen: f64,
    unit: &'static str,
    reach: f64,
    /// Whether more is better.
    more: bool,
}

/// All figures of a run.
pub(crate) struct Figures {
    list: Vec<Figure>,
    machine: String,
}

impl Figures {
    pub(crate) fn new() -> Self {
        Self {
            list: Vec::new(),
            machine: machine(),
        }
    }

    /// A figure that should stay at most at `reach`.
    pub(crate) fn at_most(
        &mut self,
        what: &'static str,
        seen: f64,
        unit: &'static str,
        reach: f64,
    ) {
        self.add(Figure {
            what,
            seen,
            unit,
            reach,
            more: false,
        });
    }

    /// A figure that should come to at least `reach`.
    pub(crate) fn at_least(
        &mut self,
        what: &'static str,
        seen: f64,
        unit: &'static str,
        reach: f64,
    ) {
        self.add(Figure {
            what,
            seen,
            unit,
            reach,
            more: true,
        });
    }

    /// A figure for orientation.
    pub(crate) fn reference(&mut self, what: &'static str, seen: f64, unit: &'static str) {
        self.add(Figure {
            what,
            seen,
            unit,
            reach: f64::NAN,
            more: true,
        });
    }

    fn add(&mut self, figure: Figure) {
        eprintln!("{}: {:.3} {}", figure.what, figure.seen, figure.unit);
        self.list.push(figure);
    }

    /// One JSON object a line.
    pub(crate) fn write(&self, path: &Path) -> Result<(), SceneError> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs();
        let lines: Vec<String> = self
            .list
            .iter()
            .map(|figure| {
                let reach = (!figure.reach.is_nan()).then_some(figure.reach);
                json!({
                    "what": figure.what, "seen": figure.seen, "unit": figure.unit,
                    "reach": reach, "more_is_better": figure.more, "machine": self.machine,
                    "unix_time": now,
                })
                .to_string()
            })
            .collect();
        fs::write(path, lines.join("\n") + "\n")
            .map_err(|e| SceneError::io(path.display().to_string(), e))
    }

    /// For people.
    pub(crate) fn table(&self) -> String {
        let mut table = Table::new();
        table
            .load_style(UTF8_BORDERS_ONLY)
            .set_header(["what", "seen", "reach", ""]);
        for figure in &self.list {
            let held = if figure.more {
                figure.seen >= figure.reach
            } else {
                figure.seen <= figure.reach
            };
            let (reach, mark) = if figure.reach.is_nan() {
                (String::new(), "")
            } else {
                let sign = if figure.more { ">=" } else { "<=" };
                (
                    format!("{sign} {} {}", figure.reach, figure.unit),
                    if held { "" } else { "short" },
                )
            };
            let seen = format!("{:.3} {}", figure.seen, figure.unit);
            table.add_row([figure.what, &seen, &reach, mark]);
        }
        format!("{}\n{table}", self.machine)
    }
}

/// The processor, its cores, and the kernel.
fn machine() -> String {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let info = read("/proc/cpuinfo");
    let model = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = read("/proc/sys/kernel/osrelease");
    let model = model.map_or("unknown processor", |(_, name)| name);
    format!("{model}, {cores} cores, Linux {}", kernel.trim())
}

/// The median of some times, in seconds.
pub(crate) fn median(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    times
        .get(times.len() / 2)
        .map_or(f64::NAN, Duration::as_secs_f64)
}
