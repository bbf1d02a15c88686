//! From an input to a plan.

use flextensord_proto::layout::LABEL_BYTES;

use crate::{
    cycle::{Cycle, Timeline},
    error::PlanError,
    input::{Goal, Input},
    layout::{self, Addresses},
    output::{Choice, Forecast, KeyForecast, Mode, Place, Plan, Span, Transfer},
    problem::{Key, Problem, seconds},
    residents::Residence,
    search::{Aim, Found, NEAR, Search},
    strategy::Offer,
};

/// Plans.
///
/// # Errors
/// [`PlanError::Infeasible`] with the least feasible budget; the others when the input
/// makes no sense.
pub fn plan(input: &Input) -> Result<Plan, PlanError> {
    layout::check(input.layout)?;
    let problem = Problem::new(input)?;
    let residence = Residence::new(&problem);
    let budget = input.goal.bytes();
    let least = least(input, &problem, &residence);
    if budget < least.all {
        return Err(PlanError::Infeasible {
            budget,
            least: least.all,
        });
    }
    let find = |aim| {
        let mut search = Search::new(&problem, &residence, input.layout, aim);
        search.hear(&Offer::new(&problem, input.strategy, false), budget);
        // small parts stay where anything else fits
        if least.all < least.small_resident {
            let room = budget.min(least.small_resident - 1);
            search.hear(&Offer::new(&problem, input.strategy, true), room);
        }
        let candidates = search.candidates();
        (search.best, candidates)
    };
    let (mode, (found, candidates)) = match input.goal {
        Goal::Memory { .. } => (Mode::Memory, find(Aim::Step)),
        Goal::Latency { .. } if problem.blind() => (Mode::LatencyWithoutCompute, find(Aim::Step)),
        Goal::Latency { .. } => {
            let computes = problem.keys.iter().map(|key| key.weight * key.total as f64);
            match find(Aim::Held(computes.sum::<f64>() * NEAR)) {
                (Some(found), candidates) => (Mode::Latency, (Some(found), candidates)),
                (None, _) => (Mode::LatencyFellBack, find(Aim::Step)),
            }
        }
    };
    let Some(found) = found else {
        // everything streams, or nothing: one of them was within the least budget
        return Err(PlanError::Infeasible {
            budget,
            least: least.all,
        });
    };
    let choice = Choice {
        mode,
        strategy: found.strategy,
        layout: input.layout,
        candidates,
    };
    Ok(build(
        input, &problem, &residence, &found, choice, least.all,
    ))
}

/// The least budgets.
#[derive(Debug)]
struct Least {
    /// Of any plan.
    all: u64,
    /// Of one that keeps small parts on the device.
    small_resident: u64,
}

fn least(input: &Input, problem: &Problem, residence: &Residence) -> Least {
    let held = |small: bool| {
        let mut streams = vec![false; problem.bytes.len()];
        let nothing = residence.bytes(problem, &streams);
        for part in problem.movable(small) {
            streams[part as usize] = layout::allowed(input.layout, problem, part as usize);
        }
        let ring = layout::least(input.layout, problem, &streams);
        let ring = match ring {
            0 => 0,
            bytes => problem.whole(bytes + LABEL_BYTES),
        };
        nothing.min(residence.bytes(problem, &streams).saturating_add(ring))
    };
    let (all, small_resident) = (held(true), held(false));
    Least {
        all: all.min(small_resident),
        small_resident,
    }
}

fn build(
    input: &Input,
    problem: &Problem,
    residence: &Residence,
    found: &Found,
    choice: Choice,
    least_feasible: u64,
) -> Plan {
    let blocks = residence.blocks(problem, &found.streams);
    let mut places = vec![Place::Nowhere; problem.bytes.len()];
    for (block, contents) in (0u32..).zip(&blocks) {
        let mut offset = LABEL_BYTES;
        for part in &contents.parts {
            places[*part as usize] = Place::Resident { block, offset };
            offset += problem.taken[*part as usize];
        }
    }
    for (place, offset) in places.iter_mut().zip(&found.addresses.offsets) {
        if let Some(offset) = offset {
            *place = Place::Streamed {
                offset: offset + LABEL_BYTES,
            };
        }
    }
    for part in 0..places.len() {
        places[part] = places[problem.stands_for[part] as usize];
    }
    let streamed = |part: &&u32| found.streams[**part as usize];
    let stream_order: Vec<u32> = problem
        .uses
        .iter()
        .flatten()
        .filter(streamed)
        .copied()
        .collect();
    let streamed_bytes = stream_order
        .iter()
        .map(|part| problem.bytes[*part as usize])
        .sum();
    let ring_bytes = match stream_order.len() {
        0 => 0,
        _ => problem.whole(found.addresses.capacity + LABEL_BYTES),
    };
    Plan {
        places,
        ring_bytes,
        stream_order,
        resident_bytes: blocks.iter().map(|block| block.bytes).sum(),
        blocks,
        streamed_bytes,
        least_feasible,
        weight_bytes: problem.bytes.iter().sum(),
        forecast: forecast_of(input, problem, &found.addresses),
        choice,
    }
}

/// What `plan`, made for the same parts and uses, promises with the times of `input`: other
/// compute, another link.
///
/// # Errors
/// When the input makes no sense.
pub fn forecast(input: &Input, plan: &Plan) -> Result<Forecast, PlanError> {
    let problem = Problem::new(input)?;
    let offset = |(part, bytes): (usize, &u64)| match plan.places.get(part) {
        Some(Place::Streamed { offset }) if *bytes > 0 => offset.checked_sub(LABEL_BYTES),
        _ => None,
    };
    let addresses = Addresses {
        capacity: plan.ring_bytes.saturating_sub(LABEL_BYTES),
        offsets: problem.bytes.iter().enumerate().map(offset).collect(),
    };
    Ok(forecast_of(input, &problem, &addresses))
}

fn forecast_of(input: &Input, problem: &Problem, addresses: &Addresses) -> Forecast {
    let cycle = Cycle::new(problem, &addresses.offsets, addresses.capacity);
    let weights: u64 = problem.bytes.iter().sum();
    let surplus = weights.saturating_sub(input.goal.bytes());
    let least_link = problem.picoseconds_per_byte * surplus as f64 / 1e12;
    let keys: Vec<KeyForecast> = problem
        .keys
        .iter()
        .map(|key| key_forecast(problem, key, &cycle, least_link))
        .collect();
    let mean = |figure: fn(&KeyForecast) -> f64| keys.iter().map(|k| k.weight * figure(k)).sum();
    let (step_s, budget_bound_s): (f64, f64) = (mean(|k| k.step_s), mean(|k| k.budget_bound_s));
    Forecast {
        step_s,
        budget_bound_s,
        plan_floor_s: mean(|k| k.plan_floor_s),
        compute_s: mean(|k| k.compute_s),
        link: input.link,
        slack_s: step_s - budget_bound_s,
        keys,
    }
}

fn key_forecast(problem: &Problem, key: &Key, cycle: &Cycle, least_link: f64) -> KeyForecast {
    let step = seconds(cycle.step(&key.compute));
    let compute = seconds(key.total);
    let link = seconds(cycle.link());
    let Timeline {
        copies,
        computes,
        waited,
    } = cycle.timeline(&key.compute);
    let time = |picoseconds: i64| picoseconds as f64 / 1e12;
    let origin = |of: u32| problem.origin[of as usize];
    KeyForecast {
        name: key.name.clone(),
        weight: key.weight,
        step_s: step,
        budget_bound_s: compute.max(least_link),
        plan_floor_s: compute.max(link),
        compute_s: compute,
        handover_s: seconds(cycle.taking()),
        wait_s: time(waited),
        link_use: if step > 0.0 { link / step } else { 0.0 },
        transfers: copies
            .into_iter()
            .map(|(part, of, start, end, wait)| Transfer {
                part,
                used_by: origin(of),
                start_s: time(start),
                end_s: time(end),
                wait_s: time(wait),
            })
            .collect(),
        computes: (0u32..)
            .zip(computes)
            .map(|(of, (start, end))| Span {
                of: origin(of),
                start_s: time(start),
                end_s: time(end),
            })
            .collect(),
    }
}
