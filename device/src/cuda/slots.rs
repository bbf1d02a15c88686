//! The slot words of a control page as a GPU sees them: acquire and release as operations of
//! a stream.
//!
//! All of a client's operations write constants to fixed addresses, so that a graph can
//! hold them (design section 6). The client touches the low half of a word alone: the
//! sequence in the high half is the daemon's.

use std::sync::Arc;

use flextensord_proto::layout::{self, State, WANT_NONE};

use super::{
    context::Context,
    driver::{DeviceAddress, StreamOp},
    error::CudaError,
    registration::{Registration, RegistrationError},
    stream::{CallerStream, submit},
};
use crate::mapping::Mapping;

/// Operations of an acquire, a part.
const ACQUIRE_OPS: usize = 3;

/// A control page registered in a context.
#[derive(Debug)]
pub struct SlotWords {
    context: Arc<Context>,
    base: DeviceAddress,
    parts: u32,
    /// Keeps the words registered and mapped.
    _registration: Registration,
}

impl SlotWords {
    /// Registers the page in `mapping`, which has `parts` slot words.
    ///
    /// # Errors
    /// When the driver refuses.
    pub(crate) fn pin(
        context: &Arc<Context>,
        mapping: &Arc<Mapping>,
        parts: u32,
    ) -> Result<Self, RegistrationError> {
        let (registration, base) = Registration::mapped(context, mapping)?;
        Ok(Self {
            context: Arc::clone(context),
            base,
            parts,
            _registration: registration,
        })
    }

    /// The context.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Client: queues the taking of `parts`, one after the other: says which part it
    /// waits for, waits until that is full, marks it in use; at the end it waits for
    /// none. Nothing on the host waits.
    ///
    /// # Errors
    /// When a part is none of the page's, or what the driver says. After an error of
    /// the driver in the middle of many parts the first of them may be taken.
    pub fn take(&self, stream: CallerStream, parts: &[u32]) -> Result<(), CudaError> {
        let mut ops = Vec::with_capacity(parts.len() * ACQUIRE_OPS + 1);
        for &part in parts {
            let slot = self.slot(part)?;
            ops.push(self.want(part));
            ops.push(StreamOp::WaitEqual32 {
                address: slot,
                value: State::Full as u32,
            });
            ops.push(StreamOp::Write32 {
                address: slot,
                value: State::InUse as u32,
            });
        }
        ops.push(self.want(WANT_NONE));
        submit(&self.context, stream, &ops)
    }

    /// Client: queues the giving back of `parts`, behind all that reads them.
    ///
    /// # Errors
    /// As [`SlotWords::take`].
    pub fn give_back(&self, stream: CallerStream, parts: &[u32]) -> Result<(), CudaError> {
        let mut ops = Vec::with_capacity(parts.len());
        for &part in parts {
            ops.push(StreamOp::Write32 {
                address: self.slot(part)?,
                value: State::Empty as u32,
            });
        }
        submit(&self.context, stream, &ops)
    }

    fn want(&self, part: u32) -> StreamOp {
        StreamOp::Write32 {
            address: self.base + layout::WANT as u64,
            value: part,
        }
    }

    /// The address of a slot word, whose low half comes first.
    fn slot(&self, part: u32) -> Result<DeviceAddress, CudaError> {
        if part < self.parts {
            Ok(self.base + layout::slot(part) as u64)
        } else {
            Err(CudaError::State("a part that its control page has not"))
        }
    }
}
