//! A checkpoint: one safetensors file, or shards and the index that names them.

mod index;

use std::{collections::HashMap, fs::File, os::unix::fs::FileExt as _, sync::Arc};

use super::{
    error::WeightError,
    loader::Watch,
    manifest::{Manifest, TensorEntry},
    safetensors::{self, FileTensor},
    shares::{Share, Shares},
};

/// Ending of an index's name.
pub const INDEX_ENDING: &str = ".index.json";
/// Most files of a checkpoint.
pub const FILES: usize = 1024;
/// Most bytes of headers and index of one checkpoint, and of all checkpoints of a user
/// at a time, 64 MiB; those of all users are at most four times as many.
pub const HEADERS: u64 = 64 << 20;
/// Bytes that are read before the caller is looked for.
const READ: usize = 1 << 20;

/// What headers and indices of all checkpoints under way share.
pub(crate) fn shares() -> Arc<Shares> {
    Shares::new("bytes of headers at a time", HEADERS, 4 * HEADERS)
}

/// A file that the caller handed over, open for reading.
#[derive(Debug)]
pub struct SourceFile {
    /// Its plain name, as the index names it.
    pub name: String,
    /// The file.
    pub file: File,
}

/// Size and time of the last change: what tells that a file was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    bytes: u64,
    modified: (i64, i64),
    inode: (u64, u64),
}

#[derive(Debug)]
struct Shard {
    name: String,
    file: File,
    stamp: Stamp,
}

/// Where a storage's bytes lie in the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    shard: usize,
    offset: u64,
}

/// The headers of all files, checked, and where each tensor's bytes lie.
#[derive(Debug)]
pub struct Checkpoint {
    shards: Vec<Shard>,
    manifest: Manifest,
    places: Vec<Place>,
    // last: what it stands for goes before it
    _share: Share,
}

impl Checkpoint {
    /// Reads the headers and the index on behalf of `uid`, in turn with others: their
    /// bytes count for as long as the checkpoint lives.
    ///
    /// # Errors
    /// [`WeightError::Checkpoint`] naming the file: not a regular file, not valid, or
    /// not what the index says; [`WeightError::CheckpointChanged`] when it shrinks while
    /// it is read; [`WeightError::Read`]; [`WeightError::Aborted`] when cancelled.
    pub(crate) fn open(
        files: Vec<SourceFile>,
        shares: &Arc<Shares>,
        uid: u32,
        watch: &dyn Watch,
    ) -> Result<Self, WeightError> {
        let mut shards = Vec::new();
        let mut index = None;
        if files.len() > FILES {
            let rule = format!("at most {FILES} files");
            return Err(WeightError::argument("files", files.len(), rule));
        }
        for SourceFile { name, file } in files {
            let stamp = stamp(&name, &file)?;
            let shard = Shard { name, file, stamp };
            if !shard.name.ends_with(INDEX_ENDING) {
                shards.push(shard);
            } else if let Some(Shard { name: first, .. }) = &index {
                let problem = format!("a second index beside {first:?}");
                return Err(WeightError::checkpoint(&shard.name, problem));
            } else {
                index = Some(shard);
            }
        }
        let Some(first) = shards.first() else {
            let rule = "a .safetensors file, or all shards and their index";
            return Err(WeightError::argument("files", 0, rule));
        };
        if shards.len() > 1 && index.is_none() {
            let problem = format!("{} files without an index", shards.len());
            return Err(WeightError::checkpoint(&first.name, problem));
        }
        let lengths = header_lengths(&shards, index.as_ref())?;
        let bytes = lengths.iter().sum::<u64>() + index.as_ref().map_or(0, |i| i.stamp.bytes);
        if bytes > HEADERS {
            let problem =
                format!("headers and index of {bytes} bytes are over the limit of {HEADERS}");
            return Err(WeightError::checkpoint(&first.name, problem));
        }
        let share = shares.wait(uid, bytes, watch)?;
        // a parser that was stopped says so as it says that something is wrong
        let given_up = |e| match watch.is_cancelled() {
            true => WeightError::gone("load"),
            false => e,
        };
        let mut headers = Vec::new();
        for (shard, length) in shards.iter().zip(lengths) {
            headers.push(header(shard, length, watch).map_err(given_up)?);
        }
        if let Some(index) = &index {
            index::check(index, &shards, &headers, watch).map_err(given_up)?;
        }
        if headers.iter().all(Vec::is_empty) {
            return Err(WeightError::checkpoint(&first.name, "it has no tensors"));
        }
        let (manifest, places) = place(&shards, headers)?;
        Ok(Self {
            shards,
            manifest,
            places,
            _share: share,
        })
    }

    /// What it holds, placed; each tensor has its own storage.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Where the bytes of the manifest's storages lie, in that order.
    #[must_use]
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// Fills `target` with the bytes from `skip` on behind `place`.
    ///
    /// # Errors
    /// [`WeightError::CheckpointChanged`] when the file has fewer, [`WeightError::Read`].
    pub fn read(&self, place: Place, skip: u64, target: &mut [u8]) -> Result<(), WeightError> {
        let shard = self
            .shards
            .get(place.shard)
            .ok_or(WeightError::Internal("place in no file"))?;
        shard
            .file
            .read_exact_at(target, place.offset.saturating_add(skip))
            .map_err(|e| WeightError::read(&shard.name, e))
    }

    /// Checks that no file has changed since it was opened.
    ///
    /// # Errors
    /// [`WeightError::CheckpointChanged`] naming the file.
    pub fn check_unchanged(&self) -> Result<(), WeightError> {
        for shard in &self.shards {
            let now = stamp(&shard.name, &shard.file)?;
            if now != shard.stamp {
                let change = if now.bytes == shard.stamp.bytes {
                    "its time of change is another".to_owned()
                } else {
                    format!("it had {} bytes and has {}", shard.stamp.bytes, now.bytes)
                };
                let file = shard.name.clone();
                return Err(WeightError::CheckpointChanged { file, change });
            }
        }
        Ok(())
    }
}

impl Place {
    /// A key that orders places as they lie in the files.
    #[must_use]
    pub fn order(self) -> (usize, u64) {
        (self.shard, self.offset)
    }
}

fn stamp(name: &str, file: &File) -> Result<Stamp, WeightError> {
    use std::os::unix::fs::MetadataExt as _;
    let found = file.metadata().map_err(|e| WeightError::read(name, e))?;
    if !found.is_file() {
        return Err(WeightError::checkpoint(name, "not a regular file"));
    }
    Ok(Stamp {
        bytes: found.len(),
        modified: (found.mtime(), found.mtime_nsec()),
        inode: (found.dev(), found.ino()),
    })
}

/// The lengths of the headers, all read before any is: they are checked together.
fn header_lengths(shards: &[Shard], index: Option<&Shard>) -> Result<Vec<u64>, WeightError> {
    let limit = safetensors::HEADER_BYTES;
    if let Some(Shard { name, stamp, .. }) = index
        && stamp.bytes > limit
    {
        let bytes = stamp.bytes;
        let problem = format!("index of {bytes} bytes is over the limit of {limit} (32 MiB)");
        return Err(WeightError::checkpoint(name, problem));
    }
    let length = |shard: &Shard| {
        let invalid = |e: safetensors::HeaderError| WeightError::checkpoint(&shard.name, e);
        let bytes = shard.stamp.bytes;
        if bytes < safetensors::PREFIX_BYTES {
            return Err(invalid(safetensors::HeaderError::Short { bytes }));
        }
        let mut prefix = [0; 8];
        read_at(shard, &mut prefix, 0)?;
        safetensors::header_bytes(prefix, bytes).map_err(invalid)
    };
    shards.iter().map(length).collect()
}

fn header(shard: &Shard, length: u64, watch: &dyn Watch) -> Result<Vec<FileTensor>, WeightError> {
    let text = read_vec(shard, length, safetensors::PREFIX_BYTES, watch)?;
    safetensors::parse(&text, shard.stamp.bytes, watch)
        .map_err(|e| WeightError::checkpoint(&shard.name, e))
}

fn read_vec(
    shard: &Shard,
    bytes: u64,
    offset: u64,
    watch: &dyn Watch,
) -> Result<Vec<u8>, WeightError> {
    let length =
        usize::try_from(bytes).map_err(|_| WeightError::Internal("length over the limit"))?;
    let mut text = vec![0; length];
    let mut at = offset;
    for run in text.chunks_mut(READ) {
        if watch.is_cancelled() {
            return Err(WeightError::gone("load"));
        }
        read_at(shard, run, at)?;
        at += run.len() as u64;
    }
    Ok(text)
}

fn read_at(shard: &Shard, target: &mut [u8], offset: u64) -> Result<(), WeightError> {
    shard
        .file
        .read_exact_at(target, offset)
        .map_err(|e| WeightError::read(&shard.name, e))
}

fn place(
    shards: &[Shard],
    headers: Vec<Vec<FileTensor>>,
) -> Result<(Manifest, Vec<Place>), WeightError> {
    let mut tensors = Vec::new();
    let mut sizes = Vec::new();
    let mut origins = HashMap::new();
    for (shard, header) in headers.into_iter().enumerate() {
        for found in header {
            let offset = found.offset;
            origins.insert(found.name.clone(), Place { shard, offset });
            let storage = u32::try_from(sizes.len())
                .map_err(|_| WeightError::Internal("more tensors than the limit"))?;
            sizes.push(found.bytes);
            tensors.push(TensorEntry {
                name: found.name,
                dtype: found.dtype,
                shape: found.shape,
                stride: Vec::new(),
                bytes: found.bytes,
                storage,
                storage_offset: 0,
            });
        }
    }
    let manifest = Manifest::place(tensors, &sizes).map_err(|e| {
        let name = shards.first().map_or("", |shard| shard.name.as_str());
        WeightError::checkpoint(name, e)
    })?;
    // one tensor a storage, and storages in the order of tensors
    let places = manifest
        .tensors()
        .iter()
        .map(|tensor| origins.get(&tensor.name).copied())
        .collect::<Option<Vec<_>>>()
        .ok_or(WeightError::Internal("tensor without a place"))?;
    Ok((manifest, places))
}

#[cfg(test)]
pub(crate) mod fixture {
    //! Checkpoint files for tests.

    use std::io::Write as _;

    use super::{Checkpoint, SourceFile, WeightError, shares};
    use crate::weights::loader::Cancel;

    /// A checkpoint of these files, alone.
    pub(crate) fn open(files: Vec<SourceFile>) -> Result<Checkpoint, WeightError> {
        Checkpoint::open(files, &shares(), 1, &Cancel::default())
    }

    /// A safetensors file of `U8` tensors with the given bytes.
    pub(crate) fn bytes(tensors: &[(&str, &[u8])]) -> Vec<u8> {
        let mut entries = Vec::new();
        let mut data = Vec::new();
        for (name, bytes) in tensors {
            let begin = data.len();
            data.extend_from_slice(bytes);
            entries.push(format!(
                r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{begin},{}]}}"#,
                bytes.len(),
                data.len()
            ));
        }
        let header = format!("{{{}}}", entries.join(","));
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(data);
        file
    }

    /// A nameless file with that content, handed over as `name`.
    pub(crate) fn source(name: &str, content: &[u8]) -> SourceFile {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        let name = name.to_owned();
        SourceFile { name, file }
    }

    /// One file of `U8` tensors.
    pub(crate) fn single(tensors: &[(&str, &[u8])]) -> Vec<SourceFile> {
        vec![source("model.safetensors", &bytes(tensors))]
    }
}

#[cfg(test)]
mod tests;
