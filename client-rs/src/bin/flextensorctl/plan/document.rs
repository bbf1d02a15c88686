//! A plan as a JSON document.

use flextensord_plan::{Goal, Place};
use serde_json::{Value, json};

use super::Planned;

pub(super) fn document(planned: &Planned<'_>) -> Value {
    let (plan, model) = (planned.plan, planned.model);
    let (goal, bytes) = match model.input.goal {
        Goal::Memory { budget } => ("memory", budget),
        Goal::Latency { cap } => ("latency", cap),
    };
    let parts = model.parts.iter().zip(&model.input.parts).zip(&plan.places);
    let parts = parts.map(|((name, part), place)| {
        let (placed, block, offset) = match place {
            Place::Nowhere => ("nowhere", None, None),
            Place::Resident { block, offset } => ("resident", Some(*block), Some(*offset)),
            Place::Streamed { offset } => ("streamed", None, Some(*offset)),
        };
        json!({
            "name": name, "stored_bytes": part.stored, "logical_bytes": part.logical,
            "place": placed, "block": block, "offset": offset,
        })
    });
    json!({
        "name": planned.name,
        "goal": goal,
        "budget_bytes": bytes,
        "mode": plan.choice.mode,
        "strategy": plan.choice.strategy,
        "layout": plan.choice.layout,
        "weight_bytes": plan.weight_bytes,
        "held_bytes": plan.held_bytes(),
        "resident_bytes": plan.resident_bytes,
        "ring_bytes": plan.ring_bytes,
        "streamed_bytes": plan.streamed_bytes,
        "least_feasible_bytes": plan.least_feasible,
        "forecast": plan.forecast,
        "candidates": plan.choice.candidates,
        "layers": model.layers,
        "parts": parts.collect::<Vec<Value>>(),
        "blocks": plan.blocks,
        "stream_order": plan.stream_order,
    })
}
