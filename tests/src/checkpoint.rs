//! Checkpoints to load and to compare with: an independent reader and writer of the
//! safetensors format, which shares no code with the daemon's.

use std::{fs, path::Path};

use serde_json::{Map, Value, json};

use crate::SceneError;

/// A tensor with its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Its element type.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Its bytes.
    pub data: Vec<u8>,
}

/// Reads all tensors of a safetensors file, in order of name.
///
/// # Errors
/// When it is none.
pub fn read(path: &Path) -> Result<Vec<Tensor>, SceneError> {
    let bytes = fs::read(path).map_err(|e| SceneError::io(path.display().to_string(), e))?;
    let bad = |what: &str| SceneError::Checkpoint(format!("{}: {what}", path.display()));
    let length = bytes.first_chunk().ok_or_else(|| bad("no header"))?;
    let length = usize::try_from(u64::from_le_bytes(*length)).map_err(|_| bad("header"))?;
    let header = bytes.get(8..8 + length).ok_or_else(|| bad("header is cut"))?;
    let header: Map<String, Value> =
        serde_json::from_slice(header).map_err(|_| bad("header is no JSON"))?;
    let mut tensors = Vec::new();
    for (name, entry) in header.into_iter().filter(|(name, _)| name != "__metadata__") {
        let numbers = |key: &str| -> Option<Vec<u64>> {
            entry[key].as_array()?.iter().map(Value::as_u64).collect()
        };
        let offsets = numbers("data_offsets").ok_or_else(|| bad("offsets"))?;
        let at = |index: usize| {
            let offset = offsets.get(index).copied()?;
            usize::try_from(offset).ok()?.checked_add(8 + length)
        };
        let data = match (at(0), at(1)) {
            (Some(from), Some(to)) => bytes.get(from..to),
            _ => None,
        };
        tensors.push(Tensor {
            shape: numbers("shape").ok_or_else(|| bad("shape"))?,
            dtype: entry["dtype"].as_str().unwrap_or_default().to_owned(),
            data: data.ok_or_else(|| bad("data is cut"))?.to_vec(),
            name,
        });
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(tensors)
}

/// Writes tensors as a safetensors file, in the order given.
///
/// # Errors
/// When it cannot be written.
pub fn write(path: &Path, tensors: &[Tensor]) -> Result<(), SceneError> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for tensor in tensors {
        let offsets = [data.len(), data.len() + tensor.data.len()];
        let entry =
            json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets });
        header.insert(tensor.name.clone(), entry);
        data.extend_from_slice(&tensor.data);
    }
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&data);
    fs::write(path, file).map_err(|e| SceneError::io(path.display().to_string(), e))
}

/// Bytes that tell tensor and place apart; never the poison of released ranges (0xdb).
#[must_use]
pub fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut data = Vec::with_capacity(bytes + 8);
    while data.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // 127 at most in each byte
        data.extend((state & 0x7f7f_7f7f_7f7f_7f7f).to_le_bytes());
    }
    data.truncate(bytes);
    data
}

/// A model of `layers` layers of `tensors` U8 tensors of about `bytes` bytes each, odd
/// lengths among them, named `layers.L.T`.
#[must_use]
pub fn layered(layers: usize, tensors: usize, bytes: usize) -> Vec<Tensor> {
    let mut all = Vec::new();
    for layer in 0..layers {
        for tensor in 0..tensors {
            let index = layer * tensors + tensor;
            let size = bytes + index % 7;
            all.push(Tensor {
                name: format!("layers.{layer}.{tensor}"),
                dtype: "U8".to_owned(),
                shape: vec![size as u64],
                data: pattern(index as u64 + 1, size),
            });
        }
    }
    all
}

/// The layer that a tensor belongs to: its name up to its first number, or its first
/// word.
#[must_use]
pub fn layer_of(name: &str) -> String {
    let words: Vec<&str> = name.split('.').collect();
    let number = words.iter().position(|word| word.bytes().all(|b| b.is_ascii_digit()));
    words[..number.map_or(1, |at| at + 1)].join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_fall_into_layers_by_their_names() {
        assert_eq!(layer_of("encoder.layer.3.output.dense.weight"), "encoder.layer.3");
        assert_eq!(layer_of("embeddings.word_embeddings.weight"), "embeddings");
    }

    #[test]
    fn what_is_written_is_read_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("m");
        let model = layered(2, 2, 100);
        write(&path, &model).unwrap();
        assert_eq!(read(&path).unwrap(), model);
        assert!(!pattern(3, 1000).contains(&0xdb));
    }
}
