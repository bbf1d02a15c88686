//! In each use as many bytes as its share of compute, found as a subset sum; what it could
//! not take is left to the next use. Of few parts, every choice there is.

use super::{Offer, Tell};
use crate::input::Strategy;

/// Most parts of which every choice is offered.
const FEW: usize = 9;
/// Most parts of a use of which every sum is tried.
const SUMS: usize = 8;

pub(super) fn every_choice(offer: &Offer<'_>, tell: Tell<'_>) {
    let parts = &offer.movable;
    if parts.len() > FEW {
        return;
    }
    let mut streams = vec![false; offer.problem.bytes.len()];
    for choice in 0u32..1 << parts.len() {
        for (bit, part) in parts.iter().enumerate() {
            streams[*part as usize] = choice >> bit & 1 == 1;
        }
        tell(Strategy::Knapsack, &streams);
    }
}

pub(super) fn offer(offer: &Offer<'_>, target: u64, tell: Tell<'_>) {
    let problem = offer.problem;
    let mut may = vec![false; problem.bytes.len()];
    for part in &offer.movable {
        may[*part as usize] = true;
    }
    let mut streams = vec![false; problem.bytes.len()];
    let (mut share_left, mut missing) = (0.0, target);
    for (held, share) in problem.uses.iter().zip(&problem.shares) {
        share_left += share * target as f64;
        let fresh = |part: &&u32| may[**part as usize] && !streams[**part as usize];
        let fresh: Vec<u32> = held.iter().filter(fresh).copied().collect();
        for part in best_sum(&problem.taken, &fresh, share_left) {
            streams[part as usize] = true;
            share_left -= problem.taken[part as usize] as f64;
            missing = missing.saturating_sub(problem.taken[part as usize]);
        }
    }
    offer.top_up(&mut streams, missing);
    tell(Strategy::Knapsack, &streams);
}

/// The parts with the largest sum up to `most`: exact for few parts, else the largest first.
fn best_sum(taken: &[u64], parts: &[u32], most: f64) -> Vec<u32> {
    let bytes = |part: &u32| taken[*part as usize] as f64;
    if parts.len() > SUMS {
        let mut largest = parts.to_vec();
        largest.sort_by_key(|part| std::cmp::Reverse(taken[*part as usize]));
        let mut left = most;
        largest.retain(|part| {
            let fits = bytes(part) <= left;
            left -= if fits { bytes(part) } else { 0.0 };
            fits
        });
        return largest;
    }
    let chosen = |choice: u32| {
        let parts = parts.iter().enumerate();
        parts
            .filter(move |(bit, _)| choice >> bit & 1 == 1)
            .map(|(_, part)| part)
    };
    let mut best = (0.0, 0);
    for choice in 1u32..1 << parts.len() {
        let sum: f64 = chosen(choice).map(bytes).sum();
        if sum <= most && sum > best.0 {
            best = (sum, choice);
        }
    }
    chosen(best.1).copied().collect()
}
