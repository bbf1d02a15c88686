//! What a weight set holds and where: tensors by name, storages by place.
//!
//! Storages are placed in the natural order of their first tensor's name, each at a
//! multiple of 256 bytes, so that the tensors of a layer lie together. A tensor without
//! bytes has a storage without bytes.

use std::{cmp::Ordering, collections::HashMap};

use flextensord_proto::{limit, name};
use serde::{Deserialize, Serialize};

use super::{digest::Digest, error::WeightError};

/// Segments are whole multiples of this, and never empty.
pub const PAGE: u64 = 4096;

/// A tensor of a weight set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Qualified name, unique in its set.
    pub name: String,
    /// Name of the element type, as safetensors spells it.
    pub dtype: String,
    /// Dimensions; empty for a scalar.
    pub shape: Vec<u64>,
    /// Strides in elements; empty when contiguous (row-major).
    pub stride: Vec<i64>,
    /// Bytes that it spans in its storage.
    pub bytes: u64,
    /// Index of its storage in [`Manifest::storages`].
    pub storage: u32,
    /// Offset in its storage, in bytes.
    pub storage_offset: u64,
}

/// A run of bytes that belongs together: one tensor, or several that share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StorageEntry {
    /// Offset in the segment, in bytes, a multiple of 256.
    pub offset: u64,
    /// Bytes, without padding.
    pub bytes: u64,
}

/// All tensors of a set in natural order of name, and the placement of their storages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "ManifestRecord")]
pub struct Manifest {
    tensors: Vec<TensorEntry>,
    storages: Vec<StorageEntry>,
    #[serde(skip)]
    index: HashMap<String, u32>,
    #[serde(skip)]
    segment_bytes: u64,
    #[serde(skip)]
    logical_bytes: u64,
}

/// The form in which a manifest is kept; its placement is worked out again when it is
/// read, and must agree.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ManifestRecord {
    tensors: Vec<TensorEntry>,
    storages: Vec<StorageEntry>,
}

impl TryFrom<ManifestRecord> for Manifest {
    type Error = String;

    fn try_from(record: ManifestRecord) -> Result<Self, String> {
        let sizes: Vec<u64> = record.storages.iter().map(|s| s.bytes).collect();
        let placed = Manifest::place(record.tensors.clone(), &sizes).map_err(|e| e.to_string())?;
        if placed.storages != record.storages || placed.tensors != record.tensors {
            return Err("placement does not follow the rules of this version".to_owned());
        }
        Ok(placed)
    }
}

impl Manifest {
    /// Places `tensors`, whose `storage` is an index into `storages`, the storages'
    /// bytes in any order.
    ///
    /// # Errors
    /// [`WeightError::Argument`] for illegal or repeated names, too many tensors, a
    /// tensor outside its storage, a storage without a tensor, or sizes whose sum
    /// overflows.
    pub fn place(mut tensors: Vec<TensorEntry>, storages: &[u64]) -> Result<Self, WeightError> {
        if tensors.len() > limit::TENSORS {
            return Err(WeightError::argument(
                "tensors",
                tensors.len(),
                format!("at most {} tensors", limit::TENSORS),
            ));
        }
        tensors.sort_by(|a, b| natural_order(&a.name, &b.name));
        let mut index = HashMap::with_capacity(tensors.len());
        let mut renumbered: Vec<Option<u32>> = vec![None; storages.len()];
        let mut placed: Vec<StorageEntry> = Vec::with_capacity(storages.len());
        let mut cursor = 0_u64;
        for (number, tensor) in (0_u32..).zip(&mut tensors) {
            let field = |part: &str| format!("tensors[{}].{part}", tensor.name);
            name::check_qualified(&tensor.name)
                .map_err(|e| WeightError::name("tensors.name", &tensor.name, &e))?;
            let overflow = || {
                let rule = "the sum of all sizes overflows 64 bits";
                WeightError::argument(field("bytes"), tensor.bytes, rule)
            };
            let old = usize::try_from(tensor.storage).unwrap_or(usize::MAX);
            let bytes = *storages
                .get(old)
                .ok_or(WeightError::Internal("tensor without a storage"))?;
            if tensor
                .storage_offset
                .checked_add(tensor.bytes)
                .is_none_or(|end| end > bytes)
            {
                let rule = format!(
                    "with {} bytes of tensor it passes the end of its storage of {bytes} bytes",
                    tensor.bytes
                );
                let value = tensor.storage_offset;
                return Err(WeightError::argument(field("storage_offset"), value, rule));
            }
            let new = match renumbered.get(old).copied().flatten() {
                Some(new) => new,
                None => {
                    let offset = limit::align(cursor).ok_or_else(overflow)?;
                    cursor = offset.checked_add(bytes).ok_or_else(overflow)?;
                    let new = u32::try_from(placed.len())
                        .map_err(|_| WeightError::Internal("more storages than tensors"))?;
                    placed.push(StorageEntry { offset, bytes });
                    if let Some(slot) = renumbered.get_mut(old) {
                        *slot = Some(new);
                    }
                    new
                }
            };
            tensor.storage = new;
            if index.insert(tensor.name.clone(), number).is_some() {
                let rule = "declared twice";
                return Err(WeightError::argument("tensors.name", &tensor.name, rule));
            }
        }
        if placed.len() != storages.len() {
            return Err(WeightError::Internal("storage without a tensor"));
        }
        let segment_bytes = cursor
            .checked_next_multiple_of(PAGE)
            .ok_or_else(|| WeightError::argument("tensors", cursor, "size overflows 64 bits"))?
            .max(PAGE);
        let logical_bytes = placed.iter().map(|s| s.bytes).sum();
        Ok(Self {
            tensors,
            storages: placed,
            index,
            segment_bytes,
            logical_bytes,
        })
    }

    /// All tensors, in natural order of name.
    #[must_use]
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// The tensor of that name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&TensorEntry> {
        let number = self.index.get(name)?;
        self.tensors.get(usize::try_from(*number).ok()?)
    }

    /// All storages, in order of offset.
    #[must_use]
    pub fn storages(&self) -> &[StorageEntry] {
        &self.storages
    }

    /// The storage that holds a tensor of this manifest.
    #[must_use]
    pub fn storage_of(&self, tensor: &TensorEntry) -> Option<StorageEntry> {
        self.storages
            .get(usize::try_from(tensor.storage).ok()?)
            .copied()
    }

    /// Where a tensor of this manifest begins in the segment, in bytes.
    #[must_use]
    pub fn segment_offset(&self, tensor: &TensorEntry) -> Option<u64> {
        self.storage_of(tensor)?
            .offset
            .checked_add(tensor.storage_offset)
    }

    /// Bytes of the segment: whole pages, at least one.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// Bytes of all storages without padding; what several tensors share counts once.
    #[must_use]
    pub fn logical_bytes(&self) -> u64 {
        self.logical_bytes
    }

    /// A hash of what is declared (names, types, shapes, strides), without bytes and
    /// without placement.
    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        let mut hasher = blake3::Hasher::new();
        for tensor in &self.tensors {
            super::digest::declare(&mut hasher, tensor);
        }
        hasher.finalize().into()
    }

    /// The first tensor, in natural order, that the two declare differently, and how;
    /// `None` when they declare the same. Placement is not compared.
    #[must_use]
    pub fn first_difference(&self, other: &Self) -> Option<(String, String)> {
        for (mine, theirs) in self.tensors.iter().zip(&other.tensors) {
            let name = || mine.name.clone();
            match natural_order(&mine.name, &theirs.name) {
                Ordering::Less => return Some((name(), "only one of them has it".to_owned())),
                Ordering::Greater => {
                    return Some((theirs.name.clone(), "only one of them has it".to_owned()));
                }
                Ordering::Equal => {}
            }
            if mine.dtype != theirs.dtype {
                let text = format!("dtype {} and {}", mine.dtype, theirs.dtype);
                return Some((name(), text));
            }
            if mine.shape != theirs.shape {
                let text = format!("shape {:?} and {:?}", mine.shape, theirs.shape);
                return Some((name(), text));
            }
            if mine.stride != theirs.stride || mine.bytes != theirs.bytes {
                let text = format!("stride {:?} and {:?}", mine.stride, theirs.stride);
                return Some((name(), text));
            }
        }
        let common = self.tensors.len().min(other.tensors.len());
        let rest = self.tensors.get(common).or(other.tensors.get(common))?;
        Some((rest.name.clone(), "only one of them has it".to_owned()))
    }
}

/// The order of [`name::natural_key`] without its allocations, then by bytes.
fn natural_order(a: &str, b: &str) -> Ordering {
    Runs(a).cmp(Runs(b)).then_with(|| a.cmp(b))
}

/// Text and number runs of a name.
struct Runs<'a>(&'a str);

impl<'a> Iterator for Runs<'a> {
    type Item = (&'a str, u128, usize);

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let digit = |c: char| c.is_ascii_digit();
        let (text, tail) = self.0.split_at(self.0.find(digit).unwrap_or(self.0.len()));
        let (digits, tail) = tail.split_at(tail.find(|c| !digit(c)).unwrap_or(tail.len()));
        self.0 = tail;
        let number = if digits.is_empty() {
            0
        } else {
            digits.parse().unwrap_or(u128::MAX)
        };
        Some((text, number, digits.len()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tensor(name: &str, bytes: u64, storage: u32) -> TensorEntry {
        TensorEntry {
            name: name.to_owned(),
            dtype: "U8".to_owned(),
            shape: vec![bytes],
            stride: Vec::new(),
            bytes,
            storage,
            storage_offset: 0,
        }
    }

    #[test]
    fn layers_lie_together_in_natural_order_and_tied_tensors_once() {
        let tied = tensor("head", 10, 1);
        let manifest = Manifest::place(
            vec![
                tensor("l.10.w", 3, 0),
                tensor("emb", 10, 1),
                tensor("l.2.w", 257, 2),
                tied,
            ],
            &[3, 10, 257],
        )
        .unwrap();
        let names: Vec<_> = manifest.tensors().iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["emb", "head", "l.2.w", "l.10.w"]);
        let offsets: Vec<_> = manifest.storages().iter().map(|s| s.offset).collect();
        assert_eq!(offsets, [0, 256, 768]);
        assert_eq!(manifest.find("head").unwrap().storage, 0);
        assert_eq!(manifest.logical_bytes(), 270);
        assert_eq!(manifest.segment_bytes(), PAGE);
    }

    #[test]
    fn a_set_without_bytes_still_has_a_page() {
        let empty = Manifest::place(vec![tensor("a", 0, 0), tensor("b", 0, 1)], &[0, 0]).unwrap();
        assert_eq!((empty.segment_bytes(), empty.logical_bytes()), (PAGE, 0));
        assert_eq!(Manifest::place(vec![], &[]).unwrap().segment_bytes(), PAGE);
    }

    #[test]
    fn sums_that_overflow_and_tensors_outside_their_storage_are_refused() {
        let big = u64::MAX - 100;
        for (tensors, storages) in [
            (
                vec![tensor("a", big, 0), tensor("b", big, 1)],
                vec![big, big],
            ),
            (vec![tensor("a", u64::MAX, 0)], vec![u64::MAX]),
            (vec![tensor("a", 5, 0)], vec![4]),
            (vec![tensor("a", 4, 0), tensor("a", 4, 1)], vec![4, 4]),
            (vec![tensor("a\n", 4, 0)], vec![4]),
            (vec![tensor("", 4, 0)], vec![4]),
        ] {
            let error = Manifest::place(tensors, &storages).unwrap_err();
            assert!(matches!(error, WeightError::Argument { .. }), "{error}");
        }
    }

    #[test]
    fn the_first_difference_is_named_in_natural_order() {
        let one = Manifest::place(vec![tensor("l.2", 1, 0), tensor("l.10", 1, 1)], &[1, 1]);
        let two = Manifest::place(vec![tensor("l.2", 1, 0), tensor("l.10", 2, 1)], &[1, 2]);
        let three = Manifest::place(vec![tensor("l.10", 2, 0)], &[2]);
        let (one, two, three) = (one.unwrap(), two.unwrap(), three.unwrap());
        assert_eq!(one.first_difference(&one), None);
        assert_eq!(one.first_difference(&two).unwrap().0, "l.10");
        assert_eq!(two.first_difference(&three).unwrap().0, "l.2");
        assert_eq!(three.first_difference(&two).unwrap().0, "l.2");
    }

    #[test]
    fn two_thousand_odd_lengths_take_little_more_than_their_sum() {
        let sizes: Vec<u64> = (0..2000).map(|i| (i * 7919) % 100_003).collect();
        let tensors = (0_u32..)
            .zip(&sizes)
            .map(|(i, s)| tensor(&format!("t{i}"), *s, i));
        let manifest = Manifest::place(tensors.collect(), &sizes).unwrap();
        let bound: u64 = sizes.iter().map(|s| s.next_multiple_of(256)).sum();
        assert!(manifest.segment_bytes() <= bound + PAGE);
    }

    proptest! {
        #[test]
        fn placement_is_aligned_disjoint_and_survives_its_record(
            sizes in prop::collection::vec(0_u64..10_000, 0..40),
            shared in prop::collection::vec(any::<prop::sample::Index>(), 0..10),
        ) {
            let mut tensors: Vec<_> = (0_u32..)
                .zip(&sizes)
                .map(|(i, s)| tensor(&format!("layer.{}.w", i * 7 % 41), *s, i))
                .collect();
            if !sizes.is_empty() {
                for (n, pick) in shared.iter().enumerate() {
                    let storage = pick.index(sizes.len());
                    let alias = tensor(
                        &format!("alias.{n}"), sizes[storage], u32::try_from(storage).unwrap());
                    tensors.push(alias);
                }
            }
            let manifest = Manifest::place(tensors.clone(), &sizes).unwrap();
            let mut end = 0;
            for storage in manifest.storages() {
                prop_assert_eq!(storage.offset % 256, 0);
                prop_assert!(storage.offset >= end);
                end = storage.offset + storage.bytes;
            }
            prop_assert!(end <= manifest.segment_bytes());
            for tensor in &tensors {
                let found = manifest.find(&tensor.name).unwrap();
                prop_assert_eq!(
                    manifest.storage_of(found).unwrap().bytes,
                    sizes[usize::try_from(tensor.storage).unwrap()]
                );
            }
            let text = serde_json::to_string(&manifest).unwrap();
            prop_assert_eq!(serde_json::from_str::<Manifest>(&text).unwrap(), manifest);
        }

        #[test]
        fn the_order_without_allocation_is_the_natural_order(a in "[a-c0-2.]{0,12}", b in "[a-c0-2.]{0,12}") {
            let keys = name::natural_key(&a).cmp(&name::natural_key(&b)).then_with(|| a.cmp(&b));
            prop_assert_eq!(natural_order(&a, &b), keys);
        }
    }
}
