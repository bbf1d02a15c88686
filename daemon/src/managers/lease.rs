//! Leases: streams that come and go, and the process behind them.

use std::sync::{Arc, Weak};

use flextensord_device::readiness::Watched;
use flextensord_proto::v1::{LeaseEvent, lease_ended::Reason};
use tokio::{sync::mpsc, time};

use super::{manager::Manager, registry::Managers};

/// A manager with a stream of its lease's events.
#[derive(Debug)]
pub struct OpenLease {
    /// The manager.
    pub manager: Arc<Manager>,
    /// Its events; dropping it loses the stream.
    pub events: LeaseStream,
}

/// Receives lease events; when dropped, the owner has the grace time to resume.
#[derive(Debug)]
pub struct LeaseStream {
    /// The events.
    pub events: mpsc::Receiver<LeaseEvent>,
    manager: Arc<Manager>,
    managers: Weak<Managers>,
    number: u64,
}

impl Drop for LeaseStream {
    fn drop(&mut self) {
        if let Some(managers) = self.managers.upgrade() {
            managers.stream_lost(&self.manager, self.number);
        }
    }
}

impl Managers {
    /// A new stream of a manager's lease.
    pub fn lease(&self, manager: Arc<Manager>) -> OpenLease {
        let (number, events) = manager.new_stream();
        let events = LeaseStream {
            events,
            manager: Arc::clone(&manager),
            managers: Weak::clone(&self.this),
            number,
        };
        OpenLease { manager, events }
    }

    /// Ends the manager as soon as its owner's process ends.
    pub(super) fn watch(&self, manager: &Arc<Manager>) {
        let watched = manager
            .process
            .as_ref()
            .and_then(|process| process.try_clone().ok());
        let Some(pidfd) = watched.and_then(|p| Watched::new(p.into_descriptor()).ok()) else {
            return;
        };
        let (this, manager) = (Weak::clone(&self.this), Arc::clone(manager));
        tokio::spawn(async move {
            tokio::select! {
                () = manager.ended.cancelled() => return,
                _ = pidfd.readable() => {}
            }
            if let Some(this) = this.upgrade() {
                this.end(&manager, Reason::Fenced);
            }
        });
    }

    fn stream_lost(&self, manager: &Arc<Manager>, number: u64) {
        if manager.ended.is_cancelled() || !manager.stream_lost(number) {
            return;
        }
        let (this, manager) = (Weak::clone(&self.this), Arc::clone(manager));
        let grace = self.settings().resume_grace;
        tokio::spawn(async move {
            tokio::select! {
                () = manager.ended.cancelled() => return,
                () = time::sleep(grace) => {}
            }
            if let Some(this) = this.upgrade().filter(|_| manager.is_lost(number)) {
                this.end(&manager, Reason::Fenced);
            }
        });
    }
}
