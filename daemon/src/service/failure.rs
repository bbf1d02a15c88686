//! The one place.
use crate::{channel::ticket::TicketError, weights::error::WeightError};
use flextensord_proto::kind::{Failure, Kind, Origin};
impl From<WeightError> for Failure {
    fn from(e: WeightError) -> Self {
        Failure::new(Kind::Internal, Origin::Daemon, e.to_string())
    }
}
impl From<TicketError> for Failure {
    fn from(e: TicketError) -> Self {
        Failure::new(Kind::Internal, Origin::Daemon, e.to_string())
    }
}

pub use super::failure_managers::{device, kernel};
