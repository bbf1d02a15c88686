//! Failures of managers, and of the rooms that they stand on.

use flextensord_device::{
    control::ControlError,
    cuda::{error::CudaError, registration::RegistrationError},
    device::DeviceError,
};
use flextensord_proto::kind::{Failure, Kind, Origin};

use super::kernel_failure;
use crate::{
    managers::{drain::GivenUp, error::ManagerError},
    plan::PlanError,
    transfer::{memory::MemoryError, residents::ResidentError},
};

/// What helps when host memory cannot be pinned.
const UNPINNED: &str = "raise the limit of locked memory (LimitMEMLOCK=infinity in the unit, \
                        docker run --ulimit memlock=-1), free host memory, lower pin_chunk, or \
                        allow unpinned memory with require_pinned = false";
/// What helps when the driver fails at what it should be able to do.
const FAULTY: &str = "look for Xid in the kernel's log and whether nvidia-smi answers, and start \
                      the daemon anew; limits of memory are not the matter";

impl From<ManagerError> for Failure {
    fn from(error: ManagerError) -> Self {
        use ManagerError as E;
        let text = error.to_string();
        let client = |kind| Failure::new(kind, Origin::Client, text.clone());
        match error {
            E::Name {
                field,
                value,
                source,
            } => client(Kind::InvalidArgument)
                .with("field", field)
                .with("value", value)
                .with("rule", source),
            E::Field { field, value, rule } => client(Kind::InvalidArgument)
                .with("field", field)
                .with("value", value)
                .with("rule", rule),
            E::Taken {
                name,
                pid,
                since_ms,
            } => client(Kind::ManagerTaken)
                .with("field", "name")
                .with("value", &name)
                .with("rule", "a name that no living process of this user owns")
                .with("name", name)
                .with("holder_pid", pid)
                .with("holder_since_ms", since_ms)
                .with(
                    "remedy",
                    "choose another name, or end its process or `flextensorctl terminate` it",
                ),
            E::UnknownManager { field, name } => {
                unknown(text, field, &name, "the name of a manager of this user")
                    .with("manager", &name)
            }
            E::UnknownLayer { manager, layer } => {
                unknown(text, "layer", &layer, "the name of a layer of the manager")
                    .with("manager", manager)
                    .with("layer", &layer)
            }
            E::UnknownTensor {
                layer,
                weight_set,
                tensor,
            } => {
                let rule = "the name of a tensor of the weight set";
                unknown(text, "layers.tensors", &tensor, rule)
                    .with("layer", layer)
                    .with("weight_set", weight_set)
                    .with("tensor", &tensor)
            }
            E::UnknownDevice { name, known } => {
                unknown(text, "device", &name, "the name of a device of the daemon")
                    .with("device", &name)
                    .with("known", known)
            }
            E::Recovering => Failure::new(Kind::Recovering, Origin::Daemon, text),
            E::NotAdopted { name, why } => Failure::new(Kind::LeaseLost, Origin::Daemon, text)
                .with("manager", name)
                .with("reason", why)
                .with("remedy", "open a manager anew"),
            // the value is a secret, of whomever it may be
            E::OwnerGone { pid } => client(Kind::Aborted).with("pid", pid),
            E::LeaseLost => client(Kind::LeaseLost)
                .with("field", "token")
                .with("value", "(not shown)")
                .with("rule", "the token of a manager of this user that is open")
                .with("remedy", "open the manager anew"),
            E::UnknownHold { hold } => client(Kind::UnknownHold)
                .with("field", "hold")
                .with("value", hold)
                .with("rule", "a hold of the manager that was not given back")
                .with("hold", hold),
            E::HoldConflict { layer, part, held } => client(Kind::HoldConflict)
                .with("field", "layer")
                .with("value", &layer)
                .with("rule", "no part overlaps one that is held")
                .with("layer", layer)
                .with("part", part)
                .with("held", held)
                .with("remedy", "release the layer that is held first"),
            E::HeldByFastPath { layer, part } => client(Kind::FailedPrecondition)
                .with("field", "except_parts")
                .with("value", "without it")
                .with("rule", "parts that the fast path holds are named")
                .with("layer", layer)
                .with("part", part),
            E::Registered { name } => {
                let rule = "the token of a manager without a model; each registers one";
                in_no_state(text, name, rule).with(
                    "remedy",
                    "open another manager, or close this one and open it anew",
                )
            }
            E::NotRegistered { name } => {
                in_no_state(text, name, "the token of a manager with a registered model")
            }
            E::Registering { name } => {
                let rule = "the token of a manager that does not register a model";
                let mut failure = in_no_state(text, name, rule);
                failure.retryable = true;
                failure
            }
            E::Deadline {
                layer,
                part,
                waited_ms,
            } => client(Kind::DeadlineExceeded)
                .with("layer", layer)
                .with("part", part)
                .with("waited_ms", waited_ms),
            E::TooMany { limit } => Failure::new(Kind::TooMany, Origin::Daemon, text)
                .with("whose", "all users")
                .with("limit", limit)
                .with("remedy", "raise max_managers or close managers"),
            E::TooManyOfUser { uid, limit } => client(Kind::TooMany)
                .with("whose", format!("user {uid}"))
                .with("limit", limit)
                .with(
                    "remedy",
                    "close managers of this user, or raise max_managers",
                ),
            E::TooManyHolds {
                manager,
                what,
                limit,
            } => client(Kind::TooMany)
                .with("manager", manager)
                .with("what", what)
                .with("limit", limit)
                .with("remedy", "release holds that are no longer read"),
            E::GivenUp(GivenUp::Stopping) => Failure::new(Kind::Draining, Origin::Daemon, text)
                .with("remedy", "try again when the daemon's successor serves"),
            E::GivenUp(GivenUp::Device {
                device,
                source,
                kept,
            }) => {
                let mut failure = driver(Kind::Device, text, &source)
                    .with("device", device)
                    .with("remedy", FAULTY);
                // a successor carries the call out
                failure.retryable = kept;
                failure
            }
            E::Draining => Failure::new(Kind::Draining, Origin::Daemon, text)
                .with("remedy", "try again when the daemon's successor serves"),
            E::NotAllowed { uid, what } => client(Kind::PermissionDenied)
                .with("field", "uid")
                .with("value", uid)
                .with("rule", "root or the daemon's own user")
                .with("uid", uid)
                .with("what", what),
            E::Plan(error) => of_plan(&error),
            E::Weights(error) => of_weight_set(error.into()),
            E::Memory(error) => error.into(),
            E::Residents(ResidentError::Memory(error)) => error.into(),
            E::Residents(ResidentError::Deadline { bytes, .. }) => {
                Failure::new(Kind::DeadlineExceeded, Origin::Daemon, text).with("bytes", bytes)
            }
            E::Device(error) => device(error),
            E::Control(ControlError::Kernel(error)) | E::Kernel(error) => kernel_failure(&error),
            E::Control(_) | E::Worker | E::Random | E::State(_) => {
                Failure::new(Kind::Internal, Origin::Daemon, text)
            }
        }
    }
}

/// A manager whose model is not as the call needs it.
fn in_no_state(text: String, manager: String, rule: &str) -> Failure {
    Failure::new(Kind::FailedPrecondition, Origin::Client, text)
        .with("field", "token")
        .with("value", format!("that of manager {manager:?}"))
        .with("rule", rule)
        .with("manager", manager)
}

/// What the request names and nobody has.
fn unknown(text: String, field: &str, name: &str, rule: &str) -> Failure {
    Failure::new(Kind::NotFound, Origin::Client, text)
        .with("field", field)
        .with("value", name)
        .with("rule", rule)
}

/// A weight set that a manager's request names: the field is another there.
fn of_weight_set(mut failure: Failure) -> Failure {
    if let Some(field) = failure.details.get_mut("field")
        && field == "name"
    {
        "weight_set".clone_into(field);
    }
    failure
}

fn of_plan(error: &PlanError) -> Failure {
    let text = error.to_string();
    match error {
        PlanError::Infeasible { budget, least } => {
            Failure::new(Kind::BudgetInfeasible, Origin::Client, text)
                .with("available", budget)
                .with("wanted", least)
                .with("limit", budget)
                .with(
                    "remedy",
                    "give the manager at least the least feasible budget, or smaller layers",
                )
        }
        PlanError::UnknownPart { .. }
        | PlanError::Overflow { .. }
        | PlanError::Alias { .. }
        | PlanError::Quantity { .. }
        | PlanError::Times { .. }
        | PlanError::Count { .. } => Failure::new(Kind::InvalidArgument, Origin::Client, text),
    }
}

impl From<MemoryError> for Failure {
    fn from(error: MemoryError) -> Self {
        let text = error.to_string();
        match error {
            MemoryError::Exhausted {
                device,
                wanted,
                available,
                total,
                reclaiming,
            } => Failure::new(Kind::DeviceMemory, Origin::Daemon, text)
                .with("device", device)
                .with("wanted", wanted)
                .with("available", available)
                .with("limit", total)
                .with("reclaiming", reclaiming)
                .with(
                    "remedy",
                    if reclaiming > 0 {
                        "end the processes of ended leases, which still hold memory of the \
                         device, close managers on it, or ask for a smaller budget"
                    } else {
                        "close managers on the device, or ask for a smaller budget"
                    },
                ),
            MemoryError::Device(error) => device(error),
            MemoryError::Random => Failure::new(Kind::Internal, Origin::Kernel, text),
        }
    }
}

/// What the driver said, by number.
fn driver(kind: Kind, text: String, error: &CudaError) -> Failure {
    let failure = Failure::new(kind, Origin::Driver, text);
    match (error.operation(), error.code()) {
        (Some(operation), Some(code)) => failure.with("operation", operation).with("code", code),
        _ => failure,
    }
}

/// A device that failed.
#[must_use]
pub fn device(error: DeviceError) -> Failure {
    let text = error.to_string();
    match error {
        DeviceError::Exhausted {
            device,
            wanted,
            free,
            total,
        } => Failure::new(Kind::DeviceMemory, Origin::Driver, text)
            .with("device", device)
            .with("wanted", wanted)
            .with("available", free)
            .with("limit", total)
            .with(
                "remedy",
                "close managers on the device, or ask for a smaller budget",
            ),
        DeviceError::Refused {
            device,
            wanted,
            free,
            total,
            source,
        } => driver(Kind::DeviceMemory, text, &source)
            .with("device", device)
            .with("wanted", wanted)
            .with("available", free)
            .with("limit", total)
            .with(
                "remedy",
                "see nvidia-smi for other processes on the device, close managers on it, or ask \
                 for a smaller budget",
            ),
        DeviceError::Kernel(error) => kernel_failure(&error),
        DeviceError::Registration(RegistrationError::Chunk {
            offset,
            bytes,
            total,
            source,
            ..
        }) => {
            let (kind, remedy) = if source.refuses_pinning() {
                (Kind::Pinning, UNPINNED)
            } else {
                (Kind::Device, FAULTY)
            };
            driver(kind, text, &source)
                .with("offset", offset)
                .with("bytes", bytes)
                .with("total", total)
                .with("remedy", remedy)
        }
        DeviceError::Registration(RegistrationError::Cancelled { .. }) => {
            Failure::new(Kind::Aborted, Origin::Client, text)
        }
        DeviceError::Cuda(error) => driver(Kind::Device, text, &error),
        DeviceError::Label { .. }
        | DeviceError::ForeignMemory
        | DeviceError::Ended { .. }
        | DeviceError::Range(_) => Failure::new(Kind::Device, Origin::Driver, text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::error::WeightError;

    #[test]
    fn a_limit_on_managers_says_whose_it_is() {
        for (error, whose) in [
            (ManagerError::TooMany { limit: 4 }, "all users"),
            (ManagerError::TooManyOfUser { uid: 7, limit: 2 }, "user 7"),
        ] {
            let failure = Failure::from(error);
            assert_eq!(failure.kind, Kind::TooMany);
            assert_eq!(failure.details["whose"], whose);
            assert!(failure.message.contains("the limit"), "{failure}");
        }
    }

    #[test]
    fn refusals_by_right_or_state_name_field_value_and_rule() {
        let name = || "m".to_owned();
        let what = "drain the daemon";
        let weights = WeightError::NotOwner { name: name() };
        for failure in [
            Failure::from(ManagerError::NotAllowed { uid: 7, what }),
            ManagerError::Registered { name: name() }.into(),
            ManagerError::NotRegistered { name: name() }.into(),
            ManagerError::Registering { name: name() }.into(),
            weights.into(),
        ] {
            for detail in ["field", "value", "rule"] {
                assert!(failure.details.contains_key(detail), "{detail}: {failure}");
            }
        }
    }
}
