//! Addresses in the ring: a part has one address for the life of a plan, and parts of
//! one use never overlap.

use std::collections::HashSet;

use flextensord_proto::layout::LABEL_BYTES;

use super::{Input, skyline::Skyline, taken};

/// Bytes of the largest use, counting only parts for which `streams` holds.
pub(super) fn largest_use(input: &Input, streams: &[bool]) -> u64 {
    let uses = input.uses.iter();
    uses.map(|held| bytes_of(input, streams, held))
        .max()
        .unwrap_or(0)
}

/// Bytes of the streamed parts of a use.
fn bytes_of(input: &Input, streams: &[bool], held: &[u32]) -> u64 {
    let streamed = distinct(held)
        .into_iter()
        .filter(|part| streams[*part as usize]);
    streamed.map(|part| taken(input.parts[part as usize])).sum()
}

/// Places the streamed parts in a ring of `capacity` bytes (label not counted), in order
/// of their first use, one behind the other, around. Returns the offset of each part,
/// label included; `None` when some part finds no place that leaves its uses apart.
pub(super) fn place(input: &Input, streams: &[bool], capacity: u64) -> Option<Vec<Option<u64>>> {
    place_by(input, streams, capacity, &mut None)
}

/// As [`place`], and where that is free to choose, as far as can be from what was used
/// just before: a copy then waits for nobody who was just served.
pub(super) fn spread(input: &Input, streams: &[bool], capacity: u64) -> Option<Vec<Option<u64>>> {
    let mut skyline = Some(Skyline::new(capacity));
    place_by(input, streams, capacity, &mut skyline)
}

fn place_by(
    input: &Input,
    streams: &[bool],
    capacity: u64,
    skyline: &mut Option<Skyline>,
) -> Option<Vec<Option<u64>>> {
    let mut offsets: Vec<Option<u64>> = vec![None; input.parts.len()];
    let uses_of = uses_of(input);
    let mut cursor = 0;
    for (number, held) in input.uses.iter().enumerate() {
        let held = distinct(held);
        let fresh: Vec<u32> = held
            .iter()
            .copied()
            .filter(|part| streams[*part as usize] && offsets[*part as usize].is_none())
            .collect();
        // a use that would be cut in two by the ring's end begins at its start instead,
        // unless it fills the ring
        let together: u64 = fresh
            .iter()
            .map(|part| taken(input.parts[*part as usize]))
            .sum();
        if cursor + together > capacity && together <= capacity {
            cursor = 0;
        }
        // parts that stand in no other use lie side by side behind the cursor: nothing of
        // their use is there, and a use may have very many of them
        let mut streamed = held.iter().filter(|part| streams[**part as usize]);
        if together <= capacity && streamed.all(|part| uses_of[*part as usize].len() == 1) {
            if let Some(skyline) = skyline {
                let next = input.uses.get(number + 1);
                let next = next.map_or(0, |held| bytes_of(input, streams, held));
                cursor = skyline.apart(number + 1, together, next);
                skyline.place(cursor, cursor + together, number + 1);
            }
            for part in fresh {
                offsets[part as usize] = Some(cursor);
                cursor += taken(input.parts[part as usize]);
            }
            continue;
        }
        for part in fresh {
            let bytes = taken(input.parts[part as usize]);
            let apart = conflicts(input, &uses_of, &offsets, part);
            let start = find(&apart, cursor, bytes, capacity)
                .or_else(|| find(&apart, 0, bytes, capacity))?;
            offsets[part as usize] = Some(start);
            cursor = start + bytes;
            if let Some(skyline) = skyline {
                skyline.place(start, cursor, number + 1);
            }
        }
    }
    Some(
        offsets
            .into_iter()
            .map(|offset| offset.map(|o| o + LABEL_BYTES))
            .collect(),
    )
}

/// The uses in which each part stands.
fn uses_of(input: &Input) -> Vec<Vec<usize>> {
    let mut uses = vec![Vec::new(); input.parts.len()];
    for (index, held) in input.uses.iter().enumerate() {
        for part in distinct(held) {
            uses[part as usize].push(index);
        }
    }
    uses
}

/// Ranges of the placed parts that stand in a use with `part`, in order of address.
fn conflicts(
    input: &Input,
    uses_of: &[Vec<usize>],
    offsets: &[Option<u64>],
    part: u32,
) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = uses_of[part as usize]
        .iter()
        .flat_map(|index| &input.uses[*index])
        .filter(|other| **other != part)
        .filter_map(|other| {
            let start = offsets[*other as usize]?;
            Some((start, start + taken(input.parts[*other as usize])))
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

/// The parts of a use, each once, in the order in which the use names them.
pub(super) fn distinct(held: &[u32]) -> Vec<u32> {
    let mut seen = HashSet::with_capacity(held.len());
    held.iter()
        .copied()
        .filter(|part| seen.insert(*part))
        .collect()
}
