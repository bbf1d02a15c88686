//! The end of a daemon as its managers see it.

use std::{sync::Arc, time::Duration};

use flextensord_device::{
    cuda::error::CudaError,
    failpoint::{self, Point},
};
use flextensord_proto::v1::{Draining, lease_ended::Reason, lease_event};
use tokio::time;

use super::{manager::Manager, registry::Managers};

/// Why no call that waits will be answered any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GivenUp {
    /// The daemon stops.
    #[error("the daemon stops")]
    Stopping,
    /// A device has failed for good, and the daemon ends.
    #[error("device {device} has failed, and the daemon ends: {source}")]
    Device {
        /// The device's name.
        device: String,
        /// What the driver said.
        source: CudaError,
        /// Whether a successor takes the managers over.
        kept: bool,
    },
}

/// Longest time that a drain may take; more makes no sense.
const LONGEST_DRAIN: Duration = Duration::from_secs(365 * 24 * 3600);

impl Managers {
    /// Takes no new managers and weights, and tells the managers until when they may go
    /// on; of several drains the earliest end counts. Returns how many there are.
    pub fn begin_drain(&self, limit: Duration) -> usize {
        failpoint::cross(Point::Drain);
        let end = time::Instant::now() + limit.min(LONGEST_DRAIN);
        self.drain
            .send_modify(|drain| *drain = Some(drain.map_or(end, |other| other.min(end))));
        self.weights().refuse_new();
        let list = self.list();
        let deadline_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        for manager in &list {
            manager.tell(lease_event::Event::Draining(Draining { deadline_ms }));
        }
        list.len()
    }

    /// Answers all calls that wait: they will not be carried out any more.
    pub fn abandon_calls(&self, why: GivenUp) {
        // the first reason counts: the end may have several
        self.given_up.send_if_modified(|given_up| {
            let first = given_up.is_none();
            given_up.get_or_insert(why);
            first
        });
    }

    /// Waits until calls that wait are given up, and says why.
    pub fn given_up(&self) -> impl Future<Output = GivenUp> + Send + 'static {
        let mut told = self.given_up.subscribe();
        async move {
            let why = told.wait_for(Option::is_some).await;
            // without its sender the daemon is over
            why.ok()
                .and_then(|why| why.clone())
                .unwrap_or(GivenUp::Stopping)
        }
    }

    /// Waits until a drain has begun.
    pub async fn drain_begun(&self) {
        // the sender is ours, so the wait cannot fail
        let _: Result<_, _> = self.drain.subscribe().wait_for(Option::is_some).await;
    }

    /// Waits until no manager is left, at most until the drain's end; ends those that are, or
    /// leaves them to a successor when `keep` says so.
    pub async fn finish_drain(&self, keep: bool) {
        let is_over = || {
            self.drain
                .borrow()
                .is_none_or(|end| time::Instant::now() >= end)
        };
        while !self.names().by_name.is_empty() && !is_over() {
            time::sleep(Duration::from_millis(10)).await;
        }
        for manager in self.list() {
            if keep {
                self.leave(manager);
            } else {
                self.end(&manager, Reason::Stopping);
            }
        }
        if !keep {
            self.give_up_all();
        }
        self.tasks.close();
        self.tasks.wait().await;
        failpoint::cross(Point::Drained);
    }

    /// Lets go of a manager's ring once its last copy has arrived; page, journal and record
    /// stay for a successor, and its client waits for that.
    fn leave(&self, manager: Arc<Manager>) {
        if manager.model_slot().is_some() {
            self.tasks.spawn_blocking(move || {
                // the journal keeps its file
                drop(manager.device.engine.detach(manager.id));
            });
        }
    }
}
