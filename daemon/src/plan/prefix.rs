//! The plan that keeps a beginning of the residence order on the device and streams
//! the rest through a ring.

use flextensord_proto::{layout::LABEL_BYTES, limit};

use super::{BLOCK_BYTES, Block, Input, Place, Plan, PlanError, labelled, order, ring, taken};

/// Blocks of a model that is not large: a driver makes memory in units of 2 MiB, and each
/// block wastes half of one.
const BLOCKS: u64 = 8;
/// About how many numbers of residents are tried.
const CANDIDATES: usize = 512;

/// How many parts of the residence order stay, and how large the ring is.
#[derive(Debug, Clone, Copy)]
struct Choice {
    residents: usize,
    capacity: u64,
}

/// Plans within `input.budget`: as many bytes resident as fit beside a ring of two of
/// the largest uses, or beside the least ring that works where that does not fit.
///
/// # Errors
/// [`PlanError::Infeasible`] with the least feasible budget; the others when the input
/// makes no sense.
pub fn plan(input: &Input) -> Result<Plan, PlanError> {
    check(input)?;
    let (residence, small) = order::residence(input);
    let mut least = u64::MAX;
    let mut best: Option<(bool, Choice)> = None;
    // nothing resident, then all small parts and ever more of the large ones
    let stride = ((residence.len() - small) / CANDIDATES).max(1);
    let more = (small.max(1)..residence.len()).step_by(stride);
    for residents in std::iter::once(0).chain(more).chain([residence.len()]) {
        let streams = streams(input, &residence[..residents]);
        let held = held_by_blocks(input, &residence[..residents]);
        let Some(capacity) = least_capacity(input, &streams) else {
            continue;
        };
        least = least.min(held.saturating_add(labelled(capacity)));
        let Some(room) = input.budget.checked_sub(held) else {
            continue;
        };
        if labelled(capacity) > room {
            continue;
        }
        // a larger ring is not always one in which the parts find a place
        let roomy = roomy_capacity(input, &streams, capacity);
        let widest = room.saturating_sub(LABEL_BYTES) / limit::ALIGNMENT * limit::ALIGNMENT;
        let fits = |tried: &u64| {
            *tried >= capacity
                && labelled(*tried) <= room
                && ring::place(input, &streams, *tried).is_some()
        };
        let wide = fits(&roomy);
        let capacity = [roomy, widest.min(roomy), capacity]
            .into_iter()
            .find(fits)
            .unwrap_or(capacity);
        // a wide ring beats a narrow one; among equals, the most residents
        if best.is_none_or(|(best_wide, _)| wide >= best_wide) {
            best = Some((
                wide,
                Choice {
                    residents,
                    capacity,
                },
            ));
        }
    }
    match best {
        Some((_, choice)) => build(input, &residence, choice, least).ok_or(PlanError::Infeasible {
            budget: input.budget,
            least,
        }),
        None => Err(PlanError::Infeasible {
            budget: input.budget,
            least,
        }),
    }
}

fn check(input: &Input) -> Result<(), PlanError> {
    let parts = input.parts.len();
    let overflow = || PlanError::Overflow { parts };
    u32::try_from(parts).map_err(|_| overflow())?;
    // room for labels and for twice the largest use, so that sums below stay in range
    let sum = input
        .parts
        .iter()
        .try_fold(0u64, |sum, bytes| sum.checked_add(limit::align(*bytes)?))
        .ok_or_else(overflow)?;
    sum.checked_mul(4).ok_or_else(overflow)?;
    for (index, held) in input.uses.iter().enumerate() {
        if let Some(&part) = held.iter().find(|part| **part as usize >= parts) {
            return Err(PlanError::UnknownPart { index, part, parts });
        }
    }
    Ok(())
}

fn streams(input: &Input, residents: &[u32]) -> Vec<bool> {
    let mut streams = vec![false; input.parts.len()];
    for part in input.uses.iter().flatten() {
        streams[*part as usize] = input.parts[*part as usize] > 0;
    }
    for part in residents {
        streams[*part as usize] = false;
    }
    streams
}

/// The least capacity in which the streamed parts can be placed.
fn least_capacity(input: &Input, streams: &[bool]) -> Option<u64> {
    let largest = ring::largest_use(input, streams);
    if largest == 0 {
        return Some(0);
    }
    // parts that stand in several uses may leave gaps: then the ring grows in steps, at
    // most until everything lies side by side
    let all: u64 = sum_streamed(input, streams);
    let mut capacity = largest;
    while capacity < all {
        if ring::place(input, streams, capacity).is_some() {
            return Some(capacity);
        }
        capacity += (capacity / 8 / limit::ALIGNMENT).max(1) * limit::ALIGNMENT;
    }
    Some(all)
}

/// A capacity that lets the next use arrive while one is held.
fn roomy_capacity(input: &Input, streams: &[bool], least: u64) -> u64 {
    least.saturating_mul(2).min(sum_streamed(input, streams))
}

fn sum_streamed(input: &Input, streams: &[bool]) -> u64 {
    input
        .parts
        .iter()
        .zip(streams)
        .filter(|(_, streams)| **streams)
        .map(|(bytes, _)| taken(*bytes))
        .sum()
}

fn held_by_blocks(input: &Input, residents: &[u32]) -> u64 {
    blocks(input, residents)
        .iter()
        .map(|block| block.bytes)
        .sum()
}

/// Cuts residents into blocks. Where the cuts lie does not depend on the budget.
fn blocks(input: &Input, residents: &[u32]) -> Vec<Block> {
    let all: u64 = input.parts.iter().map(|bytes| taken(*bytes)).sum();
    let full = (all / BLOCKS).clamp(BLOCK_BYTES.0, BLOCK_BYTES.1);
    let mut blocks: Vec<Block> = Vec::new();
    for part in residents {
        let bytes = taken(input.parts[*part as usize]);
        let open = blocks.last_mut().filter(|block| {
            block.bytes < full && block.bytes.saturating_add(bytes) <= BLOCK_BYTES.1
        });
        match open {
            Some(block) => {
                block.bytes += bytes;
                block.parts.push(*part);
            }
            None => blocks.push(Block {
                bytes: LABEL_BYTES + bytes,
                parts: vec![*part],
            }),
        }
    }
    blocks
}

fn build(input: &Input, residence: &[u32], choice: Choice, least: u64) -> Option<Plan> {
    let residents = &residence[..choice.residents];
    let streams = streams(input, residents);
    let blocks = blocks(input, residents);
    let offsets = ring::spread(input, &streams, choice.capacity)
        .or_else(|| ring::place(input, &streams, choice.capacity))?;
    let mut places = vec![Place::Nowhere; input.parts.len()];
    for (index, block) in blocks.iter().enumerate() {
        let mut offset = LABEL_BYTES;
        for part in &block.parts {
            let block = u32::try_from(index).ok()?;
            places[*part as usize] = Place::Resident { block, offset };
            offset += taken(input.parts[*part as usize]);
        }
    }
    for (place, offset) in places.iter_mut().zip(&offsets) {
        if let Some(offset) = *offset {
            *place = Place::Streamed { offset };
        }
    }
    let stream_order: Vec<u32> = input
        .uses
        .iter()
        .flatten()
        .copied()
        .filter(|part| streams[*part as usize])
        .collect();
    let streamed_bytes = stream_order
        .iter()
        .map(|part| input.parts[*part as usize])
        .sum();
    let ring_bytes = if stream_order.is_empty() {
        0
    } else {
        labelled(choice.capacity)
    };
    let resident_bytes = blocks.iter().map(|block| block.bytes).sum();
    Some(Plan {
        places,
        blocks,
        ring_bytes,
        stream_order,
        resident_bytes,
        streamed_bytes,
        least_feasible: least,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layered(layers: u32, parts: u32, bytes: u64, budget: u64) -> Input {
        Input {
            parts: vec![bytes; (layers * parts) as usize],
            uses: (0..layers)
                .map(|l| (l * parts..(l + 1) * parts).collect())
                .collect(),
            budget,
        }
    }

    /// What every plan must keep, whatever the input.
    fn keeps_its_word(input: &Input, plan: &Plan) {
        assert!(plan.held_bytes() <= input.budget, "over budget");
        let mut seen = vec![0; input.parts.len()];
        for block in &plan.blocks {
            for part in &block.parts {
                seen[*part as usize] += 1;
            }
        }
        for (index, place) in plan.places.iter().enumerate() {
            match *place {
                Place::Nowhere => assert!(
                    input.parts[index] == 0
                        || !input
                            .uses
                            .iter()
                            .flatten()
                            .any(|part| *part as usize == index)
                ),
                Place::Resident { block, offset } => {
                    assert_eq!(seen[index], 1, "part {index} lies in no or several blocks");
                    assert!(offset >= LABEL_BYTES && offset % 256 == 0);
                    assert!(offset + input.parts[index] <= plan.blocks[block as usize].bytes);
                }
                Place::Streamed { offset } => {
                    assert_eq!(seen[index], 0);
                    assert!(offset >= LABEL_BYTES && offset % 256 == 0);
                    assert!(offset + input.parts[index] <= plan.ring_bytes);
                }
            }
        }
        for held in &input.uses {
            let mut ranges: Vec<(u64, u64)> = ring::distinct(held)
                .into_iter()
                .filter_map(|part| match plan.places[part as usize] {
                    Place::Streamed { offset } => {
                        Some((offset, offset + taken(input.parts[part as usize])))
                    }
                    _ => None,
                })
                .collect();
            ranges.sort_unstable();
            assert!(
                ranges.windows(2).all(|w| w[0].1 <= w[1].0),
                "parts of one use overlap"
            );
        }
    }

    #[test]
    fn everything_stays_when_the_budget_allows_it() {
        let input = layered(4, 2, 1 << 20, 64 << 20);
        let plan = plan(&input).unwrap();
        assert_eq!((plan.ring_bytes, plan.streamed_bytes), (0, 0));
        keeps_its_word(&input, &plan);
    }

    #[test]
    fn a_budget_under_the_largest_use_names_the_least_feasible_one() {
        let input = layered(4, 2, 1 << 20, 1 << 20);
        let PlanError::Infeasible { least, .. } = plan(&input).unwrap_err() else {
            panic!()
        };
        assert_eq!(least, (2 << 20) + LABEL_BYTES);
        let tight = Input {
            budget: least,
            ..input.clone()
        };
        let tight_plan = plan(&tight).unwrap();
        keeps_its_word(&tight, &tight_plan);
        assert!(
            plan(&Input {
                budget: least - 1,
                ..input
            })
            .is_err()
        );
    }

    #[test]
    fn an_embedding_that_no_ring_could_hold_becomes_resident() {
        let mut input = layered(6, 6, 1 << 20, 64 << 20);
        input.parts.push(47 << 20);
        input.uses.insert(0, vec![36]);
        let plan = plan(&input).unwrap();
        assert!(matches!(plan.places[36], Place::Resident { .. }));
        assert!(plan.streamed_bytes > 0);
        keeps_its_word(&input, &plan);
    }

    #[test]
    fn a_part_in_two_uses_has_one_address_apart_from_both() {
        let input = Input {
            parts: vec![1 << 20; 5],
            uses: vec![vec![0, 1], vec![2, 1], vec![3, 0], vec![4, 2]],
            budget: (3 << 20) + LABEL_BYTES,
        };
        let plan = plan(&input).unwrap();
        keeps_its_word(&input, &plan);
    }

    #[test]
    fn parts_without_bytes_need_no_place() {
        let input = Input {
            parts: vec![0, 0],
            uses: vec![vec![0], vec![0, 1]],
            budget: 0,
        };
        assert_eq!(plan(&input).unwrap().places, [Place::Nowhere; 2]);
    }

    #[test]
    fn nonsense_is_refused() {
        let unknown = Input {
            parts: vec![1],
            uses: vec![vec![1]],
            budget: 1,
        };
        assert!(matches!(
            plan(&unknown),
            Err(PlanError::UnknownPart { part: 1, .. })
        ));
        let huge = Input {
            parts: vec![u64::MAX, 1],
            uses: vec![],
            budget: 1,
        };
        assert!(matches!(plan(&huge), Err(PlanError::Overflow { .. })));
    }

    proptest! {
        #[test]
        fn every_plan_keeps_its_word(
            parts in prop::collection::vec(0u64..3 << 20, 1..40),
            picks in prop::collection::vec(prop::collection::vec(any::<prop::sample::Index>(), 0..6), 1..20),
            budget in 0u64..80 << 20,
        ) {
            let uses = picks.iter().map(|held| held.iter().map(|p| u32::try_from(p.index(parts.len())).unwrap()).collect()).collect();
            let input = Input { parts, uses, budget };
            match plan(&input) {
                Ok(found) => {
                    keeps_its_word(&input, &found);
                    prop_assert_eq!(&found, &plan(&input).unwrap());
                }
                Err(PlanError::Infeasible { least, .. }) => {
                    prop_assert!(least > input.budget);
                    let enough = Input { budget: least, ..input.clone() };
                    keeps_its_word(&enough, &plan(&enough).unwrap());
                }
                Err(other) => prop_assert!(false, "{other}"),
            }
        }

        #[test]
        fn residents_of_one_budget_are_a_beginning_of_those_of_another(
            one in 3u64..60, other in 3u64..60,
        ) {
            let residents = |budget: u64| {
                plan(&layered(10, 3, 1 << 20, (budget << 20) + 4096))
                    .map(|plan| plan.blocks.into_iter().flat_map(|b| b.parts).collect::<Vec<_>>())
            };
            if let (Ok(one), Ok(other)) = (residents(one), residents(other)) {
                let common = one.len().min(other.len());
                prop_assert_eq!(&one[..common], &other[..common]);
            }
        }
    }
}
