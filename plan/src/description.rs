//! A model as a person describes it, in a file: `docs/planner.md`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::input::{
    Acquire, BatchKey, Goal, Input, Layout, Link, Part, Strategy, Use, granularity, handover,
};

/// Most layers and parts that repetition may make of a description.
const MOST: usize = 1 << 20;

/// A described model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// Its name, for people.
    #[serde(default)]
    pub name: String,
    /// Memory of the device in bytes, of which `--fraction` is a share.
    #[serde(default)]
    pub device_bytes: Option<u64>,
    /// The link; by default an H200's.
    #[serde(default)]
    pub link: LinkDescription,
    /// Microseconds of a hand-over.
    #[serde(default = "handover_us")]
    pub handover_us: f64,
    /// What is held together.
    #[serde(default)]
    pub acquire: Acquire,
    /// What compute times are for, and how much each counts. Where it is empty, times are
    /// plain numbers.
    #[serde(default)]
    pub batch_keys: Vec<BatchKey>,
    /// The layers, in the order of a pass.
    pub layers: Vec<LayerDescription>,
}

fn handover_us() -> f64 {
    handover() * 1e6
}

/// A link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkDescription {
    /// Bytes per second.
    pub bytes_per_second: u64,
    /// Microseconds that each copy takes beside its bytes.
    #[serde(default)]
    pub latency_us: f64,
}

impl Default for LinkDescription {
    fn default() -> Self {
        let link = Link::default();
        Self {
            bytes_per_second: link.bytes_per_second,
            latency_us: link.latency_s * 1e6,
        }
    }
}

/// A layer, or so many of them; one without parts is a gap.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerDescription {
    /// Its name; `{}` in it stands for its number among those it is repeated to.
    pub name: String,
    /// How many layers it stands for.
    #[serde(default = "once")]
    pub repeat: usize,
    /// Milliseconds of compute.
    #[serde(default)]
    pub compute_ms: Compute,
    /// Its parts.
    #[serde(default)]
    pub parts: Vec<PartDescription>,
}

fn once() -> usize {
    1
}

/// Milliseconds of compute.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Compute {
    /// Nobody knows.
    #[default]
    Unknown,
    /// For every batch key, or where there are none.
    Any(f64),
    /// By batch key.
    Each(BTreeMap<String, f64>),
}

/// A part, or so many of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartDescription {
    /// Its name within the layer; `{}` in it stands for its number among those it is
    /// repeated to.
    pub name: String,
    /// How many parts it stands for.
    #[serde(default = "once")]
    pub repeat: usize,
    /// Bytes as it is stored and copied.
    pub bytes: u64,
    /// Bytes as the kernel reads it, if they are others.
    #[serde(default)]
    pub logical_bytes: Option<u64>,
    /// Parts of one name here are one and the same tensor, wherever they stand.
    #[serde(default)]
    pub tied: Option<String>,
}

/// What cannot be described like that.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DescriptionError {
    /// Repetition makes too many.
    #[error("more than {limit} {what}")]
    TooMany {
        /// Layers or parts.
        what: &'static str,
        /// How many there may be.
        limit: usize,
    },
    /// Compute of a batch key that is not there, or of only some of them.
    #[error("layer {layer:?} has compute_ms for {found:?}, the batch keys are {expected:?}")]
    Keys {
        /// The layer.
        layer: String,
        /// The keys that it has times for.
        found: Vec<String>,
        /// All batch keys.
        expected: Vec<String>,
    },
}

/// A model ready to be planned, and the names of what it is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct Described {
    /// The input, in memory mode with all weights as budget.
    pub input: Input,
    /// Name of each part.
    pub parts: Vec<String>,
    /// Name of each layer.
    pub layers: Vec<String>,
    /// Stored bytes, tied parts once.
    pub weight_bytes: u64,
}

impl Description {
    /// The input that it describes.
    ///
    /// # Errors
    /// When it stands for too many layers or parts, or compute does not fit the batch keys.
    pub fn resolve(&self) -> Result<Described, DescriptionError> {
        let layers = self.layers.iter().map(|layer| layer.repeat);
        within("layers", layers.fold(0, usize::saturating_add))?;
        let parts = self.layers.iter().map(|layer| {
            let each = layer.parts.iter().map(|part| part.repeat);
            each.fold(0, usize::saturating_add)
                .saturating_mul(layer.repeat)
        });
        within("parts", parts.fold(0, usize::saturating_add))?;
        let keys = self.keys();
        let mut parts = Vec::new();
        let mut uses = Vec::new();
        let (mut part_names, mut layer_names) = (Vec::new(), Vec::new());
        let mut tied: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
        for layer in &self.layers {
            let compute_s = self.compute(layer, &keys)?;
            for number in 0..layer.repeat {
                let layer_name = numbered(&layer.name, number, layer.repeat);
                let mut held = Vec::new();
                for part in &layer.parts {
                    for number in 0..part.repeat {
                        let index = u32::try_from(parts.len()).unwrap_or(u32::MAX);
                        if let Some(group) = &part.tied {
                            tied.entry(group).or_default().push(index);
                        }
                        let name = numbered(&part.name, number, part.repeat);
                        part_names.push(format!("{layer_name}.{name}"));
                        held.push(index);
                        parts.push(Part {
                            stored: part.bytes,
                            logical: part.logical_bytes.unwrap_or(part.bytes),
                        });
                    }
                }
                layer_names.push(layer_name);
                uses.push(Use {
                    parts: held,
                    compute_s: compute_s.clone(),
                });
            }
        }
        let aliases: Vec<Vec<u32>> = tied.into_values().collect();
        let again = aliases.iter().flat_map(|group| &group[1..]);
        let again: u64 = again.map(|part| parts[*part as usize].stored).sum();
        let all = parts
            .iter()
            .fold(0u64, |sum, part| sum.saturating_add(part.stored));
        let weight_bytes = all.saturating_sub(again);
        let input = Input {
            parts,
            uses,
            batch_keys: keys,
            aliases,
            link: Link {
                latency_s: self.link.latency_us * 1e-6,
                bytes_per_second: self.link.bytes_per_second,
            },
            handover_s: self.handover_us * 1e-6,
            granularity: granularity(),
            goal: Goal::Memory {
                budget: weight_bytes,
            },
            acquire: self.acquire,
            strategy: Strategy::default(),
            layout: Layout::default(),
        };
        Ok(Described {
            input,
            parts: part_names,
            layers: layer_names,
            weight_bytes,
        })
    }

    /// The batch keys; one without a name where there are none and compute is known.
    fn keys(&self) -> Vec<BatchKey> {
        let known = |layer: &LayerDescription| matches!(layer.compute_ms, Compute::Any(_));
        if self.batch_keys.is_empty() && self.layers.iter().any(known) {
            return vec![BatchKey {
                name: String::new(),
                weight: 1.0,
            }];
        }
        self.batch_keys.clone()
    }

    fn compute(
        &self,
        layer: &LayerDescription,
        keys: &[BatchKey],
    ) -> Result<Vec<f64>, DescriptionError> {
        match &layer.compute_ms {
            Compute::Unknown => Ok(Vec::new()),
            Compute::Any(time) => Ok(vec![time * 1e-3; keys.len()]),
            Compute::Each(times) => {
                let wrong = || DescriptionError::Keys {
                    layer: layer.name.clone(),
                    found: times.keys().cloned().collect(),
                    expected: self.batch_keys.iter().map(|key| key.name.clone()).collect(),
                };
                if times.len() != keys.len() {
                    return Err(wrong());
                }
                let time = |key: &BatchKey| times.get(&key.name).map(|time| time * 1e-3);
                keys.iter()
                    .map(time)
                    .collect::<Option<Vec<f64>>>()
                    .ok_or_else(wrong)
            }
        }
    }
}

fn within(what: &'static str, count: usize) -> Result<(), DescriptionError> {
    match count {
        0..=MOST => Ok(()),
        _ => Err(DescriptionError::TooMany { what, limit: MOST }),
    }
}

fn numbered(name: &str, number: usize, of: usize) -> String {
    match (name.contains("{}"), of) {
        (true, _) => name.replace("{}", &number.to_string()),
        (false, 1) => name.to_owned(),
        (false, _) => format!("{name}.{number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(text: &str) -> Result<Described, DescriptionError> {
        serde_json::from_str::<Description>(text).unwrap().resolve()
    }

    #[test]
    fn repetition_names_ties_and_gaps() {
        let found = described(
            r#"{"layers": [
                {"name": "embed", "parts": [{"name": "w", "bytes": 900, "tied": "table"}]},
                {"name": "h.{}", "repeat": 2, "compute_ms": 2, "parts": [
                    {"name": "expert", "repeat": 2, "bytes": 10, "logical_bytes": 20}]},
                {"name": "norm", "compute_ms": 0.5},
                {"name": "head", "parts": [{"name": "w", "bytes": 900, "tied": "table"}]}]}"#,
        )
        .unwrap();
        assert_eq!(
            found.parts,
            [
                "embed.w",
                "h.0.expert.0",
                "h.0.expert.1",
                "h.1.expert.0",
                "h.1.expert.1",
                "head.w"
            ]
        );
        assert_eq!(found.layers, ["embed", "h.0", "h.1", "norm", "head"]);
        assert_eq!(found.weight_bytes, 940);
        assert_eq!(found.input.aliases, [[0, 5]]);
        assert_eq!(found.input.parts[1].logical, 20);
        assert!(found.input.uses[3].parts.is_empty());
        assert_eq!(found.input.uses[3].compute_s, [5e-4]);
        assert!(found.input.uses[0].compute_s.is_empty());
    }

    #[test]
    fn compute_is_by_batch_key_or_for_all() {
        let text = |compute: &str| {
            format!(
                r#"{{"batch_keys": [{{"name": "a", "weight": 1}}, {{"name": "b", "weight": 2}}],
                    "layers": [{{"name": "l", "compute_ms": {compute}}}]}}"#
            )
        };
        let compute =
            |compute| described(&text(compute)).map(|d| d.input.uses[0].compute_s.clone());
        assert_eq!(compute("4").unwrap(), [4e-3, 4e-3]);
        assert_eq!(compute(r#"{"b": 2, "a": 1}"#).unwrap(), [1e-3, 2e-3]);
        assert!(matches!(
            compute(r#"{"a": 1}"#),
            Err(DescriptionError::Keys { .. })
        ));
        assert!(matches!(
            compute(r#"{"a": 1, "c": 1}"#),
            Err(DescriptionError::Keys { .. })
        ));
    }

    #[test]
    fn repetition_is_bounded() {
        let text = r#"{"layers": [{"name": "l", "repeat": 1000000,
            "parts": [{"name": "p", "repeat": 1000000000000, "bytes": 1}]}]}"#;
        assert!(matches!(
            described(text),
            Err(DescriptionError::TooMany { .. })
        ));
    }
}
