//! How good plans are, against the reaches that were set for them. What is compared is
//! computed, not measured: it is the same on every machine.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod shapes;

use flextensord_plan::{Goal, Input, Mode, Place, Plan, PlanError, Strategy, Use, plan};
use shapes::{LINK, MIB, forty, layered, llama, seventy, share_of};

fn waits(found: &Plan) -> f64 {
    found.forecast.keys.iter().map(|key| key.wait_s).sum()
}

/// Shown with `--nocapture`.
fn planned(what: &str, input: &Input) -> Plan {
    let found = plan(input).unwrap();
    let forecast = &found.forecast;
    println!(
        "{what}: step {:.3} ms, budget bound {:.3}, plan floor {:.3}, waits {:.3}, moves {:.1} MB, \
         ring {:.1} MB, {} {:?}",
        forecast.step_s * 1e3,
        forecast.budget_bound_s * 1e3,
        forecast.plan_floor_s * 1e3,
        waits(&found) * 1e3,
        found.streamed_bytes as f64 / 1e6,
        found.ring_bytes as f64 / 1e6,
        found.choice.strategy.name(),
        found.choice.mode,
    );
    assert!(found.held_bytes() <= input.goal.bytes());
    assert!(forecast.budget_bound_s <= forecast.plan_floor_s);
    assert!(forecast.plan_floor_s <= forecast.step_s);
    found
}

#[test]
fn a_decoder_that_the_link_holds_back_comes_near_its_ring() {
    for (share, bound, reach) in [(0.6, 101.3e-3, 107.0e-3), (0.3, 177.3e-3, 184.0e-3)] {
        let found = planned("llama, fast", &llama(2.98e-3, share));
        assert!((found.forecast.budget_bound_s - bound).abs() < 0.1e-3);
        assert!(found.forecast.step_s <= reach);
    }
}

#[test]
fn a_decoder_that_computes_long_enough_hides_its_copies() {
    for share in [0.6, 0.3] {
        let input = llama(12.1e-3, share);
        let found = planned("llama, slow", &input);
        assert!(found.forecast.step_s <= found.forecast.compute_s * 1.005);
        assert!(waits(&found) == 0.0);
        // the fewest bytes: what the budget cannot hold, the ring, and less than a tensor
        let all = share_of(&input, 1.0);
        let least = all - input.goal.bytes() + found.ring_bytes;
        assert!(found.streamed_bytes < least + 117_400_000);
    }
}

#[test]
fn large_layers_stream_at_the_speed_of_the_link() {
    for share in [0.6, 0.3, 0.1] {
        let found = planned("80 layers", &seventy(share));
        let largest = 135.0 * MIB as f64;
        let reach = (found.streamed_bytes as f64 + 2.0 * largest) / LINK * 1.01;
        assert!(found.forecast.step_s <= reach);
        // and no more of them than the budget and the ring ask for
        assert!(found.forecast.plan_floor_s <= found.forecast.budget_bound_s * 1.02);
    }
}

#[test]
fn what_can_be_hidden_is_moved_no_more_than_needed() {
    let input = forty(60e-3, 0.6);
    let found = planned("40 layers", &input);
    assert!(waits(&found) == 0.0);
    let least = share_of(&input, 1.0) - input.goal.bytes();
    assert!(found.streamed_bytes as f64 <= least as f64 * 1.03);
}

#[test]
fn latency_mode_holds_the_least_that_hides_all_copies() {
    let mut input = forty(60e-3, 0.6);
    input.goal = Goal::Latency {
        cap: input.goal.bytes(),
    };
    let found = planned("latency, slow", &input);
    assert_eq!(found.choice.mode, Mode::Latency);
    assert!(waits(&found) == 0.0);
    assert!(found.forecast.step_s <= found.forecast.compute_s * 1.01);
    // two of the largest tensors; one and a small one would have to wait
    assert!(found.held_bytes() <= 200 * MIB + 256);
}

#[test]
fn latency_mode_falls_back_and_says_so() {
    let mut input = forty(1.5e-3, 0.6);
    let memory = plan(&input).unwrap();
    input.goal = Goal::Latency {
        cap: input.goal.bytes(),
    };
    let found = planned("latency, fast", &input);
    assert_eq!(found.choice.mode, Mode::LatencyFellBack);
    assert_eq!(found.places, memory.places);
    // where the device can hold enough of them, it does not
    input.goal = Goal::Latency {
        cap: share_of(&input, 1.1),
    };
    let found = planned("latency, fast, large device", &input);
    assert_eq!(found.choice.mode, Mode::Latency);
    assert!(found.held_bytes() < share_of(&input, 0.95));
    input.batch_keys.clear();
    input
        .uses
        .iter_mut()
        .for_each(|used| used.compute_s.clear());
    let blind = planned("latency, compute unknown", &input);
    assert_eq!(blind.choice.mode, Mode::LatencyWithoutCompute);
    assert_eq!(blind.streamed_bytes, 0);
}

#[test]
fn a_huge_layer_among_small_ones_stays() {
    let mut input = layered(40, &[20 * MIB, 20 * MIB], 2e-3, 1.0);
    input.parts[40].stored = 700 * MIB;
    let all = share_of(&input, 1.0);
    for share in [0.9, 0.7, 0.55] {
        input.goal = Goal::Memory {
            budget: share_of(&input, share),
        };
        let found = planned("one huge layer", &input);
        assert!(matches!(found.places[40], Place::Resident { .. }));
        let least = (all - input.goal.bytes()) as f64 + 60.0 * MIB as f64;
        assert!(found.forecast.step_s <= (least / LINK).max(found.forecast.compute_s) * 1.02);
    }
}

#[test]
fn experts_stream_one_by_one() {
    let input = layered(16, &[20 * MIB; 128], 20e-3, 0.5);
    let found = planned("experts", &input);
    assert!(found.forecast.step_s <= found.forecast.budget_bound_s * 1.02);
    assert!(found.ring_bytes <= 80 * MIB + 256);
}

#[test]
fn gaps_cover_copies() {
    // three layers of which each has its compute in the gap behind it
    let mut input = layered(3, &[100 * MIB], 0.0, 1.0);
    let gap = Use {
        parts: vec![],
        compute_s: vec![2.5e-3],
    };
    let uses = std::mem::take(&mut input.uses);
    input.uses = uses
        .into_iter()
        .flat_map(|used| [used, gap.clone()])
        .collect();
    input.goal = Goal::Memory { budget: 110 * MIB };
    let found = planned("gaps", &input);
    assert_eq!(found.stream_order, [0, 1, 2]);
    assert!(waits(&found) == 0.0);
    assert!(found.forecast.step_s <= 7.5e-3 + 3.0 * 12e-6 + 1e-9);
}

#[test]
fn two_layers_and_equal_ones_stream_within_their_ring() {
    let two = planned("two layers", &layered(2, &[100 * MIB], 1e-3, 0.6));
    assert_eq!(two.stream_order, [0, 1]);
    let equal = planned("equal layers", &layered(24, &[64 * MIB], 1e-3, 0.5));
    assert!(equal.forecast.step_s <= equal.forecast.budget_bound_s * 1.2);
    assert!(equal.forecast.step_s <= equal.forecast.plan_floor_s * 1.01);
}

#[test]
fn a_budget_below_the_least_is_named() {
    let mut input = seventy(0.6);
    input.goal = Goal::Memory { budget: 100 * MIB };
    let least = 135 * MIB + 256;
    assert_eq!(
        plan(&input).unwrap_err(),
        PlanError::Infeasible {
            budget: 100 * MIB,
            least,
        }
    );
    input.goal = Goal::Memory { budget: least };
    assert_eq!(planned("the least", &input).least_feasible, least);
}

#[test]
fn the_first_layer_streams_as_any_other() {
    let found = planned("all stream", &layered(8, &[64 * MIB], 5e-3, 0.26));
    assert!(matches!(found.places[0], Place::Streamed { .. }));
}

#[test]
fn prefill_and_decode_share_one_placement() {
    let mut input = llama(2.98e-3, 0.6);
    input.batch_keys.push(flextensord_plan::BatchKey {
        name: "prefill".into(),
        weight: 3.0,
    });
    for used in &mut input.uses {
        used.compute_s.push(40e-3);
    }
    let found = planned("two keys", &input);
    let [decode, prefill] = &found.forecast.keys[..] else {
        panic!("{:?}", found.forecast.keys);
    };
    assert!(decode.step_s <= 107.0e-3);
    assert!(prefill.step_s <= prefill.compute_s * 1.005);
    let mean = decode.step_s * 0.25 + prefill.step_s * 0.75;
    assert!((found.forecast.step_s - mean).abs() < 1e-9);
}

#[test]
fn each_strategy_plans_and_adaptive_is_the_best_of_them() {
    let mut input = llama(2.98e-3, 0.6);
    let adaptive = planned("adaptive", &input).forecast.step_s;
    for strategy in Strategy::SIMPLE {
        input.strategy = strategy;
        let found = planned(strategy.name(), &input);
        assert!(found.forecast.step_s >= adaptive);
    }
    input.strategy = Strategy::Adaptive;
    input.layout = flextensord_plan::Layout::AllocationBlockTransfer {
        num_blocks: 4,
        min_blocks: 2,
    };
    assert!(planned("blocks", &input).forecast.step_s >= adaptive);
}
