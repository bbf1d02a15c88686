//! The stream of a put.

use std::sync::Arc;

use flextensord_proto::{
    kind::Failure,
    limit,
    v1::{self, put_request::Part},
};
use tonic::Streaming;

use super::{
    message::{declaration, set_request},
    work::blocking,
};
use crate::{
    service::{failure::invalid_argument, request},
    weights::{load::Outcome, loader::Cancel, put::PutSession, registry::WeightStore},
};

/// Takes in what follows the header. Whatever ends it early leaves nothing behind.
pub(super) async fn receive(
    store: &Arc<WeightStore>,
    uid: u32,
    header: v1::PutHeader,
    stream: &mut Streaming<v1::PutRequest>,
) -> Result<Outcome, Failure> {
    let request = set_request(uid, header.name, header.content_id, header.share);
    let watch = Arc::new(Cancel::default());
    // should the caller go away, whatever waits on a blocking thread ends
    let _gone = CancelOnDrop(Arc::clone(&watch));
    let mut session = PutSession::new(store, request)?;
    while let Some(message) = next_part(stream).await? {
        match message {
            Part::Tensors(tensors) => {
                session.declare(tensors.tensors.into_iter().map(declaration).collect())?;
            }
            Part::Data(data) if data.bytes.len() > limit::PUT_BYTES => {
                let rule = format!("at most {} bytes", limit::PUT_BYTES);
                let field = format!("data[{}].bytes", data.tensor);
                return Err(invalid_argument(&field, data.bytes.len(), &rule));
            }
            Part::Data(data) => {
                let watch = Arc::clone(&watch);
                session = blocking(move || {
                    session.write(&data.tensor, data.offset, &data.bytes, &*watch)?;
                    Ok(session)
                })
                .await?;
            }
            Part::Header(header) => {
                let rule = "only the first message is a header";
                return Err(invalid_argument("header", header.name, rule));
            }
        }
    }
    let watch = Arc::clone(&watch);
    blocking(move || session.finish(&*watch)).await
}

/// The next part of a put; `None` at its end.
pub(super) async fn next_part(
    stream: &mut Streaming<v1::PutRequest>,
) -> Result<Option<Part>, Failure> {
    match request::next_message(stream, "put").await? {
        None => Ok(None),
        Some(v1::PutRequest { part: Some(part) }) => Ok(Some(part)),
        Some(v1::PutRequest { part: None }) => {
            Err(invalid_argument("part", "", "header, tensors or data"))
        }
    }
}

struct CancelOnDrop(Arc<Cancel>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.set();
    }
}
