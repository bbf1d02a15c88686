//! CUDA GPUs, through the driver alone: no toolkit to build, and no driver needed until
//! a GPU is asked for.
//!
//! - [`driver`]: the calls, as a trait: the fence within the fence;
//! - [`libcuda`], [`symbols`]: the real driver, loaded when it is asked for;
//! - [`error`], [`code`]: what it says when it refuses;
//! - [`gpu`]: which GPUs there are, and whether they can do what is needed;
//! - [`context`]: a GPU in use, parent of everything made on it;
//! - [`registration`]: host memory pinned for it; [`memory`]: its own memory, exported
//!   and mapped; [`stream`], [`event`]: its order;
//! - [`device`]: all of that behind the trait of [`crate::device`];
//! - `fake` (feature `fake`): a driver in host memory with faults on demand.

pub mod code;
pub mod context;
pub mod device;
pub mod driver;
pub mod error;
pub mod event;
#[cfg(feature = "fake")]
pub mod fake;
pub mod gpu;
pub mod libcuda;
pub mod memory;
mod pace;
pub mod registration;
pub mod slots;
pub mod stream;
pub mod symbols;
