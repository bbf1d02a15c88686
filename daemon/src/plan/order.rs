//! The order in which parts are made resident.

use std::collections::HashSet;

use super::{Input, SMALL_BYTES, taken};

/// Parts in the order in which they become resident: small ones first, then by size,
/// the largest first, then by index. The residents of a plan are a beginning of this
/// order, so that plans of different budgets share their first blocks. Returns the
/// order and how many small ones it begins with. Parts without bytes, and those that no use names, are left out.
pub(super) fn residence(input: &Input) -> (Vec<u32>, usize) {
    let used: HashSet<u32> = input.uses.iter().flatten().copied().collect();
    let mut order: Vec<(bool, u64, u32)> = Vec::with_capacity(input.parts.len());
    for (index, &bytes) in input.parts.iter().enumerate() {
        if let Ok(part) = u32::try_from(index)
            && bytes > 0
            && used.contains(&part)
        {
            order.push((bytes >= SMALL_BYTES, u64::MAX - taken(bytes), part));
        }
    }
    order.sort_unstable();
    let small = order.iter().take_while(|(large, ..)| !large).count();
    (order.into_iter().map(|(.., part)| part).collect(), small)
}
