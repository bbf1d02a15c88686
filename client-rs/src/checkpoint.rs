//! Which files make up a checkpoint, opened with the caller's own rights.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

/// Ending of a file with tensors.
const SAFETENSORS: &str = ".safetensors";
/// Ending of the index of a sharded checkpoint.
const INDEX: &str = ".safetensors.index.json";
/// Most bytes of an index that are read.
const INDEX_BYTES: u64 = 256 << 20;

/// Why a path is no checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file cannot be opened or read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A pipe, device or socket in place of a file.
    #[error("{} is not a regular file", path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
    },
    /// The ending says that it is something else.
    #[error("{} is neither a .safetensors file, an index (.safetensors.index.json), nor a directory", path.display())]
    NotACheckpoint {
        /// The path.
        path: PathBuf,
    },
    /// A directory without tensors.
    #[error("directory {} holds no .safetensors file", path.display())]
    Empty {
        /// The directory.
        path: PathBuf,
    },
    /// Several files and nothing that says how they belong together.
    #[error(
        "directory {} holds {files} .safetensors files and no index that names them; name one file",
        path.display()
    )]
    NoIndex {
        /// The directory.
        path: PathBuf,
        /// How many.
        files: usize,
    },
    /// Several indexes.
    #[error("directory {} holds {indexes} indexes; name one of them", path.display())]
    ManyIndexes {
        /// The directory.
        path: PathBuf,
        /// How many.
        indexes: usize,
    },
    /// The index is not one.
    #[error("index {}: {reason}", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// An open file of a checkpoint.
#[derive(Debug)]
pub(crate) struct CheckpointFile {
    /// Its plain name.
    pub(crate) name: String,
    pub(crate) file: File,
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Opens the files of the checkpoint at `path`: one .safetensors file, or an index and
/// its shards; the index comes first.
pub(crate) fn open(path: &Path) -> Result<Vec<CheckpointFile>, CheckpointError> {
    let text = path.to_string_lossy();
    if fs::metadata(path).map_err(|e| io_error(path, e))?.is_dir() {
        return open_directory(path);
    }
    if text.ends_with(INDEX) {
        open_index(path)
    } else if text.ends_with(SAFETENSORS) {
        Ok(vec![open_file(path)?])
    } else {
        Err(CheckpointError::NotACheckpoint {
            path: path.to_owned(),
        })
    }
}

fn open_directory(path: &Path) -> Result<Vec<CheckpointFile>, CheckpointError> {
    let (mut files, mut indexes) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(path).map_err(|e| io_error(path, e))? {
        let entry = entry.map_err(|e| io_error(path, e))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with('.') {
            continue;
        }
        if name.ends_with(INDEX) {
            indexes.push(entry.path());
        } else if name.ends_with(SAFETENSORS) {
            files.push(entry.path());
        }
    }
    match (indexes.as_slice(), files.as_slice()) {
        ([index], _) => open_index(index),
        ([], [file]) => Ok(vec![open_file(file)?]),
        ([], []) => Err(CheckpointError::Empty {
            path: path.to_owned(),
        }),
        ([], several) => Err(CheckpointError::NoIndex {
            path: path.to_owned(),
            files: several.len(),
        }),
        (several, _) => Err(CheckpointError::ManyIndexes {
            path: path.to_owned(),
            indexes: several.len(),
        }),
    }
}

fn open_index(path: &Path) -> Result<Vec<CheckpointFile>, CheckpointError> {
    let bad = |reason: String| CheckpointError::Index {
        path: path.to_owned(),
        reason,
    };
    let index = open_file(path)?;
    let bytes = index.file.metadata().map_err(|e| io_error(path, e))?.len();
    if bytes > INDEX_BYTES {
        return Err(bad(format!(
            "has {bytes} bytes, over the limit of {INDEX_BYTES}"
        )));
    }
    let parsed: Index = serde_json::from_reader(io::BufReader::new(&index.file))
        .map_err(|error| bad(error.to_string()))?;
    let shards: BTreeSet<String> = parsed.weight_map.into_values().collect();
    if shards.is_empty() {
        return Err(bad("names no shard".to_owned()));
    }
    let mut files = vec![index];
    for shard in shards {
        if shard.contains('/') || shard == ".." || !shard.ends_with(SAFETENSORS) {
            return Err(bad(format!(
                "shard {shard:?} is not the plain name of a .safetensors file"
            )));
        }
        files.push(open_file(&path.with_file_name(&shard))?);
    }
    Ok(files)
}

fn open_file(path: &Path) -> Result<CheckpointFile, CheckpointError> {
    // looked at before it is opened: opening a pipe would wait for a writer
    if !fs::metadata(path).map_err(|e| io_error(path, e))?.is_file() {
        return Err(CheckpointError::NotRegular {
            path: path.to_owned(),
        });
    }
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.ok_or_else(|| {
        let text = "its name is not valid UTF-8";
        io_error(path, io::Error::new(io::ErrorKind::InvalidInput, text))
    })?;
    Ok(CheckpointFile {
        name: name.to_owned(),
        file: File::open(path).map_err(|e| io_error(path, e))?,
    })
}

fn io_error(path: &Path, source: io::Error) -> CheckpointError {
    CheckpointError::Io {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(path: &Path) -> Result<Vec<String>, CheckpointError> {
        Ok(open(path)?.into_iter().map(|file| file.name).collect())
    }

    fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(directory.path().join(name), text).unwrap();
        }
        directory
    }

    const MAP: &str = r#"{"metadata":{},"weight_map":{"a":"m-2.safetensors","b":"m-1.safetensors","c":"m-2.safetensors"}}"#;

    #[test]
    fn a_file_a_directory_and_an_index_are_checkpoints() {
        let single = directory(&[("model.safetensors", "x"), ("config.json", "{}")]);
        assert_eq!(names(single.path()).unwrap(), ["model.safetensors"]);
        let file = single.path().join("model.safetensors");
        assert_eq!(names(&file).unwrap(), ["model.safetensors"]);
        let sharded = directory(&[
            ("m.safetensors.index.json", MAP),
            ("m-1.safetensors", "x"),
            ("m-2.safetensors", "x"),
            ("stray.safetensors", "x"),
        ]);
        let all = [
            "m.safetensors.index.json",
            "m-1.safetensors",
            "m-2.safetensors",
        ];
        assert_eq!(names(sharded.path()).unwrap(), all);
        let index = sharded.path().join("m.safetensors.index.json");
        assert_eq!(names(&index).unwrap(), all);
    }

    #[test]
    fn what_is_missing_or_not_clear_is_named() {
        let several = directory(&[("a.safetensors", ""), ("b.safetensors", "")]);
        let error = names(several.path()).unwrap_err();
        assert!(
            matches!(error, CheckpointError::NoIndex { files: 2, .. }),
            "{error}"
        );
        let empty = directory(&[]);
        assert!(matches!(
            names(empty.path()),
            Err(CheckpointError::Empty { .. })
        ));
        let torn = directory(&[("m.safetensors.index.json", MAP), ("m-1.safetensors", "")]);
        let error = names(torn.path()).unwrap_err().to_string();
        assert!(error.contains("m-2.safetensors"), "{error}");
        let other = directory(&[("w.bin", "")]);
        let error = names(&other.path().join("w.bin")).unwrap_err();
        assert!(
            matches!(error, CheckpointError::NotACheckpoint { .. }),
            "{error}"
        );
    }

    #[test]
    fn an_index_cannot_reach_out_of_its_directory() {
        let map = r#"{"weight_map":{"a":"../m.safetensors"}}"#;
        let index = directory(&[("m.safetensors.index.json", map)]);
        let error = names(index.path()).unwrap_err();
        assert!(matches!(error, CheckpointError::Index { .. }), "{error}");
    }

    #[test]
    fn a_pipe_is_refused_without_waiting_for_a_writer() {
        let directory = directory(&[]);
        let pipe = directory.path().join("p.safetensors");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(matches!(
            names(&pipe),
            Err(CheckpointError::NotRegular { .. })
        ));
    }
}
