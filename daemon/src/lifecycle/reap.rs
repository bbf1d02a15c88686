//! Removing what daemons of an instance left, when there is to be no successor.

use crate::{configuration::Settings, managers::record, state::StateDirectory, weights::leftovers};

use super::{
    directory::Directory,
    instance::{StartError, refuse_living},
    lock::InstanceLock,
};

/// What was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reaped {
    /// Segments of weight sets.
    pub segments: usize,
    /// Managers that waited for a successor.
    pub managers: usize,
}

/// Removes segments and state that no daemon holds any more. Processes that still map
/// segments keep the memory until they end.
///
/// # Errors
/// [`super::lock::LockError::Held`] while a daemon serves the instance, and when a
/// directory cannot be read or a file not be removed.
pub fn reap(settings: &Settings) -> Result<Reaped, StartError> {
    let failed = |error: Box<dyn std::error::Error + Send + Sync>| {
        StartError::setup("remove what a daemon left", error)
    };
    if !settings.directory().exists() {
        return Ok(Reaped {
            segments: 0,
            managers: 0,
        });
    }
    let directory = Directory::prepare(&settings.runtime_dir, &settings.instance)?;
    let _lock = InstanceLock::take(&directory.path.join("lock"))?;
    refuse_living(settings)?;
    let state = StateDirectory::open(&directory.state).map_err(|e| failed(e.into()))?;
    let segments = leftovers::discard(&settings.shm_dir, &settings.instance, &state, &[])
        .map_err(|e| failed(e.into()))?;
    let files = state.list().map_err(|e| failed(e.into()))?;
    let of_manager = files.iter().filter(|file| record::is_of_manager(file));
    let mut managers = 0;
    for file in of_manager {
        state.remove(file).map_err(|e| failed(e.into()))?;
        managers += usize::from(record::is_record(file));
    }
    Ok(Reaped { segments, managers })
}
