//! A hold on a layer, and the tensors under it.

use std::{fmt, sync::Arc};

use flextensord_device::cuda::stream::CallerStream;

use crate::{
    connection::check_process,
    error::ClientError,
    gpu::OnStream,
    memory::PlaneMemory,
    plan::{LayerId, TensorPlace},
    plane::{Ended, Plane},
    rpc_holds::RpcPart,
};

/// Holds the parts of a layer on the device: until it is dropped their bytes stay as
/// they are. Dropped on another thread than the manager's it is given back by that
/// thread's next acquire or release. In a forked child it does nothing.
///
/// On a GPU it is given back on the stream that it was acquired on, behind what is queued
/// there, unless [`Hold::release_on`] names another.
#[must_use = "a hold that is dropped gives the layer back"]
pub struct Hold {
    plane: Arc<Plane>,
    layer: LayerId,
    rpc: Option<RpcPart>,
    on: Option<OnStream>,
    ended: bool,
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hold")
            .field("layer", &self.layer_name())
            .field("rpc", &self.rpc)
            .field("on", &self.on)
            .finish_non_exhaustive()
    }
}

impl Hold {
    pub(crate) fn new(
        plane: Arc<Plane>,
        layer: LayerId,
        rpc: Option<RpcPart>,
        on: Option<OnStream>,
    ) -> Self {
        Self {
            plane,
            layer,
            rpc,
            on,
            ended: false,
        }
    }

    /// The layer.
    #[must_use]
    pub fn layer(&self) -> LayerId {
        self.layer
    }

    /// The layer's name.
    #[must_use]
    pub fn layer_name(&self) -> &str {
        self.plane
            .plan
            .layer(self.layer)
            .map_or("", |layer| &layer.name)
    }

    /// Whether it was acquired over RPC.
    #[must_use]
    pub fn is_rpc(&self) -> bool {
        self.rpc.is_some()
    }

    /// The tensors in the layer's parts, in order of name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        let layer = self.plane.plan.layer(self.layer).ok();
        layer.into_iter().flat_map(|layer| {
            let places = self.plane.plan.layer_tensors(layer);
            places.map(|place| self.view(place))
        })
    }

    /// The tensor `name`.
    ///
    /// # Errors
    /// [`ClientError::Unknown`] when it does not lie in the layer's parts.
    pub fn tensor(&self, name: &str) -> Result<TensorView<'_>, ClientError> {
        let layer = self.plane.plan.layer(self.layer)?;
        let place = self.plane.plan.tensor_of(layer, name);
        let place = place.ok_or_else(|| ClientError::Unknown {
            what: "tensor",
            name: name.to_owned(),
            place: format!("layer {}", layer.name),
        })?;
        Ok(self.view(place))
    }

    /// Gives the layer back. A hold over RPC ends here for this process; what the daemon
    /// says is kept for [`crate::Manager::take_release_error`].
    ///
    /// # Errors
    /// [`ClientError::WrongThread`]: the manager's thread gives it back with its next
    /// call. [`ClientError::Forked`]. On a GPU also [`ClientError::CaptureEdge`] and what
    /// the driver says; a hold that could not be given back is with the next call.
    pub fn release(mut self) -> Result<(), ClientError> {
        check_process(&self.plane.mark)?;
        let checked = self.plane.owner.check();
        let ended = self.end();
        checked.and(ended)
    }

    /// Gives the layer back on `stream`, behind what is queued there. A hold over RPC is
    /// given back once that is done.
    ///
    /// # Errors
    /// As [`Hold::release`], and [`ClientError::WrongDevice`] where there are no streams;
    /// the hold has ended all the same.
    pub fn release_on(mut self, stream: CallerStream) -> Result<(), ClientError> {
        check_process(&self.plane.mark)?;
        if self.plane.gpu.is_none() {
            return Err(self.plane.wrong_device("release_on", "release"));
        }
        let capture = self.on.and_then(|on| on.capture);
        self.on = Some(OnStream { stream, capture });
        self.release()
    }

    /// Gives the layer back and waits for the daemon's answer, for a hold over RPC.
    ///
    /// # Errors
    /// As [`Hold::release`], `UNKNOWN_HOLD`, and those of the connection.
    pub async fn release_rpc(mut self) -> Result<(), ClientError> {
        check_process(&self.plane.mark)?;
        self.plane.owner.check()?;
        self.ended = true;
        let (reply, answer) = tokio::sync::oneshot::channel();
        let ended = Ended {
            layer: self.layer,
            rpc: self.rpc.take(),
            on: self.on,
        };
        match self.plane.settle(ended, Some(reply))? {
            Some(job) => self.plane.send(job),
            None => return Ok(()),
        }
        answer
            .await
            .unwrap_or(Err(ClientError::State("the connection is closed")))
    }

    fn end(&mut self) -> Result<(), ClientError> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        self.plane.end(Ended {
            layer: self.layer,
            rpc: self.rpc.take(),
            on: self.on,
        })
    }

    fn view<'a>(&'a self, place: &'a TensorPlace) -> TensorView<'a> {
        TensorView {
            plane: &self.plane,
            place,
            on: self.on,
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // the words belong to the parent: a child that ends must not give them back
        if !self.plane.mark.in_child()
            && let Err(error) = self.end()
        {
            self.plane.lease.note_release_error(error);
        }
    }
}

/// A tensor of a held layer. Its bytes are shared with the daemon, so they are copied
/// or compared, never borrowed.
#[derive(Clone, Copy)]
pub struct TensorView<'a> {
    plane: &'a Plane,
    place: &'a TensorPlace,
    on: Option<OnStream>,
}

impl fmt::Debug for TensorView<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TensorView").field(self.place).finish()
    }
}

impl<'a> TensorView<'a> {
    /// Qualified name.
    #[must_use]
    pub fn name(&self) -> &'a str {
        &self.place.name
    }

    /// Element type as safetensors spells it, such as "BF16".
    #[must_use]
    pub fn dtype(&self) -> &'a str {
        &self.place.dtype
    }

    /// Dimensions; empty for a scalar.
    #[must_use]
    pub fn shape(&self) -> &'a [u64] {
        &self.place.shape
    }

    /// Strides in elements; empty means contiguous.
    #[must_use]
    pub fn stride(&self) -> &'a [i64] {
        &self.place.stride
    }

    /// Bytes that it spans.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.place.bytes
    }

    /// Where it lies.
    #[must_use]
    pub fn place(&self) -> &'a TensorPlace {
        self.place
    }

    /// Copies all its bytes into `target`, which must have as many. On a GPU it waits until
    /// all that the manager has queued is done, at most for the limit of a call.
    ///
    /// # Errors
    /// [`ClientError::Range`] when it has not, [`ClientError::Forked`]; on a GPU also
    /// [`ClientError::Deadline`], [`ClientError::LeaseLost`], [`ClientError::DaemonLost`],
    /// [`ClientError::State`] in a capture, and what the driver says.
    pub fn read(&self, target: &mut [u8]) -> Result<(), ClientError> {
        let range = self.range(target.len())?;
        range.map_or(Ok(()), |(memory, offset)| {
            self.plane.until_readable(self.place.part, self.on)?;
            memory.read(offset, target)
        })
    }

    /// Whether its bytes are those of `expected`. Another length is another content.
    ///
    /// # Errors
    /// As [`TensorView::read`].
    pub fn equals(&self, expected: &[u8]) -> Result<bool, ClientError> {
        if expected.len() as u64 != self.place.bytes {
            return Ok(false);
        }
        let range = self.range(expected.len())?;
        range.map_or(Ok(true), |(memory, offset)| {
            self.plane.until_readable(self.place.part, self.on)?;
            memory.equals(offset, expected)
        })
    }

    /// Its bytes.
    ///
    /// # Errors
    /// As [`TensorView::read`].
    pub fn to_vec(&self) -> Result<Vec<u8>, ClientError> {
        let length = usize::try_from(self.place.bytes).map_err(|_| self.misfit(0))?;
        let mut bytes = vec![0; length];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    /// The address of its bytes, read-only and valid while the layer is held, for code
    /// that reads them in place; `None` for a tensor without bytes. On a GPU it is one of
    /// the GPU's, the same for the life of the plan, with the bytes there once the stream
    /// of the acquire has come so far.
    ///
    /// # Errors
    /// [`ClientError::Forked`].
    pub fn address(&self) -> Result<Option<usize>, ClientError> {
        self.plane.address_of(self.place)
    }

    /// Where its bytes are; `None` when it has none.
    fn range(&self, length: usize) -> Result<Option<(&'a PlaneMemory, u64)>, ClientError> {
        check_process(&self.plane.mark)?;
        if length as u64 != self.place.bytes {
            return Err(self.misfit(length));
        }
        if length == 0 {
            return Ok(None);
        }
        let memory = self.plane.memory_of(self.place.part);
        memory
            .map(|memory| Some((memory, self.place.offset)))
            .ok_or_else(|| self.misfit(length))
    }

    fn misfit(&self, length: usize) -> ClientError {
        ClientError::Range {
            what: format!("the buffer for tensor {}, in bytes,", self.place.name),
            value: length as u64,
            rule: format!("the tensor has {} bytes", self.place.bytes),
        }
    }
}
