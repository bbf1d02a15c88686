//! The best places of few parts, by branch and bound.
//!
//! Moving a part down until it meets another that it does not overlap only ever takes
//! overlaps away, and with them waits. So it is enough to try places at 0 and behind sums of
//! other parts. Parts without a place yet overlap nothing: their pass is never slower than
//! one with places, which bounds it.

use crate::{cycle::Cycle, layout::Addresses, problem::Problem};

/// Most parts that are tried in all places, and most ways to place them.
const FEW: usize = 6;
const WAYS: usize = 12_000_000;

/// The parts that stream, if they are few.
fn few(streams: &[bool]) -> Option<Vec<u32>> {
    let parts: Vec<u32> = (0u32..)
        .zip(streams)
        .filter(|(_, streams)| **streams)
        .map(|(part, _)| part)
        .take(FEW + 1)
        .collect();
    (parts.len() <= FEW).then_some(parts)
}

/// A search through all places.
struct Places<'a> {
    problem: &'a Problem,
    parts: &'a [u32],
    starts: Vec<Vec<u64>>,
    /// Offset of each part in the order of `parts`.
    offsets: Vec<u64>,
}

impl<'a> Places<'a> {
    fn new(problem: &'a Problem, parts: &'a [u32]) -> Self {
        let sums = |at: usize| {
            let mut sums = vec![0];
            for (other, part) in parts.iter().enumerate() {
                if other != at {
                    let bytes = problem.taken[*part as usize];
                    let more: Vec<u64> = sums.iter().map(|sum| sum + bytes).collect();
                    sums.extend(more);
                }
            }
            sums.sort_unstable();
            sums.dedup();
            sums
        };
        Self {
            problem,
            parts,
            starts: (0..parts.len()).map(sums).collect(),
            offsets: Vec::with_capacity(parts.len()),
        }
    }

    /// Whether all ways can be tried. Depends on sizes alone.
    fn tractable(&self) -> bool {
        let starts = self.starts.iter().map(Vec::len);
        starts.fold(1, usize::saturating_mul) <= WAYS
    }

    fn bytes(&self, at: usize) -> u64 {
        self.problem.taken[self.parts[at] as usize]
    }

    /// Whether the next part may begin at `start`: it stands in no use with who lies there.
    fn may_begin(&self, start: u64) -> bool {
        let at = self.offsets.len();
        let uses = &self.problem.uses_of[self.parts[at] as usize];
        let end = start + self.bytes(at);
        self.offsets.iter().enumerate().all(|(other, begin)| {
            let apart = *begin >= end || begin + self.bytes(other) <= start;
            let others = &self.problem.uses_of[self.parts[other] as usize];
            apart || !uses.iter().any(|index| others.contains(index))
        })
    }

    /// Finds the least capacity; `end` is that of what has places.
    fn narrow(&mut self, end: u64, least: &mut u64) {
        let at = self.offsets.len();
        if at == self.parts.len() {
            *least = end;
            return;
        }
        for index in 0..self.starts[at].len() {
            let start = self.starts[at][index];
            let end = end.max(start + self.bytes(at));
            if end >= *least {
                return;
            }
            if self.may_begin(start) {
                self.offsets.push(start);
                self.narrow(end, least);
                self.offsets.pop();
            }
        }
    }

    /// All offsets; parts without a place lie behind `room`, each apart.
    fn addresses(&self, room: u64) -> Addresses {
        let mut capacity = room;
        let mut offsets = vec![None; self.problem.taken.len()];
        for (at, part) in self.parts.iter().enumerate() {
            offsets[*part as usize] = Some(*self.offsets.get(at).unwrap_or(&capacity));
            if at >= self.offsets.len() {
                capacity += self.bytes(at);
            }
        }
        Addresses { capacity, offsets }
    }

    /// Finds places within `room` with a step under `least`.
    fn hurry(
        &mut self,
        room: u64,
        step_of: &impl Fn(&Cycle) -> f64,
        least: &mut f64,
        best: &mut Option<Addresses>,
    ) {
        let mut addresses = self.addresses(room);
        let cycle = Cycle::new(self.problem, &addresses.offsets, addresses.capacity);
        let step = step_of(&cycle);
        if step >= *least {
            return;
        }
        let at = self.offsets.len();
        if at == self.parts.len() {
            let ends = (0..at).map(|at| self.offsets[at] + self.bytes(at));
            addresses.capacity = ends.max().unwrap_or(0);
            *least = step;
            *best = Some(addresses);
            return;
        }
        for index in 0..self.starts[at].len() {
            let start = self.starts[at][index];
            if start + self.bytes(at) > room {
                return;
            }
            if self.may_begin(start) {
                self.offsets.push(start);
                self.hurry(room, step_of, least, best);
                self.offsets.pop();
            }
        }
    }
}

/// The least capacity for the streamed parts, if they are few and it is under `most`.
pub(crate) fn least_capacity(problem: &Problem, streams: &[bool], most: u64) -> Option<u64> {
    let parts = few(streams)?;
    let mut least = most;
    let mut places = Places::new(problem, &parts);
    if places.tractable() {
        places.narrow(0, &mut least);
    }
    (least < most).then_some(least)
}

/// The best places within `room` with a step under `most`, if the streamed parts are few and
/// there are any.
pub(crate) fn best(
    problem: &Problem,
    streams: &[bool],
    room: u64,
    most: f64,
    step_of: &impl Fn(&Cycle) -> f64,
) -> Option<Addresses> {
    let parts = few(streams)?;
    let (mut least, mut best) = (most, None);
    let mut places = Places::new(problem, &parts);
    if places.tractable() {
        places.hurry(room, step_of, &mut least, &mut best);
    }
    best
}
