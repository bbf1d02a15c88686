//! What a successor finds about a weight set: one file in the state directory.

use serde::{Deserialize, Serialize};

use super::{
    digest,
    manifest::Manifest,
    set::{Identity, WeightSet},
};

/// Version of the format; a file of another version is discarded.
pub const FORMAT: u32 = 1;

/// A weight set as its file in the state directory says it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetRecord {
    /// [`FORMAT`].
    pub format: u32,
    /// The set's id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// User that loaded it.
    pub owner_uid: u32,
    /// Whether others may attach.
    pub shared: bool,
    /// Its digest in hexadecimal digits, unless the caller vouched for the content.
    pub digest: Option<String>,
    /// What the caller vouched with.
    pub content_id: Option<String>,
    /// The tensors' digests in the order of the manifest, in hexadecimal digits.
    pub tensor_digests: Vec<String>,
    /// Tensors and storages.
    pub manifest: Manifest,
    /// File name of the segment, in the directory for segments.
    pub segment_file: String,
    /// Bytes of the segment.
    pub segment_bytes: u64,
    /// Seconds since the Unix epoch.
    pub loaded_at: u64,
}

/// The part of a record that tells which segment it means, in any version.
#[derive(Debug, Deserialize)]
pub struct SegmentOfRecord {
    /// File name of the segment.
    pub segment_file: String,
}

impl SetRecord {
    /// The record of a live set.
    #[must_use]
    pub fn of(set: &WeightSet) -> Self {
        let (digest, content_id) = match set.identity() {
            Identity::Digest(digest) => (Some(digest::hex(digest)), None),
            Identity::ContentId(id) => (None, Some(id.clone())),
        };
        Self {
            format: FORMAT,
            id: set.id().to_owned(),
            name: set.name().to_owned(),
            owner_uid: set.owner_uid(),
            shared: set.is_shared(),
            digest,
            content_id,
            tensor_digests: set.tensor_digests().iter().map(digest::hex).collect(),
            manifest: set.manifest().clone(),
            segment_file: set
                .segment()
                .path()
                .file_name()
                .map(|name| name.to_string_lossy().into_owned())
                .unwrap_or_default(),
            segment_bytes: set.segment().bytes(),
            loaded_at: set.loaded_at(),
        }
    }
}

/// Name of the state file of the set with that id.
#[must_use]
pub fn file_name(id: &str) -> String {
    format!("set-{id}.json")
}
