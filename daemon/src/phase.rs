//! The life cycle as a value that can be watched.

use tokio::sync::watch;

/// Where in its life a daemon is. Phases only follow one another downwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Directory, lock and sockets are taken, state is read; nobody is served.
    Starting,
    /// All services answer.
    Serving,
    /// Nothing new is begun; calls in progress end.
    Draining,
    /// Sockets, threads and memory go.
    Stopping,
    /// Nothing is left.
    Stopped,
}

impl Phase {
    /// Its name, as clients see it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Serving => "serving",
            Self::Draining => "draining",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
        }
    }

    /// Whether `next` may follow.
    #[must_use]
    pub fn may_become(self, next: Self) -> bool {
        use Phase::{Draining, Serving, Starting, Stopped, Stopping};
        matches!(
            (self, next),
            // a start that fails or is interrupted, and a fatal error, have nothing to drain
            (Starting, Serving | Stopping)
                | (Serving, Draining | Stopping)
                | (Draining, Stopping)
                | (Stopping, Stopped)
        )
    }
}

/// A phase that cannot follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("phase {} cannot follow {}", to.name(), from.name())]
pub struct PhaseError {
    /// The phase that holds.
    pub from: Phase,
    /// The phase asked for.
    pub to: Phase,
}

/// The phase of one daemon; clones share it.
#[derive(Debug, Clone)]
pub struct Life(watch::Sender<Phase>);

impl Life {
    /// A daemon that starts.
    #[must_use]
    pub fn new() -> Self {
        Self(watch::Sender::new(Phase::Starting))
    }

    /// The phase now.
    #[must_use]
    pub fn phase(&self) -> Phase {
        *self.0.borrow()
    }

    /// Goes on to `to`. Of several callers one succeeds.
    ///
    /// # Errors
    /// When `to` cannot follow the phase that holds; it stays.
    pub fn advance(&self, to: Phase) -> Result<(), PhaseError> {
        let mut refused = None;
        self.0.send_if_modified(|phase| {
            let allowed = phase.may_become(to);
            if allowed {
                tracing::info!(from = phase.name(), to = to.name(), "phase");
                *phase = to;
            } else {
                refused = Some(PhaseError { from: *phase, to });
            }
            allowed
        });
        refused.map_or(Ok(()), Err)
    }

    /// Sees each change from now on.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Phase> {
        self.0.subscribe()
    }

    /// Waits until `phase` or a later one holds, and returns that.
    pub async fn reached(&self, phase: Phase) -> Phase {
        let mut watch = self.watch();
        // the sender is ours, so the wait cannot fail
        watch
            .wait_for(|now| *now >= phase)
            .await
            .map_or(Phase::Stopped, |now| *now)
    }
}

impl Default for Life {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_follow_one_another_and_never_go_back() {
        use Phase::{Draining, Serving, Starting, Stopped, Stopping};
        let all = [Starting, Serving, Draining, Stopping, Stopped];
        let allowed = [
            (Starting, Serving),
            (Starting, Stopping),
            (Serving, Draining),
            (Serving, Stopping),
            (Draining, Stopping),
            (Stopping, Stopped),
        ];
        for from in all {
            for to in all {
                assert_eq!(from.may_become(to), allowed.contains(&(from, to)));
            }
        }
    }

    #[test]
    fn a_refused_phase_changes_nothing_and_wakes_nobody() {
        let life = Life::new();
        let watch = life.watch();
        let refusal = life.advance(Phase::Draining).unwrap_err();
        assert_eq!(refusal.to_string(), "phase draining cannot follow starting");
        assert_eq!(life.phase(), Phase::Starting);
        assert!(!watch.has_changed().unwrap());
    }

    #[tokio::test]
    async fn who_waits_for_a_phase_is_woken_by_a_later_one() {
        let life = Life::new();
        let waiting = tokio::spawn({
            let life = life.clone();
            async move { life.reached(Phase::Draining).await }
        });
        life.advance(Phase::Serving).unwrap();
        life.advance(Phase::Stopping).unwrap();
        assert_eq!(waiting.await.unwrap(), Phase::Stopping);
    }
}
