//! Decides what stays on the device, what streams, and where in the ring.
//!
//! Pure: no I/O, no clock, no thread. The same input gives the same plan. The engine
//! that carries a plan out knows nothing of how it was made.
//!
//! - [`description`]: a model in a file; [`input`]: what is to be planned; [`output`]: a plan and what it promises;
//! - `problem`: the input, checked, in whole picoseconds;
//! - `strategy`: which parts stream; `spread`: which of one size;
//! - `layout`, `ring`, `skyline`, `exact`: where they lie; `residents`: how the others lie;
//! - `cycle`: the copy queue over the cyclic pass, simulated;
//! - `search`: the best of what the strategies offer; [`plan`]: all of it together.
#![forbid(unsafe_code)]

mod cycle;
pub mod description;
mod error;
mod exact;
pub mod input;
mod layout;
pub mod output;
mod planner;
mod problem;
mod residents;
mod ring;
mod search;
mod skyline;
mod spread;
mod strategy;

pub use description::{Described, Description, DescriptionError};
pub use error::PlanError;
pub use input::{Acquire, BatchKey, Goal, Input, Layout, Link, Part, Strategy, Use};
pub use output::{Block, Mode, Place, Plan};
pub use planner::{forecast, plan};

/// Parts under this size stay resident unless nothing else fits: a hand-over costs
/// more than it saves.
pub const SMALL_BYTES: u64 = 256 << 10;
/// Least and most bytes after which a block of residents is full; between them it is an
/// eighth of all parts. So a model lies in few allocations, and plans of different
/// budgets still share blocks.
pub const BLOCK_BYTES: (u64, u64) = (4 << 20, 256 << 20);
