//! What the gRPC library decides before a service sees a request, put right: refusals in the
//! form of all others, and cancelled streams told from those that have ended.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

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
use tower::Service;

use super::request::cut;

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

/// Gives a refusal without details, because of a call that is unknown, a message over the
/// limit or one that is no message of the call, the details that all refusals have. Other
/// answers pass.
#[derive(Debug, Clone)]
pub struct Typed<S> {
    inner: S,
}

impl<S> Typed<S> {
    /// Around `inner`.
    pub fn new(inner: S) -> Self {
        Self { inner }
    }
}

impl<S> Service<Request<Body>> for Typed<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let path = request.uri().path().to_owned();
        let answer = self.inner.call(request);
        Box::pin(async move { Ok(typed(answer.await?, &path)) })
    }
}

fn typed(response: Response<Body>, path: &str) -> Response<Body> {
    let Some(refusal) = Status::from_header_map(response.headers()) else {
        return response;
    };
    let failure = of_call(&refusal, path).or_else(|| of_message(&refusal));
    match failure.map(Status::from) {
        Some(mut status) => {
            // such as the encodings that the daemon takes
            *status.metadata_mut() = refusal.metadata().clone();
            status.into_http()
        }
        None => response,
    }
}

/// The failure behind a status about a call that the daemon does not have.
fn of_call(status: &Status, path: &str) -> Option<Failure> {
    if status.code() != Code::Unimplemented || !status.details().is_empty() {
        return None;
    }
    let path = cut(path);
    let (field, value, rule) = match status.message() {
        "" => (
            "method",
            path.as_str(),
            "a call of the services that the daemon has",
        ),
        said => ("encoding", said, "one of those in grpc-accept-encoding"),
    };
    let text = format!("{field} is {value}: {rule}");
    let failure = Failure::new(Kind::Unimplemented, Origin::Client, text)
        .with("field", field)
        .with("value", value)
        .with("rule", rule);
    Some(failure)
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
            (Status::unimplemented(""), Some(Kind::Unimplemented)),
            (
                Status::unimplemented("no such encoding"),
                Some(Kind::Unimplemented),
            ),
            (Status::not_found("of another service"), None),
            (
                Status::from(Failure::new(Kind::Internal, Origin::Daemon, "a fault")),
                Some(Kind::Internal),
            ),
        ] {
            let typed = typed(status.into_http(), "/a.B/C");
            let status = Status::from_header_map(typed.headers()).unwrap();
            assert_eq!(
                Failure::from_status(&status).map(|failure| failure.kind),
                kind
            );
        }
    }
}
