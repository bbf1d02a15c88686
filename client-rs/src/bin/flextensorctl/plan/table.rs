//! A plan as tables for people.

use std::io;

use flextensord_plan::{Goal, Mode, Place, Strategy};

use super::Planned;
use crate::output::{Output, Table, bytes};

pub(super) fn print(output: &Output, planned: &Planned<'_>) -> io::Result<()> {
    output.line(&what_was_planned(planned))?;
    output.table(&sizes(planned))?;
    output.line("")?;
    output.table(&steps(planned))?;
    output.line("")?;
    output.table(&candidates(planned))?;
    output.line("")?;
    output.table(&layers(planned))
}

fn what_was_planned(planned: &Planned<'_>) -> String {
    let budget = match planned.model.input.goal {
        Goal::Latency { cap: u64::MAX } => "a device without a limit".to_owned(),
        goal => bytes(goal.bytes()),
    };
    let name = match planned.name {
        "" => "the model",
        name => name,
    };
    match planned.plan.choice.mode {
        Mode::Memory => format!("{name} within {budget}"),
        Mode::Latency => format!("{name}: the fewest bytes that hide all copies, up to {budget}"),
        Mode::LatencyFellBack => {
            format!("{name}: no plan within {budget} hides all copies; the least step instead")
        }
        Mode::LatencyWithoutCompute => {
            format!("{name}: compute is unknown; the least step within {budget} instead")
        }
    }
}

fn sizes(planned: &Planned<'_>) -> Table {
    let plan = planned.plan;
    let mut table = Table::new(&["BYTES", ""]);
    for (what, size) in [
        ("weights", plan.weight_bytes),
        ("held", plan.held_bytes()),
        ("of these residents", plan.resident_bytes),
        ("of these the ring", plan.ring_bytes),
        ("moved in a pass", plan.streamed_bytes),
        ("least feasible budget", plan.least_feasible),
    ] {
        table.row([what.to_owned(), bytes(size)]);
    }
    table
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.3} ms", seconds * 1e3)
}

fn steps(planned: &Planned<'_>) -> Table {
    let mut table = Table::new(&[
        "BATCH KEY",
        "STEP",
        "BUDGET BOUND",
        "PLAN FLOOR",
        "COMPUTE",
        "WAITS",
        "HAND-OVERS",
        "LINK USE",
    ]);
    for key in &planned.plan.forecast.keys {
        let name = match key.name.as_str() {
            "" => "-",
            name => name,
        };
        table.row([
            name.to_owned(),
            milliseconds(key.step_s),
            milliseconds(key.budget_bound_s),
            milliseconds(key.plan_floor_s),
            milliseconds(key.compute_s),
            milliseconds(key.wait_s),
            milliseconds(key.handover_s),
            format!("{:.1} %", key.link_use * 100.0),
        ]);
    }
    table
}

fn candidates(planned: &Planned<'_>) -> Table {
    let choice = &planned.plan.choice;
    let mut table = Table::new(&["STRATEGY", "SIMULATED", "BEST STEP", ""]);
    let chosen = |strategy: Strategy| match strategy == choice.strategy {
        true => "chosen".to_owned(),
        false => String::new(),
    };
    for candidate in &choice.candidates {
        table.row([
            candidate.strategy.name().to_owned(),
            candidate.judged.to_string(),
            candidate.best_step_s.map_or("-".to_owned(), milliseconds),
            chosen(candidate.strategy),
        ]);
    }
    table
}

fn layers(planned: &Planned<'_>) -> Table {
    let (plan, model) = (planned.plan, planned.model);
    let mut waits = vec![0.0; model.layers.len()];
    // of several batch keys the mean
    for key in &plan.forecast.keys {
        for transfer in &key.transfers {
            waits[transfer.used_by as usize] += key.weight * transfer.wait_s;
        }
    }
    let mut table = Table::new(&["LAYER", "PARTS", "RESIDENT", "STREAMED", "WAITS"]);
    for ((name, used), wait) in model.layers.iter().zip(&model.input.uses).zip(waits) {
        let sum = |streamed: bool| -> u64 {
            let parts = used.parts.iter().filter(|part| {
                matches!(plan.places[**part as usize], Place::Streamed { .. }) == streamed
            });
            parts
                .map(|part| model.input.parts[*part as usize].stored)
                .sum()
        };
        table.row([
            name.clone(),
            used.parts.len().to_string(),
            bytes(sum(false)),
            bytes(sum(true)),
            milliseconds(wait),
        ]);
    }
    table
}
