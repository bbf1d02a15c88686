//! gRPC to the domain and back.
//!
//! - [`offload`], [`weights`], [`admin`]: the three services;
//! - `handing_back`, `lease_events`: managers of a dead daemon, and the stream of a lease;
//! - [`plan_pages`], [`dump`]: long answers in pages;
//! - [`caller`], [`request`], [`idempotency`]: what all calls share;
//! - [`failure`]: the one place that turns errors into a status;
//! - [`framing`]: the same for messages that cannot be read.

pub mod admin;
pub mod caller;
pub mod dump;
pub mod failure;
pub mod framing;
mod handing_back;
pub mod idempotency;
mod lease_events;
pub mod offload;
pub mod plan_pages;
pub mod request;
pub mod weights;
