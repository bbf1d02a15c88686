//! Which parts stream: each strategy offers choices of at least so many bytes.
//!
//! What they offer depends neither on the budget nor on the link. So what is there for a
//! budget is there for every larger one, and the best of it never gets worse.

mod budget_fill;
mod greedy;
mod knapsack;
mod nth_layer;

use std::cmp::Reverse;

use crate::{
    input::Strategy,
    problem::Problem,
    spread::{self, Class},
};

/// Who is told of a choice: whether each part streams.
pub(crate) type Tell<'a> = &'a mut dyn FnMut(Strategy, &[bool]);

/// What the strategies know of the parts.
#[derive(Debug)]
pub(crate) struct Offer<'a> {
    pub(crate) problem: &'a Problem,
    /// Parts that may stream, by size, the largest first.
    movable: Vec<u32>,
    classes: Vec<Class>,
    /// Bytes of all that may stream.
    pub(crate) bytes: u64,
    strategies: Vec<Strategy>,
}

impl<'a> Offer<'a> {
    /// What `strategy` offers, if `small` of small parts too.
    pub(crate) fn new(problem: &'a Problem, strategy: Strategy, small: bool) -> Self {
        let mut movable = problem.movable(small);
        movable.sort_by_key(|part| (Reverse(problem.taken[*part as usize]), *part));
        let strategies = match strategy {
            Strategy::Adaptive => Strategy::SIMPLE.to_vec(),
            one => vec![one],
        };
        Self {
            problem,
            bytes: movable
                .iter()
                .map(|part| problem.taken[*part as usize])
                .sum(),
            movable,
            classes: spread::classes(problem, small),
            strategies,
        }
    }

    /// Bytes of the largest part that may stream.
    pub(crate) fn largest(&self) -> u64 {
        let largest = self.movable.first();
        largest.map_or(0, |part| self.problem.taken[*part as usize])
    }

    /// How many parts may stream.
    pub(crate) fn len(&self) -> usize {
        self.movable.len()
    }

    /// Choices of any number of bytes. The last resort of all strategies: nothing streams,
    /// or everything.
    pub(crate) fn fixed(&self, tell: Tell<'_>) {
        let nothing = vec![false; self.problem.bytes.len()];
        tell(Strategy::Streaming, &nothing);
        let mut all = nothing;
        for part in &self.movable {
            all[*part as usize] = true;
        }
        tell(Strategy::Streaming, &all);
        for strategy in &self.strategies {
            match strategy {
                Strategy::NthLayer => nth_layer::offer(self, tell),
                Strategy::Knapsack => knapsack::every_choice(self, tell),
                _ => (),
            }
        }
    }

    /// Choices of at least `target` bytes, and at most [`Offer::largest`] bytes more.
    pub(crate) fn at_least(&self, target: u64, tell: Tell<'_>) {
        for strategy in &self.strategies {
            match strategy {
                Strategy::BudgetFill => budget_fill::offer(self, target, tell),
                Strategy::Knapsack => knapsack::offer(self, target, tell),
                Strategy::Greedy => greedy::offer(self, target, tell),
                Strategy::NthLayer | Strategy::Streaming | Strategy::Adaptive => (),
            }
        }
    }

    /// Adds parts until `missing` bytes are there: the smallest that is large enough, or the
    /// largest.
    fn top_up(&self, streams: &mut [bool], mut missing: u64) {
        while missing > 0 {
            let mut left = self.movable.iter().filter(|part| !streams[**part as usize]);
            let Some(&largest) = left.next() else { return };
            let enough = |part: &&u32| self.problem.taken[**part as usize] >= missing;
            let part = left.take_while(enough).last().copied().unwrap_or(largest);
            streams[part as usize] = true;
            missing = missing.saturating_sub(self.problem.taken[part as usize]);
        }
    }
}
