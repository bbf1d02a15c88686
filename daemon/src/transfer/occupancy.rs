//! Which parts lie in a ring, by their offset: they never overlap, whatever a client writes.

use std::collections::{BTreeMap, HashSet};

use flextensord_device::{
    control::ControlPage,
    handover::{Filler, Sight},
    journal::JournalFile,
};
use flextensord_proto::limit;

use super::stream::StreamPart;

/// What a predecessor left in a ring: the parts that are not empty, by their offset, and the
/// position where the client was last seen. Copies that never arrived are forgotten: nothing
/// is under way when a stream begins. All is empty in a new ring.
pub(super) fn inherited(
    filler: &mut Filler<JournalFile>,
    control: &ControlPage,
    parts: &[StreamPart],
    order: &[u32],
) -> (BTreeMap<u64, u32>, Option<usize>) {
    let mut occupied = BTreeMap::new();
    let mut in_use = HashSet::new();
    for (number, place) in (0..).zip(parts).filter(|(_, place)| place.bytes > 0) {
        match filler.sight(control, number) {
            Sight::Empty => {}
            Sight::Filling => filler.withdraw(number),
            sight => {
                occupied.insert(place.ring_offset, number);
                if sight == Sight::InUse {
                    in_use.insert(number);
                }
            }
        }
    }
    let reached = order.iter().rposition(|part| in_use.contains(part));
    (occupied, reached)
}

/// The occupied parts whose range meets that of `place`.
pub(super) fn overlapping<'a>(
    occupied: &'a BTreeMap<u64, u32>,
    parts: &'a [StreamPart],
    place: StreamPart,
) -> impl Iterator<Item = &'a u32> {
    let size = |part: u32| limit::align(parts[part as usize].bytes).unwrap_or(u64::MAX);
    let end = place.ring_offset + limit::align(place.bytes).unwrap_or(u64::MAX - place.ring_offset);
    // occupied parts do not overlap each other: of those that begin before the range,
    // only the last can reach into it
    let before = occupied
        .range(..place.ring_offset)
        .next_back()
        .filter(move |(offset, part)| **offset + size(**part) > place.ring_offset);
    before
        .into_iter()
        .chain(occupied.range(place.ring_offset..end))
        .map(|(_, part)| part)
}
