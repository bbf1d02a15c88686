//! How good plans are, and how long planning takes. The quality is computed and the same on
//! every machine; `plan/tests/quality.rs` asserts it.

#[path = "../../../../plan/tests/shapes/mod.rs"]
mod shapes;

use std::time::{Duration, Instant};

use flextensord_plan::{Goal, Input, Plan, PlanError, plan};
use flextensord_tests::SceneError;
use shapes::{LINK, MIB, forty, layered, llama, seventy, share_of};

use crate::figures::{Figures, median};

const ROUNDS: usize = 9;

pub(crate) fn measure(figures: &mut Figures) -> Result<(), SceneError> {
    let milliseconds = |input: &Input| Ok::<_, SceneError>(planned(input)?.forecast.step_s * 1e3);
    let fast = |share| milliseconds(&llama(2.98e-3, share));
    figures.at_most(
        "plan: llama, 2.98 ms a layer, 60 %",
        fast(0.6)?,
        "ms",
        107.0,
    );
    figures.at_most(
        "plan: llama, 2.98 ms a layer, 30 %",
        fast(0.3)?,
        "ms",
        184.0,
    );
    for (what, share) in [
        ("plan: llama, 12.1 ms a layer, 60 %, over compute", 0.6),
        ("plan: llama, 12.1 ms a layer, 30 %, over compute", 0.3),
    ] {
        let forecast = planned(&llama(12.1e-3, share))?.forecast;
        let over = (forecast.step_s / forecast.compute_s - 1.0) * 100.0;
        figures.at_most(what, over, "%", 0.5);
    }
    for (what, share) in [
        ("plan: 80 large layers, 60 %, over bytes and two uses", 0.6),
        ("plan: 80 large layers, 30 %, over bytes and two uses", 0.3),
        ("plan: 80 large layers, 10 %, over bytes and two uses", 0.1),
    ] {
        let found = planned(&seventy(share))?;
        let reach = (found.streamed_bytes as f64 + 270.0 * MIB as f64) / LINK;
        let over = (found.forecast.step_s / reach - 1.0) * 100.0;
        figures.at_most(what, over, "%", 1.0);
    }
    let input = forty(60e-3, 0.6);
    let found = planned(&input)?;
    let least = share_of(&input, 1.0) - input.goal.bytes();
    let over = (found.streamed_bytes as f64 / least as f64 - 1.0) * 100.0;
    figures.at_most(
        "plan: 40 slow layers, 60 %, bytes over the least",
        over,
        "%",
        3.0,
    );
    let waits = found
        .forecast
        .keys
        .iter()
        .map(|key| key.wait_s)
        .sum::<f64>()
        * 1e3;
    figures.at_most("plan: 40 slow layers, 60 %, waits", waits, "ms", 0.0);
    speed(figures)
}

/// How long planning takes, on one thread.
fn speed(figures: &mut Figures) -> Result<(), SceneError> {
    let sizes = [38, 10, 10, 38, 135, 135, 134].map(|mib| mib * MIB);
    let slowest = |layers: u32| -> Result<f64, SceneError> {
        let mut slowest: f64 = 0.0;
        for share in [0.9, 0.6, 0.3, 0.1] {
            // from the link alone to compute alone
            for compute_ms in [0.0, 1.5, 4.0, 6.0, 9.0, 60.0] {
                let input = layered(layers, &sizes, compute_ms * 1e-3, share);
                let mut times = [Duration::ZERO; ROUNDS];
                for time in &mut times {
                    let begin = Instant::now();
                    planned(&input)?;
                    *time = begin.elapsed();
                }
                slowest = slowest.max(median(&mut times));
            }
        }
        Ok(slowest)
    };
    figures.at_most(
        "planning 301 parts, slowest case",
        slowest(43)? * 1e3,
        "ms",
        50.0,
    );
    figures.at_most(
        "planning 2002 parts, slowest case",
        slowest(286)? * 1e3,
        "ms",
        1000.0,
    );
    let mut input = layered(286, &sizes, 1.5e-3, 0.6);
    input.goal = Goal::Memory { budget: MIB };
    let begin = Instant::now();
    let refused = plan(&input);
    let took = begin.elapsed().as_secs_f64() * 1e3;
    if !matches!(refused, Err(PlanError::Infeasible { .. })) {
        return Err(SceneError::Unexpected(format!("{refused:?}")));
    }
    figures.at_most("the least budget of 2002 parts", took, "ms", 100.0);
    Ok(())
}

fn planned(input: &Input) -> Result<Plan, SceneError> {
    plan(input).map_err(|error| SceneError::Unexpected(error.to_string()))
}
