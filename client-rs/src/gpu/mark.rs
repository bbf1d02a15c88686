//! Waiting on the host until what was queued is done.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use flextensord_device::cuda::{
    context::Context, error::CudaError, event::Event, stream::CallerStream,
};

use super::{Core, OnStream};
use crate::{error::ClientError, plane::Plane};

/// Longest wait before the lease is looked at again.
const SLICE: Duration = Duration::from_millis(50);
/// Pause of a task between two looks.
const LOOK: Duration = Duration::from_millis(1);

/// A point in the order that is reached once all queued before it is done.
#[derive(Debug)]
pub(crate) struct Mark(Option<Event>);

impl Mark {
    /// One that is reached, because nothing was queued.
    pub(crate) fn nothing() -> Self {
        Self(None)
    }

    /// One behind all that is queued on `stream`.
    pub(crate) fn behind(context: &Arc<Context>, stream: CallerStream) -> Result<Self, CudaError> {
        let event = Event::new(context)?;
        event.record(stream)?;
        Ok(Self(Some(event)))
    }

    /// Whether it is reached.
    pub(crate) fn is_reached(&self) -> Result<bool, CudaError> {
        self.0.as_ref().map_or(Ok(true), Event::has_passed)
    }

    /// Waits until it is reached, at most for `limit`, on a task. Whether it is.
    pub(crate) async fn reached_within(&self, limit: Duration) -> Result<bool, CudaError> {
        let begin = Instant::now();
        while !self.is_reached()? {
            if begin.elapsed() >= limit {
                return Ok(false);
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(true)
    }

    fn reached_soon(&self, limit: Duration) -> Result<bool, CudaError> {
        self.0
            .as_ref()
            .map_or(Ok(true), |event| event.wait_within(limit))
    }
}

impl Core {
    /// A mark behind all that was queued outside captures.
    pub(crate) fn mark(&self) -> Result<Mark, ClientError> {
        let marked = self.order().mark(&self.context);
        marked.map_err(|error| self.explain(error))
    }

    /// As [`Core::mark`], without waiting for a call that the driver does not let go;
    /// `None` while there is one, or the last stream is being captured.
    pub(crate) fn try_mark(&self) -> Result<Option<Mark>, CudaError> {
        let Some(order) = self.try_order() else {
            return Ok(None);
        };
        match order.mark(&self.context) {
            Ok(mark) => Ok(Some(mark)),
            Err(ClientError::Cuda(error)) => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Blocks until all that was queued so far is done.
    fn until_done(&self) -> Result<(), ClientError> {
        let mark = self.mark()?;
        let begin = Instant::now();
        loop {
            self.lease.check()?;
            let left = self.limit.saturating_sub(begin.elapsed());
            let reached = mark.reached_soon(left.min(SLICE));
            if reached.map_err(|error| self.explain(error.into()))? {
                return Ok(());
            }
            if left.is_zero() {
                return Err(ClientError::Deadline {
                    what: format!(
                        "the work queued before a read of manager {}",
                        self.lease.name
                    ),
                    limit: self.limit,
                });
            }
        }
    }
}

impl Plane {
    /// Waits until the bytes of a held part are there for the host to read.
    pub(crate) fn until_readable(
        &self,
        part: u32,
        on: Option<OnStream>,
    ) -> Result<(), ClientError> {
        let Some(gpu) = &self.gpu else {
            return Ok(());
        };
        // a ring that was taken away must not be touched
        self.lease.check()?;
        let part = self.plan.parts().get(part as usize);
        if part.is_none_or(|part| !part.streamed) {
            return Ok(());
        }
        if on.is_some_and(|on| on.capture.is_some()) {
            return Err(ClientError::State(
                "a layer that is held in a capture has no bytes before its graph runs",
            ));
        }
        gpu.core().until_done()
    }
}
