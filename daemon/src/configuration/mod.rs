//! Configuration: flags over environment over file over defaults, complete and checked
//! before anything is bound.
//!
//! - [`key`]: which keys there are;
//! - [`mod@file`], [`environment`], [`flags`]: one layer each, as text;
//! - `value`: the rules that text must meet;
//! - [`settings`]: the layers put together: what the daemon runs by;
//! - [`show`]: the effective configuration and where each value came from.

pub mod environment;
pub mod error;
pub mod file;
pub mod flags;
pub mod key;
pub mod layer;
pub mod settings;
pub mod show;
mod value;

pub use environment::{Environment, ProcessEnvironment};
pub use error::ConfigurationError;
pub use flags::Flags;
pub use key::Key;
pub use layer::{Given, Layer, Origin};
pub use settings::{CpuSettings, DeviceKind, LogFormat, Pinning, Settings};

use std::path::{Path, PathBuf};

/// Where [`collect`] looks; everything about the machine is given, so that tests need
/// neither the process environment nor `/etc`.
pub struct Sources<'a> {
    /// The command line.
    pub flags: &'a Flags,
    /// Environment variables.
    pub environment: &'a dyn Environment,
    /// The directory of the file `<instance>.toml` that is read when none is named.
    pub etc: PathBuf,
    /// The user that the daemon runs as.
    pub uid: u32,
    /// Cores of the machine.
    pub cores: usize,
}

impl<'a> Sources<'a> {
    /// The sources of this process.
    #[must_use]
    pub fn of_process(flags: &'a Flags) -> Self {
        Self {
            flags,
            environment: &ProcessEnvironment,
            etc: PathBuf::from("/etc/flextensord"),
            uid: nix::unistd::geteuid().as_raw(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// The effective configuration.
///
/// # Errors
/// For the first key, variable or value that breaks a rule.
pub fn load(sources: &Sources<'_>) -> Result<Settings, ConfigurationError> {
    Settings::new(&collect(sources)?, sources)
}

/// The layers put together, not yet checked.
///
/// # Errors
/// When the file cannot be read or a name is unknown.
pub fn collect(sources: &Sources<'_>) -> Result<Layer, ConfigurationError> {
    let flags = sources.flags.layer();
    let environment = environment::layer(sources.environment)?;
    let above = environment.clone().under(flags);
    let named = match &sources.flags.config {
        Some(path) => Some(path.clone()),
        None => environment::value(sources.environment, environment::CONFIG)?.map(PathBuf::from),
    };
    let (instance, file) = match named {
        Some(path) => (None, file::read(&path)?),
        None => {
            let instance = value::instance(&above)?;
            let path = sources.etc.join(format!("{instance}.toml"));
            (Some(instance), read_if_present(&path)?)
        }
    };
    // the file of one instance must not quietly configure another
    if let (Some(instance), Some(given)) = (instance, file.get(Key::Instance))
        && given.text != instance
    {
        let rule = format!("must be absent or {instance:?} in the file of that instance");
        return Err(value::bad(Key::Instance, given, rule));
    }
    Ok(file.under(above))
}

fn read_if_present(path: &Path) -> Result<Layer, ConfigurationError> {
    match file::read(path) {
        Err(ConfigurationError::Read { source, .. })
            if source.kind() == std::io::ErrorKind::NotFound =>
        {
            Ok(Layer::default())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests;
