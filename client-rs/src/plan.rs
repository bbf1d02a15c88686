//! The plan in force, as the client sees it: which parts a layer has and where they lie.

use std::collections::HashMap;

use flextensord_proto::v1::{PlanLayer, PlanMemory, PlanPage, PlanPart};

use crate::error::ClientError;

/// A layer of the plan: look it up once by name, then acquire by this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayerId(pub(crate) u32);

/// Where a tensor lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorPlace {
    /// Qualified name.
    pub name: String,
    /// Element type as safetensors spells it.
    pub dtype: String,
    /// Dimensions; empty for a scalar.
    pub shape: Vec<u64>,
    /// Strides in elements; empty means contiguous.
    pub stride: Vec<i64>,
    /// Bytes that it spans.
    pub bytes: u64,
    /// The part that it lies in.
    pub part: u32,
    /// Offset in the part's allocation, in bytes.
    pub offset: u64,
}

/// A part: the unit of residency and of copying.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Index, and for a streamed one that of its slot word.
    pub index: u32,
    /// Copied into the ring each pass, or kept on the device.
    pub streamed: bool,
    /// Index of the allocation.
    pub allocation: u32,
    /// Offset in it, in bytes.
    pub offset: u64,
    /// Bytes as a reader sees them.
    pub bytes: u64,
    /// Indexes of its tensors in [`Plan::tensors`].
    pub tensors: Vec<u32>,
}

/// A layer of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Its name.
    pub name: String,
    /// Its parts, each once, in rising order.
    pub parts: Vec<u32>,
    /// Those of them that are streamed.
    pub streamed: Vec<u32>,
    /// Indexes of its tensors in [`Plan::tensors`], in order of name.
    tensors: Vec<u32>,
}

/// The plan. Every index and range in it was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    version: u64,
    parts: Vec<Part>,
    layers: Vec<Layer>,
    tensors: Vec<TensorPlace>,
    stream_order: Vec<u32>,
    by_name: HashMap<String, u32>,
}

impl Plan {
    /// Its version.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// All parts, by index.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// All layers, in the order of a pass.
    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// All tensors.
    #[must_use]
    pub fn tensors(&self) -> &[TensorPlace] {
        &self.tensors
    }

    /// Order in which the daemon fills the streamed parts of a pass.
    #[must_use]
    pub fn stream_order(&self) -> &[u32] {
        &self.stream_order
    }

    /// The layers to acquire, in the order of a pass.
    pub fn layer_ids(&self) -> impl Iterator<Item = LayerId> + use<> {
        // as many as fit an index: checked when the plan was read
        (0..u32::try_from(self.layers.len()).unwrap_or(u32::MAX)).map(LayerId)
    }

    /// The layer with that name.
    ///
    /// # Errors
    /// [`ClientError::Unknown`].
    pub fn layer_id(&self, name: &str) -> Result<LayerId, ClientError> {
        let found = self.by_name.get(name).copied().map(LayerId);
        found.ok_or_else(|| ClientError::Unknown {
            what: "layer",
            name: name.to_owned(),
            place: format!("plan {}", self.version),
        })
    }

    /// The layer with that id.
    ///
    /// # Errors
    /// [`ClientError::Unknown`] when the id is one of another plan.
    pub fn layer(&self, id: LayerId) -> Result<&Layer, ClientError> {
        self.layers
            .get(id.0 as usize)
            .ok_or_else(|| ClientError::Unknown {
                what: "layer",
                name: format!("#{}", id.0),
                place: format!("plan {}", self.version),
            })
    }

    /// The tensors of a layer, in order of name: those that lie in its parts.
    pub fn layer_tensors<'a>(
        &'a self,
        layer: &'a Layer,
    ) -> impl Iterator<Item = &'a TensorPlace> + 'a {
        layer
            .tensors
            .iter()
            .filter_map(|&at| self.tensors.get(at as usize))
    }

    /// The tensor `name` of a layer.
    pub(crate) fn tensor_of(&self, layer: &Layer, name: &str) -> Option<&TensorPlace> {
        let at = layer.tensors.binary_search_by(|&at| {
            let tensor = self.tensors.get(at as usize);
            tensor.map_or("", |tensor| tensor.name.as_str()).cmp(name)
        });
        self.tensors.get(*layer.tensors.get(at.ok()?)? as usize)
    }

    /// A tensor in `part`, for messages.
    pub(crate) fn tensor_in(&self, part: u32) -> &str {
        let part = self.parts.get(part as usize);
        part.and_then(|part| part.tensors.first())
            .and_then(|&at| self.tensors.get(at as usize))
            .map_or("no tensor", |tensor| &tensor.name)
    }

    /// Reads the pages of a plan, and returns it with what it needs of memory.
    pub(crate) fn read(pages: Vec<PlanPage>) -> Result<(Self, PlanMemory), ClientError> {
        let mut memory = None;
        let (mut parts, mut layers) = (Vec::new(), Vec::new());
        for page in pages {
            memory = memory.or(page.memory);
            parts.extend(page.parts);
            layers.extend(page.layers);
        }
        let memory = memory.ok_or_else(|| broken("no page carries the memory".to_owned()))?;
        parts.sort_by_key(|part: &PlanPart| part.part);
        let indexed = (0u32..).zip(&parts).all(|(index, part)| index == part.part);
        if !indexed || parts.len() != memory.parts as usize {
            return Err(broken(format!(
                "{} parts came of {}, or their numbers have gaps",
                parts.len(),
                memory.parts
            )));
        }
        let mut plan = Self {
            version: memory.plan_version,
            parts: Vec::with_capacity(parts.len()),
            layers: Vec::with_capacity(layers.len()),
            tensors: Vec::new(),
            stream_order: memory.stream_order.clone(),
            by_name: HashMap::with_capacity(layers.len()),
        };
        for part in parts {
            plan.add_part(part, &memory)?;
        }
        for layer in layers {
            plan.add_layer(layer)?;
        }
        if plan.layers.len() != memory.layers as usize {
            let (got, want) = (plan.layers.len(), memory.layers);
            return Err(broken(format!("{got} layers came of {want}")));
        }
        Ok((plan, memory))
    }

    fn add_part(&mut self, part: PlanPart, memory: &PlanMemory) -> Result<(), ClientError> {
        let index = part.part;
        let end = part.offset.checked_add(part.logical_bytes);
        let within = memory
            .allocations
            .get(part.allocation as usize)
            .is_some_and(|allocation| end.is_some_and(|end| end <= allocation.bytes));
        // a part without bytes lies nowhere
        if !within && part.logical_bytes > 0 {
            return Err(broken(format!(
                "part {index} does not lie in its allocation"
            )));
        }
        let mut tensors = Vec::with_capacity(part.tensors.len());
        for tensor in part.tensors {
            let end = tensor.storage_offset.checked_add(tensor.bytes);
            if end.is_none_or(|end| end > part.logical_bytes) {
                let name = tensor.name;
                return Err(broken(format!(
                    "tensor {name} does not lie in part {index}"
                )));
            }
            let at = u32::try_from(self.tensors.len())
                .map_err(|_| broken("too many tensors".to_owned()))?;
            tensors.push(at);
            self.tensors.push(TensorPlace {
                name: tensor.name,
                dtype: tensor.dtype,
                shape: tensor.shape,
                stride: tensor.stride,
                bytes: tensor.bytes,
                part: index,
                offset: part.offset.saturating_add(tensor.storage_offset),
            });
        }
        self.parts.push(Part {
            index,
            streamed: part.streamed,
            allocation: part.allocation,
            offset: part.offset,
            bytes: part.logical_bytes,
            tensors,
        });
        Ok(())
    }

    fn add_layer(&mut self, layer: PlanLayer) -> Result<(), ClientError> {
        let id =
            u32::try_from(self.layers.len()).map_err(|_| broken("too many layers".to_owned()))?;
        let mut parts = layer.parts;
        parts.sort_unstable();
        parts.dedup();
        let (mut streamed, mut tensors) = (Vec::new(), Vec::new());
        for &index in &parts {
            let part = self.parts.get(index as usize).ok_or_else(|| {
                broken(format!(
                    "layer {} names part {index}, which is none",
                    layer.name
                ))
            })?;
            if part.streamed {
                streamed.push(index);
            }
            tensors.extend_from_slice(&part.tensors);
        }
        tensors.sort_by(|&one, &two| {
            let name = |at: u32| self.tensors.get(at as usize).map(|tensor| &tensor.name);
            name(one).cmp(&name(two))
        });
        if self.by_name.insert(layer.name.clone(), id).is_some() {
            return Err(broken(format!("layer {} comes twice", layer.name)));
        }
        self.layers.push(Layer {
            name: layer.name,
            parts,
            streamed,
            tensors,
        });
        Ok(())
    }
}

fn broken(reason: String) -> ClientError {
    ClientError::Protocol {
        call: "GetPlan",
        reason,
    }
}

#[cfg(test)]
mod tests {
    use flextensord_proto::v1::{Allocation, Tensor};

    use super::*;

    fn tensor(name: &str, bytes: u64, storage_offset: u64) -> Tensor {
        Tensor {
            name: name.to_owned(),
            bytes,
            storage_offset,
            ..Tensor::default()
        }
    }

    fn page() -> PlanPage {
        let part = |part, streamed, offset, tensors| PlanPart {
            part,
            streamed,
            allocation: 0,
            offset,
            stored_bytes: 256,
            logical_bytes: 256,
            tensors,
        };
        PlanPage {
            memory: Some(PlanMemory {
                plan_version: 3,
                parts: 2,
                layers: 1,
                allocations: vec![Allocation {
                    bytes: 768,
                    ..Allocation::default()
                }],
                stream_order: vec![1],
                ..PlanMemory::default()
            }),
            // not in order: pages may come as they like
            parts: vec![
                part(
                    1,
                    true,
                    512,
                    vec![tensor("l.b", 8, 0), tensor("l.a", 8, 64)],
                ),
                part(0, false, 256, vec![tensor("l.c", 0, 256)]),
            ],
            layers: vec![PlanLayer {
                name: "l".to_owned(),
                parts: vec![1, 0, 1],
            }],
        }
    }

    #[test]
    fn a_plan_is_read_with_places_in_the_allocation() {
        let (plan, _) = Plan::read(vec![page()]).unwrap();
        let id = plan.layer_id("l").unwrap();
        let layer = plan.layer(id).unwrap();
        assert_eq!(
            (layer.parts.as_slice(), layer.streamed.as_slice()),
            (&[0, 1][..], &[1][..])
        );
        let places: Vec<_> = plan
            .layer_tensors(layer)
            .map(|t| (t.name.as_str(), t.offset))
            .collect();
        assert_eq!(places, [("l.a", 576), ("l.b", 512), ("l.c", 512)]);
        assert_eq!(plan.tensor_of(layer, "l.b").unwrap().part, 1);
        assert!(plan.tensor_of(layer, "l.d").is_none());
        assert!(matches!(
            plan.layer_id("m"),
            Err(ClientError::Unknown { .. })
        ));
    }

    #[test]
    fn what_points_outside_is_refused() {
        let damage: [fn(&mut PlanPage); 8] = [
            |page| page.memory = None,
            |page| page.parts[0].offset = 513,
            |page| page.parts[0].offset = u64::MAX,
            |page| page.parts[0].allocation = 1,
            |page| page.parts[0].part = 2,
            |page| page.parts[0].tensors[0].bytes = 257,
            |page| page.layers[0].parts.push(2),
            |page| page.layers.push(page.layers[0].clone()),
        ];
        for (at, damage) in damage.iter().enumerate() {
            let mut page = page();
            damage(&mut page);
            assert!(Plan::read(vec![page]).is_err(), "damage {at}");
        }
    }
}
