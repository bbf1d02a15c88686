//! Model check of the hand-over: engine, copies and clients step through the *real*
//! functions of `flextensord_device::handover` in every order.
//!
//! Two checkers, because each sees what the other cannot:
//!
//! - An **explicit-state explorer** (`explorer`, `fairness`, `walk`) visits all states of
//!   a setting, not only runs of some length. So it can prove progress (from every state
//!   a waiting client can still be served, and none is passed over for ever), and it
//!   counts any number of passes, for the sequences run in a circle. `replay` lets it stop
//!   the real functions between two atomic accesses. Accesses are sequentially consistent.
//! - **loom** (`weave`) runs the same functions as threads. It explores fewer and shorter
//!   runs, bounded in preemptions, but under the C11 memory model, and with the bytes as
//!   cells whose races it sees: that the words alone order copies and reads is its result.
//!
//! A random scheduler such as `shuttle` would add nothing: `walk` takes random runs of
//! rings too large for the explorer, over the same steps.
//!
//! What is checked, its bounds and what is left out: `docs/handover.md`.

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    reason = "a failed check is a panic, in functions that the tests share as well"
)]

mod client;
mod copies;
mod engine;
mod explorer;
mod fairness;
mod findings;
mod planted;
mod replay;
mod scenarios;
mod setting;
mod walk;
mod weave;
mod world;
mod wrap;
