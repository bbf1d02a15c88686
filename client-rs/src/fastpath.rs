//! Acquire and release through slot words: no RPC, and no system call unless the
//! bytes are not there yet or the engine sleeps.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use flextensord_device::{
    control::ControlPage,
    failpoint::{self, Point},
    handover::{self, Cells as _},
};
use flextensord_proto::layout::State;

use crate::{
    error::ClientError,
    hold::Hold,
    plan::{Layer, LayerId},
    plane::{Ended, Plane},
    rpc_holds::{Job, Reply},
};

/// Longest sleep before the lease and the deadline are looked at again.
const SLICE: Duration = Duration::from_millis(50);

/// The waits of one acquire.
struct Waits {
    limit: Duration,
    /// When the first of them began.
    begin: Option<Instant>,
}

impl Plane {
    /// Holds a layer: returns when all its parts are on the device, at the latest after
    /// `limit`. All or nothing.
    #[inline]
    pub(crate) fn acquire(
        self: &Arc<Self>,
        id: LayerId,
        limit: Duration,
    ) -> Result<Hold, ClientError> {
        if self.gpu.is_some() {
            return Err(self.wrong_device("acquire", "acquire_on with the stream that reads"));
        }
        failpoint::pass(Point::ClientAcquire)?;
        let layer = self.enter(id)?;
        if self.rpc_busy.load(Ordering::Acquire) {
            return Err(ClientError::OrderBroken {
                layer: layer.name.clone(),
            });
        }
        // resident parts are always there and touch no word
        if !layer.streamed.is_empty() {
            let mut table = self.table();
            self.check_overlap(&table, id, layer)?;
            let mut waits = Waits { limit, begin: None };
            let acquired = table.acquire(
                &layer.streamed,
                |part| {
                    if handover::take(&*self.control, part) {
                        Ok(())
                    } else {
                        self.wait_for(part, &mut waits)
                    }
                },
                |part| self.give_back(part),
            );
            drop(table);
            if let Some(begin) = waits.begin {
                self.note_wait(begin.elapsed());
            }
            if let Err(error) = acquired {
                // what was given back may be what the engine sleeps for
                self.lease.wake_engine();
                return Err(error);
            }
        }
        failpoint::cross(Point::ClientAcquired);
        Ok(Hold::new(self.clone(), id, None, None))
    }

    /// Gives the parts of an ended hold back that nobody holds any more. For a hold over
    /// RPC, returns the call that is to be made.
    pub(crate) fn settle(
        &self,
        mut ended: Ended,
        reply: Option<Reply>,
    ) -> Result<Option<Job>, ClientError> {
        failpoint::cross(Point::ClientRelease);
        let layer = self.plan.layer(ended.layer)?;
        let Some(rpc) = ended.rpc.take() else {
            if let (Some(gpu), Some(on)) = (&self.gpu, ended.on) {
                self.settle_on(gpu, ended, on)?;
            } else {
                self.settle_words(layer);
            }
            failpoint::cross(Point::ClientReleased);
            return Ok(None);
        };
        let mut after = None;
        if let Some(gpu) = &self.gpu {
            match self.order_rpc(gpu, ended.on.map(|on| on.stream)) {
                Ok(mark) => after = Some(mark),
                Err(error) => {
                    // reads cannot be told from now: a later call ends it
                    ended.rpc = Some(rpc);
                    self.park(ended);
                    return Err(error);
                }
            }
        }
        let (mut keep_parts, mut given) = (Vec::new(), Vec::new());
        let mut table = self.table();
        for &part in &layer.streamed {
            let (last, own) = (table.remove(part), rpc.own.contains(&part));
            match (last, own) {
                // taken through its word, or by a hold over RPC that has ended since
                (true, false) => given.push(part),
                // held by others: the daemon must leave its word in use
                (false, true) => keep_parts.push(part),
                // the daemon gives it back; or it is held by others and not ours
                (true, true) | (false, false) => {}
            }
        }
        drop(table);
        if let Err(error) = self.give_back_all(&given) {
            self.lease.note_release_error(error);
        }
        self.lease.wake_engine();
        Ok(rpc.hold.map(|hold| Job::Release {
            hold,
            keep_parts,
            after,
            reply,
        }))
    }

    /// The end of a hold through slot words, of one thread.
    fn settle_words(&self, layer: &Layer) {
        if layer.streamed.is_empty() {
            return;
        }
        let mut given = false;
        self.table().release(&layer.streamed, |part| {
            self.give_back(part);
            given = true;
        });
        // nothing has changed for the engine while others hold the parts
        if given {
            self.lease.wake_engine();
        }
    }

    /// Gives parts back whose reads are over, or queued on a GPU.
    fn give_back_all(&self, parts: &[u32]) -> Result<(), ClientError> {
        match &self.gpu {
            Some(gpu) if gpu.core().has_queued() => gpu.core().give_back(parts),
            _ => {
                parts.iter().for_each(|&part| self.give_back(part));
                Ok(())
            }
        }
    }

    #[cold]
    fn wait_for(&self, part: u32, waits: &mut Waits) -> Result<(), ClientError> {
        let begin = *waits.begin.get_or_insert_with(Instant::now);
        // said before the word is looked at again: the daemon publishes first and looks
        // at `want` then, so one of the two sees the other
        self.control.set_want(part);
        failpoint::cross(Point::ClientWait);
        let waited = self.wait_until_taken(part, begin, waits.limit);
        handover::end_wait(&*self.control);
        waited
    }

    fn wait_until_taken(
        &self,
        part: u32,
        begin: Instant,
        limit: Duration,
    ) -> Result<(), ClientError> {
        loop {
            let seen = self.control.load(part);
            if handover::take(&*self.control, part) {
                return Ok(());
            }
            self.lease.check()?;
            let left = limit.saturating_sub(begin.elapsed());
            if left.is_zero() {
                return Err(ClientError::Deadline {
                    what: format!(
                        "the wait for part {part} ({}) of manager {}",
                        self.plan.tensor_in(part),
                        self.lease.name
                    ),
                    limit,
                });
            }
            // after `want`: an engine that goes to sleep says so first and looks then
            self.lease.wake_engine();
            // one that was full and could not be taken was revoked: by now it may be full
            // again, with its wake-up spent, so only an empty one is slept on
            if seen.state() != Some(State::Full) {
                ControlPage::wait_change(&self.control, part, seen, left.min(SLICE));
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
