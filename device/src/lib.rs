//! The fence of flextensord: the only crate with unsafe code.
//!
//! - [`kernel`]: the error of a system call;
//! - [`mapping`], [`memfd`], [`segment`]: memory shared between processes;
//! - [`control`], [`notice`], [`journal`]: the pages of the hand-over protocol;
//! - [`handover`]: the protocol itself, pure, over any memory;
//! - [`failpoint`]: where tests make a process fail or die;
//! - [`doorbell`], [`futex`]: waking; [`heap`]: giving free pages back;
//! - [`process`], [`fork`], [`descriptor`], [`readiness`]: who a peer is, whether we
//!   are a forked child, handing descriptors over, waiting for them;
//! - [`device`]: what a device must do; [`cpu`]: a device in host memory; [`cuda`]: GPUs.
//!
//! It depends on `flextensord-proto` for layouts alone.

pub mod control;
pub mod cpu;
pub mod cuda;
pub mod descriptor;
pub mod device;
pub mod doorbell;
pub mod failpoint;
pub mod fork;
pub mod futex;
pub mod handover;
mod header;
pub mod heap;
pub mod journal;
pub mod kernel;
pub mod mapping;
pub mod memfd;
pub mod notice;
pub mod process;
pub mod readiness;
pub mod segment;
