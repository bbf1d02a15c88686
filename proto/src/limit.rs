//! Sizes that both sides enforce.

/// Most bytes of one gRPC message, the default of every gRPC library.
pub const MESSAGE_BYTES: usize = 4 << 20;
/// Most bytes of one packet on the descriptor channel.
pub const PACKET_BYTES: usize = 64 << 10;
/// Most descriptors that travel with one packet.
pub const PACKET_DESCRIPTORS: usize = 64;
/// Most bytes of a manager's or weight set's name.
pub const NAME_BYTES: usize = 128;
/// Most bytes of a tensor's or layer's name.
pub const QUALIFIED_NAME_BYTES: usize = 512;
/// Most dimensions of a tensor.
pub const DIMENSIONS: usize = 64;
/// Most tensors of a weight set.
pub const TENSORS: usize = 1 << 20;
/// Most layers of a manager.
pub const LAYERS: usize = 1 << 16;
/// Most bytes of data in one `PutData`.
pub const PUT_BYTES: usize = 1 << 20;
/// Alignment of storages in a segment and of parts in device memory, in bytes.
pub const ALIGNMENT: u64 = 256;
/// Bytes of a request id: at least this many are asked for, so that ids do not meet.
pub const REQUEST_ID_BYTES: std::ops::RangeInclusive<usize> = 16..=128;

/// `bytes` rounded up to [`ALIGNMENT`]; `None` when that overflows.
#[must_use]
pub fn align(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(ALIGNMENT)
}

/// `PlanPart.allocation` of a part that has no bytes and so lies nowhere.
pub const NO_ALLOCATION: u32 = u32::MAX;
