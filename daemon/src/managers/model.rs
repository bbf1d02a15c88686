//! What a manager registered: layers, their parts, and where those lie.

use std::{collections::HashMap, sync::Arc};

use flextensord_device::control::ControlPage;

use super::error::ManagerError;
use crate::{
    plan::{Place, Plan},
    transfer::{memory::Allocation, residents::Block},
    weights::{
        manifest::{Manifest, TensorEntry},
        registry::Attachment,
    },
};

/// A layer as the client names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerSpec {
    /// Unique within the manager.
    pub name: String,
    /// Names of tensors of the weight set.
    pub tensors: Vec<String>,
}

/// A part: one storage of the weight set, with the tensors that lie in it.
#[derive(Debug, Clone)]
pub struct Part {
    /// Index of the storage.
    pub storage: u32,
    /// Its offset in the segment, in bytes.
    pub segment_offset: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Its tensors: indices into the manifest's.
    pub tensors: Vec<usize>,
}

/// A layer with its parts.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Its name.
    pub name: String,
    /// Its parts, each once.
    pub parts: Vec<u32>,
}

/// Layers resolved against a weight set.
#[derive(Debug, Clone, Default)]
pub struct Structure {
    /// All parts.
    pub parts: Vec<Part>,
    /// Layers in the order of a pass.
    pub layers: Vec<Layer>,
    /// Index of each layer by its name.
    pub index: HashMap<String, usize>,
    /// Tensors of the set that no layer names, and their bytes.
    pub unregistered: (u32, u64),
}

impl Structure {
    /// Resolves `specs` against the manifest of the weight set `set`.
    ///
    /// # Errors
    /// When a layer has no tensors, its name repeats, or a tensor is unknown.
    pub fn resolve(
        set: &str,
        manifest: &Manifest,
        specs: &[LayerSpec],
    ) -> Result<Self, ManagerError> {
        let mut structure = Self::default();
        let positions: HashMap<&str, usize> = manifest
            .tensors()
            .iter()
            .enumerate()
            .map(|(at, t)| (t.name.as_str(), at))
            .collect();
        let mut part_of: HashMap<u32, u32> = HashMap::new();
        let mut named = vec![false; manifest.tensors().len()];
        // the last layer that each part was seen in
        let mut last_in: HashMap<u32, usize> = HashMap::new();
        for (number, spec) in specs.iter().enumerate() {
            if spec.tensors.is_empty() {
                // nothing would move for it: a pattern that matched nothing, most likely
                return Err(ManagerError::Field {
                    field: "layers.tensors",
                    value: format!("empty in layer {:?}", spec.name),
                    rule: "each layer has at least one tensor of the weight set".to_owned(),
                });
            }
            let mut parts = Vec::new();
            for name in &spec.tensors {
                let &at =
                    positions
                        .get(name.as_str())
                        .ok_or_else(|| ManagerError::UnknownTensor {
                            layer: spec.name.clone(),
                            weight_set: set.to_owned(),
                            tensor: name.clone(),
                        })?;
                let tensor = &manifest.tensors()[at];
                let part = match part_of.get(&tensor.storage) {
                    Some(part) => *part,
                    None => structure.add_part(manifest, tensor, &mut part_of)?,
                };
                if !std::mem::replace(&mut named[at], true) {
                    structure.parts[part as usize].tensors.push(at);
                }
                if last_in.insert(part, number) != Some(number) {
                    parts.push(part);
                }
            }
            let layer = Layer {
                name: spec.name.clone(),
                parts,
            };
            if structure
                .index
                .insert(spec.name.clone(), structure.layers.len())
                .is_some()
            {
                return Err(ManagerError::Field {
                    field: "layers.name",
                    value: format!("{:?}", spec.name),
                    rule: "names of layers are unique within a manager".to_owned(),
                });
            }
            structure.layers.push(layer);
        }
        for (tensor, named) in manifest.tensors().iter().zip(named) {
            if !named {
                structure.unregistered.0 += 1;
                structure.unregistered.1 += tensor.bytes;
            }
        }
        Ok(structure)
    }

    fn add_part(
        &mut self,
        manifest: &Manifest,
        tensor: &TensorEntry,
        part_of: &mut HashMap<u32, u32>,
    ) -> Result<u32, ManagerError> {
        let part = u32::try_from(self.parts.len()).map_err(|_| ManagerError::Worker)?;
        let storage = manifest
            .storages()
            .get(tensor.storage as usize)
            .ok_or(ManagerError::Worker)?;
        part_of.insert(tensor.storage, part);
        self.parts.push(Part {
            storage: tensor.storage,
            segment_offset: storage.offset,
            bytes: storage.bytes,
            tensors: Vec::new(),
        });
        Ok(part)
    }
}

/// A registered model with its plan's memory.
#[derive(Debug)]
pub struct Model {
    /// Keeps the weight set alive.
    pub attachment: Attachment,
    /// Layers and parts.
    pub structure: Structure,
    /// The plan.
    pub plan: Plan,
    /// Its version; grows with each plan of the manager.
    pub plan_version: u64,
    /// Slot words and `want`.
    pub control: Arc<ControlPage>,
    /// Blocks of residents, by the plan's index.
    pub blocks: Vec<Arc<Block>>,
    /// The ring, if anything streams.
    pub ring: Option<Allocation>,
    /// What was asked for and granted, in bytes.
    pub requested: u64,
    /// See `requested`.
    pub granted: u64,
    /// Bytes of residents that were on the device already.
    pub shared_bytes: u64,
    /// The least budget in which the model can run.
    pub least_feasible: u64,
}

impl Model {
    /// The layer of that name.
    ///
    /// # Errors
    /// When there is none.
    pub fn layer(&self, manager: &str, name: &str) -> Result<&Layer, ManagerError> {
        let unknown = || ManagerError::UnknownLayer {
            manager: manager.to_owned(),
            layer: name.to_owned(),
        };
        self.structure
            .index
            .get(name)
            .map(|at| &self.structure.layers[*at])
            .ok_or_else(unknown)
    }

    /// Whether a part streams.
    #[must_use]
    pub fn streams(&self, part: u32) -> bool {
        matches!(
            self.plan.places.get(part as usize),
            Some(Place::Streamed { .. })
        )
    }

    /// Name of the first tensor of a part, for people.
    #[must_use]
    pub fn tensor_name(&self, part: u32) -> &str {
        let tensors = self.attachment.set().manifest().tensors();
        self.structure
            .parts
            .get(part as usize)
            .and_then(|part| part.tensors.first())
            .and_then(|at| tensors.get(*at))
            .map_or("", |tensor| tensor.name.as_str())
    }

    /// Whether two streamed parts overlap in the ring.
    #[must_use]
    pub fn overlap(&self, one: u32, other: u32) -> bool {
        let range = |part: u32| match self.plan.places.get(part as usize) {
            Some(Place::Streamed { offset }) => {
                Some((*offset, offset + self.structure.parts[part as usize].bytes))
            }
            _ => None,
        };
        match (range(one), range(other)) {
            (Some(one), Some(other)) => one.0 < other.1 && other.0 < one.1,
            _ => false,
        }
    }
}
