//! Verdicts, and how they are shown.

use serde::Serialize;
use serde_json::{Value, json};

use crate::lifecycle::Exit;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Nothing to do.
    Ok,
    /// The daemon works, but somebody may be surprised.
    Warn,
    /// The daemon cannot work.
    Fail,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What.
    pub name: &'static str,
    /// How bad it is.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What to change; empty when there is nothing.
    pub remedy: String,
}

impl Check {
    /// Nothing to do.
    pub fn ok(name: &'static str, found: impl Into<String>) -> Self {
        Self::new(name, Verdict::Ok, found, "")
    }

    /// Somebody may be surprised.
    pub fn warn(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(name, Verdict::Warn, found, remedy)
    }

    /// The daemon cannot work.
    pub fn fail(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(name, Verdict::Fail, found, remedy)
    }

    fn new(
        name: &'static str,
        verdict: Verdict,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Self {
            name,
            verdict,
            found: found.into(),
            remedy: remedy.into(),
        }
    }
}

/// All checks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report(pub Vec<Check>);

impl Report {
    /// The worst verdict.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let verdicts = self.0.iter().map(|check| check.verdict);
        verdicts.max().unwrap_or(Verdict::Ok)
    }

    /// 69 when a check has failed, else 0: a warning stops nobody.
    #[must_use]
    pub fn exit(&self) -> Exit {
        match self.verdict() {
            Verdict::Fail => Exit::Unavailable,
            Verdict::Ok | Verdict::Warn => Exit::Ok,
        }
    }

    /// For a person: a line a check, its remedy below it.
    #[must_use]
    pub fn text(&self) -> String {
        let width = self.0.iter().map(|c| c.name.len()).max().unwrap_or(0);
        let mut text = String::new();
        for check in &self.0 {
            let Check { name, found, .. } = check;
            let verdict = check.verdict.name();
            text.push_str(&format!("{verdict:<4}  {name:<width$}  {found}\n"));
            if !check.remedy.is_empty() {
                let indent = width + 8;
                text.push_str(&format!("{:indent$}-> {}\n", "", check.remedy));
            }
        }
        text
    }

    /// For a program.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({"verdict": self.verdict(), "checks": self.0})
    }
}
