//! Who owns which name, what it registered, what it holds, and what its end leaves.
//!
//! - [`registry`]: names, tokens, opening and ending;
//! - [`manager`]: one manager and its lease;
//! - [`registration`]: from layers to a plan with memory;
//! - [`model`]: what was registered;
//! - [`lease`]: its streams, and the process behind them;
//! - `drain`: the end of the daemon as managers see it;
//! - [`holds`]: holds taken over RPC;
//! - [`record`]: what a successor needs; [`adoption`]: how it takes managers over,
//!   `rebuilding`: and their models;
//! - [`error`]: what can go wrong.

pub mod adoption;
pub mod drain;
pub mod error;
pub mod holds;
pub mod lease;
pub mod manager;
pub mod model;
mod rebuilding;
pub mod record;
pub mod registration;
pub mod registry;
