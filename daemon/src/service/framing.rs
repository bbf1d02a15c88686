//! What the gRPC library decides before a service sees a request, put right: refusals in the
//! form of all others, and cancelled streams told from those that have ended.

use flextensord_proto::{
    kind::{Failure, Kind, Origin},
    limit,
};
use http_body_util::BodyExt as _;
use tonic::{
    Code, Status,
    body::Body,
    codegen::http::{Request, Response},
};

/// The library takes a stream that its caller cancelled for one that has ended, so that
/// half a request would pass for a whole one. With this it is an error.
#[must_use]
pub fn unbroken(request: Request<Body>) -> Request<Body> {
    request.map(|body| Body::new(body.map_err(broken)))
}

fn broken(status: Status) -> Status {
    match status.code() {
        Code::Cancelled => {
            let text = "the stream of the request was cancelled";
            Failure::new(Kind::Aborted, Origin::Client, text).into()
        }
        _ => status,
    }
}

/// Gives a refusal without details, because of a message over the limit or one that is no
/// message of the call, the details that all refusals have. Other answers pass.
#[must_use]
pub fn typed(response: Response<Body>) -> Response<Body> {
    let refusal = Status::from_header_map(response.headers());
    match refusal.as_ref().and_then(of_message) {
        Some(failure) => Status::from(failure).into_http(),
        None => response,
    }
}

/// The failure behind a status about a message that could not be read.
#[must_use]
pub fn of_message(status: &Status) -> Option<Failure> {
    if !status.details().is_empty() {
        return None;
    }
    let said = status.message();
    let (value, rule) = match status.code() {
        Code::OutOfRange => (
            "too large",
            format!("at most {} bytes", limit::MESSAGE_BYTES),
        ),
        Code::Internal => ("not readable", "a message of this call".to_owned()),
        _ => return None,
    };
    let text = format!("message is {value}: {rule}: {said}");
    let failure = Failure::new(Kind::InvalidArgument, Origin::Client, text)
        .with("field", "message")
        .with("value", said)
        .with("rule", rule);
    Some(failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_of_the_library_get_details_and_others_keep_theirs() {
        for (status, kind) in [
            (Status::out_of_range("5 MiB"), Some(Kind::InvalidArgument)),
            (
                Status::internal("failed to decode"),
                Some(Kind::InvalidArgument),
            ),
            (Status::unimplemented("no such call"), None),
            (
                Status::from(Failure::new(Kind::Internal, Origin::Daemon, "a fault")),
                Some(Kind::Internal),
            ),
        ] {
            let typed = typed(status.into_http());
            let status = Status::from_header_map(typed.headers()).unwrap();
            assert_eq!(
                Failure::from_status(&status).map(|failure| failure.kind),
                kind
            );
        }
    }
}
