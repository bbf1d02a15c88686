//! Streams: our own, and those that a caller names.

use std::sync::Arc;

use super::{
    context::Context,
    driver::{Capture, StreamHandle, StreamOp},
    error::CudaError,
};

/// A stream of our own that waits for no other; destroyed on drop.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    handle: StreamHandle,
}

impl Stream {
    /// Makes one.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let handle = context.with(|driver| driver.create_stream())?;
        Ok(Self {
            context: Arc::clone(context),
            handle,
        })
    }

    /// The context that it belongs to.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Whether all that was queued is done.
    ///
    /// # Errors
    /// What the driver says, also of an error in what ran before.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the stream is self's and live.
        self.context
            .with(|driver| unsafe { driver.is_done(self.handle) })
    }

    pub(super) fn handle(&self) -> StreamHandle {
        self.handle
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the stream is self's and not used again; what is queued still runs.
        self.context.give_back("destroy a stream", |driver| unsafe {
            driver.destroy_stream(self.handle)
        });
    }
}

/// A stream that somebody else owns, such as PyTorch's current one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CallerStream(StreamHandle);

impl CallerStream {
    /// The stream with the number `raw`, a `CUstream` (`cudaStream_t`); 0 is the legacy
    /// default stream.
    ///
    /// The number is trusted, as one from another language must be: it is a stream of the
    /// primary context of the GPU that it is used with, and stays one until the manager
    /// that uses it is closed or used with another stream. The driver crashes on others.
    #[must_use]
    pub fn from_raw(raw: usize) -> Self {
        Self(StreamHandle(raw))
    }

    /// The number behind it.
    #[must_use]
    pub fn raw(self) -> usize {
        self.0.0
    }

    /// Whether it is being captured.
    ///
    /// # Errors
    /// What the driver says.
    pub fn capture(self, context: &Context) -> Result<Capture, CudaError> {
        // SAFETY: live by the contract of `from_raw`.
        context.with(|driver| unsafe { driver.capture(self.0) })
    }

    pub(super) fn handle(self) -> StreamHandle {
        self.0
    }
}

impl From<&Stream> for CallerStream {
    fn from(stream: &Stream) -> Self {
        Self(stream.handle)
    }
}

/// Queues `ops` on `stream` in as few batches as they fit in.
pub(super) fn submit(
    context: &Context,
    stream: CallerStream,
    ops: &[StreamOp],
) -> Result<(), CudaError> {
    for batch in ops.chunks(super::driver::BATCH_LIMIT) {
        // SAFETY: the stream is live by the contract of `CallerStream`; the words lie in
        // a registration that whoever built the operations keeps until the stream is done.
        context.with(|driver| unsafe { driver.batch(stream.handle(), batch) })?;
    }
    Ok(())
}
