//! Blocking work of the domain on behalf of calls, its progress and its end.

use std::{sync::Arc, time::Duration};

use flextensord_proto::{
    kind::{Failure, Kind, Origin},
    v1,
};
use tokio::{
    sync::mpsc,
    task::{JoinHandle, spawn_blocking},
    time::{MissedTickBehavior, interval},
};
use tonic::Status;

use super::message::Viewer;
use crate::{
    service::idempotency::First,
    weights::{
        claim::BuildProgress,
        error::WeightError,
        load::Outcome,
        loader::{Cancel, Watch},
    },
};

/// How often progress is sent.
const PROGRESS: Duration = Duration::from_millis(100);
/// Runs blocking work of the domain.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, WeightError> + Send + 'static,
) -> Result<T, Failure> {
    joined(spawn_blocking(work).await)
}

fn joined<T>(result: Result<Result<T, WeightError>, tokio::task::JoinError>) -> Result<T, Failure> {
    match result {
        Ok(result) => Ok(result?),
        Err(e) => {
            let text = format!("work on a weight set ended: {e}");
            Err(Failure::new(Kind::Internal, Origin::Daemon, text))
        }
    }
}

/// Sends progress while `work` runs, then its end. Cancels it when the caller is gone.
pub(super) async fn report(
    mut work: JoinHandle<Result<Outcome, WeightError>>,
    watch: Arc<LoadWatch>,
    sender: mpsc::Sender<Result<v1::LoadProgress, Status>>,
    first: First<v1::Loaded>,
    viewer: Viewer,
) {
    let mut tick = interval(PROGRESS);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut sent = None;
    let mut is_gone = false;
    let result = loop {
        tokio::select! {
            biased;
            result = &mut work => break joined(result),
            () = sender.closed(), if !is_gone => {
                watch.cancel.set();
                is_gone = true;
            }
            _ = tick.tick(), if !is_gone => {
                let (bytes_done, bytes_total) = watch.progress.figures();
                let now = v1::Progress { bytes_done, bytes_total };
                let event = v1::LoadProgress {
                    event: Some(v1::load_progress::Event::Progress(now)),
                };
                // a client that does not read misses figures, and holds nothing up
                if sent != Some(now) && sender.try_send(Ok(event)).is_ok() {
                    sent = Some(now);
                }
            }
        }
    };
    let end = match result {
        Ok(outcome) => {
            let loaded = v1::Loaded {
                set: Some(viewer.message(&outcome.set)),
                attached: outcome.attached,
            };
            first.complete(loaded.clone());
            Ok(load_event(loaded))
        }
        Err(failure) => {
            drop(first);
            Err(failure.into())
        }
    };
    // the caller may be gone; then nobody is to be told
    let _: Result<_, _> = sender.send(end).await;
}

pub(super) fn load_event(loaded: v1::Loaded) -> v1::LoadProgress {
    v1::LoadProgress {
        event: Some(v1::load_progress::Event::Loaded(loaded)),
    }
}

/// Progress and cancellation of one load.
#[derive(Debug, Default)]
pub(super) struct LoadWatch {
    progress: BuildProgress,
    cancel: Cancel,
}

impl Watch for LoadWatch {
    fn progress(&self, done: u64, total: u64) {
        self.progress.record(done, total);
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }
}
