//! What can be wrong with a configuration.

use std::{io, path::PathBuf};

use super::{key::Key, layer::Origin};

/// Why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigurationError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The file is no TOML.
    #[error("{} line {line}: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What the parser said.
        message: String,
    },
    /// A key of the file that does not exist.
    #[error("{} line {line}: unknown key {name:?}{}", path.display(), meant(nearest.as_deref()))]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The key.
        name: String,
        /// The key that was likely meant.
        nearest: Option<String>,
    },
    /// A variable that looks like ours and is none.
    #[error("unknown environment variable {name}{}", meant(nearest.as_deref()))]
    UnknownVariable {
        /// The variable.
        name: String,
        /// The variable that was likely meant.
        nearest: Option<String>,
    },
    /// A variable whose value is no text.
    #[error("environment variable {name} is not UTF-8")]
    NotUnicode {
        /// The variable.
        name: String,
    },
    /// A value that breaks its key's rule.
    #[error("{} = {text:?} ({origin}): {rule}", key.name())]
    Value {
        /// The key.
        key: Key,
        /// The value as given.
        text: String,
        /// Who gave it.
        origin: Origin,
        /// The rule that it breaks.
        rule: String,
    },
    /// A key without a default that nobody gave.
    #[error("{} is not set: {rule}", key.name())]
    Missing {
        /// The key.
        key: Key,
        /// How to set it.
        rule: String,
    },
    /// A unix socket cannot have a path so long.
    #[error(
        "the socket path {} has {length} bytes, over the limit of {limit}; \
         choose a shorter runtime_dir (--runtime-dir) or instance (--instance)",
        path.display()
    )]
    SocketPath {
        /// The path.
        path: PathBuf,
        /// Its bytes.
        length: usize,
        /// Most bytes.
        limit: usize,
    },
}

fn meant(nearest: Option<&str>) -> String {
    nearest.map_or_else(String::new, |name| format!("; did you mean {name}?"))
}
