//! Tensors as a client declares them, and what they come to.
//!
//! An element type that is not one of safetensors needs `storage_bytes` (its bits are
//! then bytes * 8 / elements, which must be whole) and no stride; a tensor that shares
//! another's storage may have such a type only with the same shape as the owner.

use std::{collections::HashMap, sync::Arc};

use super::{
    dtype,
    error::WeightError,
    manifest::{Manifest, TensorEntry},
    shares::Shares,
};

/// Most bytes of names and shapes that one put declares, 64 MiB.
pub const TEXT_BYTES: u64 = 64 << 20;
/// Most bytes of declarations in memory at a time, of one user and of all.
const OF_USER: u64 = 256 << 20;
const OF_ALL: u64 = 4 * OF_USER;

/// What the declarations of all puts under way share.
pub(crate) fn shares() -> Arc<Shares> {
    Shares::new("bytes of declarations at a time", OF_USER, OF_ALL)
}

/// A tensor as a client declares it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Declaration {
    /// Qualified name.
    pub name: String,
    /// Element type.
    pub dtype: String,
    /// Dimensions.
    pub shape: Vec<u64>,
    /// Strides in elements; empty when contiguous.
    pub stride: Vec<i64>,
    /// The tensor whose storage it shares; empty when it has its own.
    pub alias_of: String,
    /// Offset in that storage, in bytes.
    pub storage_offset: u64,
    /// Bytes of its own storage; 0 means what shape and stride need.
    pub storage_bytes: u64,
}

/// A tensor that owns its storage.
struct Owner {
    storage: u32,
    dtype: String,
    shape: Vec<u64>,
    bytes: u64,
}

/// Works out sizes and storages of what was declared, and who owns them.
pub(crate) fn place(
    declared: Vec<Declaration>,
) -> Result<(Manifest, HashMap<String, usize>), WeightError> {
    let mut storages = Vec::new();
    let mut owners: HashMap<String, Owner> = HashMap::new();
    for tensor in declared.iter().filter(|tensor| tensor.alias_of.is_empty()) {
        let bytes = tensor
            .bytes()?
            .ok_or(WeightError::Internal("owner without a size"))?;
        let storage = u32::try_from(storages.len())
            .map_err(|_| WeightError::Internal("more tensors than the limit"))?;
        storages.push(tensor.own_storage(bytes)?);
        let (dtype, shape) = (tensor.dtype.clone(), tensor.shape.clone());
        let owner = Owner {
            storage,
            dtype,
            shape,
            bytes,
        };
        if owners.insert(tensor.name.clone(), owner).is_some() {
            let rule = "declared twice";
            return Err(WeightError::argument("tensors.name", &tensor.name, rule));
        }
    }
    let mut entries = Vec::with_capacity(declared.len());
    for tensor in declared {
        let owner_name = match tensor.alias_of.as_str() {
            "" => &tensor.name,
            other => other,
        };
        let Some(owner) = owners.get(owner_name) else {
            let rule = "the name of a declared tensor that owns its storage";
            return Err(tensor.argument("alias_of", &tensor.alias_of, rule));
        };
        if !tensor.alias_of.is_empty() && tensor.storage_bytes != 0 {
            let rule = "not with alias_of";
            return Err(tensor.argument("storage_bytes", tensor.storage_bytes, rule));
        }
        let is_same = (&owner.dtype, &owner.shape) == (&tensor.dtype, &tensor.shape);
        let bytes = match tensor.bytes()? {
            Some(bytes) => bytes,
            None if is_same => owner.bytes,
            None => {
                let rule = "a type that is not one of safetensors may only repeat the dtype and \
                            shape of the tensor whose storage it shares";
                return Err(tensor.argument("dtype", &tensor.dtype, rule));
            }
        };
        let storage = owner.storage;
        let is_contiguous = dtype::is_contiguous(&tensor.shape, &tensor.stride);
        entries.push(TensorEntry {
            name: tensor.name,
            dtype: tensor.dtype,
            shape: tensor.shape,
            stride: if is_contiguous {
                Vec::new()
            } else {
                tensor.stride
            },
            bytes,
            storage,
            storage_offset: tensor.storage_offset,
        });
    }
    let manifest = Manifest::place(entries, &storages)?;
    let placed = owners
        .into_keys()
        .filter_map(|name| {
            let storage = manifest.find(&name)?.storage;
            Some((name, usize::try_from(storage).ok()?))
        })
        .collect();
    Ok((manifest, placed))
}

impl Declaration {
    /// Bytes of its names and dimensions.
    pub(crate) fn text_bytes(&self) -> u64 {
        let text = self.name.len() + self.dtype.len() + self.alias_of.len();
        let numbers = self.shape.len() + self.stride.len();
        (text + numbers * size_of::<u64>()) as u64
    }

    /// Bytes that the tensor spans; `None` for an alias of unknown type.
    fn bytes(&self) -> Result<Option<u64>, WeightError> {
        let wrong = |e: dtype::SizeError| {
            let field = match e {
                dtype::SizeError::Name | dtype::SizeError::Unknown => "dtype",
                dtype::SizeError::StrideCount { .. }
                | dtype::SizeError::NegativeStride { .. }
                | dtype::SizeError::SubByteStride { .. } => "stride",
                _ => "shape",
            };
            match field {
                "dtype" => self.argument(field, &self.dtype, e.to_string()),
                "stride" => self.argument(field, &self.stride, e.to_string()),
                _ => self.argument(field, &self.shape, e.to_string()),
            }
        };
        if !self.stride.is_empty() && !dtype::is_contiguous(&self.shape, &self.stride) {
            let bytes = dtype::span_bytes(&self.dtype, &self.shape, &self.stride);
            return bytes.map(Some).map_err(wrong);
        }
        let is_given = self.storage_bytes > 0 || self.shape.contains(&0);
        let given = (is_given && self.alias_of.is_empty()).then_some(self.storage_bytes);
        match dtype::contiguous_bytes(&self.dtype, &self.shape, given) {
            Err(dtype::SizeError::Unknown) if !self.alias_of.is_empty() => Ok(None),
            other => other.map(Some).map_err(wrong),
        }
    }

    /// Bytes of the storage of a tensor that owns it.
    fn own_storage(&self, needed: u64) -> Result<u64, WeightError> {
        if self.storage_offset != 0 {
            let rule = "only with alias_of";
            return Err(self.argument("storage_offset", self.storage_offset, rule));
        }
        if self.storage_bytes != 0 && self.storage_bytes < needed {
            let rule = format!("shape and stride need {needed} bytes");
            return Err(self.argument("storage_bytes", self.storage_bytes, rule));
        }
        Ok(self.storage_bytes.max(needed))
    }

    fn argument(
        &self,
        part: &str,
        value: impl std::fmt::Debug,
        rule: impl Into<String>,
    ) -> WeightError {
        let name: String = self.name.chars().take(96).collect();
        WeightError::argument(format!("tensors[{name}].{part}"), value, rule)
    }
}
