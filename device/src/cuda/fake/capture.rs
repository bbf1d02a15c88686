//! Captures of streams, and the graphs that come of them.

use std::{collections::HashMap, sync::Arc};

use super::{
    super::driver::{Capture, StreamHandle},
    codes::{
        CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_MERGE, CAPTURE_UNJOINED,
        CAPTURE_UNMATCHED, CAPTURED_EVENT, ILLEGAL_STATE, Refusable,
    },
    event::{Clock, Event},
    stream::{Step, Stream},
};

/// What was captured, to be launched any number of times. Its steps run in the order in
/// which they were captured, also those of different streams, which a real graph may run
/// at once: a step that waits for one captured after it waits for ever here.
#[derive(Debug, Clone)]
pub struct FakeGraph {
    pub(super) gpu: usize,
    pub(super) steps: Vec<Step>,
}

impl FakeGraph {
    /// Number of its steps.
    #[must_use]
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether nothing was captured.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }
}

#[derive(Debug)]
struct Recording {
    origin: StreamHandle,
    invalid: bool,
    steps: Vec<Step>,
    clocks: HashMap<StreamHandle, Clock>,
}

impl Recording {
    /// Whether the origin has waited for all that every other stream did.
    fn is_joined(&self) -> bool {
        let Some(origin) = self.clocks.get(&self.origin) else {
            return false;
        };
        self.clocks.iter().all(|(stream, clock)| {
            let own = clock.get(stream).copied().unwrap_or(0);
            origin.get(stream).copied().unwrap_or(0) >= own
        })
    }

    /// Orders a stream behind what a clock says; it joins when it was not in.
    fn order(&mut self, stream: StreamHandle, behind: Clock) {
        let clock = self.clocks.entry(stream).or_default();
        for (other, steps) in behind {
            let known = clock.entry(other).or_default();
            *known = steps.max(*known);
        }
        // the wait itself is something that must be joined again
        *clock.entry(stream).or_default() += 1;
    }
}

/// Captures under way.
#[derive(Debug, Default)]
pub(super) struct Captures {
    members: HashMap<StreamHandle, u64>,
    recordings: HashMap<u64, Recording>,
}

impl Captures {
    pub(super) fn begin(&mut self, stream: StreamHandle, id: u64) -> Refusable<()> {
        if self.members.contains_key(&stream) {
            return Err(ILLEGAL_STATE);
        }
        let recording = Recording {
            origin: stream,
            invalid: false,
            steps: Vec::new(),
            clocks: HashMap::from([(stream, Clock::new())]),
        };
        self.members.insert(stream, id);
        self.recordings.insert(id, recording);
        Ok(())
    }

    pub(super) fn end(&mut self, stream: StreamHandle) -> Refusable<Vec<Step>> {
        let id = *self.members.get(&stream).ok_or(ILLEGAL_STATE)?;
        let recording = self.recordings.get_mut(&id).ok_or(ILLEGAL_STATE)?;
        if recording.origin != stream {
            recording.invalid = true;
            return Err(CAPTURE_UNMATCHED);
        }
        self.members.retain(|_, of| *of != id);
        let recording = self.recordings.remove(&id).ok_or(ILLEGAL_STATE)?;
        if recording.invalid {
            Err(CAPTURE_INVALIDATED)
        } else if recording.is_joined() {
            Ok(recording.steps)
        } else {
            Err(CAPTURE_UNJOINED)
        }
    }

    pub(super) fn state(&self, stream: StreamHandle) -> Capture {
        let id = self.members.get(&stream);
        match id.and_then(|id| Some((id, self.recordings.get(id)?))) {
            None => Capture::None,
            Some((_, recording)) if recording.invalid => Capture::Invalidated,
            Some((id, _)) => Capture::Active(*id),
        }
    }

    /// Refuses what a stream may not do while it is captured, which ends the capture.
    pub(super) fn forbid(&mut self, stream: StreamHandle, code: u32) -> Refusable<()> {
        let id = self.members.get(&stream);
        match id.and_then(|id| self.recordings.get_mut(id)) {
            None => Ok(()),
            Some(recording) => {
                recording.invalid = true;
                Err(code)
            }
        }
    }

    /// A stream that is gone takes its capture with it.
    pub(super) fn forget(&mut self, stream: StreamHandle) {
        // what it was told to refuse is not of interest
        let _: Refusable<()> = self.forbid(stream, CAPTURE_INVALIDATED);
        self.members.remove(&stream);
    }

    /// Queues steps, or records them when the stream is captured.
    pub(super) fn submit(
        &mut self,
        stream: &Stream,
        steps: impl IntoIterator<Item = Step>,
    ) -> Refusable<()> {
        if let Some(recording) = self.active(stream.handle)? {
            recording.steps.extend(steps);
            recording.order(stream.handle, Clock::new());
        } else {
            stream.push(steps);
        }
        Ok(())
    }

    /// Records an event on a stream.
    pub(super) fn record(&mut self, stream: &Stream, event: &Arc<Event>) -> Refusable<()> {
        let id = self.members.get(&stream.handle).copied();
        if let Some(recording) = self.active(stream.handle)? {
            let clock = recording.clocks.get(&stream.handle).cloned();
            event.record_captured(id.unwrap_or(0), clock.unwrap_or_default());
        } else {
            let number = event.record();
            stream.push([Step::Record(Arc::clone(event), number)]);
        }
        Ok(())
    }

    /// Makes a stream wait for an event.
    pub(super) fn wait(&mut self, stream: &Stream, event: &Arc<Event>) -> Refusable<()> {
        let id = self.members.get(&stream.handle).copied();
        let captured = event.captured();
        if let Some(recording) = self.active(stream.handle)? {
            return match captured {
                Some((of, clock)) if Some(of) == id => {
                    recording.order(stream.handle, clock);
                    Ok(())
                }
                Some(_) => {
                    recording.invalid = true;
                    Err(CAPTURE_MERGE)
                }
                None if event.last() == 0 => Ok(()),
                None => {
                    recording.invalid = true;
                    Err(CAPTURE_ISOLATION)
                }
            };
        }
        let Some((of, clock)) = captured else {
            let last = event.last();
            if last > 0 {
                stream.push([Step::Wait(Arc::clone(event), last)]);
            }
            return Ok(());
        };
        let recording = self.recordings.get_mut(&of).ok_or(CAPTURED_EVENT)?;
        if stream.handle.0 == 0 {
            recording.invalid = true;
            return Err(CAPTURE_IMPLICIT);
        }
        recording.order(stream.handle, clock);
        self.members.insert(stream.handle, of);
        Ok(())
    }

    /// An event may not be asked about while its capture goes on, which ends that.
    pub(super) fn forbid_event(&mut self, event: &Event) -> Refusable<()> {
        let Some((id, _)) = event.captured() else {
            return Ok(());
        };
        if let Some(recording) = self.recordings.get_mut(&id) {
            recording.invalid = true;
        }
        Err(CAPTURED_EVENT)
    }

    fn active(&mut self, stream: StreamHandle) -> Refusable<Option<&mut Recording>> {
        let id = self.members.get(&stream);
        let recording = id.and_then(|id| self.recordings.get_mut(id));
        match recording {
            Some(recording) if recording.invalid => Err(CAPTURE_INVALIDATED),
            other => Ok(other),
        }
    }
}
