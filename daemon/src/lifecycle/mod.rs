//! From start to stop: who may serve an instance, where, and in which phase it is.
//!
//! - [`directory`], [`lock`], [`socket`], [`generation`]: what belongs to one daemon
//!   of an instance alone;
//! - [`instance`]: those four put together;
//! - [`descriptor_limit`]: how many descriptors there may be;
//! - [`incoming`]: the connections of the gRPC socket;
//! - [`devices`]: those that the configuration names;
//! - [`logging`], [`mod@panic`], [`exit`]: how the process speaks and ends;
//! - `rooms`: the rooms of the daemon put together;
//! - [`serve`]: the daemon's run.

pub mod descriptor_limit;
pub mod devices;
pub mod directory;
pub mod exit;
pub mod generation;
pub mod incoming;
pub mod instance;
pub mod lock;
pub mod logging;
pub mod panic;
mod predecessor;
pub mod reap;
mod rooms;
pub mod serve;
pub mod socket;

pub use crate::phase::{Life, Phase};
pub use exit::Exit;
pub use instance::{Instance, Sockets, StartError};
