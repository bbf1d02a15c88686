//! What is wrong with a header.

use super::{super::dtype::SizeError, HEADER_BYTES};

/// What is wrong with a header. Messages repeat only what the file itself says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Too short to hold anything.
    #[error("it has {bytes} bytes, too few for a safetensors file")]
    Short {
        /// Bytes of the file.
        bytes: u64,
    },
    /// A header over the limit.
    #[error("header of {bytes} bytes is over the limit of {HEADER_BYTES} (32 MiB)")]
    HeaderLength {
        /// Bytes that the file claims.
        bytes: u64,
    },
    /// A header that passes the end of the file.
    #[error("header of {bytes} bytes passes the end of the file of {file} bytes")]
    HeaderCut {
        /// Bytes that the file claims.
        bytes: u64,
        /// Bytes of the file.
        file: u64,
    },
    /// Not the JSON that it should be.
    #[error("header is not valid: {problem}")]
    Json {
        /// What the parser says.
        problem: String,
    },
    /// A tensor's name.
    #[error("tensor {tensor:?}: {problem}")]
    Name {
        /// The name.
        tensor: String,
        /// The rule it breaks.
        problem: String,
    },
    /// A tensor's size.
    #[error("tensor {tensor:?} of dtype {dtype:?}: {problem}")]
    Size {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: String,
        /// What is wrong.
        problem: SizeError,
    },
    /// Offsets that do not agree with type and shape.
    #[error(
        "tensor {tensor:?} has offsets {begin}..{end}, but dtype and shape need {needed} bytes"
    )]
    Offsets {
        /// The tensor.
        tensor: String,
        /// First byte.
        begin: u64,
        /// Byte after the last.
        end: u64,
        /// Bytes that dtype and shape give.
        needed: u64,
    },
    /// Bytes that two tensors claim.
    #[error("tensor {tensor:?} begins at {begin}, inside the tensor that ends at {expected}")]
    Overlap {
        /// The second of the two.
        tensor: String,
        /// Where it begins.
        begin: u64,
        /// Where the one before it ends.
        expected: u64,
    },
    /// Bytes that no tensor claims.
    #[error("tensor {tensor:?} begins at {begin}, which leaves a hole from {expected}")]
    Hole {
        /// The tensor after the hole.
        tensor: String,
        /// Where it begins.
        begin: u64,
        /// Where the hole begins.
        expected: u64,
    },
    /// Tensors and file end at different places.
    #[error("tensors take {tensors} bytes, the file has {file} behind its header")]
    End {
        /// Bytes of all tensors.
        tensors: u64,
        /// Bytes behind the header.
        file: u64,
    },
}
