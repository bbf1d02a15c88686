//! Events: a point in a stream that others can wait for.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{context::Context, driver::EventHandle, error::CudaError, stream::CallerStream};

/// Pause between two looks at an event.
const LOOK: Duration = Duration::from_micros(50);
/// Most that a small copy is waited for.
const LIMIT: Duration = Duration::from_secs(60);

/// An event; destroyed on drop.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    handle: EventHandle,
}

impl Event {
    /// Makes one without a clock: the cheap kind.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::make(context, false)
    }

    /// Makes one with a clock.
    ///
    /// # Errors
    /// What the driver says.
    pub fn timed(context: &Arc<Context>) -> Result<Self, CudaError> {
        Self::make(context, true)
    }

    fn make(context: &Arc<Context>, timing: bool) -> Result<Self, CudaError> {
        let handle = context.with(|driver| driver.create_event(timing))?;
        Ok(Self {
            context: Arc::clone(context),
            handle,
        })
    }

    /// Records it behind what is queued on `stream`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(&self, stream: CallerStream) -> Result<(), CudaError> {
        // SAFETY: both are live: the event is self's, the stream by its own contract.
        self.context
            .with(|driver| unsafe { driver.record(self.handle, stream.handle()) })
    }

    /// Makes what is queued on `stream` from here on wait for the last recording.
    ///
    /// # Errors
    /// What the driver says.
    pub fn hold_up(&self, stream: CallerStream) -> Result<(), CudaError> {
        // SAFETY: as in `record`.
        self.context
            .with(|driver| unsafe { driver.wait_event(stream.handle(), self.handle) })
    }

    /// Whether the last recording is done.
    ///
    /// # Errors
    /// What the driver says, also of an error in what ran before.
    pub fn has_passed(&self) -> Result<bool, CudaError> {
        // SAFETY: the event is self's and live.
        self.context
            .with(|driver| unsafe { driver.has_passed(self.handle) })
    }

    /// Waits until the last recording is done, at most for `limit`. Whether it is.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait_within(&self, limit: Duration) -> Result<bool, CudaError> {
        let begin = Instant::now();
        while !self.has_passed()? {
            if begin.elapsed() >= limit {
                return Ok(false);
            }
            thread::sleep(LOOK);
        }
        Ok(true)
    }

    /// Milliseconds from the recording of `begin` to that of self; both have a clock.
    ///
    /// # Errors
    /// What the driver says.
    pub fn since_ms(&self, begin: &Self) -> Result<f32, CudaError> {
        // SAFETY: both events are live, by the borrows.
        self.context
            .with(|driver| unsafe { driver.elapsed_ms(begin.handle, self.handle) })
    }

    pub(super) fn wait(&self) -> Result<(), CudaError> {
        if self.wait_within(LIMIT)? {
            Ok(())
        } else {
            Err(CudaError::State("a small copy took longer than a minute"))
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is self's and not used again; what waits for it still does.
        self.context.give_back("destroy an event", |driver| unsafe {
            driver.destroy_event(self.handle)
        });
    }
}
