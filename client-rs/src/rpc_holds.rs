//! Acquire and release over gRPC, for a client that cannot use the fast path. Both
//! count in one table, so they may be mixed.
//!
//! One task sends the calls in the order in which they were begun. An acquire counts
//! its parts before it is sent, so that a release in the meantime leaves them alone.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use flextensord_device::failpoint::{self, Point};
use flextensord_proto::v1::{AcquireRequest, ReleaseRequest, offload_client::OffloadClient};
use tokio::sync::{mpsc, oneshot};

use crate::{
    connection::{Client, request},
    error::ClientError,
    gpu::Mark,
    hold::Hold,
    lease::Lease,
    plan::LayerId,
    plane::{Ended, Plane},
    request_id,
};

/// How much longer than the daemon's own limit a call may take.
const MARGIN: Duration = Duration::from_secs(5);
/// Pause before an acquire that met a restart of the daemon is made again.
const AGAIN_AFTER: Duration = Duration::from_millis(50);
/// Longest wait that the daemon takes on.
const LONGEST: Duration = Duration::from_secs(600);

/// What a hold over RPC has beside its layer.
#[derive(Debug)]
pub(crate) struct RpcPart {
    /// Its name at the daemon; none when the acquire failed.
    pub(crate) hold: Option<u64>,
    /// The parts that the daemon took for it.
    pub(crate) own: Vec<u32>,
}

/// Where the answer of a release goes.
pub(crate) type Reply = oneshot::Sender<Result<(), ClientError>>;

/// A call to make.
#[derive(Debug)]
pub(crate) enum Job {
    Acquire {
        message: AcquireRequest,
        limit: Duration,
        /// On a GPU, behind what was queued before.
        after: Option<Mark>,
        reservation: Reservation,
        reply: oneshot::Sender<Result<Hold, ClientError>>,
    },
    Release {
        hold: u64,
        keep_parts: Vec<u32>,
        /// On a GPU, behind what reads the parts.
        after: Option<Mark>,
        reply: Option<Reply>,
    },
}

/// Parts that are counted for an acquire under way. Dropped, they are given back.
#[derive(Debug)]
pub(crate) struct Reservation {
    plane: Arc<Plane>,
    layer: LayerId,
    own: Vec<u32>,
    kept: bool,
}

impl Reservation {
    fn into_hold(mut self, hold: u64) -> Hold {
        self.kept = true;
        let rpc = RpcPart {
            hold: Some(hold),
            own: std::mem::take(&mut self.own),
        };
        // a successor is told of it
        self.plane.lease.note_hold(hold, rpc.own.clone());
        Hold::new(self.plane.clone(), self.layer, Some(rpc), None)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.kept {
            self.plane.park(Ended {
                layer: self.layer,
                rpc: Some(RpcPart {
                    hold: None,
                    own: std::mem::take(&mut self.own),
                }),
                on: None,
            });
        }
        self.plane.rpc_busy.store(false, Ordering::Release);
    }
}

impl Plane {
    /// Holds a layer by RPC; the daemon waits for its bytes at most for `limit`.
    pub(crate) async fn acquire_rpc(
        self: &Arc<Self>,
        id: LayerId,
        limit: Duration,
    ) -> Result<Hold, ClientError> {
        failpoint::pass(Point::ClientCall)?;
        let (message, after, reservation) = self.reserve(id, limit)?;
        let (reply, answer) = oneshot::channel();
        self.send(Job::Acquire {
            message,
            limit,
            after,
            reservation,
            reply,
        });
        let begin = Instant::now();
        let acquired = answer.await;
        self.note_wait(begin.elapsed());
        failpoint::cross(Point::ClientCalled);
        if self.owner.is_current() {
            self.settle_parked();
        }
        acquired.unwrap_or(Err(ClientError::State("the connection is closed")))
    }

    /// Counts the parts of a layer before they are asked for.
    fn reserve(
        self: &Arc<Self>,
        id: LayerId,
        limit: Duration,
    ) -> Result<(AcquireRequest, Option<Mark>, Reservation), ClientError> {
        let layer = self.enter(id)?;
        if self.rpc_busy.load(Ordering::Acquire) {
            return Err(ClientError::OrderBroken {
                layer: layer.name.clone(),
            });
        }
        let limit = limit.min(LONGEST);
        let milliseconds = u32::try_from(limit.as_millis().max(1)).unwrap_or(u32::MAX);
        let mut message = AcquireRequest {
            request_id: request_id::fresh()?,
            token: self.lease.token.0.clone(),
            layer: layer.name.clone(),
            timeout_ms: milliseconds,
            except_parts: Vec::new(),
        };
        let after = match &self.gpu {
            Some(gpu) => Some(self.order_rpc(gpu, None)?),
            None => None,
        };
        let mut own = Vec::new();
        let mut table = self.table();
        self.check_overlap(&table, id, layer)?;
        for &part in &layer.streamed {
            if table.add(part) {
                own.push(part);
            } else {
                message.except_parts.push(part);
            }
        }
        self.rpc_busy.store(true, Ordering::Release);
        drop(table);
        let reservation = Reservation {
            plane: self.clone(),
            layer: id,
            own,
            kept: false,
        };
        Ok((message, after, reservation))
    }
}

/// Makes the calls, one after the other, until nobody can send any more.
pub(crate) async fn serve(
    client: Client,
    lease: Arc<Lease>,
    mut jobs: mpsc::UnboundedReceiver<Job>,
) {
    while let Some(job) = jobs.recv().await {
        match job {
            Job::Acquire {
                message,
                limit,
                after,
                reservation,
                reply,
            } => {
                let begin = Instant::now();
                let acquired = match queued_before(after.as_ref(), limit).await {
                    Ok(()) => {
                        let left = limit.saturating_sub(begin.elapsed());
                        acquire(&client, &lease, &message, left, &reservation).await
                    }
                    Err(error) => Err(error),
                };
                let acquired = acquired.map(|hold| reservation.into_hold(hold));
                // nobody waits any more: the hold is dropped, and so given back
                let _ = reply.send(acquired);
            }
            Job::Release {
                hold,
                keep_parts,
                after,
                mut reply,
            } => {
                let limit = client.options().call_timeout;
                // a release says that all reads are over: it is made when they are, however
                // long that takes; or never, for a lease that is over
                while let Err(error) = queued_before(after.as_ref(), limit).await {
                    if !matches!(error, ClientError::Deadline { .. }) || lease.check().is_err() {
                        // a broken context reads no more, and a lost lease has no holds
                        break;
                    }
                    tell(&lease, reply.take(), Err(error));
                }
                let released = release(&client, &lease, Which::Hold(hold), keep_parts).await;
                tell(&lease, reply, released);
            }
        }
    }
}

/// Waits for what was queued on a GPU before a call.
async fn queued_before(after: Option<&Mark>, limit: Duration) -> Result<(), ClientError> {
    let Some(mark) = after else {
        return Ok(());
    };
    if mark.reached_within(limit).await? {
        return Ok(());
    }
    Err(ClientError::Deadline {
        what: "the work queued on the GPU before a call".to_owned(),
        limit,
    })
}

/// Tells how a release went, or keeps its error where nobody waits for it.
fn tell(lease: &Lease, reply: Option<Reply>, released: Result<(), ClientError>) {
    match (reply, released) {
        (Some(reply), released) => {
            let _ = reply.send(released);
        }
        (None, Err(error)) => lease.note_release_error(error),
        (None, Ok(())) => {}
    }
}

/// The hold to release.
enum Which {
    Hold(u64),
    /// That of an acquire, by its request id, whose answer never came, and the parts that it
    /// may have taken.
    Lost(String, Vec<u32>),
}

async fn acquire(
    client: &Client,
    lease: &Lease,
    message: &AcquireRequest,
    limit: Duration,
    reservation: &Reservation,
) -> Result<u64, ClientError> {
    let begin = Instant::now();
    let mut message = message.clone();
    let answer = loop {
        let limit = limit.min(LONGEST) + MARGIN;
        // once: another daemon would find its parts in use
        let again = message.clone();
        let answer = client.call_once("Acquire", limit, |channel| async move {
            let message = request(again, limit);
            Ok(OffloadClient::new(channel)
                .acquire(message)
                .await?
                .into_inner())
        });
        let error = match answer.await {
            Ok(answer) => break answer,
            Err(error) => error,
        };
        if !matches!(error, ClientError::Refused(_)) {
            // it may have been granted all the same, and its daemon be gone: whoever answers
            // next gives back what it took; refused means that nothing was
            let lost = Which::Lost(message.request_id.clone(), reservation.own.clone());
            let _: Result<(), _> = release(client, lease, lost, Vec::new()).await;
        }
        if !error.is_of_a_restart() || begin.elapsed() >= limit || lease.check().is_err() {
            return Err(error);
        }
        tokio::time::sleep(AGAIN_AFTER).await;
        message.request_id = request_id::fresh()?;
    };
    let version = reservation.plane.plan.version();
    if answer.plan_version != version {
        return Err(ClientError::Protocol {
            call: "Acquire",
            reason: format!(
                "it holds parts of plan {}, in force is {version}",
                answer.plan_version
            ),
        });
    }
    Ok(answer.hold)
}

async fn release(
    client: &Client,
    lease: &Lease,
    which: Which,
    keep_parts: Vec<u32>,
) -> Result<(), ClientError> {
    // the daemon drops all holds of a lease that is over
    lease.check()?;
    let limit = client.options().call_timeout;
    let (hold, acquire_request_id, acquired_parts) = match which {
        Which::Hold(hold) => (hold, String::new(), Vec::new()),
        Which::Lost(id, parts) => (0, id, parts),
    };
    let message = ReleaseRequest {
        request_id: request_id::fresh()?,
        token: lease.token.0.clone(),
        hold,
        keep_parts,
        acquire_request_id,
        acquired_parts,
    };
    let answer = lease.call(client, "Release", limit, |channel| {
        let message = request(message.clone(), limit);
        async move {
            Ok(OffloadClient::new(channel)
                .release(message)
                .await?
                .into_inner())
        }
    });
    let released = answer.await.map(drop);
    // kept where it may not have been released: a successor is told of it then
    if released.is_ok() {
        lease.forget_hold(hold);
    }
    released
}
