//! Storing a weight set from this process's memory.

use std::time::Duration;

use flextensord_proto::{
    limit,
    v1::{
        PutData, PutHeader, PutRequest, PutResponse, PutTensor, PutTensors, put_request::Part,
        weights_client::WeightsClient,
    },
};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use crate::{
    error::{ClientError, is_transport},
    request_id,
    weights::{LoadOptions, LoadedSet, Weights, no_set},
};

/// Most bytes of declarations in one message, well under the message limit.
const DECLARATION_BYTES: usize = 512 << 10;
/// Messages that are prepared before the connection has taken them.
const AHEAD: usize = 4;

/// Where a tensor's bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source<'a> {
    /// It owns its storage, which has these bytes.
    Bytes(&'a [u8]),
    /// It lies in the storage of another tensor of the same set (tied weights, views).
    Alias {
        /// The tensor that owns the storage.
        of: String,
        /// Where it begins in that storage, in bytes.
        offset: u64,
    },
}

/// A tensor to store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UploadTensor<'a> {
    /// Qualified name, unique within the set.
    pub name: String,
    /// Element type as safetensors spells it, such as "BF16".
    pub dtype: String,
    /// Dimensions; empty for a scalar.
    pub shape: Vec<u64>,
    /// Strides in elements; empty means contiguous (row-major).
    pub stride: Vec<i64>,
    /// Its bytes.
    pub source: Source<'a>,
}

impl Weights<'_> {
    /// Stores `tensors` as the weight set `name` (empty: named by its digest). Bytes go
    /// in pieces of at most 1 MiB; a call that fails leaves nothing behind.
    ///
    /// # Errors
    /// `CONTENT_DIFFERS` when a live set of that name has other content,
    /// `INVALID_ARGUMENT`, `HOST_MEMORY`, `SHARED_MEMORY_FULL`, and
    /// [`ClientError::Deadline`] when nothing moves for the long timeout.
    pub async fn put(
        &self,
        name: &str,
        tensors: &[UploadTensor<'_>],
        options: &LoadOptions,
    ) -> Result<LoadedSet, ClientError> {
        const CALL: &str = "Put";
        let limit = self.client.options().long_timeout;
        let header = PutHeader {
            request_id: request_id::fresh()?,
            name: name.to_owned(),
            content_id: options.content_id.clone().unwrap_or_default(),
            share: options.share,
        };
        let mut again = true;
        loop {
            let status = match self.put_once(&header, tensors, limit).await? {
                Ok(answer) => {
                    return Ok(LoadedSet {
                        set: answer.set.ok_or_else(|| no_set(CALL))?,
                        attached: answer.attached,
                    });
                }
                Err(status) => status,
            };
            if !again || !is_transport(&status) {
                return Err(self.client.failed(CALL, limit, &status));
            }
            again = false;
        }
    }

    async fn put_once(
        &self,
        header: &PutHeader,
        tensors: &[UploadTensor<'_>],
        limit: Duration,
    ) -> Result<Result<PutResponse, Status>, ClientError> {
        let mut client = WeightsClient::new(self.client.channel()?);
        let (sender, receiver) = mpsc::channel(AHEAD);
        let call = client.put(ReceiverStream::new(receiver));
        tokio::pin!(call);
        // the daemon may answer before it has all: then nobody takes what is left
        let fed = tokio::select! {
            answer = &mut call => return Ok(answer.map(tonic::Response::into_inner)),
            fed = feed(sender, header, tensors, limit) => fed,
        };
        fed?;
        match tokio::time::timeout(limit, call).await {
            Ok(answer) => Ok(answer.map(tonic::Response::into_inner)),
            Err(_) => Err(stuck(limit)),
        }
    }
}

async fn feed(
    sender: mpsc::Sender<PutRequest>,
    header: &PutHeader,
    tensors: &[UploadTensor<'_>],
    limit: Duration,
) -> Result<(), ClientError> {
    let send = async |part: Part| {
        let message = PutRequest { part: Some(part) };
        match tokio::time::timeout(limit, sender.send(message)).await {
            Ok(sent) => Ok(sent.is_ok()),
            Err(_) => Err(stuck(limit)),
        }
    };
    // `false`: the call has ended and its answer says why
    if !send(Part::Header(header.clone())).await? {
        return Ok(());
    }
    for declared in declarations(tensors) {
        if !send(Part::Tensors(declared)).await? {
            return Ok(());
        }
    }
    for tensor in tensors {
        let Source::Bytes(bytes) = tensor.source else {
            continue;
        };
        let mut offset = 0u64;
        for piece in bytes.chunks(limit::PUT_BYTES) {
            let data = PutData {
                tensor: tensor.name.clone(),
                offset,
                bytes: piece.to_vec(),
            };
            if !send(Part::Data(data)).await? {
                return Ok(());
            }
            offset += piece.len() as u64;
        }
    }
    Ok(())
}

/// The declarations, in messages of a moderate size.
fn declarations(tensors: &[UploadTensor<'_>]) -> Vec<PutTensors> {
    let mut messages = Vec::new();
    let mut current = PutTensors::default();
    let mut bytes = 0;
    for tensor in tensors {
        let (alias_of, storage_offset, storage_bytes) = match &tensor.source {
            Source::Bytes(bytes) => (String::new(), 0, bytes.len() as u64),
            Source::Alias { of, offset } => (of.clone(), *offset, 0),
        };
        let declared = PutTensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype.clone(),
            shape: tensor.shape.clone(),
            stride: tensor.stride.clone(),
            alias_of,
            storage_offset,
            storage_bytes,
        };
        let size = declared.encoded_len() + 8;
        if bytes + size > DECLARATION_BYTES && !current.tensors.is_empty() {
            messages.push(std::mem::take(&mut current));
            bytes = 0;
        }
        bytes += size;
        current.tensors.push(declared);
    }
    messages.push(current);
    messages
}

fn stuck(limit: Duration) -> ClientError {
    ClientError::Deadline {
        what: "a step of Put".to_owned(),
        limit,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_are_split_and_keep_their_order() {
        let tensors: Vec<_> = (0..5000)
            .map(|n| UploadTensor {
                name: format!("{n}.{}", "x".repeat(250)),
                dtype: "U8".to_owned(),
                shape: vec![0],
                stride: Vec::new(),
                source: Source::Bytes(&[]),
            })
            .collect();
        let messages = declarations(&tensors);
        assert!(messages.len() > 1);
        assert!(
            messages
                .iter()
                .all(|m| m.encoded_len() <= DECLARATION_BYTES + 4096)
        );
        let names = messages.iter().flat_map(|m| &m.tensors).map(|t| &t.name);
        assert!(names.eq(tensors.iter().map(|t| &t.name)));
        assert_eq!(declarations(&[]).len(), 1, "an empty set is declared too");
    }
}
