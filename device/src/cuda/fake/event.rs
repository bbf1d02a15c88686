//! Events: points in the order of streams.

use std::{
    collections::HashMap,
    sync::{Condvar, Mutex},
    time::{Duration, Instant},
};

use super::{super::driver::StreamHandle, lock, wait};

/// How far each stream of a capture had come.
pub(super) type Clock = HashMap<StreamHandle, u64>;

#[derive(Debug, Default)]
struct State {
    /// Recordings that were queued, and those of them that were reached.
    recorded: u64,
    passed: u64,
    passed_at: Option<Instant>,
    captured: Option<(u64, Clock)>,
}

/// An event.
#[derive(Debug)]
pub(super) struct Event {
    pub(super) gpu: usize,
    pub(super) timing: bool,
    state: Mutex<State>,
    changed: Condvar,
}

impl Event {
    pub(super) fn new(gpu: usize, timing: bool) -> Self {
        Self {
            gpu,
            timing,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Begins a recording; its number.
    pub(super) fn record(&self) -> u64 {
        let mut state = lock(&self.state);
        state.captured = None;
        state.recorded += 1;
        state.recorded
    }

    /// Recorded in a capture, which is an order and no moment.
    pub(super) fn record_captured(&self, capture: u64, clock: Clock) {
        lock(&self.state).captured = Some((capture, clock));
    }

    /// The capture that it was last recorded in, if it was in one.
    pub(super) fn captured(&self) -> Option<(u64, Clock)> {
        lock(&self.state).captured.clone()
    }

    /// The number of the last recording, 0 when there is none.
    pub(super) fn last(&self) -> u64 {
        lock(&self.state).recorded
    }

    /// A recording is reached.
    pub(super) fn pass(&self, recording: u64) {
        let mut state = lock(&self.state);
        if recording > state.passed {
            state.passed = recording;
            state.passed_at = Some(Instant::now());
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits a little while for a recording; whether it is reached.
    pub(super) fn wait(&self, recording: u64, patience: Duration) -> bool {
        let state = lock(&self.state);
        if state.passed >= recording {
            return true;
        }
        wait(&self.changed, state, patience).passed >= recording
    }

    /// Whether the last recording is reached; so it counts when there is none.
    pub(super) fn has_passed(&self) -> bool {
        let state = lock(&self.state);
        state.passed >= state.recorded
    }

    /// When the last recording was reached.
    pub(super) fn passed_at(&self) -> Option<Instant> {
        lock(&self.state).passed_at
    }
}
