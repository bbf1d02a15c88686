//! Weight sets: named, sealed, immutable collections of tensors in shared memory.
//!
//! - [`registry`]: the store: who owns which set, who is attached, what may go;
//! - [`load`], [`put`]: the two ways in, from checkpoint files and from a client's
//!   memory; [`declaration`]: what a client declares;
//! - [`claim`]: who may build a set now; [`room`]: memory for it, and what goes for it;
//! - [`safetensors`], [`checkpoint`]: what a file says, checked against the file;
//! - [`dtype`], [`manifest`]: tensors, their sizes, and their places in a segment;
//! - [`loader`], [`digest`]: filling a segment, and what its content is called;
//! - [`budget`], [`cgroup`]: how many bytes the host has left for weight sets;
//! - `shares`: how many bytes of headers and declarations are in memory at a time;
//! - [`record`], [`adoption`], [`leftovers`]: what a successor finds, takes over, removes.
//!
//! Everything here blocks; callers on an asynchronous runtime use a blocking thread.

pub mod adoption;
pub mod budget;
pub mod cgroup;
pub mod checkpoint;
pub mod claim;
pub mod declaration;
pub mod digest;
pub mod dtype;
pub mod error;
pub mod leftovers;
pub mod load;
pub mod loader;
pub mod manifest;
pub mod pinning;
pub mod put;
pub mod record;
pub mod registry;
pub mod room;
pub mod safetensors;
pub mod set;
pub(crate) mod shares;
