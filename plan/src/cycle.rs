//! The single copy queue over the cyclic pass, simulated.
//!
//! Copies go back to back in the order of the pass, on into the next pass. A copy starts
//! when the one before it ended, and a hand-over after everything that overlaps it in the
//! ring was released. A use starts when the one before it ended and its parts arrived; to
//! take and give back a streamed part costs a hand-over. Parts are released when their use
//! ends.
//!
//! All that is sums and maxima, so a steady pass takes as long as the longest cycle of waits,
//! divided by the passes it goes through: [`Cycle::step`] is that time, exactly, rounded up to
//! a picosecond. No wait grows when a copy gets faster, so a faster link never makes a step
//! slower.

mod trace;

use crate::{problem::Problem, skyline::Skyline};

/// Before anything happened.
const NEVER: i64 = i64::MIN / 4;
/// Passes after which a schedule that still changes is taken as it is.
const PASSES: u32 = 256;
/// Passes after which it is traced why a schedule still changes.
const PATIENCE: u32 = 8;
/// Steps that are tried.
const TRIES: u32 = 1024;

/// One copy of a pass.
#[derive(Debug, Clone, Copy)]
struct Copy {
    part: u32,
    time: i64,
    /// Index of the last use, of those that stream, that overlaps it.
    after: u32,
    /// Whether that one was in the pass before.
    passed: bool,
}

/// A use that streams.
#[derive(Debug, Clone, Copy)]
struct Stop {
    /// Index of the use.
    of: u32,
    /// End of its copies.
    copies: u32,
    /// What taking and giving back its parts costs.
    taking: i64,
}

/// A pass of which the streamed parts have places.
#[derive(Debug)]
pub(crate) struct Cycle {
    copies: Vec<Copy>,
    stops: Vec<Stop>,
    handover: i64,
    link: i64,
}

/// A pass that comes round, in picoseconds from the begin of its first use.
#[derive(Debug)]
pub(crate) struct Timeline {
    /// Part, use, start, end, and how long the use waited for it.
    pub(crate) copies: Vec<(u32, u32, i64, i64, i64)>,
    /// Start and end of the compute of each use.
    pub(crate) computes: Vec<(i64, i64)>,
    /// How long all uses waited.
    pub(crate) waited: i64,
}

/// `time` divided by the passes it took, rounded up.
fn mean(time: i64, passes: u32) -> i64 {
    let passes = i64::from(passes);
    time / passes + i64::from(time % passes > 0)
}

fn signed(time: u64) -> i64 {
    i64::try_from(time).unwrap_or(i64::MAX)
}

fn unsigned(time: i64) -> u64 {
    u64::try_from(time).unwrap_or(0)
}

impl Cycle {
    /// The cycle of a ring in which each streamed part has the offset in `offsets`.
    pub(crate) fn new(problem: &Problem, offsets: &[Option<u64>], capacity: u64) -> Self {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let mut stop_of: Vec<u32> = Vec::new();
        let (mut copies, mut stops) = (Vec::new(), Vec::new());
        for (of, held) in (0u32..).zip(&problem.uses) {
            let stop = u32::try_from(stops.len()).unwrap_or(u32::MAX);
            for &part in held {
                if let Some(offset) = offsets[part as usize] {
                    ranges.push((offset, offset + problem.taken[part as usize]));
                    stop_of.push(stop);
                    copies.push(Copy {
                        part,
                        time: signed(problem.copy[part as usize]),
                        after: 0,
                        passed: false,
                    });
                }
            }
            let end = u32::try_from(copies.len()).unwrap_or(u32::MAX);
            if stop_of.last() == Some(&stop) {
                let before = stops.last().map_or(0, |stop: &Stop| stop.copies);
                let parts = i64::from(end - before);
                stops.push(Stop {
                    of,
                    copies: end,
                    taking: signed(problem.handover).saturating_mul(parts),
                });
            }
        }
        let mut skyline = Skyline::new(capacity);
        let count = ranges.len();
        for turn in 0..2 {
            for (index, &(begin, end)) in ranges.iter().enumerate() {
                if turn == 1 {
                    // counted from 1; its own place in the pass before is always there
                    let last = skyline.last_between(begin, end).max(1) - 1;
                    copies[index].after = stop_of[last % count];
                    copies[index].passed = last < count;
                }
                skyline.place(begin, end, turn * count + index + 1);
            }
        }
        let link = copies
            .iter()
            .map(|copy| copy.time)
            .fold(0, i64::saturating_add);
        Self {
            copies,
            stops,
            handover: signed(problem.handover),
            link,
        }
    }

    /// No step is shorter, wherever the parts lie.
    pub(crate) fn floor(&self, compute: u64) -> u64 {
        let taking = signed(self.taking());
        unsigned(signed(compute).saturating_add(taking).max(self.link))
    }

    /// What a pass spends on hand-overs.
    pub(crate) fn taking(&self) -> u64 {
        unsigned(self.handover).saturating_mul(self.copies.len() as u64)
    }

    /// How long the link copies in a pass.
    pub(crate) fn link(&self) -> u64 {
        unsigned(self.link)
    }

    /// How long a steady pass takes whose uses compute for `compute`, and the state of the
    /// uses and of the copy queue from which it starts.
    ///
    /// A step is right when no round of waits takes longer: when the times of a pass, set
    /// back by a step each, stop growing. While some round takes longer, its mean is the
    /// next step to try, so the last one is the mean of the longest round.
    fn steady(&self, compute: &[u64]) -> (u64, State) {
        let total = compute
            .iter()
            .fold(0u64, |sum, time| sum.saturating_add(*time));
        let gaps = self.gaps(compute);
        let mut step = signed(self.floor(total));
        let mut state = State::new(gaps.len());
        for _ in 0..TRIES {
            match self.longer_round(step, &gaps, &mut state) {
                0 => break,
                longer => step = step.saturating_add(longer),
            }
        }
        (unsigned(step), state)
    }

    /// By how much the mean of some round of waits is longer than `step`; 0 when there is
    /// none.
    fn longer_round(&self, step: i64, gaps: &[(i64, i64)], state: &mut State) -> i64 {
        state.reset();
        for pass in 1..=PASSES {
            let changed = self.pass(step, gaps, state, true);
            let late = state.ends.last().copied().unwrap_or(0);
            if late > 0 {
                return mean(late, pass);
            }
            if !changed {
                return 0;
            }
            if pass % PATIENCE == 0 {
                let longer = trace::longer_round(self, step, gaps, state);
                if longer > 0 {
                    return longer;
                }
            }
        }
        0
    }

    /// How long a steady pass takes whose uses compute for `compute`.
    pub(crate) fn step(&self, compute: &[u64]) -> u64 {
        if self.stops.is_empty() {
            return compute
                .iter()
                .fold(0u64, |sum, time| sum.saturating_add(*time));
        }
        self.steady(compute).0
    }

    /// Compute since the stop before, and of the stop itself.
    fn gaps(&self, compute: &[u64]) -> Vec<(i64, i64)> {
        let mut gaps = Vec::with_capacity(self.stops.len());
        let mut next = 0;
        for stop in &self.stops {
            let between = &compute[next..stop.of as usize];
            let before = between
                .iter()
                .fold(0i64, |sum, time| sum.saturating_add(signed(*time)));
            gaps.push((before, signed(compute[stop.of as usize])));
            next = stop.of as usize + 1;
        }
        let rest = compute[next..].iter();
        let rest = rest.fold(0i64, |sum, time| sum.saturating_add(signed(*time)));
        if let Some((before, _)) = gaps.first_mut() {
            *before = before.saturating_add(rest);
        }
        gaps
    }

    /// One pass, in time that is set back by `step` each pass; if it `waits`, its last use
    /// does not end before the one of the first pass did. Returns whether it differs from the
    /// pass before.
    fn pass(&self, step: i64, gaps: &[(i64, i64)], state: &mut State, waits: bool) -> bool {
        let mut changed = false;
        let mut end = state
            .ends
            .last()
            .map_or(NEVER, |end| end.saturating_sub(step));
        let mut queue = state.queue.saturating_sub(step).max(NEVER);
        let mut next = 0;
        for (index, (stop, &(gap, own))) in self.stops.iter().zip(gaps).enumerate() {
            for copy in &self.copies[next..stop.copies as usize] {
                let released = state.ends[copy.after as usize];
                let released = if copy.passed {
                    released - step
                } else {
                    released
                };
                queue = queue.max((released + self.handover).max(NEVER)) + copy.time;
            }
            next = stop.copies as usize;
            end = (end + gap).max(queue) + stop.taking + own;
            if waits && index + 1 == self.stops.len() {
                end = end.max(0);
            }
            changed |= state.ends[index] != end;
            state.ends[index] = end;
        }
        changed |= state.queue != queue;
        state.queue = queue;
        changed
    }

    /// A steady pass in all detail.
    pub(crate) fn timeline(&self, compute: &[u64]) -> Timeline {
        let (step, mut state) = self.steady(compute);
        let (step, gaps) = (signed(step), self.gaps(compute));
        if !self.stops.is_empty() {
            for _ in 0..PASSES {
                if !self.pass(step, &gaps, &mut state, false) {
                    break;
                }
            }
        }
        let rest = self.stops.last().map_or(0, |stop| stop.of as usize + 1);
        let rest = compute[rest..]
            .iter()
            .fold(0i64, |sum, time| sum + signed(*time));
        // the last stop of the pass before ended then, and what came behind it
        let begin = state.ends.last().map_or(0, |end| end - step + rest);
        let mut queue = state.queue - step;
        let mut now = begin;
        let mut copies = Vec::with_capacity(self.copies.len());
        let mut computes = Vec::with_capacity(compute.len());
        let (mut next, mut waited) = (0, 0);
        let mut stops = self.stops.iter().enumerate().peekable();
        for (of, time) in (0u32..).zip(compute) {
            if let Some((index, stop)) = stops.next_if(|(_, stop)| stop.of == of) {
                let mut ready = now;
                for copy in &self.copies[next..stop.copies as usize] {
                    let released = state.ends[copy.after as usize];
                    let released = if copy.passed {
                        released - step
                    } else {
                        released
                    };
                    let start = queue.max(released + self.handover);
                    queue = start + copy.time;
                    let wait = (queue - ready).max(0);
                    ready = ready.max(queue);
                    copies.push((copy.part, of, start - begin, queue - begin, wait));
                }
                next = stop.copies as usize;
                waited += ready - now;
                now = ready + stop.taking;
                computes.push((now - begin, now + signed(*time) - begin));
                now += signed(*time);
                state.ends[index] = now;
            } else {
                computes.push((now - begin, now + signed(*time) - begin));
                now += signed(*time);
            }
        }
        Timeline {
            copies,
            computes,
            waited,
        }
    }
}

/// When things happened last.
#[derive(Debug)]
struct State {
    /// When each use that streams ended.
    ends: Vec<i64>,
    /// When the last copy ended.
    queue: i64,
}

impl State {
    fn new(stops: usize) -> Self {
        Self {
            ends: vec![NEVER; stops],
            queue: NEVER,
        }
    }

    /// The last use has just ended, and all else long ago.
    fn reset(&mut self) {
        self.ends.fill(NEVER);
        self.queue = NEVER;
        if let Some(end) = self.ends.last_mut() {
            *end = 0;
        }
    }
}
