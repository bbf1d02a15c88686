//! The hold table: who holds which part how often. Pure.
//!
//! RPC and fast path count in one table. Only the first acquire and the last release
//! of a part touch its slot word, so tied weights, nested and shared modules may hold a
//! part many times. Two held parts never overlap in the ring.

use crate::plan::{Layer, Plan};

/// Range of a streamed part in its allocation.
#[derive(Debug, Clone, Copy)]
struct Range {
    allocation: u32,
    begin: u64,
    end: u64,
}

impl Range {
    fn overlaps(self, other: Self) -> bool {
        let shared = self.begin.max(other.begin) < self.end.min(other.end);
        self.allocation == other.allocation && shared
    }
}

/// Parts that cannot be held together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Overlap {
    /// The part asked for.
    pub(crate) part: u32,
    /// The one that is held.
    pub(crate) held: u32,
}

/// Counts per part; resident parts are never counted.
#[derive(Debug)]
pub(crate) struct HoldTable {
    counts: Vec<u64>,
    ranges: Vec<Range>,
    /// Parts with a count, in no order: few at any time.
    held: Vec<u32>,
}

impl HoldTable {
    pub(crate) fn new(plan: &Plan) -> Self {
        let ranges: Vec<Range> = plan
            .parts()
            .iter()
            .map(|part| Range {
                allocation: part.allocation,
                begin: part.offset,
                end: part.offset.saturating_add(part.bytes),
            })
            .collect();
        Self {
            counts: vec![0; ranges.len()],
            // no allocation while layers are acquired, unless many are held at once
            held: Vec::with_capacity(64),
            ranges,
        }
    }

    /// Parts that are held.
    pub(crate) fn held(&self) -> &[u32] {
        &self.held
    }

    /// How often `part` is held.
    #[cfg(test)]
    pub(crate) fn count(&self, part: u32) -> u64 {
        self.counts.get(part as usize).copied().unwrap_or(0)
    }

    /// Whether all of `parts` may be held beside what is held: looked at before
    /// anything is touched.
    pub(crate) fn check(&self, parts: &[u32]) -> Result<(), Overlap> {
        for &part in parts {
            let Some((&range, 0)) = self
                .ranges
                .get(part as usize)
                .zip(self.counts.get(part as usize).copied())
            else {
                continue;
            };
            for &held in &self.held {
                if self
                    .ranges
                    .get(held as usize)
                    .is_some_and(|&other| range.overlaps(other))
                {
                    return Err(Overlap { part, held });
                }
            }
        }
        Ok(())
    }

    /// Counts one more hold of `part`. `true` when it is the first.
    pub(crate) fn add(&mut self, part: u32) -> bool {
        let Some(count) = self.counts.get_mut(part as usize) else {
            return false;
        };
        *count += 1;
        if *count == 1 {
            self.held.push(part);
        }
        *count == 1
    }

    /// Counts one hold of `part` less. `true` when it was the last.
    pub(crate) fn remove(&mut self, part: u32) -> bool {
        match self.counts.get_mut(part as usize) {
            Some(count) if *count > 0 => {
                *count -= 1;
                if *count > 0 {
                    return false;
                }
            }
            _ => return false,
        }
        if let Some(at) = self.held.iter().rposition(|&held| held == part) {
            self.held.swap_remove(at);
        }
        true
    }

    /// Forgets all holds.
    pub(crate) fn clear(&mut self) {
        for part in self.held.drain(..) {
            if let Some(count) = self.counts.get_mut(part as usize) {
                *count = 0;
            }
        }
    }

    /// Holds all of `parts`, which were checked: `touch` takes one that was not held.
    /// When it fails, what this call took is given back by `undo` and nothing has changed.
    pub(crate) fn acquire<E>(
        &mut self,
        parts: &[u32],
        mut touch: impl FnMut(u32) -> Result<(), E>,
        mut undo: impl FnMut(u32),
    ) -> Result<(), E> {
        for (taken, &part) in parts.iter().enumerate() {
            if self.add(part)
                && let Err(error) = touch(part)
            {
                self.remove(part);
                for &part in parts.iter().take(taken).rev() {
                    if self.remove(part) {
                        undo(part);
                    }
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Releases all of `parts`: `touch` gives one back that nobody holds any more.
    pub(crate) fn release(&mut self, parts: &[u32], mut touch: impl FnMut(u32)) {
        for &part in parts {
            if self.remove(part) {
                touch(part);
            }
        }
    }
}

/// Two parts of one layer that overlap: such a layer can never be held.
pub(crate) fn overlap_within(plan: &Plan, layer: &Layer) -> Option<Overlap> {
    let mut ranges: Vec<_> = layer
        .streamed
        .iter()
        .filter_map(|&index| plan.parts().get(index as usize))
        .filter(|part| part.bytes > 0)
        .collect();
    ranges.sort_by_key(|part| (part.allocation, part.offset));
    ranges.windows(2).find_map(|pair| match pair {
        [one, two] if one.allocation == two.allocation && two.offset < one.offset + one.bytes => {
            Some(Overlap {
                part: two.index,
                held: one.index,
            })
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests;
