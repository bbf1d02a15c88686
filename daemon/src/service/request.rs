//! What all requests share: checks, and an end to streams that fall silent.

use std::time::Duration;

use flextensord_proto::{
    kind::{Failure, Kind, Origin},
    limit, name,
};
use tokio::time::timeout;
use tokio_stream::{Stream, StreamExt as _};
use tonic::Status;

use super::framing;

/// How long the stream of a request may be silent between two messages.
pub const SILENCE: Duration = Duration::from_secs(60);

/// The rule that a stream of requests breaks which ends before it has begun.
pub const NO_HEADER: &str = "the stream ended without a message; the first one is the header";

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
    id_of("request_id", id)
}

/// Checks the id of a request, in the field of that name.
///
/// # Errors
/// When its length is out of bounds.
pub fn id_of(field_name: &str, id: &str) -> Result<(), Failure> {
    if limit::REQUEST_ID_BYTES.contains(&id.len()) {
        return Ok(());
    }
    let rule = "16 to 128 bytes, chosen anew for each call and kept for its retries";
    Err(field(field_name, format!("{} bytes long", id.len()), rule))
}

/// Checks the name of a manager.
///
/// # Errors
/// When it breaks a rule.
pub fn name(field_name: &str, value: &str) -> Result<(), Failure> {
    name::check(value)
        .map_err(|error| field(field_name, format!("{:?}", cut(value)), &error.to_string()))
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

/// The next message of the stream of `what`; `None` at its end.
///
/// # Errors
/// `ABORTED` when the stream breaks off or none comes for [`SILENCE`], `INVALID_ARGUMENT`
/// for one that cannot be read.
pub async fn next_message<T>(
    stream: &mut (impl Stream<Item = Result<T, Status>> + Unpin),
    what: &str,
) -> Result<Option<T>, Failure> {
    next_within(stream, what, SILENCE).await
}

async fn next_within<T>(
    stream: &mut (impl Stream<Item = Result<T, Status>> + Unpin),
    what: &str,
    silence: Duration,
) -> Result<Option<T>, Failure> {
    let aborted = |reason: String| {
        let text = format!("{what} was given up: {reason}");
        Failure::new(Kind::Aborted, Origin::Client, text)
    };
    match timeout(silence, stream.next()).await {
        Err(_) => {
            let seconds = silence.as_secs();
            let failure = aborted(format!("no message for {seconds} s, the limit"));
            Err(failure.with("limit", format!("{seconds} s")))
        }
        Ok(message) => message.transpose().map_err(|status| {
            Failure::from_status(&status)
                .or_else(|| framing::of_message(&status))
                .unwrap_or_else(|| aborted(format!("its stream broke off: {}", status.message())))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(10);

    #[tokio::test]
    async fn a_stream_that_sends_its_header_and_then_nothing_is_ended() {
        let header = tokio_stream::once(Ok::<_, Status>("header"));
        let mut stream = header.chain(tokio_stream::pending());
        let mut next = async || next_within(&mut stream, "registration", SHORT).await;
        assert_eq!(next().await.unwrap(), Some("header"));
        let failure = next().await.unwrap_err();
        assert_eq!(failure.kind, Kind::Aborted);
        assert!(
            failure.message.contains("registration") && failure.details.contains_key("limit"),
            "{failure}"
        );
    }

    #[tokio::test]
    async fn a_stream_that_breaks_off_is_told_from_one_that_has_ended() {
        let broken = |status| tokio_stream::once(Err::<(), _>(status));
        for (status, kind) in [
            (Status::unknown("reset"), Kind::Aborted),
            (Status::out_of_range("5 MiB"), Kind::InvalidArgument),
            (
                Failure::new(Kind::LeaseLost, Origin::Client, "typed").into(),
                Kind::LeaseLost,
            ),
        ] {
            let ended = next_within(&mut broken(status), "put", SHORT).await;
            assert_eq!(ended.unwrap_err().kind, kind);
        }
        let mut empty = tokio_stream::empty::<Result<(), Status>>();
        assert_eq!(next_within(&mut empty, "put", SHORT).await, Ok(None));
    }
}
