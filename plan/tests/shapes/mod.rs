//! Shapes of models that plans are judged by.
#![allow(dead_code)]

use flextensord_plan::{Acquire, BatchKey, Goal, Input, Link, Part, Use};

pub(crate) const MB: u64 = 1_000_000;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const LINK: f64 = 55.1e9;

/// `layers` layers of parts of `sizes` bytes with `compute_s` seconds each, held part by
/// part, within a share of all bytes.
pub(crate) fn layered(layers: u32, sizes: &[u64], compute_s: f64, share: f64) -> Input {
    let each = u32::try_from(sizes.len()).unwrap_or(u32::MAX);
    let part = |bytes: &u64| Part {
        stored: *bytes,
        logical: *bytes,
    };
    let uses = (0..layers).map(|layer| Use {
        parts: (layer * each..(layer + 1) * each).collect(),
        compute_s: vec![compute_s],
    });
    let mut input = Input {
        parts: (0..layers).flat_map(|_| sizes.iter().map(part)).collect(),
        uses: uses.collect(),
        batch_keys: vec![BatchKey {
            name: "decode".into(),
            weight: 1.0,
        }],
        link: Link {
            latency_s: 0.0,
            bytes_per_second: 55_100_000_000,
        },
        acquire: Acquire::Part,
        ..Input::of_sizes(&[], &[], 0)
    };
    input.goal = Goal::Memory {
        budget: share_of(&input, share),
    };
    input
}

/// Bytes of a share of all parts.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
pub(crate) fn share_of(input: &Input, share: f64) -> u64 {
    let all: u64 = input.parts.iter().map(|part| part.stored).sum();
    (all as f64 * share) as u64
}

/// Llama-8B: q, k, v, o, gate, up, down.
pub(crate) fn llama(compute_s: f64, share: f64) -> Input {
    let sizes = [335, 84, 84, 335, 1174, 1174, 1174].map(|tenths| tenths * MB / 10);
    layered(32, &sizes, compute_s, share)
}

/// 80 layers of 500 MiB in seven tensors, in Llama's proportions.
pub(crate) fn seventy(share: f64) -> Input {
    let sizes = [38, 10, 10, 38, 135, 135, 134].map(|mib| mib * MIB);
    layered(80, &sizes, 1.5e-3, share)
}

/// 40 layers of 500 MiB in six tensors, as FlexTensor was probed with.
pub(crate) fn forty(compute_s: f64, share: f64) -> Input {
    let sizes = [100, 100, 100, 100, 50, 50].map(|mib| mib * MIB);
    let mut input = layered(40, &sizes, compute_s, share);
    input.link.bytes_per_second = 25_600 * MIB;
    input
}
