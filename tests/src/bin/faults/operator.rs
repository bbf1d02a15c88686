//! Who loads and drops weight sets while others read: asks again when it was refused, as
//! long as that makes sense.

use std::{
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use flextensord_client::{ClientError, LoadOptions, blocking::Client, kind::Kind};
use flextensord_tests::{
    SceneError,
    daemon::{Daemon, options},
};

use crate::{
    cell::{Action, Cell},
    verdict::is_injected,
};

/// How long it is asked again.
const INSIST: Duration = Duration::from_secs(20);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(50);
/// How often a step that fails always is tried.
const TRIES: usize = 3;

/// Somebody with a shell.
pub(crate) struct Operator {
    pub(crate) socket: PathBuf,
    cell: Option<Cell>,
}

impl Operator {
    pub(crate) fn new(daemon: &Daemon, cell: Option<Cell>) -> Self {
        Self {
            socket: daemon.socket(),
            cell,
        }
    }

    /// Loads a set, or attaches to it. `false` when that fails always, as it was told to.
    pub(crate) fn load(&self, path: &Path, name: &str) -> Result<bool, SceneError> {
        let load = |client: &Client| client.load(path, name, &LoadOptions::default(), |_| ());
        Ok(self.insist("load", load)?.is_some())
    }

    /// Removes a set. That it is gone is as good: the answer to an earlier try may be lost.
    pub(crate) fn drop_set(&self, name: &str) -> Result<(), SceneError> {
        let drop_it = |client: &Client| match client.drop_weight_set(name) {
            Err(error) if error.kind() == Some(Kind::NotFound) => Ok(0),
            other => other,
        };
        self.insist("drop", drop_it).map(drop)
    }

    /// Names of all sets.
    pub(crate) fn sets(&self) -> Result<Vec<String>, SceneError> {
        let sets = self.insist("list", Client::weight_sets)?;
        Ok(sets
            .unwrap_or_default()
            .into_iter()
            .map(|set| set.name)
            .collect())
    }

    fn insist<T>(
        &self,
        what: &str,
        call: impl Fn(&Client) -> Result<T, ClientError>,
    ) -> Result<Option<T>, SceneError> {
        let begin = Instant::now();
        let mut injected = 0;
        loop {
            let answer = Client::connect(options(&self.socket)).and_then(|client| call(&client));
            let error = match answer {
                Ok(answer) => return Ok(Some(answer)),
                Err(error) => error,
            };
            injected += usize::from(is_injected(&error.to_string()));
            let always = self
                .cell
                .is_some_and(|cell| cell.action == Action::FailsAlways);
            if always && injected >= TRIES {
                return Ok(None);
            }
            if begin.elapsed() > INSIST {
                let text = format!("{what}: {error} for {INSIST:?}");
                return Err(SceneError::Unexpected(text));
            }
            thread::sleep(PAUSE);
        }
    }
}
