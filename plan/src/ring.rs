//! Addresses in the ring: a part has one address for the life of a plan, and parts of
//! one use never overlap.

use std::cmp::Reverse;

use flextensord_proto::limit;

use crate::{exact, problem::Problem, skyline::Skyline};

/// How places are sought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    /// Each part behind the one before, around.
    Around,
    /// Each use as a whole, as far as can be from what was used just before: a copy then
    /// waits for nobody who was just served.
    Apart,
    /// Each use as a whole behind the one before, around.
    Behind,
    /// What stands in many uses first, at the begin, and the others as low as can be: the
    /// narrowest.
    Low,
}

/// Bytes of the largest use, counting only parts that stream.
pub(crate) fn largest_use(problem: &Problem, streams: &[bool]) -> u64 {
    let uses = problem.uses.iter();
    uses.map(|held| bytes_of(problem, streams, held))
        .max()
        .unwrap_or(0)
}

/// Bytes of the streamed parts of a use.
fn bytes_of(problem: &Problem, streams: &[bool], held: &[u32]) -> u64 {
    let streamed = held.iter().filter(|part| streams[**part as usize]);
    streamed.map(|part| problem.taken[*part as usize]).sum()
}

/// Bytes of all streamed parts side by side.
pub(crate) fn side_by_side(problem: &Problem, streams: &[bool]) -> u64 {
    let parts = problem.taken.iter().zip(streams);
    parts
        .filter(|(_, streams)| **streams)
        .map(|(bytes, _)| bytes)
        .sum()
}

/// The least capacity in which the streamed parts are known to find places.
pub(crate) fn least_capacity(problem: &Problem, streams: &[bool]) -> u64 {
    let largest = largest_use(problem, streams);
    // parts that stand in several uses may leave gaps: then the ring grows in steps, at
    // most until everything lies side by side
    let all = side_by_side(problem, streams);
    let fits = |capacity| {
        let methods = [Method::Low, Method::Behind].into_iter();
        methods
            .map(|method| place(problem, streams, capacity, method))
            .any(|found| found.is_some())
    };
    let mut capacity = largest;
    while capacity < all && !fits(capacity) {
        capacity += (capacity / 8 / limit::ALIGNMENT).max(1) * limit::ALIGNMENT;
    }
    let capacity = capacity.min(all);
    match capacity > largest {
        true => exact::least_capacity(problem, streams, capacity).unwrap_or(capacity),
        false => capacity,
    }
}

/// Places the streamed parts in a ring of `capacity` bytes. Returns the offset of each part
/// from behind the label; `None` when some part finds no place that leaves its uses apart.
pub(crate) fn place(
    problem: &Problem,
    streams: &[bool],
    capacity: u64,
    method: Method,
) -> Option<Vec<Option<u64>>> {
    let mut offsets: Vec<Option<u64>> = vec![None; problem.taken.len()];
    if method == Method::Low {
        return low(problem, streams, capacity, offsets);
    }
    let mut skyline = (method == Method::Apart).then(|| Skyline::new(capacity));
    let mut cursor = 0;
    let mut fresh: Vec<u32> = Vec::new();
    // the streamed bytes of the uses that stream, in order, to look one ahead
    let sizes: Vec<u64> = match method {
        Method::Apart => {
            let uses = problem.uses.iter();
            uses.map(|held| bytes_of(problem, streams, held)).collect()
        }
        _ => Vec::new(),
    };
    let mut sizes = sizes.into_iter().filter(|bytes| *bytes > 0).skip(1);
    let mut number = 0;
    for held in &problem.uses {
        let mut lone = true;
        let mut together = 0;
        fresh.clear();
        let mut any = false;
        for &part in held.iter().filter(|part| streams[**part as usize]) {
            any = true;
            lone &= problem.uses_of[part as usize].len() == 1;
            if offsets[part as usize].is_none() {
                fresh.push(part);
                together += problem.taken[part as usize];
            }
        }
        if !any {
            continue;
        }
        number += 1;
        let next = sizes.next().unwrap_or(0);
        let whole = method != Method::Around || fresh.len() == 1;
        // a use that would be cut in two by the ring's end begins at its start instead,
        // unless it fills the ring
        if whole && cursor + together > capacity && together <= capacity {
            cursor = 0;
        }
        // parts that stand in no other use lie side by side behind the cursor: nothing of
        // their use is there, and a use may have very many of them
        if lone && whole && together <= capacity {
            if let Some(skyline) = &mut skyline {
                cursor = skyline.apart(number, together, next.min(capacity));
                skyline.place(cursor, cursor + together, number);
            }
            for part in &fresh {
                offsets[*part as usize] = Some(cursor);
                cursor += problem.taken[*part as usize];
            }
            continue;
        }
        if lone && method == Method::Around {
            // nothing of their use is there yet: they go round until they meet its begin
            let around = around(problem, &fresh, cursor, capacity, &mut offsets);
            if let Some(end) = around {
                cursor = end;
                continue;
            }
        }
        for part in &fresh {
            let bytes = problem.taken[*part as usize];
            let apart = conflicts(problem, &offsets, *part);
            let start = find(&apart, cursor, bytes, capacity)
                .or_else(|| find(&apart, 0, bytes, capacity))?;
            offsets[*part as usize] = Some(start);
            cursor = start + bytes;
            if let Some(skyline) = &mut skyline {
                skyline.place(start, cursor, number);
            }
        }
    }
    Some(offsets)
}

fn low(
    problem: &Problem,
    streams: &[bool],
    capacity: u64,
    mut offsets: Vec<Option<u64>>,
) -> Option<Vec<Option<u64>>> {
    let mut parts: Vec<u32> = (0u32..)
        .zip(streams)
        .filter(|(_, streams)| **streams)
        .map(|(part, _)| part)
        .collect();
    parts.sort_by_key(|part| {
        let part = *part as usize;
        Reverse((problem.uses_of[part].len(), problem.taken[part]))
    });
    for part in parts {
        let bytes = problem.taken[part as usize];
        let start = find(&conflicts(problem, &offsets, part), 0, bytes, capacity)?;
        offsets[part as usize] = Some(start);
    }
    Some(offsets)
}

/// Places the parts of a use, of which none stands elsewhere, one behind the other from
/// `cursor` on, around. Returns where they end; `None`, with nothing placed, when they would
/// overlap.
fn around(
    problem: &Problem,
    fresh: &[u32],
    cursor: u64,
    capacity: u64,
    offsets: &mut [Option<u64>],
) -> Option<u64> {
    let mut end = cursor;
    let mut begin = None;
    let mut turned = false;
    for part in fresh {
        let bytes = problem.taken[*part as usize];
        if end + bytes > capacity {
            if turned || bytes > capacity {
                begin = None;
                break;
            }
            // the first part may begin there as well
            turned = begin.is_some();
            end = 0;
        }
        let first = *begin.get_or_insert(end);
        if turned && end + bytes > first {
            begin = None;
            break;
        }
        offsets[*part as usize] = Some(end);
        end += bytes;
    }
    if begin.is_none() {
        for part in fresh {
            offsets[*part as usize] = None;
        }
        return None;
    }
    Some(end)
}

/// Ranges of the placed parts that stand in a use with `part`, in order of address.
fn conflicts(problem: &Problem, offsets: &[Option<u64>], part: u32) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = problem.uses_of[part as usize]
        .iter()
        .flat_map(|index| &problem.uses[*index as usize])
        .filter(|other| **other != part)
        .filter_map(|other| {
            let start = offsets[*other as usize]?;
            Some((start, start + problem.taken[*other as usize]))
        })
        .collect();
    ranges.sort_unstable();
    ranges.dedup();
    ranges
}

/// The first start at or behind `from` that keeps clear of `ranges`.
fn find(ranges: &[(u64, u64)], from: u64, bytes: u64, capacity: u64) -> Option<u64> {
    let mut start = from;
    for &(begin, end) in ranges {
        if start < end && begin < start + bytes {
            start = end;
        }
    }
    (start + bytes <= capacity).then_some(start)
}
