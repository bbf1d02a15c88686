//! Weight sets: loading from files, looking, dropping. For uploads see
//! [`crate::upload`].

use std::{fs::File, path::Path, time::Duration};

use flextensord_proto::v1::{
    DropRequest, GetRequest, ListRequest, LoadRequest, Tensor, WeightSet, load_progress::Event,
    weights_client::WeightsClient,
};

use crate::{
    checkpoint::{self, CheckpointFile},
    connection::{Client, request},
    error::{ClientError, is_transport},
    request_id,
};

/// How to load or store a weight set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Vouches for the content instead of having it hashed.
    pub content_id: Option<String>,
    /// Lets other users attach (read-only).
    pub share: bool,
}

/// How far a load is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadStep {
    /// Bytes read so far.
    pub bytes_done: u64,
    /// Bytes in all.
    pub bytes_total: u64,
}

/// A weight set that is there now.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadedSet {
    /// The set.
    pub set: WeightSet,
    /// The content was there already: this call attached to it.
    pub attached: bool,
}

/// A weight set with all its tensors.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightSetDetail {
    /// The set.
    pub set: WeightSet,
    /// Its tensors, in the daemon's order.
    pub tensors: Vec<Tensor>,
    /// Where each tensor's storage begins in the segment, in bytes.
    pub storage_segment_offsets: Vec<u64>,
}

/// Calls about weight sets, from [`Client::weights`].
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a> {
    pub(crate) client: &'a Client,
}

impl Client {
    /// Calls about weight sets.
    #[must_use]
    pub fn weights(&self) -> Weights<'_> {
        Weights { client: self }
    }
}

impl Weights<'_> {
    /// Loads the checkpoint at `path`: a .safetensors file, the index of a sharded one,
    /// or a directory with either. The files are opened here, with the caller's rights.
    /// An empty `name` names the set by its digest. `progress` is called as the daemon
    /// reports.
    ///
    /// # Errors
    /// [`ClientError::Checkpoint`] when the files cannot be opened, refusals of the
    /// daemon (`CHECKPOINT_INVALID`, `CONTENT_DIFFERS`, `HOST_MEMORY`, …), and
    /// [`ClientError::Deadline`] when nothing moves for the long timeout.
    pub async fn load(
        &self,
        path: &Path,
        name: &str,
        options: &LoadOptions,
        mut progress: impl FnMut(LoadStep) + Send,
    ) -> Result<LoadedSet, ClientError> {
        self.client.check_process()?;
        let files = checkpoint::open(path)?;
        let tickets = self.client.descriptors(move |channel| {
            let named: Vec<(String, &File)> = files
                .iter()
                .map(|CheckpointFile { name, file }| (name.clone(), file))
                .collect();
            channel.offer(&named)
        });
        let message = LoadRequest {
            request_id: request_id::fresh()?,
            name: name.to_owned(),
            files: tickets.await?,
            content_id: options.content_id.clone().unwrap_or_default(),
            share: options.share,
        };
        let mut again = true;
        loop {
            // the same id: a second try attaches to the load under way
            match self.load_once(message.clone(), &mut progress).await {
                Err(Attempt::Lost(_)) if again => again = false,
                Err(Attempt::Lost(error) | Attempt::Failed(error)) => return Err(error),
                Ok(loaded) => return Ok(loaded),
            }
        }
    }

    async fn load_once(
        &self,
        message: LoadRequest,
        progress: &mut (impl FnMut(LoadStep) + Send),
    ) -> Result<LoadedSet, Attempt> {
        const CALL: &str = "Load";
        // no deadline in the request: it may take as long as it moves
        let limit = self.client.options().long_timeout;
        let channel = self.client.channel().map_err(Attempt::Failed)?;
        let failed = |status: tonic::Status| {
            let error = self.client.failed(CALL, limit, &status);
            if is_transport(&status) {
                Attempt::Lost(error)
            } else {
                Attempt::Failed(error)
            }
        };
        let mut client = WeightsClient::new(channel);
        let mut events = step(CALL, limit, client.load(message))
            .await?
            .map_err(failed)?
            .into_inner();
        while let Some(event) = step(CALL, limit, events.message()).await?.map_err(failed)? {
            match event.event {
                Some(Event::Progress(at)) => progress(LoadStep {
                    bytes_done: at.bytes_done,
                    bytes_total: at.bytes_total,
                }),
                Some(Event::Loaded(loaded)) => {
                    let set = loaded.set.ok_or_else(|| Attempt::Failed(no_set(CALL)))?;
                    return Ok(LoadedSet {
                        set,
                        attached: loaded.attached,
                    });
                }
                // a newer daemon may say more
                None => {}
            }
        }
        Err(Attempt::Failed(ClientError::Protocol {
            call: CALL,
            reason: "the stream ended without a result".to_owned(),
        }))
    }

    /// The weight set `name` with all its tensors.
    ///
    /// # Errors
    /// `NOT_FOUND` when there is none that the caller may see.
    pub async fn get(&self, name: &str) -> Result<WeightSetDetail, ClientError> {
        let limit = self.client.options().call_timeout;
        let (mut tensors, mut offsets) = (Vec::new(), Vec::new());
        let mut page_token = String::new();
        loop {
            let message = GetRequest {
                name: name.to_owned(),
                page_token: page_token.clone(),
                ..GetRequest::default()
            };
            let page = self.client.call("Get", limit, |channel| {
                let message = request(message.clone(), limit);
                async move { Ok(WeightsClient::new(channel).get(message).await?.into_inner()) }
            });
            let page = page.await?;
            tensors.extend(page.tensors);
            offsets.extend(page.storage_segment_offsets);
            if page.next_page_token.is_empty() {
                return Ok(WeightSetDetail {
                    set: page.set.ok_or_else(|| no_set("Get"))?,
                    tensors,
                    storage_segment_offsets: offsets,
                });
            }
            page_token = next(&page_token, page.next_page_token, "Get")?;
        }
    }

    /// All weight sets that the caller may see, in order of name.
    ///
    /// # Errors
    /// Those of the connection.
    pub async fn list(&self) -> Result<Vec<WeightSet>, ClientError> {
        let limit = self.client.options().call_timeout;
        let mut sets = Vec::new();
        let mut page_token = String::new();
        loop {
            let message = ListRequest {
                page_size: 0,
                page_token: page_token.clone(),
            };
            let page = self.client.call("List", limit, |channel| {
                let message = request(message.clone(), limit);
                async move {
                    Ok(WeightsClient::new(channel)
                        .list(message)
                        .await?
                        .into_inner())
                }
            });
            let page = page.await?;
            sets.extend(page.sets);
            if page.next_page_token.is_empty() {
                return Ok(sets);
            }
            page_token = next(&page_token, page.next_page_token, "List")?;
        }
    }

    /// Removes the weight set `name`, and returns the bytes that were given back.
    ///
    /// # Errors
    /// `IN_USE` while a manager is attached, `NOT_FOUND`, `PERMISSION_DENIED`.
    pub async fn drop(&self, name: &str) -> Result<u64, ClientError> {
        let limit = self.client.options().call_timeout;
        let message = DropRequest {
            request_id: request_id::fresh()?,
            name: name.to_owned(),
        };
        let answer = self.client.call("Drop", limit, |channel| {
            let message = request(message.clone(), limit);
            async move {
                Ok(WeightsClient::new(channel)
                    .drop(message)
                    .await?
                    .into_inner())
            }
        });
        Ok(answer.await?.freed_bytes)
    }
}

/// Why an attempt did not succeed.
enum Attempt {
    /// The connection failed: worth another.
    Lost(ClientError),
    Failed(ClientError),
}

/// Waits for one step of a stream, at most for `limit`.
async fn step<T>(
    call: &'static str,
    limit: Duration,
    work: impl Future<Output = T>,
) -> Result<T, Attempt> {
    tokio::time::timeout(limit, work).await.map_err(|_| {
        Attempt::Failed(ClientError::Deadline {
            what: format!("a step of {call}"),
            limit,
        })
    })
}

/// The next page's token; one that repeats would never end.
fn next(current: &str, next: String, call: &'static str) -> Result<String, ClientError> {
    if next == current {
        return Err(ClientError::Protocol {
            call,
            reason: "a page names itself as the next one".to_owned(),
        });
    }
    Ok(next)
}

pub(crate) fn no_set(call: &'static str) -> ClientError {
    ClientError::Protocol {
        call,
        reason: "the answer names no weight set".to_owned(),
    }
}
