//! What can go wrong with a manager.

use std::time::{Duration, UNIX_EPOCH};

use flextensord_device::{control::ControlError, device::DeviceError, kernel::KernelError};
use flextensord_proto::name::NameError;

use super::drain::GivenUp;
use crate::{
    plan::PlanError, state::StateError, transfer::memory::MemoryError,
    transfer::residents::ResidentError, weights::error::WeightError,
};

/// Why a call on a manager fails.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// The name breaks a rule.
    #[error("{field} is {value:?}: {source}")]
    Name {
        /// The field of the request.
        field: &'static str,
        /// Its value, shortened.
        value: String,
        /// The rule.
        source: NameError,
    },
    /// A field breaks a rule.
    #[error("{field} is {value}: {rule}")]
    Field {
        /// The field of the request.
        field: &'static str,
        /// Its value.
        value: String,
        /// The rule.
        rule: String,
    },
    /// A living process owns the name.
    #[error(
        "manager {name:?} is owned by process {pid} since {}",
        humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_millis(*since_ms))
    )]
    Taken {
        /// The name.
        name: String,
        /// The owner.
        pid: u32,
        /// Since when, in milliseconds since the Unix epoch.
        since_ms: u64,
    },
    /// The caller has ended while its call was under way.
    #[error("process {pid} has ended")]
    OwnerGone {
        /// The caller.
        pid: u32,
    },
    /// No such manager, or not the caller's to see.
    #[error("{field}: there is no manager {name:?}")]
    UnknownManager {
        /// The field of the request.
        field: &'static str,
        /// The name, shortened.
        name: String,
    },
    /// No such layer.
    #[error("manager {manager:?} has no layer {layer:?}")]
    UnknownLayer {
        /// The manager.
        manager: String,
        /// The layer.
        layer: String,
    },
    /// No such tensor.
    #[error("layer {layer:?}: weight set {weight_set:?} has no tensor {tensor:?}")]
    UnknownTensor {
        /// The layer that names it.
        layer: String,
        /// The weight set.
        weight_set: String,
        /// The tensor.
        tensor: String,
    },
    /// No such device.
    #[error("there is no device {name:?}; there are {known}")]
    UnknownDevice {
        /// The name.
        name: String,
        /// The devices there are.
        known: String,
    },
    /// A manager of a dead daemon cannot be taken up.
    #[error("manager {name:?} cannot be taken over from the daemon before: {why}")]
    NotAdopted {
        /// Its name.
        name: String,
        /// Why not.
        why: String,
    },
    /// Its owner has not taken it up yet.
    #[error("the manager is being taken over from the daemon before; take its lease up first")]
    Recovering,
    /// The token owns nothing, or no longer.
    #[error("the lease is over, or the token is not this user's")]
    LeaseLost,
    /// The hold is unknown or was given back.
    #[error("hold {hold} is unknown or was given back already")]
    UnknownHold {
        /// The hold.
        hold: u64,
    },
    /// The part would overlap one that is held.
    #[error("layer {layer:?}: part {part} would overlap part {held}, which is held")]
    HoldConflict {
        /// The layer asked for.
        layer: String,
        /// Its part.
        part: u32,
        /// The part that is held.
        held: u32,
    },
    /// The part is held by the fast path.
    #[error("layer {layer:?}: part {part} is held by the fast path; name it in except_parts")]
    HeldByFastPath {
        /// The layer asked for.
        layer: String,
        /// Its part.
        part: u32,
    },
    /// The manager has a model already.
    #[error("manager {name:?} has registered a model already")]
    Registered {
        /// The manager.
        name: String,
    },
    /// Another registration of this manager is under way.
    #[error("manager {name:?} is registering a model")]
    Registering {
        /// The manager.
        name: String,
    },
    /// The manager has no model yet.
    #[error("manager {name:?} has not registered a model")]
    NotRegistered {
        /// The manager.
        name: String,
    },
    /// The bytes did not come in time.
    #[error("layer {layer:?}: part {part} did not arrive within {waited_ms} ms")]
    Deadline {
        /// The layer asked for.
        layer: String,
        /// The part waited for.
        part: u32,
        /// How long it was waited for.
        waited_ms: u64,
    },
    /// Too many managers.
    #[error("there are {limit} managers, the limit; raise max_managers")]
    TooMany {
        /// The limit.
        limit: usize,
    },
    /// Too many managers of one user.
    #[error("user {uid} has {limit} managers, the limit of a user: half of max_managers")]
    TooManyOfUser {
        /// The user.
        uid: u32,
        /// The limit.
        limit: usize,
    },
    /// Too many holds over RPC.
    #[error("manager {manager:?} has {limit} {what}, the limit; release some")]
    TooManyHolds {
        /// The manager.
        manager: String,
        /// What there are too many of.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// The daemon ends while the call waits.
    #[error(transparent)]
    GivenUp(#[from] GivenUp),
    /// The daemon takes nothing new.
    #[error("the daemon drains and takes no new managers")]
    Draining,
    /// The caller may not do this.
    #[error("user {uid} may not {what}: only root and the daemon's user may")]
    NotAllowed {
        /// The caller.
        uid: u32,
        /// What it tried.
        what: &'static str,
    },
    /// There is no plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The weight set refuses.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// Device memory is short.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Residents could not be filled.
    #[error(transparent)]
    Residents(#[from] ResidentError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A shared page could not be made.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// A system call failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The state directory could not be written.
    #[error(transparent)]
    State(#[from] StateError),
    /// The system has no random numbers.
    #[error("no random numbers for a token")]
    Random,
    /// A worker thread ended without an answer.
    #[error("a worker ended without an answer")]
    Worker,
}
