//! Every n-th use streams as a whole, or all but every n-th.

use super::{Offer, Tell};
use crate::input::Strategy;

/// Largest n.
const LARGEST: usize = 16;

pub(super) fn offer(offer: &Offer<'_>, tell: Tell<'_>) {
    let problem = offer.problem;
    let mut may = vec![false; problem.bytes.len()];
    for part in &offer.movable {
        may[*part as usize] = true;
    }
    let full: Vec<&Vec<u32>> = problem
        .uses
        .iter()
        .filter(|held| held.iter().any(|part| may[*part as usize]))
        .collect();
    for n in 2..=LARGEST.min(full.len()) {
        for nth in [true, false] {
            let mut streams = vec![false; problem.bytes.len()];
            for (index, held) in full.iter().enumerate() {
                if (index % n == n - 1) == nth {
                    for part in held.iter().filter(|part| may[**part as usize]) {
                        streams[*part as usize] = true;
                    }
                }
            }
            tell(Strategy::NthLayer, &streams);
        }
    }
}
