//! What every plan keeps, whatever the input.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use flextensord_plan::{
    Acquire, BatchKey, Goal, Input, Layout, Link, Place, Plan, PlanError, Strategy as Choice, Use,
    forecast, plan,
};
use proptest::prelude::*;

const LABEL: u64 = 256;

fn keeps_its_word(input: &Input, found: &Plan) {
    assert!(found.held_bytes() <= input.goal.bytes(), "over budget");
    let mut seen = vec![0; input.parts.len()];
    for (index, block) in (0u32..).zip(&found.blocks) {
        assert!(block.bytes <= (256 << 20) || block.parts.len() == 1);
        let mut end = LABEL;
        for &part in &block.parts {
            seen[part as usize] += 1;
            let expected = Place::Resident {
                block: index,
                offset: end,
            };
            assert_eq!(found.places[part as usize], expected);
            end += input.parts[part as usize].stored.next_multiple_of(256);
        }
        assert_eq!(end, block.bytes);
    }
    let first = |part: u32| {
        let tied = input.aliases.iter().find(|group| group.contains(&part));
        tied.map_or(part, |group| *group.iter().min().unwrap())
    };
    for (index, place) in (0u32..).zip(&found.places) {
        assert_eq!(*place, found.places[first(index) as usize]);
        let bytes = input.parts[index as usize].stored;
        match *place {
            Place::Nowhere => assert!(
                bytes == 0
                    || !input
                        .uses
                        .iter()
                        .flat_map(|used| &used.parts)
                        .any(|part| first(*part) == first(index))
            ),
            Place::Resident { .. } => {
                assert_eq!(seen[first(index) as usize], 1, "in no or several blocks");
            }
            Place::Streamed { offset } => {
                assert_eq!(seen[index as usize], 0);
                assert!(offset >= LABEL && offset % 256 == 0);
                assert!(offset + bytes <= found.ring_bytes);
            }
        }
    }
    let mut order: Vec<u32> = Vec::new();
    for used in &input.uses {
        let mut held: Vec<u32> = Vec::new();
        for part in used.parts.iter().map(|part| first(*part)) {
            if !held.contains(&part) {
                held.push(part);
            }
        }
        held.retain(|part| matches!(found.places[*part as usize], Place::Streamed { .. }));
        order.extend(&held);
        if input.acquire == Acquire::Part {
            continue;
        }
        let mut ranges: Vec<(u64, u64)> = held
            .into_iter()
            .map(|part| match found.places[part as usize] {
                Place::Streamed { offset } => (offset, offset + input.parts[part as usize].stored),
                _ => unreachable!(),
            })
            .collect();
        ranges.sort_unstable();
        assert!(
            ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0),
            "overlap"
        );
    }
    assert_eq!(found.stream_order, order);
    let forecast = &found.forecast;
    assert!(forecast.budget_bound_s <= forecast.step_s * (1.0 + 1e-9));
    assert!(forecast.plan_floor_s <= forecast.step_s * (1.0 + 1e-9));
    for key in &forecast.keys {
        assert_eq!(key.transfers.len(), found.stream_order.len());
        assert!(key.link_use <= 1.0 + 1e-9);
        let spent = key.compute_s + key.handover_s + key.wait_s;
        assert!(
            (spent - key.step_s).abs() <= key.step_s * 0.01 + 1e-9,
            "{spent} {}",
            key.step_s
        );
        let copies = key.transfers.windows(2);
        for pair in copies.map(|pair| (&pair[0], &pair[1])) {
            assert!(pair.0.end_s <= pair.1.start_s + 1e-12, "two copies at once");
        }
    }
}

prop_compose! {
    fn inputs()(
        sizes in prop::collection::vec(prop_oneof![0u64..3 << 20, Just(1 << 20), Just(400_000)], 1..30),
        uses in prop::collection::vec(
            (prop::collection::vec(any::<prop::sample::Index>(), 0..5), 0u64..4), 1..20),
        (known, acquire, tied) in (any::<bool>(), any::<bool>(), any::<[prop::sample::Index; 2]>()),
        budget in 0u64..40 << 20,
    ) -> Input {
        let mut input = Input::of_sizes(&sizes, &[], budget);
        let part = |index: &prop::sample::Index| u32::try_from(index.index(sizes.len())).unwrap();
        input.uses = uses
            .iter()
            .map(|(held, tenths)| Use {
                parts: held.iter().map(part).collect(),
                compute_s: if known { vec![*tenths as f64 * 1e-4] } else { vec![] },
            })
            .collect();
        if known {
            input.batch_keys = vec![BatchKey { name: "k".into(), weight: 1.0 }];
        }
        let (one, other) = (part(&tied[0]), part(&tied[1]));
        if one != other {
            input.parts[other as usize] = input.parts[one as usize];
            input.aliases = vec![vec![one, other]];
        }
        input.link = Link { latency_s: 5e-6, bytes_per_second: 10_000_000_000 };
        if acquire {
            input.acquire = Acquire::Part;
        }
        input
    }
}

/// `PROPTEST_CASES`, or a number that takes seconds.
fn cases() -> u32 {
    let asked = std::env::var("PROPTEST_CASES").ok();
    asked.and_then(|cases| cases.parse().ok()).unwrap_or(96)
}

fn within(input: &Input, budget: u64) -> Input {
    Input {
        goal: Goal::Memory { budget },
        ..input.clone()
    }
}

/// The input with the least budget if its own is less.
fn feasible(input: Input) -> Input {
    match plan(&input) {
        Err(PlanError::Infeasible { least, .. }) => within(&input, least),
        _ => input,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    #[test]
    fn every_plan_keeps_its_word(input in inputs(), strategy in 0usize..6, blocks in any::<bool>()) {
        let mut input = input;
        if strategy < 5 {
            input.strategy = Choice::SIMPLE[strategy];
        }
        if blocks {
            input.layout = Layout::AllocationBlockTransfer { num_blocks: 3, min_blocks: 1 };
        }
        match plan(&input) {
            Ok(found) => {
                keeps_its_word(&input, &found);
                prop_assert_eq!(&found, &plan(&input).unwrap());
            }
            Err(PlanError::Infeasible { least, budget }) => {
                prop_assert!(least > budget);
                let enough = within(&input, least);
                keeps_its_word(&enough, &plan(&enough).unwrap());
                prop_assert!(plan(&within(&input, least - 1)).is_err());
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    #[test]
    fn more_budget_never_predicts_slower(input in inputs(), more in 0u64..8 << 20) {
        let input = feasible(input);
        let before = plan(&input).unwrap();
        let after = plan(&within(&input, input.goal.bytes() + more)).unwrap();
        prop_assert!(after.forecast.step_s <= before.forecast.step_s);
    }

    #[test]
    fn more_link_never_predicts_slower(
        input in inputs(), percent in 0u64..300, nanoseconds in 0u32..5000,
    ) {
        let input = feasible(input);
        let before = plan(&input).unwrap();
        let mut faster = input;
        faster.link.bytes_per_second += faster.link.bytes_per_second / 100 * percent;
        faster.link.latency_s -= f64::from(nanoseconds) * 1e-9;
        let after = plan(&faster).unwrap();
        prop_assert!(after.forecast.step_s <= before.forecast.step_s);
    }

    #[test]
    fn latency_mode_holds_no_more_than_memory_mode_needs_for_compute(input in inputs()) {
        let input = feasible(input);
        let cap = input.goal.bytes();
        let memory = plan(&input).unwrap();
        let latency = Input { goal: Goal::Latency { cap }, ..input };
        let found = plan(&latency).unwrap();
        keeps_its_word(&latency, &found);
        prop_assert!(found.held_bytes() <= cap);
        if found.choice.mode == flextensord_plan::Mode::Latency {
            prop_assert!(found.forecast.step_s <= found.forecast.compute_s * 1.01 + 1e-9);
        } else {
            prop_assert!(memory.forecast.step_s >= found.forecast.compute_s * 1.01 - 1e-9);
        }
    }
}

#[test]
fn what_allocations_are_rounded_up_by_counts_against_the_budget() {
    const UNIT: u64 = 2 << 20;
    let uses: Vec<Vec<u32>> = (0..24).map(|part| vec![part]).collect();
    let sizes: Vec<u64> = (0..24).map(|part| (1 << 20) + 70_000 * part).collect();
    let mut input = Input::of_sizes(&sizes, &uses, 0);
    input.granularity = UNIT;
    let Err(PlanError::Infeasible { least, .. }) = plan(&input) else {
        panic!("a plan without memory")
    };
    assert_eq!(least % UNIT, 0);
    for budget in (least..80 << 20).step_by(777_777) {
        let found = plan(&within(&input, budget)).unwrap();
        assert!(found.held_bytes() <= budget, "{budget}");
        assert_eq!(found.ring_bytes % UNIT, 0);
        assert!(found.blocks.iter().all(|block| block.bytes % UNIT == 0));
    }
    input.granularity = 0;
    assert!(matches!(plan(&input), Err(PlanError::Count { .. })));
}

#[test]
fn plans_of_different_budgets_cut_blocks_at_the_same_places() {
    let uses: Vec<Vec<u32>> = (0..24)
        .map(|layer| vec![2 * layer, 2 * layer + 1])
        .collect();
    let sizes: Vec<u64> = (0..24).flat_map(|_| [3 << 20, 1 << 20]).collect();
    let blocks = |budget: u64| {
        let found = plan(&Input::of_sizes(&sizes, &uses, budget << 20)).unwrap();
        let block = |place: &Place| match place {
            Place::Resident { block, .. } => Some(found.blocks[*block as usize].clone()),
            _ => None,
        };
        let blocks: Vec<_> = found.places.iter().map(block).collect();
        (blocks, found.blocks)
    };
    let (one, blocks_of_one) = blocks(60);
    let (other, blocks_of_other) = blocks(80);
    for (a, b) in (0..48).flat_map(|a| (0..a).map(move |b| (a, b))) {
        if [&one[a], &one[b], &other[a], &other[b]]
            .iter()
            .all(|block| block.is_some())
        {
            assert_eq!(one[a] == one[b], other[a] == other[b], "{a} {b}");
        }
    }
    let shared = blocks_of_one
        .iter()
        .filter(|block| blocks_of_other.contains(block));
    assert!(shared.map(|block| block.bytes).sum::<u64>() >= 20 << 20);
}

#[test]
fn an_input_and_a_plan_survive_a_file() {
    let mut input = Input::of_sizes(
        &[1 << 20; 6],
        &[vec![0, 1], vec![2, 3], vec![4, 5]],
        5 << 20,
    );
    input.layout = Layout::AllocationBlockTransfer {
        num_blocks: 2,
        min_blocks: 2,
    };
    let text = serde_json::to_string(&input).unwrap();
    assert_eq!(serde_json::from_str::<Input>(&text).unwrap(), input);
    let found = plan(&input).unwrap();
    let text = serde_json::to_string(&found).unwrap();
    let read: Plan = serde_json::from_str(&text).unwrap();
    assert_eq!(read.places, found.places);
    assert_eq!(read.stream_order, found.stream_order);
}

#[test]
fn a_plan_can_be_judged_with_other_times() {
    let uses: Vec<Vec<u32>> = (0..8).map(|part| vec![part]).collect();
    let mut input = Input::of_sizes(&[8 << 20; 8], &uses, 40 << 20);
    let found = plan(&input).unwrap();
    assert_eq!(forecast(&input, &found).unwrap(), found.forecast);
    input.batch_keys = vec![BatchKey {
        name: "k".into(),
        weight: 1.0,
    }];
    input
        .uses
        .iter_mut()
        .for_each(|used| used.compute_s = vec![1e-3]);
    let slower = forecast(&input, &found).unwrap();
    assert!(slower.compute_s == 8e-3 && slower.step_s >= 8e-3);
}

#[test]
fn small_parts_stay_unless_nothing_else_fits() {
    let uses: Vec<Vec<u32>> = (0..8).map(|layer| vec![2 * layer, 2 * layer + 1]).collect();
    let sizes: Vec<u64> = (0..8).flat_map(|_| [8 << 20, 1000]).collect();
    let found = plan(&Input::of_sizes(&sizes, &uses, 40 << 20)).unwrap();
    assert!(found.stream_order.iter().all(|part| part % 2 == 0));
    let least = found.least_feasible;
    let tight = plan(&Input::of_sizes(&sizes, &uses, least)).unwrap();
    assert!(tight.stream_order.contains(&1));
}

#[test]
fn stored_bytes_take_room_and_link_and_logical_ones_split_compute() {
    let mut input = Input::of_sizes(&[4 << 20, 4 << 20], &[vec![0, 1]], 5 << 20);
    input.acquire = Acquire::Part;
    input.parts[1].logical = 12 << 20;
    input.batch_keys = vec![BatchKey {
        name: "k".into(),
        weight: 1.0,
    }];
    input.uses[0].compute_s = vec![4e-3];
    let found = plan(&input).unwrap();
    assert_eq!(found.weight_bytes, 8 << 20);
    let lengths: Vec<f64> = found.forecast.keys[0]
        .computes
        .iter()
        .map(|span| ((span.end_s - span.start_s) * 1e6).round())
        .collect();
    assert_eq!(lengths, [1000.0, 3000.0]);
}

#[test]
fn nonsense_is_refused() {
    let refused = |change: fn(&mut Input)| {
        let mut input = Input::of_sizes(&[1 << 20, 2 << 20], &[vec![0], vec![1]], 1 << 30);
        change(&mut input);
        plan(&input).unwrap_err()
    };
    assert!(matches!(
        refused(|input| input.uses[1].parts.push(2)),
        PlanError::UnknownPart { part: 2, .. }
    ));
    assert!(matches!(
        refused(|input| input.parts[0].stored = u64::MAX),
        PlanError::Overflow { .. }
    ));
    assert!(matches!(
        refused(|input| input.aliases = vec![vec![0, 1]]),
        PlanError::Alias { .. }
    ));
    assert!(matches!(
        refused(|input| input.handover_s = f64::NAN),
        PlanError::Quantity { .. }
    ));
    assert!(matches!(
        refused(|input| input.uses[0].compute_s = vec![1.0]),
        PlanError::Times { .. }
    ));
    assert!(matches!(
        refused(|input| input.link.bytes_per_second = 0),
        PlanError::Count { .. }
    ));
    assert!(matches!(
        refused(|input| {
            input.layout = Layout::AllocationBlockTransfer {
                num_blocks: 1,
                min_blocks: 2,
            };
        }),
        PlanError::Count { .. }
    ));
    assert!(matches!(
        refused(|input| {
            input.batch_keys = vec![BatchKey {
                name: "k".into(),
                weight: 0.0,
            }];
        }),
        PlanError::Quantity { .. }
    ));
}
