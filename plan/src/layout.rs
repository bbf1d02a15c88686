//! Where the streamed parts can lie: capacities and addresses, for either layout.

use flextensord_proto::limit;

use crate::{
    error::PlanError,
    input::Layout,
    problem::Problem,
    ring::{self, Method},
};

/// Capacities that are tried, in quarters of the largest use. They do not depend on the
/// budget.
const QUARTERS: [u64; 9] = [5, 6, 7, 8, 10, 12, 16, 24, 32];

/// Most blocks.
const BLOCKS: u32 = 256;

/// Addresses of the streamed parts in a ring of so many bytes, label not counted.
#[derive(Debug)]
pub(crate) struct Addresses {
    pub(crate) capacity: u64,
    pub(crate) offsets: Vec<Option<u64>>,
}

/// Checks what a layout asks for.
pub(crate) fn check(layout: Layout) -> Result<(), PlanError> {
    match layout {
        Layout::AllocationBlockTransfer {
            num_blocks,
            min_blocks,
        } if min_blocks == 0 || num_blocks < min_blocks || num_blocks > BLOCKS => {
            Err(PlanError::Count {
                what: "num_blocks",
                value: u64::from(num_blocks),
                rule: "1 to 256, and at least min_blocks",
            })
        }
        _ => Ok(()),
    }
}

/// What of a choice the layout can stream: whole uses by turns have no place for a part of
/// several uses.
pub(crate) fn allowed(layout: Layout, problem: &Problem, part: usize) -> bool {
    match layout {
        Layout::Ring => true,
        Layout::AllocationBlockTransfer { .. } => problem.uses_of[part].len() == 1,
    }
}

/// Bytes that the streamed parts need at least.
pub(crate) fn least(layout: Layout, problem: &Problem, streams: &[bool]) -> u64 {
    match layout {
        Layout::Ring => ring::least_capacity(problem, streams),
        Layout::AllocationBlockTransfer { .. } => {
            let counts = blocks(layout)
                .into_iter()
                .filter_map(|count| turns(problem, streams, count, u64::MAX));
            counts.map(|found| found.capacity).min().unwrap_or(0)
        }
    }
}

/// Places for the streamed parts within `room` bytes, the roomiest first, or the least first
/// if `least`. Tells `try_it` of each until it has enough.
pub(crate) fn places(
    layout: Layout,
    problem: &Problem,
    streams: &[bool],
    room: u64,
    least: bool,
    mut try_it: impl FnMut(Addresses) -> bool,
) {
    if layout != Layout::Ring {
        let mut counts = blocks(layout);
        if !least {
            counts.reverse();
        }
        for count in counts {
            if let Some(found) = turns(problem, streams, count, room)
                && try_it(found)
            {
                return;
            }
        }
        return;
    }
    let mut sizes = capacities(problem, streams, room);
    if !least {
        sizes.reverse();
    }
    for capacity in sizes {
        let mut found = false;
        for method in [Method::Around, Method::Apart, Method::Behind, Method::Low] {
            let needed = match method {
                Method::Around | Method::Apart => true,
                // as around where each use has one part
                Method::Behind => !problem.lone,
                // the last resort
                Method::Low => !found,
            };
            if !needed {
                continue;
            }
            if let Some(offsets) = ring::place(problem, streams, capacity, method) {
                found = true;
                if try_it(Addresses { capacity, offsets }) {
                    return;
                }
            }
        }
    }
}

/// Capacities up to `room`, in order: some multiples of the largest use, that use with one
/// part of each size beside it, and everything side by side.
fn capacities(problem: &Problem, streams: &[bool], room: u64) -> Vec<u64> {
    let largest = ring::largest_use(problem, streams);
    if largest > room {
        return Vec::new();
    }
    let all = ring::side_by_side(problem, streams);
    let step = limit::ALIGNMENT;
    let quarters = QUARTERS
        .iter()
        .map(|quarters| (largest / 4).saturating_mul(*quarters));
    let mut sizes: Vec<u64> = quarters.map(|size| size.div_ceil(step) * step).collect();
    sizes.push(largest);
    let mut beside: Vec<u64> = problem
        .taken
        .iter()
        .zip(streams)
        .filter(|(_, streams)| **streams)
        .map(|(bytes, _)| *bytes)
        .collect();
    beside.sort_unstable();
    beside.dedup();
    if beside.len() <= SIZES {
        sizes.extend(beside.iter().map(|bytes| largest + bytes));
    }
    if !problem.single {
        sizes.push(ring::least_capacity(problem, streams));
    }
    sizes.retain(|size| *size < all);
    sizes.push(all);
    sizes.retain(|size| *size <= room);
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Most sizes of which each is tried beside the largest use.
const SIZES: usize = 6;

fn blocks(layout: Layout) -> Vec<u32> {
    match layout {
        Layout::Ring => Vec::new(),
        Layout::AllocationBlockTransfer {
            num_blocks,
            min_blocks,
        } => (min_blocks..=num_blocks).collect(),
    }
}

/// Whole uses by turns in `count` blocks, each as large as its largest use.
fn turns(problem: &Problem, streams: &[bool], count: u32, room: u64) -> Option<Addresses> {
    let mut sizes = vec![0u64; count as usize];
    let mut places: Vec<(u32, usize, u64)> = Vec::new();
    let mut turn = 0;
    for held in &problem.uses {
        let mut end = 0;
        for &part in held.iter().filter(|part| streams[**part as usize]) {
            places.push((part, turn, end));
            end += problem.taken[part as usize];
        }
        if end > 0 {
            sizes[turn] = sizes[turn].max(end);
            turn = (turn + 1) % sizes.len();
        }
    }
    let capacity: u64 = sizes.iter().sum();
    if capacity > room {
        return None;
    }
    let mut offsets = vec![None; problem.taken.len()];
    for (part, block, offset) in places {
        let begin: u64 = sizes[..block].iter().sum();
        offsets[part as usize] = Some(begin + offset);
    }
    Some(Addresses { capacity, offsets })
}
