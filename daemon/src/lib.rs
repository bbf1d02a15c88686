//! flextensord: a daemon that owns the weights of large models on a node.
//!
//! Rooms, by noun of the domain (see `docs/architecture.md`):
//! - [`configuration`]: flags, environment and file, checked before anything is bound;
//! - [`weights`]: segments, identity, loading;
//! - [`state`]: what a successor needs;
//! - [`managers`]: ownership, leases, phases, holds;
//! - [`plan`]: what stays, what streams, where: pure, a crate of its own;
//! - [`transfer`]: device memory and the engine that fills it;
//! - [`channel`]: the descriptor channel and its tickets;
//! - [`service`]: gRPC to the domain and back;
//! - [`admission`]: how many connections, of whom;
//! - [`phase`]: the life cycle as a value;
//! - [`lifecycle`]: instance lock, start, drain, stop;
//! - [`doctor`]: what is wrong with this machine;
//! - [`cli`]: the command line.
#![forbid(unsafe_code)]

pub mod admission;
pub mod channel;
pub mod cli;
pub mod configuration;
pub mod doctor;
pub mod lifecycle;
pub mod managers;
pub mod phase;
pub mod service;
pub mod state;
pub mod transfer;
pub mod weights;

pub use flextensord_plan as plan;
