//! What the content of a weight set is called. A stable format, version 1:
//!
//! - a tensor's bytes are the `bytes` bytes from its place in its storage; they are cut
//!   into blocks of 4 MiB, the last one shorter, and
//!   `tensor = BLAKE3("flextensord-tensor-1\n", length, BLAKE3(block 0), BLAKE3(block 1), …)`;
//! - a set is the tensors in order of their names' bytes, and
//!   `set = BLAKE3("flextensord-set-1\n", count, for each: declaration, tensor)`;
//! - a declaration is the name and the dtype, each behind its length in bytes, the
//!   number of dimensions and the dimensions, the number of strides and the strides (none
//!   when contiguous), and the number of bytes;
//! - all numbers are 64-bit little-endian.
//!
//! So neither sharding, nor the order in a file, nor placement, nor what shares a
//! storage changes the digest, and blocks can be hashed in any order.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use super::manifest::{Manifest, TensorEntry};

/// 32 bytes of BLAKE3.
pub type Digest = [u8; 32];

/// Bytes of a block.
pub const BLOCK: usize = 4 << 20;

/// The digest of one block.
#[must_use]
pub fn block(bytes: &[u8]) -> Digest {
    blake3::hash(bytes).into()
}

/// The digest of one block whose bytes come in several runs.
#[derive(Debug, Clone, Default)]
pub struct BlockHasher(blake3::Hasher);

impl BlockHasher {
    /// Adds the next run.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest, as [`block`] of all runs.
    #[must_use]
    pub fn finish(&self) -> Digest {
        self.0.finalize().into()
    }
}

/// The digest of a tensor of `length` bytes from those of its blocks, in order.
#[must_use]
pub fn tensor(length: u64, blocks: &[Digest]) -> Digest {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"flextensord-tensor-1\n");
    hasher.update(&length.to_le_bytes());
    for block in blocks {
        hasher.update(block);
    }
    hasher.finalize().into()
}

/// The digest of a set; `tensors` are the digests of [`Manifest::tensors`], in that
/// order.
#[must_use]
pub fn set(manifest: &Manifest, tensors: &[Digest]) -> Digest {
    let mut in_order: Vec<_> = manifest.tensors().iter().zip(tensors).collect();
    in_order.sort_by(|a, b| a.0.name.cmp(&b.0.name));
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"flextensord-set-1\n");
    number(&mut hasher, in_order.len());
    for (entry, digest) in in_order {
        declare(&mut hasher, entry);
        hasher.update(digest);
    }
    hasher.finalize().into()
}

/// Adds a tensor's declaration to a hash.
pub(crate) fn declare(hasher: &mut blake3::Hasher, tensor: &TensorEntry) {
    for text in [&tensor.name, &tensor.dtype] {
        number(hasher, text.len());
        hasher.update(text.as_bytes());
    }
    number(hasher, tensor.shape.len());
    for dimension in &tensor.shape {
        hasher.update(&dimension.to_le_bytes());
    }
    number(hasher, tensor.stride.len());
    for stride in &tensor.stride {
        hasher.update(&stride.to_le_bytes());
    }
    hasher.update(&tensor.bytes.to_le_bytes());
}

fn number(hasher: &mut blake3::Hasher, value: usize) {
    hasher.update(&(value as u64).to_le_bytes());
}

/// Lower-case hexadecimal digits of a digest.
#[must_use]
pub fn hex(digest: &Digest) -> String {
    blake3::Hash::from_bytes(*digest).to_hex().to_string()
}

/// The digest that [`hex`] wrote.
#[must_use]
pub fn parse_hex(text: &str) -> Option<Digest> {
    blake3::Hash::from_hex(text).ok().map(Into::into)
}

/// The digests of all tensors of a filled segment, in the order of the manifest,
/// hashed by `threads` threads. `None` when the segment is too short for the manifest.
#[must_use]
pub fn of_segment(manifest: &Manifest, segment: &[u8], threads: usize) -> Option<Vec<Digest>> {
    let mut blocks: Vec<(usize, &[u8])> = Vec::new();
    for (number, entry) in manifest.tensors().iter().enumerate() {
        let start = usize::try_from(manifest.segment_offset(entry)?).ok()?;
        let end = start.checked_add(usize::try_from(entry.bytes).ok()?)?;
        blocks.extend(segment.get(start..end)?.chunks(BLOCK).map(|b| (number, b)));
    }
    let hashed = Mutex::new(vec![[0; 32]; blocks.len()]);
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, blocks.len().max(1)) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some((_, bytes)) = blocks.get(at) else {
                        return;
                    };
                    let digest = block(bytes);
                    let mut hashed = hashed.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Some(slot) = hashed.get_mut(at) {
                        *slot = digest;
                    }
                }
            });
        }
    });
    let hashed = hashed.into_inner().unwrap_or_else(PoisonError::into_inner);
    let mut rest = blocks
        .iter()
        .map(|(number, _)| *number)
        .zip(hashed)
        .peekable();
    let mut digests = Vec::with_capacity(manifest.tensors().len());
    for (number, entry) in manifest.tensors().iter().enumerate() {
        let mut own = Vec::new();
        while let Some((_, digest)) = rest.next_if(|(of, _)| *of == number) {
            own.push(digest);
        }
        digests.push(tensor(entry.bytes, &own));
    }
    Some(digests)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, bytes: u64, storage: u32, storage_offset: u64) -> TensorEntry {
        TensorEntry {
            name: name.to_owned(),
            dtype: "U8".to_owned(),
            shape: vec![bytes],
            stride: Vec::new(),
            bytes,
            storage,
            storage_offset,
        }
    }

    #[test]
    fn the_format_is_stable() {
        let manifest = Manifest::place(vec![entry("w", 3, 0, 0)], &[3]).unwrap();
        let mut segment = vec![0; 4096];
        segment[..3].copy_from_slice(b"abc");
        let tensors = of_segment(&manifest, &segment, 2).unwrap();
        // kept by sets that live longer than a daemon: a change needs a new version
        assert_eq!(
            hex(&set(&manifest, &tensors)),
            "eed02425e9904b65063cb4322afe35af7394f9643a54ac217062dda48cd62108"
        );
    }

    #[test]
    fn sharing_a_storage_does_not_change_the_digest() {
        let bytes = [5_u8, 6, 7, 8];
        let apart =
            Manifest::place(vec![entry("a", 4, 0, 0), entry("b", 2, 1, 0)], &[4, 2]).unwrap();
        let view = Manifest::place(vec![entry("a", 4, 0, 0), entry("b", 2, 0, 1)], &[4]).unwrap();
        let mut one = vec![0; 4096];
        one[..4].copy_from_slice(&bytes);
        let two = one.clone();
        one[256..258].copy_from_slice(&bytes[1..3]);
        let of = |m: &Manifest, s: &[u8]| set(m, &of_segment(m, s, 1).unwrap());
        assert_eq!(of(&apart, &one), of(&view, &two));
        one[257] ^= 1;
        assert_ne!(of(&apart, &one), of(&view, &two));
    }

    #[test]
    fn many_blocks_hash_the_same_with_any_number_of_threads() {
        let bytes = (BLOCK * 2 + 17) as u64;
        let manifest = Manifest::place(
            vec![entry("a", bytes, 0, 0), entry("b", 0, 1, 0)],
            &[bytes, 0],
        )
        .unwrap();
        let mut segment = vec![1; usize::try_from(manifest.segment_bytes()).unwrap()];
        segment[BLOCK] = 9;
        assert_eq!(
            of_segment(&manifest, &segment, 1),
            of_segment(&manifest, &segment, 5)
        );
        assert_eq!(of_segment(&manifest, &segment[..BLOCK], 1), None);
    }
}
