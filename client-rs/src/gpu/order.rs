//! The one order of a manager's acquires and releases over the streams of its caller, and
//! the captures that they are recorded in.
//!
//! Outside captures, work on another stream than the last waits for the last. Inside one
//! the same holds among its streams; what was queued before is not waited for there, since
//! a graph may not wait for what is not in it. Each capture begins and ends with nothing
//! held, so that every replay leaves the words as it found them.

use std::sync::Arc;

use flextensord_device::cuda::{
    context::Context, driver::Capture, error::CudaError, event::Event, stream::CallerStream,
};

use super::Mark;
use crate::{
    error::ClientError,
    holds::HoldTable,
    plan::{LayerId, Plan},
};

/// Most layers that a message names.
const NAMED: usize = 8;
/// `CU_STREAM_PER_THREAD`: which stream that is depends on who asks.
const PER_THREAD: usize = 2;

const ENTERED: &str = "a capture begins while layers are held, and no hold may cross its edge; \
                       release them before";
const LEFT: &str = "a capture ended while layers were held in it, and no hold may cross its edge; \
                    release them inside (they count as not held now)";

/// How a stream stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// What is queued runs.
    Eager,
    /// It is recorded by the capture of that number.
    Captured(u64),
}

impl Mode {
    pub(crate) fn capture(self) -> Option<u64> {
        match self {
            Self::Eager => None,
            Self::Captured(id) => Some(id),
        }
    }
}

/// The capture that the last call was recorded in.
#[derive(Debug)]
struct Recording {
    id: u64,
    last: Option<CallerStream>,
}

/// Where the order stands.
#[derive(Debug)]
pub(crate) struct Order {
    /// The last stream that was used outside captures.
    last: Option<CallerStream>,
    /// Orders two streams outside captures; used again and again.
    between: Event,
    recording: Option<Recording>,
    /// As `between`, inside captures: an event of a capture may not be asked about.
    within: Event,
    has_recorded: bool,
    /// How often each layer is held through its words.
    layers: Vec<u32>,
    /// Parts of a call; kept so that none allocates.
    pub(crate) parts: Vec<u32>,
}

impl Order {
    pub(crate) fn new(context: &Arc<Context>, layers: usize) -> Result<Self, CudaError> {
        Ok(Self {
            last: None,
            between: Event::new(context)?,
            recording: None,
            within: Event::new(context)?,
            has_recorded: false,
            layers: vec![0; layers],
            parts: Vec::with_capacity(64),
        })
    }

    /// The last stream that was used outside captures.
    pub(crate) fn last(&self) -> Option<CallerStream> {
        self.last
    }

    /// Whether there may be graphs, of whose launches nothing is known here.
    pub(crate) fn has_recorded(&self) -> bool {
        self.has_recorded
    }

    /// Whether the capture `id` is the one under way.
    pub(crate) fn records(&self, id: u64) -> bool {
        self.recording
            .as_ref()
            .is_some_and(|recording| recording.id == id)
    }

    /// How `stream` stands. A capture that was made invalid takes its holds with it.
    pub(crate) fn mode(
        &mut self,
        context: &Context,
        stream: CallerStream,
        table: &mut HoldTable,
        plan: &Plan,
    ) -> Result<Mode, ClientError> {
        if stream.raw() == PER_THREAD {
            return Err(ClientError::State(
                "the default stream of a thread is another one in every thread; name a stream \
                 that was made",
            ));
        }
        match stream.capture(context)? {
            Capture::None => Ok(Mode::Eager),
            Capture::Active(id) => Ok(Mode::Captured(id)),
            Capture::Invalidated => {
                if self.recording.take().is_some() {
                    self.forget(table, plan);
                }
                Err(ClientError::State(
                    "the capture of the stream was made invalid by an earlier error; end it and \
                     begin anew",
                ))
            }
        }
    }

    /// Goes over from how the last call stood to `mode`, with nothing held where that is
    /// an edge.
    pub(crate) fn cross(
        &mut self,
        mode: Mode,
        table: &mut HoldTable,
        plan: &Plan,
    ) -> Result<(), ClientError> {
        let before = self.recording.as_ref().map(|recording| recording.id);
        if before == mode.capture() {
            return Ok(());
        }
        let edge = |edge, held| Err(ClientError::CaptureEdge { held, edge });
        // all that is held now was taken in the capture that is left: it began with nothing
        if self.recording.take().is_some() && !table.held().is_empty() {
            let held = self.held(table, plan);
            self.forget(table, plan);
            return edge(LEFT, held);
        }
        if let Mode::Captured(id) = mode {
            if !table.held().is_empty() {
                return edge(ENTERED, self.held(table, plan));
            }
            self.recording = Some(Recording { id, last: None });
        }
        Ok(())
    }

    /// Puts what is queued on `stream` from here on behind all that was queued in the same
    /// mode.
    pub(crate) fn follow(
        &mut self,
        context: &Context,
        stream: CallerStream,
        mode: Mode,
    ) -> Result<(), ClientError> {
        if let (Mode::Captured(_), Some(recording)) = (mode, self.recording.as_mut()) {
            if let Some(last) = recording.last.filter(|last| *last != stream) {
                self.within.record(last)?;
                self.within.hold_up(stream)?;
            }
            recording.last = Some(stream);
            self.has_recorded = true;
            return Ok(());
        }
        if let Some(last) = self.last.filter(|last| *last != stream) {
            refuse_captured(context, last)?;
            self.between.record(last)?;
            self.between.hold_up(stream)?;
        }
        self.last = Some(stream);
        Ok(())
    }

    /// A mark behind all that was queued outside captures.
    pub(crate) fn mark(&self, context: &Arc<Context>) -> Result<Mark, ClientError> {
        let Some(last) = self.last else {
            return Ok(Mark::nothing());
        };
        refuse_captured(context, last)?;
        Ok(Mark::behind(context, last)?)
    }

    /// Counts a hold of a layer.
    pub(crate) fn count(&mut self, layer: LayerId) {
        if let Some(count) = self.layers.get_mut(layer.0 as usize) {
            *count = count.saturating_add(1);
        }
    }

    /// Counts one less. `false` when it was not held.
    pub(crate) fn uncount(&mut self, layer: LayerId) -> bool {
        let count = self.layers.get_mut(layer.0 as usize);
        let Some(count) = count.filter(|count| **count > 0) else {
            return false;
        };
        *count -= 1;
        true
    }

    /// Whether a layer is held through its words.
    pub(crate) fn is_held(&self, layer: LayerId) -> bool {
        self.layers
            .get(layer.0 as usize)
            .is_some_and(|count| *count > 0)
    }

    /// All counts of streamed parts are zero again.
    fn forget(&mut self, table: &mut HoldTable, plan: &Plan) {
        table.clear();
        for (count, layer) in self.layers.iter_mut().zip(plan.layers()) {
            // resident parts are held by no word, and cross every edge
            if !layer.streamed.is_empty() {
                *count = 0;
            }
        }
    }

    /// What is held, for a message.
    fn held(&self, table: &HoldTable, plan: &Plan) -> String {
        let layers = self.layers.iter().zip(plan.layers());
        let mut names: Vec<&str> = layers
            .filter(|(count, layer)| **count > 0 && !layer.streamed.is_empty())
            .map(|(_, layer)| layer.name.as_str())
            .collect();
        if names.is_empty() {
            // held over RPC, where layers are not counted
            names = table
                .held()
                .iter()
                .map(|&part| plan.tensor_in(part))
                .collect();
        }
        let more = names.len().saturating_sub(NAMED);
        names.truncate(NAMED);
        let names = names.join(", ");
        if more > 0 {
            format!("{names} and {more} more")
        } else {
            names
        }
    }
}

/// Refuses a stream on which no event can be recorded that others may wait for.
fn refuse_captured(context: &Context, stream: CallerStream) -> Result<(), ClientError> {
    match stream.capture(context)? {
        Capture::None => Ok(()),
        Capture::Active(_) | Capture::Invalidated => Err(ClientError::State(
            "the stream that the manager used last is being captured, and what it did before \
             cannot be waited for; go on when the capture has ended",
        )),
    }
}
