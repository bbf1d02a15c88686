//! Weight sets, tensors and requests between gRPC and the domain.

use flextensord_proto::v1;

use crate::weights::{
    load::SetRequest, manifest::TensorEntry, put::Declaration, registry::WeightSet,
};

pub(super) fn set_request(uid: u32, name: String, content_id: String, share: bool) -> SetRequest {
    SetRequest {
        uid,
        name: Some(name).filter(|name| !name.is_empty()),
        content_id: Some(content_id).filter(|id| !id.is_empty()),
        share,
    }
}

pub(super) fn declaration(tensor: v1::PutTensor) -> Declaration {
    Declaration {
        name: tensor.name,
        dtype: tensor.dtype,
        shape: tensor.shape,
        stride: tensor.stride,
        alias_of: tensor.alias_of,
        storage_offset: tensor.storage_offset,
        storage_bytes: tensor.storage_bytes,
    }
}

/// Who reads about a set.
#[derive(Debug, Clone, Copy)]
pub(super) struct Viewer {
    uid: u32,
    pub(super) is_admin: bool,
}

impl Viewer {
    pub(super) fn of(uid: u32) -> Self {
        let is_admin = uid == 0 || uid == nix::unistd::geteuid().as_raw();
        Self { uid, is_admin }
    }

    /// The set without the names of other users' managers.
    pub(super) fn message(self, set: &WeightSet) -> v1::WeightSet {
        let mut message = weight_set_message(set);
        let attached = set.attached_by().into_iter().map(|by| {
            if self.is_admin || by.uid == self.uid {
                by.manager
            } else {
                "(another user's)".to_owned()
            }
        });
        message.attached_by = attached.collect();
        message
    }
}

/// A set as operators see it, with the names of all managers attached.
#[must_use]
pub fn weight_set_message(set: &WeightSet) -> v1::WeightSet {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    v1::WeightSet {
        name: set.name().to_owned(),
        id: set.id().to_owned(),
        digest: set.digest().unwrap_or_default(),
        content_id: set.content_id().unwrap_or_default().to_owned(),
        tensors: count(set.manifest().tensors().len()),
        storages: count(set.manifest().storages().len()),
        logical_bytes: set.manifest().logical_bytes(),
        segment_bytes: set.segment().bytes(),
        pinned_bytes: set.pinned_bytes(),
        degraded: set.degraded().unwrap_or_default(),
        attached_by: set.attached_by().into_iter().map(|by| by.manager).collect(),
        shared: set.is_shared(),
        owner_uid: set.owner_uid(),
        loaded_at: set.loaded_at(),
        unlinked: set.segment().is_unlinked(),
    }
}

/// A tensor as clients see it.
#[must_use]
pub fn tensor_message(tensor: &TensorEntry) -> v1::Tensor {
    v1::Tensor {
        name: tensor.name.clone(),
        dtype: tensor.dtype.clone(),
        shape: tensor.shape.clone(),
        stride: tensor.stride.clone(),
        bytes: tensor.bytes,
        storage: tensor.storage,
        storage_offset: tensor.storage_offset,
    }
}
