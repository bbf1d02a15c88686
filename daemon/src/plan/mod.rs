//! Decides what stays on the device, what streams, and where in the ring.
//!
//! Pure: no I/O, no clock, no thread. The same input gives the same plan. The engine
//! that carries a plan out knows nothing of how it was made.

mod order;
mod prefix;
mod ring;
mod skyline;

use flextensord_proto::{layout::LABEL_BYTES, limit};

pub use prefix::plan;

/// Parts under this size stay resident unless nothing else fits: a hand-over costs
/// more than it saves.
pub const SMALL_BYTES: u64 = 256 << 10;
/// Least and most bytes after which a block of residents is full; between them it is a
/// 64th of all parts. So a model lies in few allocations, and plans of different
/// budgets still share all blocks but one.
pub const BLOCK_BYTES: (u64, u64) = (4 << 20, 256 << 20);

/// What is to be planned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// Bytes of each part, by its index.
    pub parts: Vec<u64>,
    /// Parts that are held at the same time, in order of a pass. A part may stand in
    /// several uses.
    pub uses: Vec<Vec<u32>>,
    /// Bytes that may be held on the device: residents, ring and their labels.
    pub budget: u64,
}

/// Where a part lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// It has no bytes, or stands in no use: it needs no place.
    Nowhere,
    /// In block `block` of the residents, at `offset` bytes from its begin.
    Resident {
        /// Index into [`Plan::blocks`].
        block: u32,
        /// Bytes from the block's begin, its label included.
        offset: u64,
    },
    /// In the ring, at `offset` bytes from its begin.
    Streamed {
        /// Bytes from the ring's begin, its label included.
        offset: u64,
    },
}

/// One allocation of residents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Its bytes, label included.
    pub bytes: u64,
    /// Its parts, in order of offset.
    pub parts: Vec<u32>,
}

/// A plan: a value that says everything the engine needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Where each part lies, by its index.
    pub places: Vec<Place>,
    /// Allocations of residents.
    pub blocks: Vec<Block>,
    /// Bytes of the ring, label included; 0 when nothing streams.
    pub ring_bytes: u64,
    /// Streamed parts in the order in which a pass needs them; a part occurs once for
    /// each use it stands in.
    pub stream_order: Vec<u32>,
    /// Bytes of all blocks.
    pub resident_bytes: u64,
    /// Bytes that one pass moves over the link.
    pub streamed_bytes: u64,
    /// The least budget for which there is a plan.
    pub least_feasible: u64,
}

impl Plan {
    /// Bytes that the plan holds on the device.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.resident_bytes + self.ring_bytes
    }
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The budget is under the least in which the uses can run.
    #[error("budget of {budget} bytes is infeasible: the least feasible one is {least} bytes")]
    Infeasible {
        /// The budget.
        budget: u64,
        /// The least feasible budget.
        least: u64,
    },
    /// The input names a part that is not there, or sizes that overflow.
    #[error("use {index} names part {part}, there are {parts}")]
    UnknownPart {
        /// The use.
        index: usize,
        /// The part it names.
        part: u32,
        /// How many parts there are.
        parts: usize,
    },
    /// The sum of all parts is no size.
    #[error("the sizes of {parts} parts overflow")]
    Overflow {
        /// How many parts there are.
        parts: usize,
    },
}

/// Bytes that a part takes in device memory.
fn taken(bytes: u64) -> u64 {
    limit::align(bytes).unwrap_or(u64::MAX)
}

/// The label at the begin of an allocation that has bytes at all.
fn labelled(bytes: u64) -> u64 {
    if bytes == 0 { 0 } else { bytes + LABEL_BYTES }
}
