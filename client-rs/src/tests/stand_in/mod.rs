//! Stands in for the daemon in tests: both sockets, one manager at a time, a thread that
//! fills parts by the real rules of the hand-over. Part `n` holds one tensor `t<n>`.

mod engine;
mod memory;
mod service;

use std::{
    collections::HashMap,
    os::fd::{AsFd as _, OwnedFd},
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use flextensord_device::{
    control::{ControlIdentity, ControlPage},
    cuda::fake::{FakeDriver, FakeSettings},
    descriptor,
    doorbell::Doorbell,
    notice::NoticePage,
};
use flextensord_proto::v1::{
    ChannelAnswer, ChannelRequest, LeaseEnded, LeaseEvent, Offered, PutRequest, Redeemed, Refused,
    Welcome, channel_answer::Answer, channel_request::Request, lease_ended::Reason,
    lease_event::Event,
};
use prost::Message as _;
use tokio::sync::mpsc;
use tonic::Status;

use crate::{Address, ConnectOptions};

pub(crate) use engine::bytes_of;
use memory::StageMemory;

/// A part of the stage's plan.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StagePart {
    pub(crate) streamed: bool,
    /// Where it lies, in units of 256 bytes.
    pub(crate) place: u64,
    pub(crate) bytes: u64,
}

/// Everything that the threads of the stand-in share.
pub(crate) struct Stage {
    pub(crate) parts: Vec<StagePart>,
    control: ControlPage,
    memory: StageMemory,
    notice: Mutex<NoticePage>,
    doorbell: Doorbell,
    stopped: AtomicBool,
    /// Parts that the engine must not fill.
    pub(crate) withheld: Mutex<Vec<u32>>,
    state: Mutex<State>,
    pub(crate) acquires_failing: AtomicU32,
    pub(crate) resumes_refused: AtomicBool,
}

#[derive(Default)]
pub(crate) struct State {
    tickets: HashMap<Vec<u8>, OwnedFd>,
    next: u64,
    layers: Vec<(String, Vec<u32>)>,
    holds: HashMap<u64, Vec<u32>>,
    lease: Option<mpsc::UnboundedSender<Result<LeaseEvent, Status>>>,
    pub(crate) resumed: u32,
    pub(crate) passes: u64,
    pub(crate) closed: bool,
    pub(crate) offered: Vec<String>,
    pub(crate) put: Vec<PutRequest>,
    pub(crate) request_ids: Vec<String>,
}

impl Stage {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// A ticket for a descriptor.
    fn ticket(&self, descriptor: OwnedFd) -> Vec<u8> {
        let mut state = self.state();
        state.next += 1;
        let ticket = state.next.to_le_bytes().to_vec();
        state.tickets.insert(ticket.clone(), descriptor);
        ticket
    }
}

/// A running stand-in. Dropped, it dies like a killed daemon.
pub(crate) struct StandIn {
    pub(crate) stage: Arc<Stage>,
    /// The client's driver, where the device is a GPU.
    pub(crate) driver: Option<Arc<FakeDriver>>,
    directory: tempfile::TempDir,
    runtime: Option<tokio::runtime::Runtime>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl StandIn {
    pub(crate) fn start(parts: &[StagePart]) -> Self {
        Self::start_on(parts, StageMemory::host(), None)
    }

    /// With memory of a GPU; the client has a driver of its own, as another process has.
    pub(crate) fn start_on_gpu(parts: &[StagePart]) -> Self {
        let driver = FakeDriver::new(FakeSettings::default());
        Self::start_on(parts, StageMemory::gpu(), Some(driver))
    }

    fn start_on(parts: &[StagePart], memory: StageMemory, driver: Option<Arc<FakeDriver>>) -> Self {
        let identity = ControlIdentity {
            lease_epoch: 7,
            plan_version: 1,
            parts: u32::try_from(parts.len()).unwrap(),
        };
        let stage = Arc::new(Stage {
            parts: parts.to_vec(),
            control: ControlPage::create(identity).unwrap(),
            memory,
            notice: Mutex::new(NoticePage::create(1).unwrap()),
            doorbell: Doorbell::new().unwrap(),
            stopped: AtomicBool::new(false),
            withheld: Mutex::new(Vec::new()),
            state: Mutex::new(State::default()),
            acquires_failing: AtomicU32::new(0),
            resumes_refused: AtomicBool::new(false),
        });
        let directory = tempfile::tempdir().unwrap();
        let listener = descriptor::bind_listener(&directory.path().join("fd.sock")).unwrap();
        let channel = {
            let stage = stage.clone();
            thread::spawn(move || serve_descriptors(&stage, &listener))
        };
        let engine = {
            let stage = stage.clone();
            thread::spawn(move || engine::run(&stage))
        };
        let mut stand_in = Self {
            stage,
            driver,
            directory,
            runtime: None,
            threads: vec![channel, engine],
        };
        stand_in.serve();
        stand_in
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("flextensord.sock")
    }

    /// Begins to serve gRPC.
    pub(crate) fn serve(&mut self) {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let _: std::io::Result<()> = std::fs::remove_file(self.socket());
        let guard = runtime.enter();
        let listener = tokio::net::UnixListener::bind(self.socket()).unwrap();
        drop(guard);
        runtime.spawn(service::serve(self.stage.clone(), listener));
        self.runtime = Some(runtime);
    }

    /// Stops to serve gRPC, as if killed; words and memory stay.
    pub(crate) fn kill(&mut self) {
        self.stage.state().lease = None;
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
        let _: std::io::Result<()> = std::fs::remove_file(self.socket());
    }

    /// What a successor makes anew.
    pub(crate) fn renew_notice(&self) {
        *self.stage.notice.lock().unwrap() = NoticePage::create(2).unwrap();
        self.stage.doorbell.ring();
    }

    /// Ends the lease as an operator does.
    pub(crate) fn terminate(&self) {
        let ended = LeaseEnded {
            reason: Reason::Terminated.into(),
        };
        let event = Some(Event::Ended(ended));
        self.lease_event(Some(LeaseEvent { event }));
    }

    /// Sends an event on the lease's stream, or ends the stream.
    pub(crate) fn lease_event(&self, event: Option<LeaseEvent>) {
        let mut state = self.stage.state();
        match event {
            Some(event) => drop(state.lease.as_ref().unwrap().send(Ok(event))),
            None => state.lease = None,
        }
    }

    pub(crate) fn options(&self) -> ConnectOptions {
        ConnectOptions {
            address: Address::from(self.socket().as_path()),
            patience: Duration::from_secs(2),
            driver: self.driver.clone().map(|driver| driver as _),
            ..ConnectOptions::default()
        }
    }

    /// The state of a part's word, for a look from the other side.
    pub(crate) fn parts_in_use(&self) -> u32 {
        self.stage.control.parts_in_use()
    }

    pub(crate) fn withhold(&self, parts: &[u32]) {
        *self.stage.withheld.lock().unwrap() = parts.to_vec();
        self.stage.doorbell.ring();
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.kill();
        self.stage.stopped.store(true, Ordering::SeqCst);
        self.stage.doorbell.ring();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Waits until `done`, for at most ten seconds.
pub(crate) fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if done() {
            return;
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("{what} did not happen");
}

fn serve_descriptors(stage: &Stage, listener: &OwnedFd) {
    let mut connections: Vec<OwnedFd> = Vec::new();
    while !stage.stopped.load(Ordering::SeqCst) {
        if let Ok(connection) = descriptor::accept(listener.as_fd()) {
            connections.push(connection);
        }
        connections.retain(|connection| match descriptor::receive(connection.as_fd()) {
            Ok((packet, _)) if packet.is_empty() => false,
            Ok((packet, _)) => {
                let request = ChannelRequest::decode(packet.as_slice()).unwrap();
                let (answer, given) = answer(stage, request.request.unwrap());
                let answer = ChannelAnswer {
                    answer: Some(answer),
                };
                let given: Vec<_> = given.iter().map(|fd| fd.as_fd()).collect();
                let packet = answer.encode_to_vec();
                descriptor::send(connection.as_fd(), &packet, &given).is_ok()
            }
            Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
        });
        thread::sleep(Duration::from_micros(500));
    }
}

fn answer(stage: &Stage, request: Request) -> (Answer, Option<OwnedFd>) {
    match request {
        Request::Hello(_) => (Answer::Welcome(Welcome::default()), None),
        Request::Redeem(redeem) => match stage.state().tickets.remove(&redeem.ticket) {
            Some(descriptor) => (Answer::Redeemed(Redeemed::default()), Some(descriptor)),
            None => {
                let refused = Refused {
                    kind: "NOT_FOUND".to_owned(),
                    message: "no such ticket".to_owned(),
                    ..Refused::default()
                };
                (Answer::Refused(refused), None)
            }
        },
        Request::Offer(offer) => {
            let tickets = offer.file_names.iter().map(|name| name.as_bytes().to_vec());
            let tickets = tickets.collect();
            stage.state().offered.extend(offer.file_names);
            (Answer::Offered(Offered { tickets }), None)
        }
    }
}
