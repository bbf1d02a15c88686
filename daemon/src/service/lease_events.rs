//! The stream that is a lease.

use std::time::Duration;

use flextensord_proto::{
    kind::Failure,
    v1::{Heartbeat, LeaseEvent, Opened, lease_event::Event},
};
use tokio::time;
use tokio_stream::{Stream, StreamExt as _};
use tonic::Status;

use crate::managers::{drain::GivenUp, error::ManagerError, lease::OpenLease};

/// How often a living daemon says so on a lease.
const HEARTBEAT: Duration = Duration::from_secs(5);

/// The lease as its owner sees it: `opened`, then events and heartbeats until the end.
pub(super) fn lease_events(
    opened: Opened,
    lease: OpenLease,
    given_up: impl Future<Output = GivenUp> + Send + 'static,
) -> impl Stream<Item = Result<LeaseEvent, Status>> + Send {
    let first = LeaseEvent {
        event: Some(Event::Opened(opened)),
    };
    let events = async_stream(lease, given_up);
    tokio_stream::once(Ok(first)).chain(events)
}

fn async_stream(
    lease: OpenLease,
    given_up: impl Future<Output = GivenUp> + Send + 'static,
) -> impl Stream<Item = Result<LeaseEvent, Status>> + Send {
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        let mut events = lease.events;
        let failed = async {
            match given_up.await {
                // a stop is told as an event, or not at all to who is kept for a successor
                GivenUp::Stopping => std::future::pending().await,
                failed => Failure::from(ManagerError::from(failed)),
            }
        };
        tokio::pin!(failed);
        loop {
            let event = tokio::select! {
                // the caller is gone: dropping the lease's stream begins the grace time
                () = sender.closed() => return,
                event = events.events.recv() => match event {
                    Some(event) => event,
                    None => return,
                },
                failure = &mut failed => {
                    // a caller that is gone needs no word
                    let _: Result<(), _> = sender.send(Err(failure.into())).await;
                    return;
                }
                () = time::sleep(HEARTBEAT) => {
                    LeaseEvent { event: Some(Event::Heartbeat(Heartbeat {})) }
                }
            };
            let last = matches!(event.event, Some(Event::Ended(_)));
            if sender.send(Ok(event)).await.is_err() || last {
                return;
            }
        }
    });
    tokio_stream::wrappers::ReceiverStream::new(receiver)
}
