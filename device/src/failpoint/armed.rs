//! Rules from the environment, and the record of what was passed.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
};

use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::getpid,
};

use super::{HITS, Point, RULES};
use crate::kernel::KernelError;

/// What is to be done at a point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rule {
    kills: bool,
    /// At this passage, counted from 1.
    first: u64,
    /// And at all later ones.
    onward: bool,
}

impl Rule {
    /// Reads `kill`, `kill@3`, `fail`, `fail@3`, `fail*`, `fail@3*`.
    fn from_text(text: &str) -> Option<Self> {
        let (text, onward) = match text.strip_suffix('*') {
            Some(rest) => (rest, true),
            None => (text, false),
        };
        let (action, first) = match text.split_once('@') {
            Some((action, number)) => (action, number.parse().ok().filter(|n| *n > 0)?),
            None => (text, 1),
        };
        let kills = match action {
            "kill" => true,
            "fail" => false,
            _ => return None,
        };
        Some(Self {
            kills,
            first,
            onward,
        })
    }

    fn counts(self, passage: u64) -> bool {
        passage == self.first || self.onward && passage > self.first
    }
}

/// Reads rules such as `seal=kill;submit=fail@3;journal=fail*`.
fn rules(text: &str) -> Result<Vec<(Point, Rule)>, String> {
    let items = text.split(';').filter(|item| !item.is_empty());
    items
        .map(|item| {
            let (name, rule) = item.split_once('=').unwrap_or((item, ""));
            let point = Point::named(name).ok_or_else(|| format!("no point {name:?}"))?;
            let rule = Rule::from_text(rule)
                .ok_or_else(|| format!("{item:?}: kill or fail, then @N, then *"))?;
            Ok((point, rule))
        })
        .collect()
}

struct Armed {
    rules: Vec<(Point, Rule)>,
    passages: Vec<AtomicU64>,
    record: Option<File>,
}

impl Armed {
    fn of_process() -> io::Result<Self> {
        let text = std::env::var(RULES).unwrap_or_default();
        let refused = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        let record = std::env::var_os(HITS)
            .map(|path| OpenOptions::new().append(true).create(true).open(path))
            .transpose()?;
        Ok(Self {
            rules: rules(&text).map_err(refused)?,
            passages: Point::ALL.iter().map(|_| AtomicU64::new(0)).collect(),
            record,
        })
    }

    /// One write a line: the lines of several processes do not mix.
    fn note(&self, what: &str, point: Point, passage: u64) {
        if let Some(mut record) = self.record.as_ref() {
            let line = format!("{what} {} {passage}\n", point.name());
            // a record that cannot be written shows as points that were never hit
            let _: io::Result<()> = record.write_all(line.as_bytes());
        }
    }
}

fn armed() -> Option<&'static Armed> {
    static ARMED: OnceLock<Option<Armed>> = OnceLock::new();
    let read = || match Armed::of_process() {
        Ok(armed) => Some(armed),
        Err(error) => {
            // a run with rules that nobody obeys would prove nothing
            let _: io::Result<()> = writeln!(io::stderr(), "{RULES}: {error}");
            die();
            None
        }
    };
    ARMED.get_or_init(read).as_ref()
}

/// As `kill -9` does: no destructor runs, nothing is flushed.
fn die() {
    // there is nothing else that can be done if the kernel refuses
    let _: nix::Result<()> = kill(getpid(), Signal::SIGKILL);
}

pub(super) fn pass(point: Point) -> Result<(), KernelError> {
    let Some(armed) = armed() else {
        return Ok(());
    };
    let index = point as usize;
    let passage = armed.passages[index].fetch_add(1, SeqCst) + 1;
    if passage == 1 {
        armed.note("hit", point, passage);
    }
    let mut rules = armed.rules.iter().filter(|(of, _)| *of == point);
    match rules.find(|(_, rule)| rule.counts(passage)) {
        Some((_, rule)) if rule.kills => {
            armed.note("kill", point, passage);
            die();
            Ok(())
        }
        Some(_) => {
            armed.note("fail", point, passage);
            let operation = format!("pass the fail point {}", point.name());
            Err(KernelError::new(operation, Errno::EIO))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_say_what_happens_at_which_passage() {
        let read = rules("seal=kill;submit=fail@3;journal=fail*;load=fail@2*").unwrap();
        let at = |index: usize| -> Vec<u64> {
            let rule: Rule = read[index].1;
            (1..5).filter(|passage| rule.counts(*passage)).collect()
        };
        assert_eq!(read[0].0, Point::Seal);
        assert!(read[0].1.kills && !read[1].1.kills);
        assert_eq!([at(0), at(1)], [[1], [3]]);
        assert_eq!(at(2), [1, 2, 3, 4]);
        assert_eq!(at(3), [2, 3, 4]);
        assert_eq!(rules("").unwrap(), []);
    }

    #[test]
    fn rules_that_nobody_could_obey_are_refused() {
        for text in [
            "sael=kill",
            "seal",
            "seal=die",
            "seal=fail@0",
            "seal=fail@x",
        ] {
            assert!(rules(text).is_err(), "{text}");
        }
    }

    #[test]
    fn no_two_points_have_one_name() {
        let mut names: Vec<_> = Point::ALL.iter().map(|point| point.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Point::ALL.len());
    }
}
