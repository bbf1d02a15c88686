//! Named points at which a daemon or a client can be made to fail, or to die as with
//! `kill -9`. Without the feature `failpoints` they are compiled to nothing.
//!
//! The variable [`RULES`] says what happens where (`seal=kill;submit=fail@3;journal=fail*`),
//! and the first passage of each point and each thing done is appended to the file that
//! [`HITS`] names, so that a point that was never reached can be told. (The crate `fail`
//! neither kills nor tells which points were passed; what would be left of it is a counter.)

#[cfg(feature = "failpoints")]
mod armed;
mod point;

pub use point::{Point, Stage, Way};

use crate::kernel::KernelError;

/// Names the variable with the rules.
pub const RULES: &str = "FLEXTENSORD_FAILPOINTS";
/// Names the variable with the file for the record.
pub const HITS: &str = "FLEXTENSORD_FAILPOINT_HITS";
/// Whether points do anything in this build.
pub const COMPILED_IN: bool = cfg!(feature = "failpoints");

/// Passes a point where something can fail.
///
/// # Errors
/// When a rule says so.
#[cfg(feature = "failpoints")]
pub fn pass(point: Point) -> Result<(), KernelError> {
    armed::pass(point)
}

/// Passes a point where something can fail.
///
/// # Errors
/// Never in this build.
#[cfg(not(feature = "failpoints"))]
#[inline(always)]
pub const fn pass(_point: Point) -> Result<(), KernelError> {
    Ok(())
}

/// Passes a point where nothing can fail: the process may only end there.
#[inline(always)]
pub fn cross(point: Point) {
    // a rule that says fail is for nobody here
    drop(pass(point));
}
