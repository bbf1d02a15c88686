//! One layer of the configuration: texts, each with where it came from.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use super::key::Key;

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// Nobody gave it.
    Default,
    /// A line of a file.
    File {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
    },
    /// An environment variable.
    Environment {
        /// Its name.
        variable: String,
    },
    /// A flag.
    Flag {
        /// Its name, with dashes.
        flag: String,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "file {} line {line}", path.display()),
            Self::Environment { variable } => write!(f, "environment {variable}"),
            Self::Flag { flag } => write!(f, "flag {flag}"),
        }
    }
}

/// A value as it was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given {
    /// Its text.
    pub text: String,
    /// Who gave it.
    pub origin: Origin,
}

/// A layer: for each key a value, or none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layer(BTreeMap<Key, Given>);

impl Layer {
    /// The value of `key`, if this layer has one.
    #[must_use]
    pub fn get(&self, key: Key) -> Option<&Given> {
        self.0.get(&key)
    }

    /// Gives `key` a value.
    pub fn set(&mut self, key: Key, text: impl Into<String>, origin: Origin) {
        let text = text.into();
        self.0.insert(key, Given { text, origin });
    }

    /// Gives `key` a value where it has none: for commands that need less than the
    /// daemon does.
    pub fn assume(&mut self, key: Key, text: &str) {
        if self.get(key).is_none() {
            self.set(key, text, Origin::Default);
        }
    }

    /// This layer with `above` laid over it.
    #[must_use]
    pub fn under(mut self, above: Self) -> Self {
        self.0.extend(above.0);
        self
    }
}
