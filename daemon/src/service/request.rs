//! Checks that all requests share.

use flextensord_proto::{
    kind::{Failure, Kind, Origin},
    limit, name,
};

/// A field that breaks a rule.
pub fn field(name: &str, value: impl std::fmt::Display, rule: &str) -> Failure {
    Failure::new(
        Kind::InvalidArgument,
        Origin::Client,
        format!("{name} is {value}: {rule}"),
    )
    .with("field", name)
    .with("value", value)
    .with("rule", rule)
}

/// Checks the id of a request.
///
/// # Errors
/// When its length is out of bounds.
pub fn id(id: &str) -> Result<(), Failure> {
    if limit::REQUEST_ID_BYTES.contains(&id.len()) {
        return Ok(());
    }
    let rule = "16 to 128 bytes, chosen anew for each call and kept for its retries";
    Err(field(
        "request_id",
        format!("{} bytes long", id.len()),
        rule,
    ))
}

/// Checks the name of a layer or tensor.
///
/// # Errors
/// When it breaks a rule.
pub fn qualified(field_name: &str, value: &str) -> Result<(), Failure> {
    name::check_qualified(value)
        .map_err(|error| field(field_name, format!("{:?}", cut(value)), &error.to_string()))
}

/// The beginning of a name, for a message.
#[must_use]
pub fn cut(value: &str) -> String {
    value.chars().take(128).collect()
}

/// A worker thread that ended without an answer.
#[must_use]
pub fn worker() -> Failure {
    Failure::new(
        Kind::Internal,
        Origin::Daemon,
        "a worker ended without an answer",
    )
}
