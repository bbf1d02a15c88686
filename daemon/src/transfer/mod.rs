//! Device memory, and the engine that fills it.
//!
//! - [`managed`]: a device with all that is kept for it;
//! - [`memory`]: one device's memory: grants, allocations, what waits for its last
//!   holder;
//! - [`residents`]: blocks of residents, shared between managers of one user;
//! - [`engine`]: one thread a device that issues copies into rings, by turns;
//! - [`stream`]: one manager's ring as the engine sees it; `occupancy`: what lies in it;
//! - [`counters`]: what was moved.

pub mod counters;
pub mod engine;
pub mod managed;
pub mod memory;
mod occupancy;
pub mod residents;
pub mod stream;
