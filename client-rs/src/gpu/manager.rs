//! What a manager on a GPU offers beside that of any.

use flextensord_device::cuda::stream::CallerStream;

use crate::{
    error::ClientError,
    hold::Hold,
    manager::Manager,
    plan::{LayerId, TensorPlace},
};

impl Manager {
    /// Holds a layer for what is queued on `stream` from here on; nothing waits on the
    /// host, and no RPC is made. The stream waits until the layer's parts are on the GPU.
    ///
    /// All acquires and releases of a manager form one order, also over streams: what is
    /// queued on another stream than the last waits for the last. While `stream` is being
    /// captured the operations become part of the graph; each capture begins and ends with
    /// nothing held. Graphs of one manager do not run at once with each other, nor with
    /// eager passes.
    ///
    /// The stream is one of the manager's GPU, in its primary context, and lives until
    /// holds acquired on it are released and the manager is closed or used with another.
    ///
    /// # Errors
    /// [`ClientError::HoldConflict`] before anything is queued,
    /// [`ClientError::CaptureEdge`], [`ClientError::WrongDevice`] where there are no
    /// streams, [`ClientError::LeaseLost`], [`ClientError::DaemonLost`],
    /// [`ClientError::WrongThread`], [`ClientError::OrderBroken`],
    /// [`ClientError::Forked`], and what the driver says.
    pub fn acquire_on(&self, layer: LayerId, stream: CallerStream) -> Result<Hold, ClientError> {
        self.plane()?.acquire_on(layer, stream)
    }

    /// As [`Manager::acquire_on`], for a caller that ends the hold with
    /// [`Manager::release_on`] instead of dropping an object. Both count together.
    ///
    /// # Errors
    /// As [`Manager::acquire_on`].
    pub fn hold_on(&self, layer: LayerId, stream: CallerStream) -> Result<(), ClientError> {
        self.plane()?.hold_on(layer, stream).map(drop)
    }

    /// Gives a layer back that [`Manager::hold_on`] holds, on `stream` and behind what is
    /// queued there.
    ///
    /// # Errors
    /// [`ClientError::NotHeld`], and as [`Manager::acquire_on`]; the layer is held as
    /// before then, unless it was held in a capture that has ended.
    pub fn release_on(&self, layer: LayerId, stream: CallerStream) -> Result<(), ClientError> {
        self.plane()?.release_on(layer, stream)
    }

    /// The address of a tensor of the plan, the same for the plan's life; `None` for one
    /// without bytes. Those of streamed parts are there only while a layer with them is
    /// held.
    ///
    /// # Errors
    /// [`ClientError::State`] before a model is registered, [`ClientError::Forked`].
    pub fn tensor_address(&self, place: &TensorPlace) -> Result<Option<usize>, ClientError> {
        self.plane()?.address_of(place)
    }
}
