//! What on this machine stands in the way, and what to change.
//!
//! - [`probe`]: facts, and how this machine tells them;
//! - [`report`]: verdicts, and how they are shown;
//! - one room for each subject, which judges facts and touches nothing:
//!   [`instance`], [`shared_memory`], [`limits`], [`memory`], [`kernel`], [`gpu`],
//!   [`login`].

pub mod gpu;
pub mod instance;
pub mod kernel;
pub mod limits;
pub mod login;
mod machine;
pub mod memory;
pub mod probe;
pub mod report;
pub mod shared_memory;
mod trial;

pub use machine::Machine;
pub use probe::Probe;
pub use report::{Check, Report, Verdict};

/// Judges everything that `probe` tells.
#[must_use]
pub fn examine(probe: &dyn Probe) -> Report {
    let mut checks = instance::judge(&probe.instance());
    checks.extend(shared_memory::judge(&probe.shared_memory()));
    checks.extend(limits::judge(&probe.limits()));
    let memory = probe.memory();
    checks.push(memory::judge(&memory));
    checks.push(memory::huge_pages(&memory));
    checks.extend(kernel::judge(&probe.kernel()));
    checks.extend(gpu::judge(&probe.gpus()));
    checks.push(login::judge(&probe.login()));
    Report(checks)
}

#[cfg(test)]
mod tests;
