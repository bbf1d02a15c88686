//! The index of shards.

use std::collections::HashMap;

use serde::de::DeserializeSeed as _;

use super::{Shard, read_vec};
use crate::weights::{
    error::WeightError,
    loader::Watch,
    safetensors::{self, FileTensor},
};

/// The index must name exactly the tensors of each shard, and all shards.
pub(super) fn check(
    index: &Shard,
    shards: &[Shard],
    headers: &[Vec<FileTensor>],
    watch: &dyn Watch,
) -> Result<(), WeightError> {
    let wrong = |problem: String| WeightError::checkpoint(&index.name, problem);
    let text = read_vec(index, index.stamp.bytes, 0, watch)?;
    let mut reader = serde_json::Deserializer::from_slice(&text);
    let of_tensor = safetensors::Index(watch).deserialize(&mut reader);
    let mut of_tensor = of_tensor
        .and_then(|of_tensor| reader.end().map(|()| of_tensor))
        .map_err(|e| wrong(format!("not a valid index: {e}")))?;
    let mut named: HashMap<&str, bool> = HashMap::new();
    for shard in shards {
        if named.insert(&shard.name, false).is_some() {
            return Err(WeightError::checkpoint(&shard.name, "handed over twice"));
        }
    }
    for (tensor, file) in &of_tensor {
        match named.get_mut(file.as_str()) {
            Some(seen) => *seen = true,
            None => {
                let problem =
                    format!("tensor {tensor:?} is in {file:?}, which was not handed over");
                return Err(wrong(problem));
            }
        }
    }
    for (shard, tensors) in shards.iter().zip(headers) {
        for FileTensor { name, .. } in tensors {
            match of_tensor.remove(name) {
                Some(file) if file == shard.name => {}
                Some(file) => {
                    let problem = format!("has tensor {name:?}, which the index puts in {file:?}");
                    return Err(WeightError::checkpoint(&shard.name, problem));
                }
                None => {
                    let problem = format!(
                        "has tensor {name:?}, which is not in the index, or is in two files"
                    );
                    return Err(WeightError::checkpoint(&shard.name, problem));
                }
            }
        }
    }
    if let Some((tensor, file)) = of_tensor.into_iter().min() {
        let problem = format!("tensor {tensor:?} of the index is not in it");
        return Err(WeightError::checkpoint(&file, problem));
    }
    match named
        .into_iter()
        .filter(|(_, seen)| !seen)
        .map(|(name, _)| name)
        .min()
    {
        Some(name) => Err(WeightError::checkpoint(name, "not named by the index")),
        None => Ok(()),
    }
}
