//! Why a schedule still changes: the round of waits that drives it.

use super::{Cycle, NEVER, State, mean};

/// Passes that are looked back on.
const BACK: usize = 24;

/// What happened, at the end of a pass or in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    /// The use at that stop ended.
    End(usize),
    /// That copy ended.
    Copied(usize),
}

/// A pass, and what each of its events waited for.
#[derive(Debug)]
struct Pass {
    ends: Vec<i64>,
    queue: i64,
    /// Whether the use waited for its copies, not for the use before.
    end_by_copy: Vec<bool>,
    /// Whether the copy waited for a release, not for the copy before.
    copy_by_release: Vec<bool>,
}

/// Goes on for some passes, then back from the last event, until an event comes again. By
/// how much the mean of that round is longer than `step`; 0 when it is not.
pub(super) fn longer_round(
    cycle: &Cycle,
    step: i64,
    gaps: &[(i64, i64)],
    state: &mut State,
) -> i64 {
    let passes: Vec<Pass> = (0..BACK)
        .map(|_| record(cycle, step, gaps, state))
        .collect();
    let (stops, copies) = (cycle.stops.len(), cycle.copies.len());
    let mut crossed: Vec<(Event, usize, i64)> = Vec::new();
    let mut at = BACK - 1;
    let mut event = Event::End(stops - 1);
    loop {
        let pass = &passes[at];
        let (before, crosses) = match event {
            Event::End(stop) if pass.end_by_copy[stop] => {
                (Event::Copied(cycle.stops[stop].copies as usize - 1), false)
            }
            Event::End(0) => (Event::End(stops - 1), true),
            Event::End(stop) => (Event::End(stop - 1), false),
            Event::Copied(copy) if pass.copy_by_release[copy] => {
                let copy = cycle.copies[copy];
                (Event::End(copy.after as usize), copy.passed)
            }
            Event::Copied(0) => (Event::Copied(copies - 1), true),
            Event::Copied(copy) => (Event::Copied(copy - 1), false),
        };
        event = before;
        if !crosses {
            continue;
        }
        if at == 0 {
            return 0;
        }
        at -= 1;
        let time = match event {
            Event::End(stop) => passes[at].ends[stop],
            Event::Copied(_) => passes[at].queue,
        };
        if time < NEVER / 2 {
            return 0;
        }
        let again = crossed.iter().rfind(|(seen, ..)| *seen == event);
        if let Some((_, later, then)) = again
            && *then > time
        {
            return mean(then - time, u32::try_from(later - at).unwrap_or(u32::MAX));
        }
        crossed.push((event, at, time));
    }
}

fn record(cycle: &Cycle, step: i64, gaps: &[(i64, i64)], state: &mut State) -> Pass {
    let mut end_by_copy = Vec::with_capacity(cycle.stops.len());
    let mut copy_by_release = Vec::with_capacity(cycle.copies.len());
    let mut end = state
        .ends
        .last()
        .map_or(NEVER, |end| end.saturating_sub(step));
    let mut queue = state.queue.saturating_sub(step).max(NEVER);
    let mut next = 0;
    for (index, (stop, &(gap, own))) in cycle.stops.iter().zip(gaps).enumerate() {
        for copy in &cycle.copies[next..stop.copies as usize] {
            let released = state.ends[copy.after as usize];
            let released = if copy.passed {
                released - step
            } else {
                released
            };
            let free = (released + cycle.handover).max(NEVER);
            copy_by_release.push(free > queue);
            queue = queue.max(free) + copy.time;
        }
        next = stop.copies as usize;
        end_by_copy.push(queue > end + gap);
        end = (end + gap).max(queue) + stop.taking + own;
        state.ends[index] = end;
    }
    state.queue = queue;
    Pass {
        ends: state.ends.clone(),
        queue,
        end_by_copy,
        copy_by_release,
    }
}
