//! Taking up a lease whose stream was lost: with the same daemon, or with its successor, which
//! is handed back what its predecessor gave.

use std::{
    os::fd::OwnedFd,
    sync::{PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use flextensord_device::failpoint::{self, Point};
use flextensord_proto::v1::{
    HandedBack, KeptHold, LeaseEvent, OpenManagerRequest, handed_back::What,
};
use tonic::Streaming;

use super::{Lease, LeaseState, Owned, fetch_bell, open_stream};
use crate::{connection::Client, error::ClientError, request_id};

/// Limit of one attempt: the daemon keeps a lease for five seconds.
const LIMIT: Duration = Duration::from_secs(5);
/// Pause between attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// Takes the lease up, as long as the patience lasts.
pub(super) async fn take_up(
    client: &Client,
    lease: &Lease,
    message: &OpenManagerRequest,
) -> Option<Streaming<LeaseEvent>> {
    let mut begin = Instant::now();
    let mut seen = lease.generation();
    while begin.elapsed() < lease.patience {
        let before = seen;
        let attempted = attempt(client, lease, message, &mut seen).await;
        if seen != before {
            // a successor is there: it has its time
            begin = Instant::now();
        }
        match attempted {
            Ok(stream) => return Some(stream),
            Err(ClientError::Refused(failure)) if !failure.retryable => {
                // what was handed to one successor is unknown to the next
                let answers = client.descriptors(|channel| channel.hello()).await;
                if answers.ok() != Some(seen) {
                    continue;
                }
                lease.end(&format!("it could not be taken up: {failure}"));
                return None;
            }
            Err(error @ ClientError::LeaseLost { .. }) => {
                lease.end(&error.to_string());
                return None;
            }
            // nobody there yet, or not ready
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
    lease.set(LeaseState::DaemonLost);
    None
}

async fn attempt(
    client: &Client,
    lease: &Lease,
    message: &OpenManagerRequest,
    seen: &mut u64,
) -> Result<Streaming<LeaseEvent>, ClientError> {
    // its process must be known to a new daemon before the lease is
    *seen = client.descriptors(|channel| channel.hello()).await?;
    let (mut handed_back, mut holds) = (Vec::new(), Vec::new());
    let mut nothing_mapped = false;
    if *seen != lease.generation() {
        match hand_back(client, lease).await? {
            Some(handed) => handed_back = handed,
            None => nothing_mapped = true,
        }
        let kept = lease.rpc_holds().clone();
        let kept = kept
            .into_iter()
            .map(|(hold, parts)| KeptHold { hold, parts });
        holds = kept.collect();
    }
    let message = OpenManagerRequest {
        request_id: request_id::fresh()?,
        name: lease.name.clone(),
        resume_token: lease.token.0.clone(),
        device: lease.device.clone(),
        handed_back,
        holds,
        nothing_mapped,
        ..message.clone()
    };
    failpoint::pass(Point::ClientResume)?;
    let (opened, stream) = open_stream(client, message, LIMIT).await?;
    failpoint::pass(Point::ClientResumed)?;
    if opened.lease_epoch != lease.epoch {
        return Err(ClientError::LeaseLost {
            manager: lease.name.clone(),
            reason: "the daemon began a new lease in its place".to_owned(),
            context_lost: lease.context_lost(),
        });
    }
    let bell = fetch_bell(client, &opened).await?;
    lease
        .generation
        .store(opened.daemon_generation, Ordering::Release);
    *lease.bell.write().unwrap_or_else(PoisonError::into_inner) = bell;
    Ok(stream)
}

/// Hands a successor what its predecessor gave; none when nothing is mapped.
async fn hand_back(client: &Client, lease: &Lease) -> Result<Option<Vec<HandedBack>>, ClientError> {
    let possessions = {
        let mut owned = lease.owned();
        match &*owned {
            Owned::These(possessions) => possessions.upgrade(),
            Owned::Nothing | Owned::Disclaimed => {
                *owned = Owned::Disclaimed;
                None
            }
        }
    };
    let Some(possessions) = possessions else {
        return Ok(None);
    };
    let handed = client.descriptors(move |channel| {
        let (what, descriptors): (Vec<What>, Vec<OwnedFd>) =
            possessions.descriptors()?.into_iter().unzip();
        // the last of it may unmap memory: on this thread, which may block
        drop(possessions);
        let tickets = channel.hand_back(&descriptors)?;
        let handed = what.into_iter().zip(tickets);
        Ok(Some(
            handed
                .map(|(what, ticket)| HandedBack {
                    what: Some(what),
                    ticket,
                })
                .collect(),
        ))
    });
    handed.await
}
