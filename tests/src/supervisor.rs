//! A daemon that is started again as soon as it has ended, as a supervisor does.

use std::{
    os::unix::process::ExitStatusExt as _,
    path::PathBuf,
    process::ExitStatus,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use crate::{SceneError, daemon::Daemon};

/// Between two looks.
const LOOK: Duration = Duration::from_millis(3);

/// A supervised daemon.
#[derive(Debug)]
pub struct Supervisor {
    shared: Arc<Shared>,
    socket: PathBuf,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    daemon: Mutex<Option<Daemon>>,
    ends: Mutex<Vec<ExitStatus>>,
    is_over: AtomicBool,
}

impl Shared {
    fn daemon(&self) -> MutexGuard<'_, Option<Daemon>> {
        self.daemon.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ends(&self) -> MutexGuard<'_, Vec<ExitStatus>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self) -> Result<(), SceneError> {
        if let Some(daemon) = self.daemon().as_mut()
            && let Some(end) = daemon.ended()?
        {
            self.ends().push(end);
            daemon.respawn()?;
        }
        Ok(())
    }
}

impl Supervisor {
    /// Begins to watch `daemon`.
    #[must_use]
    pub fn new(daemon: Daemon) -> Self {
        let socket = daemon.socket();
        let shared = Arc::new(Shared {
            daemon: Mutex::new(Some(daemon)),
            ends: Mutex::default(),
            is_over: AtomicBool::new(false),
        });
        let theirs = Arc::clone(&shared);
        let watch = move || {
            while !theirs.is_over.load(SeqCst) {
                // one that cannot be started shows as one that nobody can connect to
                drop(theirs.look());
                thread::sleep(LOOK);
            }
        };
        Self {
            shared,
            socket,
            thread: Some(thread::spawn(watch)),
        }
    }

    /// Where the daemon serves, or will.
    #[must_use]
    pub fn socket(&self) -> &PathBuf {
        &self.socket
    }

    /// Kills the daemon; a successor is started at once.
    ///
    /// # Errors
    /// When it cannot be killed.
    pub fn crash(&self) -> Result<(), SceneError> {
        match self.shared.daemon().as_mut() {
            Some(daemon) => daemon.crash(),
            None => Ok(()),
        }
    }

    /// How often a daemon was killed, and with which status others ended by themselves.
    #[must_use]
    pub fn ends(&self) -> (usize, Vec<i32>) {
        let ends = self.shared.ends();
        let killed = ends.iter().filter(|end| end.signal() == Some(9)).count();
        let codes = ends.iter().filter_map(ExitStatus::code).collect();
        (killed, codes)
    }

    /// Watches no more, and gives the daemon as it is now.
    ///
    /// # Errors
    /// Never in practice: the daemon is there until this takes it.
    pub fn release(mut self) -> Result<Daemon, SceneError> {
        self.stop();
        // one that died after the last look is started once more
        self.shared.look()?;
        let daemon = self.shared.daemon().take();
        daemon.ok_or_else(|| SceneError::Unexpected("no daemon is supervised".to_owned()))
    }

    fn stop(&mut self) {
        self.shared.is_over.store(true, SeqCst);
        if let Some(thread) = self.thread.take() {
            // it does not panic
            let _: thread::Result<()> = thread.join();
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.stop();
    }
}
