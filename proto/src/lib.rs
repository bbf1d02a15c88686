//! What the daemon and its clients must agree on.
//!
//! - [`v1`]: the gRPC messages and services, generated from `proto/flextensor/v1`;
//! - [`layout`]: the control page, the notice page and the slot word;
//! - [`name`]: which names are legal;
//! - [`kind`]: error kinds, their origin, whether a retry can help, and how they
//!   travel in a gRPC status;
//! - [`limit`]: sizes that both sides enforce.
//!
//! This crate does no I/O and knows nobody else.
#![forbid(unsafe_code)]

pub mod kind;
pub mod layout;
pub mod limit;
pub mod name;

/// Messages and services of package `flextensor.v1`.
#[allow(missing_docs, unreachable_pub)]
#[allow(clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod v1 {
    tonic::include_proto!("flextensor.v1");
}

/// The encoded file descriptor set of all `.proto` files, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/flextensor.bin"));

/// The protocol versions that this build speaks: lowest and highest.
pub const PROTOCOL: (u32, u32) = (1, 1);

/// The version that a peer with the range `lowest..=highest` and this build both
/// speak, the highest such; `None` when there is none.
#[must_use]
pub fn negotiate(lowest: u32, highest: u32) -> Option<u32> {
    let version = highest.min(PROTOCOL.1);
    (lowest <= highest && version >= lowest && version >= PROTOCOL.0).then_some(version)
}

#[cfg(test)]
mod tests {
    use super::negotiate;

    #[test]
    fn older_and_newer_peers_agree_on_the_highest_version_both_speak() {
        assert_eq!(negotiate(1, 1), Some(1));
        assert_eq!(negotiate(1, 9), Some(1));
        assert_eq!(negotiate(2, 9), None);
        assert_eq!(negotiate(0, 0), None);
        assert_eq!(negotiate(5, 1), None);
    }
}
