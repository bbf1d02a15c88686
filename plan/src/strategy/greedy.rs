//! A part streams when the compute so far has paid for it.

use super::{Offer, Tell};
use crate::input::Strategy;

pub(super) fn offer(offer: &Offer<'_>, target: u64, tell: Tell<'_>) {
    let problem = offer.problem;
    let mut may = vec![false; problem.bytes.len()];
    for part in &offer.movable {
        may[*part as usize] = true;
    }
    let mut streams = vec![false; problem.bytes.len()];
    let (mut paid, mut missing) = (0.0, target);
    for (held, share) in problem.uses.iter().zip(&problem.shares) {
        paid += share * target as f64;
        for &part in held {
            let bytes = problem.taken[part as usize];
            if may[part as usize] && !streams[part as usize] && bytes as f64 <= paid {
                streams[part as usize] = true;
                paid -= bytes as f64;
                missing = missing.saturating_sub(bytes);
            }
        }
    }
    offer.top_up(&mut streams, missing);
    tell(Strategy::Greedy, &streams);
}
