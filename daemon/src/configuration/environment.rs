//! The layer of environment variables.

use flextensord_device::failpoint;

use super::{
    error::ConfigurationError,
    key::{Key, nearest},
    layer::{Layer, Origin},
};

/// Names the configuration file, as `--config` does.
pub(super) const CONFIG: &str = "FLEXTENSORD_CONFIG";
/// Read by clients alone, but often set for a whole container.
const OF_CLIENTS: &str = "FLEXTENSORD_SOCKET";
const PREFIX: &str = "FLEXTENSORD_";

/// Environment variables, as far as the configuration needs them.
pub trait Environment {
    /// The value of `name`.
    ///
    /// # Errors
    /// When it is not UTF-8.
    fn get(&self, name: &str) -> Result<Option<String>, NotUnicode>;

    /// The names of all variables.
    fn names(&self) -> Vec<String>;
}

/// A variable's value is no text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotUnicode;

/// The environment of this process.
#[derive(Debug, Clone, Copy)]
pub struct ProcessEnvironment;

impl Environment for ProcessEnvironment {
    fn get(&self, name: &str) -> Result<Option<String>, NotUnicode> {
        match std::env::var(name) {
            Ok(text) => Ok(Some(text)),
            Err(std::env::VarError::NotPresent) => Ok(None),
            Err(std::env::VarError::NotUnicode(_)) => Err(NotUnicode),
        }
    }

    fn names(&self) -> Vec<String> {
        std::env::vars_os()
            .map(|(name, _)| name.to_string_lossy().into_owned())
            .collect()
    }
}

/// The value of one variable.
pub(super) fn value(
    environment: &dyn Environment,
    name: &str,
) -> Result<Option<String>, ConfigurationError> {
    environment
        .get(name)
        .map_err(|NotUnicode| ConfigurationError::NotUnicode { name: name.into() })
}

/// What the `FLEXTENSORD_*` variables say.
pub(super) fn layer(environment: &dyn Environment) -> Result<Layer, ConfigurationError> {
    let mut layer = Layer::default();
    for name in environment.names() {
        let Some(rest) = name.strip_prefix(PREFIX) else {
            continue;
        };
        if name == CONFIG || name == OF_CLIENTS || is_of_cluster(rest) || is_of_failpoints(&name) {
            continue;
        }
        let Some(key) = Key::ALL.into_iter().find(|key| key.variable() == name) else {
            let known = Key::ALL.into_iter().map(Key::variable);
            let nearest = nearest(&name, known.chain([CONFIG.to_owned()]));
            return Err(ConfigurationError::UnknownVariable { name, nearest });
        };
        if let Some(text) = value(environment, &name)? {
            layer.set(key, text, Origin::Environment { variable: name });
        }
    }
    Ok(layer)
}

/// Where nobody would obey them they are as wrong as any other.
fn is_of_failpoints(name: &str) -> bool {
    failpoint::COMPILED_IN && [failpoint::RULES, failpoint::HITS].contains(&name)
}

/// Kubernetes gives every pod such variables for a Service named `flextensord`; nobody
/// mistyped them.
fn is_of_cluster(rest: &str) -> bool {
    rest == "PORT" || rest.starts_with("PORT_") || rest.starts_with("SERVICE_")
}
