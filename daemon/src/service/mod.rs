//! gRPC to the domain and back.

pub mod caller;
pub mod failure;
pub mod idempotency;
pub mod weights;
