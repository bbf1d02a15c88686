//! The numbers (`CUresult`) that the fake answers with.

use super::super::{driver::Outcome, error::CudaError};

pub(super) const INVALID_VALUE: u32 = 1;
pub(super) const OUT_OF_MEMORY: u32 = 2;
pub(super) const DEVICE_UNAVAILABLE: u32 = 46;
pub(super) const INVALID_DEVICE: u32 = 101;
pub(super) const INVALID_CONTEXT: u32 = 201;
pub(super) const OPERATING_SYSTEM: u32 = 304;
pub(super) const INVALID_HANDLE: u32 = 400;
pub(super) const ILLEGAL_STATE: u32 = 401;
pub(super) const NOT_READY: u32 = 600;
pub(super) const ILLEGAL_ADDRESS: u32 = 700;
pub(super) const ALREADY_REGISTERED: u32 = 712;
pub(super) const NOT_REGISTERED: u32 = 713;
pub(super) const LAUNCH_FAILED: u32 = 719;
pub(super) const NOT_SUPPORTED: u32 = 801;
pub(super) const CAPTURE_UNSUPPORTED: u32 = 900;
pub(super) const CAPTURE_INVALIDATED: u32 = 901;
pub(super) const CAPTURE_MERGE: u32 = 902;
pub(super) const CAPTURE_UNMATCHED: u32 = 903;
pub(super) const CAPTURE_UNJOINED: u32 = 904;
pub(super) const CAPTURE_ISOLATION: u32 = 905;
pub(super) const CAPTURE_IMPLICIT: u32 = 906;
pub(super) const CAPTURED_EVENT: u32 = 907;

/// A refusal by number, before it is known which call it answers.
pub(super) type Refusable<T> = Result<T, u32>;

/// Names the call that a refusal answers.
pub(super) fn named<T>(call: &'static str, outcome: Refusable<T>) -> Outcome<T> {
    outcome.map_err(|code| CudaError::Call { call, code })
}
