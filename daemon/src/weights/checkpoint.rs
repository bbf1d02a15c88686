//! A checkpoint: one safetensors file, or shards and the index that names them.

use std::{collections::HashMap, fs::File, os::unix::fs::FileExt as _};

use serde::Deserialize;

use super::{
    error::WeightError,
    manifest::{Manifest, TensorEntry},
    safetensors::{self, FileTensor, UniqueMap},
};

/// Ending of an index's name.
pub const INDEX_ENDING: &str = ".index.json";
/// Most files of a checkpoint.
pub const FILES: usize = 1024;

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
}

impl Checkpoint {
    /// Reads the headers and the index.
    ///
    /// # Errors
    /// [`WeightError::Checkpoint`] naming the file: not a regular file, not valid, or
    /// not what the index says; [`WeightError::CheckpointChanged`] when it shrinks while
    /// it is read; [`WeightError::Read`].
    pub fn open(files: Vec<SourceFile>) -> Result<Self, WeightError> {
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
        let mut headers = Vec::new();
        for shard in &shards {
            headers.push(header(shard)?);
        }
        if let Some(index) = &index {
            check_index(index, &shards, &headers)?;
        }
        if headers.iter().all(Vec::is_empty) {
            return Err(WeightError::checkpoint(&first.name, "it has no tensors"));
        }
        let (manifest, places) = place(&shards, headers)?;
        Ok(Self {
            shards,
            manifest,
            places,
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

fn header(shard: &Shard) -> Result<Vec<FileTensor>, WeightError> {
    let invalid = |e: safetensors::HeaderError| WeightError::checkpoint(&shard.name, e);
    let bytes = shard.stamp.bytes;
    if bytes < safetensors::PREFIX_BYTES {
        return Err(invalid(safetensors::HeaderError::Short { bytes }));
    }
    let mut prefix = [0; 8];
    read_at(shard, &mut prefix, 0)?;
    let length = safetensors::header_bytes(prefix, bytes).map_err(invalid)?;
    let text = read_vec(shard, length, safetensors::PREFIX_BYTES)?;
    safetensors::parse(&text, bytes).map_err(invalid)
}

fn read_vec(shard: &Shard, bytes: u64, offset: u64) -> Result<Vec<u8>, WeightError> {
    let length =
        usize::try_from(bytes).map_err(|_| WeightError::Internal("length over the limit"))?;
    let mut text = vec![0; length];
    read_at(shard, &mut text, offset)?;
    Ok(text)
}

fn read_at(shard: &Shard, target: &mut [u8], offset: u64) -> Result<(), WeightError> {
    shard
        .file
        .read_exact_at(target, offset)
        .map_err(|e| WeightError::read(&shard.name, e))
}

#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

/// The index must name exactly the tensors of each shard, and all shards.
fn check_index(
    index: &Shard,
    shards: &[Shard],
    headers: &[Vec<FileTensor>],
) -> Result<(), WeightError> {
    let wrong = |problem: String| WeightError::checkpoint(&index.name, problem);
    if index.stamp.bytes > safetensors::HEADER_BYTES {
        let limit = safetensors::HEADER_BYTES;
        let bytes = index.stamp.bytes;
        return Err(wrong(format!(
            "index of {bytes} bytes is over the limit of {limit}"
        )));
    }
    let text = read_vec(index, index.stamp.bytes, 0)?;
    let Index {
        weight_map: UniqueMap(pairs),
    } = serde_json::from_slice(&text).map_err(|e| wrong(format!("not a valid index: {e}")))?;
    let mut of_tensor: HashMap<String, String> = pairs.into_iter().collect();
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

    use super::SourceFile;

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
mod tests {
    use super::{fixture::*, *};

    fn index(map: &str) -> SourceFile {
        let text = format!(r#"{{"metadata":{{"total_size":3}},"weight_map":{map}}}"#);
        source("model.safetensors.index.json", text.as_bytes())
    }

    fn shards() -> Vec<SourceFile> {
        vec![
            source("m-1", &bytes(&[("a", b"1")])),
            source("m-2", &bytes(&[("b", b"23")])),
        ]
    }

    fn with(mut files: Vec<SourceFile>, more: SourceFile) -> Vec<SourceFile> {
        files.push(more);
        files
    }

    #[test]
    fn shards_and_their_index_are_one_checkpoint() {
        let files = with(shards(), index(r#"{"a":"m-1","b":"m-2"}"#));
        let checkpoint = Checkpoint::open(files).unwrap();
        assert_eq!(checkpoint.manifest().tensors().len(), 2);
        let mut read = [0; 2];
        checkpoint
            .read(checkpoint.places()[1], 0, &mut read)
            .unwrap();
        assert_eq!(&read, b"23");
        checkpoint.check_unchanged().unwrap();
    }

    #[test]
    fn an_index_that_disagrees_with_the_shards_is_refused_naming_the_file() {
        for (file, files) in [
            (
                "index",
                with(shards(), index(r#"{"a":"m-1","b":"m-2","c":"m-3"}"#)),
            ),
            (
                "m-2",
                with(shards(), index(r#"{"a":"m-1","b":"m-2","c":"m-2"}"#)),
            ),
            ("m-2", with(shards(), index(r#"{"a":"m-1"}"#))),
            ("m-1", with(shards(), index(r#"{"a":"m-2","b":"m-2"}"#))),
            (
                "index",
                with(shards(), index(r#"{"a":"m-1","b":"m-2","a":"m-1"}"#)),
            ),
            ("index", with(shards(), index("3"))),
            ("m-1", shards()),
            ("index", with(with(shards(), index("{}")), index("{}"))),
            (
                "m-1",
                with(
                    with(shards(), shards().remove(0)),
                    index(r#"{"a":"m-1","b":"m-2"}"#),
                ),
            ),
            (
                "m-2",
                with(
                    vec![
                        source("m-1", &bytes(&[("a", b"1")])),
                        source("m-2", &bytes(&[])),
                    ],
                    index(r#"{"a":"m-1"}"#),
                ),
            ),
            (
                "m-2",
                with(
                    vec![
                        source("m-1", &bytes(&[("a", b"1")])),
                        source("m-2", &bytes(&[("a", b"1")])),
                    ],
                    index(r#"{"a":"m-1"}"#),
                ),
            ),
        ] {
            let error = Checkpoint::open(files).unwrap_err();
            assert!(
                matches!(&error, WeightError::Checkpoint { file: named, .. } if named.contains(file)),
                "{file}: {error}"
            );
        }
        for files in [vec![], vec![index("{}")]] {
            assert!(matches!(
                Checkpoint::open(files),
                Err(WeightError::Argument { .. })
            ));
        }
    }

    #[test]
    fn a_file_cut_at_any_length_is_refused_naming_it() {
        let whole = bytes(&[("a", b"123"), ("b", b"4")]);
        for length in 0..whole.len() {
            let error = Checkpoint::open(vec![source("cut", &whole[..length])]).unwrap_err();
            assert!(error.to_string().contains("\"cut\""), "{length}: {error}");
        }
    }

    #[test]
    fn what_is_no_regular_file_is_refused() {
        for path in ["/", "/dev/null"] {
            let file = File::open(path).unwrap();
            let name = "x".to_owned();
            let error = Checkpoint::open(vec![SourceFile { name, file }]).unwrap_err();
            assert!(error.to_string().contains("regular"), "{error}");
        }
    }

    #[test]
    fn a_change_behind_our_back_is_noticed() {
        let files = single(&[("a", b"123")]);
        let behind = files[0].file.try_clone().unwrap();
        let checkpoint = Checkpoint::open(files).unwrap();
        let length = behind.metadata().unwrap().len();
        behind.set_len(length - 1).unwrap();
        let mut target = [0; 3];
        let place = checkpoint.places()[0];
        for error in [
            checkpoint.read(place, 0, &mut target).unwrap_err(),
            checkpoint.check_unchanged().unwrap_err(),
        ] {
            assert!(
                matches!(error, WeightError::CheckpointChanged { .. }),
                "{error}"
            );
        }
        behind.set_len(length).unwrap();
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
        behind.set_modified(later).unwrap();
        assert!(checkpoint.check_unchanged().is_err());
    }
}
