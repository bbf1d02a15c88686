//! The client of flextensord: a daemon that owns the weights of large models in shared
//! memory and streams them to a device while programs compute.
//!
//! ```no_run
//! use flextensord_client::{Budget, ConnectOptions, LayerSpec, LoadOptions, OpenOptions, blocking};
//!
//! # fn main() -> Result<(), flextensord_client::ClientError> {
//! let client = blocking::Client::connect(ConnectOptions::default())?;
//! client.load("model.safetensors".as_ref(), "minilm", &LoadOptions::default(), |_| ())?;
//! let mut manager = client.open(OpenOptions::default())?;
//! let layers = [LayerSpec { name: "embed".into(), tensors: vec!["embed.weight".into()] }];
//! manager.register("minilm", &layers, Budget::Fraction(0.5))?;
//! let embed = manager.layer("embed")?;
//! let hold = manager.acquire(embed)?; // given back when dropped
//! let weights = hold.tensor("embed.weight")?.to_vec()?;
//! # drop(weights);
//! # Ok(())
//! # }
//! ```
//!
//! - [`Client`]: a connection; [`Client::weights`] and [`Client::admin`] are its calls;
//! - [`Manager`]: a named offload context that this process owns, with the fast path
//!   ([`Manager::acquire`]) through shared memory and the same over RPC;
//! - [`Manager::acquire_on`]: the same on a stream of a GPU ([`CallerStream`]), eager or
//!   while it is captured, without a wait on the host;
//! - [`Hold`]: a layer whose bytes stay as they are until it is dropped;
//! - [`blocking`]: the same without an asynchronous runtime.
//!
//! **Rules.** Acquires and releases of a manager form one order and belong to one thread
//! ([`Manager::rebind_thread`] changes it). Parts that overlap on the device are never
//! held together ([`ClientError::HoldConflict`]). Every wait has a deadline. A forked
//! child owns nothing: its calls fail with [`ClientError::Forked`] and its exit changes
//! nothing. An asynchronous program needs a runtime with a worker thread, because
//! [`Manager::acquire`] blocks the thread that it is called on.
#![forbid(unsafe_code)]

pub mod admin;
pub mod blocking;
mod channel;
pub mod checkpoint;
mod connection;
mod error;
mod fastpath;
mod gpu;
mod hold;
mod holds;
mod lease;
pub mod locate;
mod manager;
mod memory;
pub mod plan;
mod plane;
mod registration;
mod request_id;
mod rpc_holds;
mod thread;
pub mod upload;
pub mod weights;

pub use connection::{Client, ConnectOptions};
pub use error::ClientError;
pub use flextensord_device::cuda::{driver::Driver, error::CudaError, stream::CallerStream};
pub use flextensord_proto::{kind, v1};
pub use hold::{Hold, TensorView};
pub use lease::LeaseState;
pub use locate::Address;
pub use manager::{ACQUIRE_LIMIT, Manager, OpenOptions};
pub use plan::{LayerId, Plan};
pub use registration::{Budget, LayerSpec};
pub use weights::{LoadOptions, LoadStep, LoadedSet};

#[cfg(test)]
mod tests;
