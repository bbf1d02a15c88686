//! Which parts of about one size stream, so that copies are spread over the pass.

use std::cmp::Reverse;

use crate::problem::Problem;

/// How the parts of a class are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spread {
    /// Each number contains the choice of every smaller one: plans of several budgets share
    /// residents.
    Nested,
    /// As evenly as can be.
    Even,
}

/// Parts of about one size, in order of their first use.
#[derive(Debug)]
pub(crate) struct Class {
    /// Bytes of its largest part.
    pub(crate) largest: u64,
    /// Bytes of its smallest part.
    pub(crate) smallest: u64,
    /// Bytes of all.
    pub(crate) bytes: u64,
    parts: Vec<u32>,
    begins: Vec<f64>,
    nested: Vec<u32>,
}

/// Parts that need a place, small ones only if `small`, by size, the largest first. A class
/// begins where a part is under seven eighths of the largest of its class.
pub(crate) fn classes(problem: &Problem, small: bool) -> Vec<Class> {
    let mut parts = problem.movable(small);
    let taken = |part: &u32| problem.taken[*part as usize];
    parts.sort_by_key(|part| (Reverse(taken(part)), *part));
    let mut classes = Vec::new();
    let mut begin = 0;
    while begin < parts.len() {
        let largest = taken(&parts[begin]);
        let end = parts.partition_point(|part| taken(part) > largest / 8 * 7);
        classes.push(Class::new(problem, &parts[begin..end.max(begin + 1)]));
        begin = end.max(begin + 1);
    }
    classes
}

impl Class {
    fn new(problem: &Problem, parts: &[u32]) -> Self {
        let taken = |part: &u32| problem.taken[*part as usize];
        let mut parts = parts.to_vec();
        // parts are numbered in order of their first use, unless somebody did otherwise
        parts.sort_by_key(|part| (problem.uses_of[*part as usize].first().copied(), *part));
        let begins = parts
            .iter()
            .map(|part| problem.first_begin(*part))
            .collect();
        let nested = bit_reversed(parts.len()).map(|at| parts[at]).collect();
        Self {
            largest: parts.iter().map(taken).max().unwrap_or(0),
            smallest: parts.iter().map(taken).min().unwrap_or(0),
            bytes: parts.iter().map(taken).sum(),
            begins,
            nested,
            parts,
        }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.parts.len()
    }

    /// All, in order of their first use.
    pub(crate) fn parts(&self) -> &[u32] {
        &self.parts
    }

    /// All, in the order in which [`Spread::Nested`] takes them.
    pub(crate) fn parts_nested(&self) -> &[u32] {
        &self.nested
    }

    /// Tells `count` parts of it.
    pub(crate) fn choose(&self, count: usize, spread: Spread, mut tell: impl FnMut(u32)) {
        let count = count.min(self.parts.len());
        match spread {
            Spread::Nested => self.nested[..count].iter().for_each(|part| tell(*part)),
            Spread::Even => {
                let mut next = 0;
                for number in 0..count {
                    let target = (number as f64 + 0.5) / count as f64;
                    // the last that begins before, but one that leaves enough for the others
                    let found = self.begins[next..].partition_point(|begin| *begin <= target);
                    let at = (next + found.max(1) - 1).min(self.parts.len() - (count - number));
                    tell(self.parts[at]);
                    next = at + 1;
                }
            }
        }
    }
}

/// The numbers under `count`, in the order of their bits read backwards: each beginning is
/// spread about evenly.
fn bit_reversed(count: usize) -> impl Iterator<Item = usize> {
    let bits = usize::BITS - count.saturating_sub(1).leading_zeros();
    let all = 0..if count == 0 { 0 } else { 1usize << bits };
    all.map(move |number| match bits {
        0 => 0,
        bits => number.reverse_bits() >> (usize::BITS - bits),
    })
    .filter(move |number| *number < count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_stands_once_and_halves_come_before_quarters() {
        assert_eq!(
            bit_reversed(8).collect::<Vec<_>>(),
            [0, 4, 2, 6, 1, 5, 3, 7]
        );
        let mut all: Vec<_> = bit_reversed(37).collect();
        all.sort_unstable();
        assert_eq!(all, (0..37).collect::<Vec<_>>());
        assert_eq!(bit_reversed(1).collect::<Vec<_>>(), [0]);
        assert_eq!(bit_reversed(0).count(), 0);
    }
}
