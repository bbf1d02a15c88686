//! As few bytes as the budget allows, from parts of few sizes: parts of equal size make a
//! small ring, and streaming few large ones costs few hand-overs.

use super::{Offer, Tell};
use crate::{
    input::Strategy,
    spread::{Class, Spread},
};

/// Most sizes that are tried as the largest that streams.
const LARGEST: usize = 6;
/// Up to how many parts are put one by one where the fewest others stream.
const FEW: u64 = 8;

/// How the last bytes are made up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    /// With one more of the largest.
    Large,
    /// With smaller ones.
    Small,
    /// With smaller ones, and those in place of one of the largest.
    Smaller,
}

pub(super) fn offer(offer: &Offer<'_>, target: u64, tell: Tell<'_>) {
    let classes = &offer.classes;
    let stride = classes.len().div_ceil(LARGEST).max(1);
    let mut below: u64 = classes.iter().map(|class| class.bytes).sum();
    for (first, class) in classes.iter().enumerate() {
        if below < target {
            return;
        }
        if first % stride == 0 {
            for spread in [Spread::Nested, Spread::Even] {
                for change in [Change::Large, Change::Small, Change::Smaller] {
                    let streams = Filling::new(offer, target).fill(first, spread, change);
                    tell(Strategy::BudgetFill, &streams);
                }
            }
        }
        below -= class.bytes;
    }
}

/// A choice in the making.
struct Filling<'a> {
    offer: &'a Offer<'a>,
    streams: Vec<bool>,
    missing: u64,
}

impl<'a> Filling<'a> {
    fn new(offer: &'a Offer<'a>, target: u64) -> Self {
        Self {
            offer,
            streams: vec![false; offer.problem.bytes.len()],
            missing: target,
        }
    }

    /// Parts of class `first` and those behind it until enough bytes are there.
    fn fill(mut self, first: usize, spread: Spread, change: Change) -> Vec<bool> {
        for (index, class) in self.offer.classes.iter().enumerate().skip(first) {
            if self.missing == 0 {
                break;
            }
            let count = match change {
                Change::Large => self
                    .missing
                    .div_ceil((class.bytes / class.len() as u64).max(1)),
                Change::Small => self.missing / class.largest.max(1),
                Change::Smaller => {
                    let count = self.missing / class.largest.max(1);
                    count.saturating_sub(u64::from(index == first))
                }
            };
            if index > first && count <= FEW {
                (0..count).for_each(|_| self.take_far(class));
                continue;
            }
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            class.choose(count, spread, |part| {
                // of a class of several sizes the first may be enough
                if self.missing > 0 {
                    self.take(part);
                }
            });
        }
        self.top_up(first);
        self.streams
    }

    fn take(&mut self, part: u32) {
        self.streams[part as usize] = true;
        self.missing = self
            .missing
            .saturating_sub(self.offer.problem.taken[part as usize]);
    }

    /// Takes the part of a class that is the farthest from all that stream.
    fn take_far(&mut self, class: &Class) {
        let problem = self.offer.problem;
        let streams = |held: &Vec<u32>| held.iter().any(|part| self.streams[*part as usize]);
        let uses = problem.uses.iter().enumerate();
        let stops: Vec<(f64, f64)> = uses
            .filter(|(_, held)| streams(held))
            .map(|(index, _)| (problem.begins[index], problem.shares[index]))
            .collect();
        let distance = |part: u32| {
            let Some(&index) = problem.uses_of[part as usize].first() else {
                return 0.0;
            };
            let (begin, share) = (
                problem.begins[index as usize],
                problem.shares[index as usize],
            );
            let behind = stops.partition_point(|(stop, _)| *stop < begin);
            let around = |at: f64| if at < 0.0 { at + 1.0 } else { at };
            let next = stops.get(behind).or(stops.first());
            let before = behind
                .checked_sub(1)
                .map_or(stops.last(), |at| stops.get(at));
            let next = next.map_or(1.0, |(stop, _)| around(stop - begin) - share);
            let before = before.map_or(1.0, |(stop, length)| around(begin - stop) - length);
            next.min(before)
        };
        let mut best: Option<(f64, u32)> = None;
        for &part in class
            .parts()
            .iter()
            .filter(|part| !self.streams[**part as usize])
        {
            let distance = distance(part);
            if best.is_none_or(|(most, _)| distance > most) {
                best = Some((distance, part));
            }
        }
        if let Some((_, part)) = best {
            self.take(part);
        }
    }

    /// Adds parts no larger than those of class `first` until enough bytes are there: of the
    /// smallest class of which one is enough, or of the largest.
    fn top_up(&mut self, first: usize) {
        while self.missing > 0 {
            let left = |class: &&Class| {
                let mut parts = class.parts().iter();
                parts.any(|part| !self.streams[*part as usize])
            };
            let open: Vec<&Class> = self.offer.classes[first..].iter().filter(left).collect();
            let enough = open
                .iter()
                .rev()
                .find(|class| class.smallest >= self.missing);
            let Some(class) = enough.or(open.first()).copied() else {
                return;
            };
            self.take_far(class);
        }
    }
}
