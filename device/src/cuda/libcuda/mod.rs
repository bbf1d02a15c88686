//! The real driver, `libcuda.so.1`, loaded when a GPU is asked for and never before: every
//! other command works without one.

mod calls;
mod parameters;
#[cfg(test)]
mod tests;

use std::{
    error::Error as _,
    fmt, mem,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use libloading::Library;

use super::{
    code,
    driver::{Driver, Outcome},
    error::CudaError,
    symbols::{Found, Functions},
};

/// Names under which the driver installs its library. The first is what the CUDA runtime
/// opens, so a process that has PyTorch gets the very same; the second may be the stub of
/// a toolkit, which has every symbol and refuses to start.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// The driver of this process, once it has been loaded and started.
static LOADED: Mutex<Option<Arc<dyn Driver>>> = Mutex::new(None);

/// The CUDA driver: its functions, each looked up once. They may be called from any
/// thread; those that work on the current context use the calling thread's.
pub struct Libcuda {
    functions: Functions,
    origin: String,
}

impl fmt::Debug for Libcuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Libcuda")
            .field("origin", &self.origin)
            .finish_non_exhaustive()
    }
}

/// Loads and starts the driver. The first success is kept; a failure is tried again by
/// the next call, since a driver may be installed meanwhile.
///
/// # Errors
/// When there is no driver, it lacks a required symbol, or it cannot start.
pub fn load() -> Result<Arc<dyn Driver>, CudaError> {
    // the guarded value is either whole or absent, whatever a panicking thread did
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(driver) = &*loaded {
        return Ok(Arc::clone(driver));
    }
    let mut tried = Vec::new();
    for name in NAMES {
        match open(Path::new(name)) {
            Ok(library) => {
                let driver = start(library, name.to_owned())?;
                *loaded = Some(Arc::clone(&driver));
                return Ok(driver);
            }
            Err(error) => tried.push(error),
        }
    }
    Err(CudaError::NoDriver {
        tried: tried.join("; "),
    })
}

/// Loads and starts the driver in a given file.
///
/// # Errors
/// As [`load`].
pub fn load_from(path: &Path) -> Result<Arc<dyn Driver>, CudaError> {
    let library = open(path).map_err(|tried| CudaError::NoDriver { tried })?;
    start(library, path.display().to_string())
}

fn open(path: &Path) -> Result<Library, String> {
    // SAFETY: the initialisers of the library run here. The file is the system's CUDA
    // driver, or one that whoever runs this process has named in its place; there is
    // nothing else to be trusted about either.
    unsafe { Library::new(path) }.map_err(|error| match error.source() {
        // the loader's own words name the file
        Some(source) => source.to_string(),
        None => format!("{}: {error}", path.display()),
    })
}

fn start(library: Library, origin: String) -> Result<Arc<dyn Driver>, CudaError> {
    // SAFETY: it is a CUDA driver, as `open` says, and it is never unloaded once the table
    // is used: see below.
    let functions = unsafe { Functions::find(&library) }?;
    // the driver keeps threads and exit handlers once it has been started, so its code
    // must stay to the end of the process
    mem::forget(library);
    let Found { name, function } = functions.init;
    // SAFETY: takes flags, which must be 0; may be called by any thread, and again.
    check(name, unsafe { function(0) })?;
    Ok(Arc::new(Libcuda { functions, origin }))
}

/// The result of a call as an error where it is one.
fn check(call: &'static str, code: u32) -> Outcome<()> {
    match code {
        code::SUCCESS => Ok(()),
        code => Err(CudaError::Call { call, code }),
    }
}

/// The result of a question that may be answered with "not yet".
fn answer(call: &'static str, code: u32) -> Outcome<bool> {
    match code {
        code::NOT_READY => Ok(false),
        code => check(call, code).map(|()| true),
    }
}
