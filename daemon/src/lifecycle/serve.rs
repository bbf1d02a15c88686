//! The daemon's run: take the instance, serve, drain, stop.

use std::{io, time::Duration};

use flextensord_device::{
    failpoint::{self, Point},
    notice::NoticePhase,
};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
    task::JoinError,
};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Server, server::Router};
use tonic_health::{
    ServingStatus,
    server::{HealthReporter, health_reporter},
};
use tower::{layer::layer_fn, util::MapRequestLayer};

use super::{
    descriptor_limit,
    devices::Drivers,
    exit::Exit,
    incoming,
    instance::{Instance, Sockets, StartError},
    panic,
    rooms::{self, Rooms},
};
use crate::{
    admission::Room,
    configuration::Settings,
    phase::{Life, Phase},
    service::framing,
};

/// How long connections that are still open may hold up a stop that has drained: a
/// client's watch of our health would otherwise hold it up for ever.
const CLOSE: Duration = Duration::from_millis(300);
/// Most calls of a connection that are cancelled and not yet cleared away.
const RESETS: usize = 4096;
/// The name that stands for the whole daemon in `grpc.health.v1`.
const WHOLE: &str = "";

/// Runs the daemon until it is told to stop, and says how that went.
#[must_use]
pub fn run(settings: &Settings, drivers: &Drivers) -> Exit {
    let panicked = panic::install_hook();
    let outcome = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .max_blocking_threads(rooms::BLOCKING_THREADS)
        .build()
        .map_err(|error| StartError::setup("start the runtime", error))
        .and_then(|runtime| {
            let outcome = runtime.block_on(serve(settings, drivers, panicked));
            // a blocked thread must not hold up the end
            runtime.shutdown_timeout(CLOSE);
            outcome
        });
    match outcome {
        Ok(()) => Exit::Ok,
        Err(error) => {
            tracing::error!(exit = error.exit().code(), "{error}");
            error.exit()
        }
    }
}

async fn serve(
    settings: &Settings,
    drivers: &Drivers,
    panicked: watch::Receiver<bool>,
) -> Result<(), StartError> {
    let life = Life::new();
    // a signal counts from before anything is bound
    let mut signals = StopSignals::new()?;
    let descriptors = descriptor_limit::raise();
    tracing::debug!(limit = descriptors, "open descriptors");
    let mut instance = Instance::prepare(settings)?;
    let refused = |error| StartError::setup("go on", error);
    failpoint::pass(Point::Bind).map_err(refused)?;
    let Sockets { grpc, channel } = instance.bind()?;
    failpoint::pass(Point::Bound).map_err(refused)?;

    let (health, health_service) = health_reporter();
    set_health(&health, ServingStatus::NotServing).await;
    turn_on_panic(health.clone(), panicked);
    failpoint::pass(Point::Leftovers).map_err(refused)?;
    let rooms = Rooms::new(&instance, drivers)?;
    // a client that cancels many calls at once must not lose its lease with its connection
    let mut server = Server::builder()
        .http2_max_pending_accept_reset_streams(Some(RESETS))
        .layer(MapRequestLayer::new(framing::unbroken))
        .layer(layer_fn(framing::Typed::new));
    let router = with_reflection(server.add_service(health_service))?;
    let router = rooms.serve_in(router, &instance, &life);
    let closing = CancellationToken::new();
    let limits = incoming::LIMITS.within(descriptors);
    let room = Room::new(limits, nix::unistd::geteuid().as_raw());
    let incoming = incoming::connections(grpc, room);
    let served = router.serve_with_incoming_shutdown(incoming, closing.clone().cancelled_owned());
    let mut server = tokio::spawn(served);
    let mut channel = tokio::spawn(rooms.channel(descriptors).serve(channel, closing.clone()));

    rooms.notice(NoticePhase::Serving);
    advance(&life, Phase::Serving)?;
    set_health(&health, ServingStatus::Serving).await;
    tracing::info!(
        instance = instance.settings.instance,
        generation = instance.generation,
        socket = %instance.settings.grpc_socket().display(),
        "serving"
    );
    let grace = instance.settings.drain_grace;
    let keep = instance.settings.keep_on_stop;
    let outcome = tokio::select! {
        signal = signals.next() => {
            tracing::info!(signal, "told to stop");
            // who is kept for a successor need not be waited for
            rooms.begin_drain(if keep { Duration::ZERO } else { grace });
            Ok(())
        }
        () = rooms.drain_begun() => Ok(()),
        ended = &mut server => Err(ended_early(ended.map(|e| e.map_err(io::Error::other)))),
        ended = &mut channel => Err(ended_early(ended)),
        failure = rooms.upkeep() => Err(StartError::setup("go on", failure)),
    };
    set_health(&health, ServingStatus::NotServing).await;
    if outcome.is_ok() {
        advance(&life, Phase::Draining)?;
        tokio::select! {
            () = rooms.finish_drain(keep) => {}
            // told twice, somebody is in a hurry
            signal = signals.next() => {
                tracing::info!(signal, "told to stop at once");
                rooms.begin_drain(Duration::ZERO);
                rooms.finish_drain(keep).await;
            }
        }
    }
    rooms.give_up();
    closing.cancel();
    advance(&life, Phase::Stopping)?;
    if tokio::time::timeout(CLOSE, &mut server).await.is_err() {
        tracing::debug!("close connections that are still open");
        server.abort();
    }
    failpoint::cross(Point::Stop);
    rooms.close(keep);
    failpoint::cross(Point::Stopped);
    instance.close();
    advance(&life, Phase::Stopped)?;
    outcome
}

fn ended_early(ended: Result<io::Result<()>, JoinError>) -> StartError {
    match ended {
        Ok(Ok(())) => StartError::setup("serve", "a server ended by itself"),
        Ok(Err(error)) => StartError::setup("serve", error),
        Err(error) => StartError::setup("serve", error),
    }
}

/// Says the same of every service and of the whole.
async fn set_health(health: &HealthReporter, status: ServingStatus) {
    for service in rooms::SERVICES.into_iter().chain([WHOLE]) {
        health.set_service_status(service, status).await;
    }
}

fn advance(life: &Life, phase: Phase) -> Result<(), StartError> {
    life.advance(phase)
        .map_err(|error| StartError::setup("go on", error))
}

fn turn_on_panic(health: HealthReporter, mut panicked: watch::Receiver<bool>) {
    tokio::spawn(async move {
        if panicked.wait_for(|told| *told).await.is_ok() {
            set_health(&health, ServingStatus::NotServing).await;
        }
    });
}

/// Adds both versions of server reflection: common tools still ask for the older one.
fn with_reflection<L>(router: Router<L>) -> Result<Router<L>, StartError> {
    let builder = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(flextensord_proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let refused = |error| StartError::setup("describe the services", error);
    Ok(router
        .add_service(builder().build_v1().map_err(refused)?)
        .add_service(builder().build_v1alpha().map_err(refused)?))
}

/// SIGTERM, SIGINT, and SIGHUP: there is no configuration to read again, and a terminal
/// that closes should end the daemon as cleanly as anybody else.
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl StopSignals {
    fn new() -> Result<Self, StartError> {
        let handle =
            |kind| signal(kind).map_err(|error| StartError::setup("handle signals", error));
        Ok(Self {
            terminate: handle(SignalKind::terminate())?,
            interrupt: handle(SignalKind::interrupt())?,
            hangup: handle(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.hangup.recv() => "SIGHUP",
        }
    }
}
