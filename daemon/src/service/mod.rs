//! gRPC to the domain and back.

pub mod caller;
