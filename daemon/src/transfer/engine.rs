//! The engine: one thread a device that fills the rings of its managers by turns. It
//! never waits for a client.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::SeqCst},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use flextensord_device::{
    device::{Device, DeviceError, Memory, Ticket},
    doorbell::{Doorbell, wait_any},
    journal::JournalFile,
    kernel::KernelError,
    notice::NoticePage,
};

use super::stream::{Stream, StreamSpec};

/// Most bytes queued on a device: a copy out of order waits for no more than that.
const QUEUED_BYTES: u64 = 128 << 20;
/// Shortest and longest sleep where clients cannot ring.
const POLL: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(25));
/// What part of the time since the last work a sleep there may be, beyond `BRISK`: who calls
/// from the host rings at once, but a graph that is launched after a rest finds a full ring,
/// and its second turn may begin that much later, once. A wake-up costs 40 to 70 us of a core
/// (virtual machines), every 10 ms that is 0.7 % of one.
const PATIENCE: u32 = 200;
/// Sleeps up to this need no such reason.
const BRISK: Duration = Duration::from_millis(2);
/// Longest sleep while copies are under way there: their places are wanted again soon.
const BUSY: Duration = Duration::from_micros(50);
/// How long before a copy arrives there the engine stays awake, to publish it at once: a
/// sleep ends later than it should.
const EARLY: Duration = Duration::from_micros(40);
/// How long after the last work it does so no more: a copy that takes that long is not about
/// to arrive.
const LATE: Duration = Duration::from_millis(100);
/// How long a stream whose copy was refused is left alone.
const REFUSED: Duration = Duration::from_secs(1);
/// Precision of the sleeps, instead of the 50 µs that threads have (prctl(2)).
const SLACK_NS: u64 = 1000;
/// Sleep where clients ring: only a guard against a lost ring.
const RUNG: Duration = Duration::from_millis(250);

/// What an ended stream leaves: nothing will be copied into its ring any more.
#[derive(Debug)]
pub struct Detached {
    /// The ring.
    pub ring: Arc<dyn Memory>,
    /// The journal.
    pub journal: JournalFile,
}

enum Command {
    Attach(Box<StreamSpec>),
    Detach {
        manager: u64,
        reply: mpsc::Sender<Option<Detached>>,
    },
    End,
}

/// An engine; dropping it ends its thread.
#[derive(Debug)]
pub struct Engine {
    commands: Mutex<mpsc::Sender<Command>>,
    bell: Arc<Doorbell>,
    asleep: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts the engine of `device`, whose sleep word on the notice page is number
    /// `index`.
    ///
    /// # Errors
    /// When the thread or its doorbell cannot be made.
    pub fn start(
        index: usize,
        device: Arc<dyn Device>,
        notice: Arc<NoticePage>,
    ) -> Result<Self, KernelError> {
        let (commands, inbox) = mpsc::channel();
        let bell = Arc::new(Doorbell::new()?);
        let asleep = Arc::new(AtomicBool::new(false));
        let work = Work {
            index,
            notice,
            inbox,
            bell: Arc::clone(&bell),
            asleep: Arc::clone(&asleep),
            streams: Vec::new(),
            leaving: Vec::new(),
            clock: 0,
            device,
        };
        let name = format!("engine-{}", work.device.info().name);
        let thread = thread::Builder::new()
            .name(name)
            .spawn(move || work.run())
            .map_err(|e| KernelError::new("start an engine thread", e))?;
        Ok(Self {
            commands: Mutex::new(commands),
            bell,
            asleep,
            thread: Some(thread),
        })
    }

    /// Begins to fill a manager's ring.
    pub fn attach(&self, spec: StreamSpec) {
        self.send(Command::Attach(Box::new(spec)));
    }

    /// Ends the filling of a manager's ring and waits until its last copy is done.
    /// `None` when the manager has no ring here or the engine has ended.
    pub fn detach(&self, manager: u64) -> Option<Detached> {
        let (reply, answer) = mpsc::channel();
        self.send(Command::Detach { manager, reply });
        // the engine answers once the device has completed what is queued, or drops the
        // sender when it ends
        answer.recv().ok().flatten()
    }

    /// Whether the engine sleeps.
    #[must_use]
    pub fn is_asleep(&self) -> bool {
        self.asleep.load(SeqCst)
    }

    fn send(&self, command: Command) {
        let commands: MutexGuard<'_, _> =
            self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        // a closed inbox means that the engine has ended; a reply sender goes with it
        let _: Result<(), _> = commands.send(command);
        drop(commands);
        self.bell.ring();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.send(Command::End);
        if let Some(thread) = self.thread.take() {
            let _: thread::Result<()> = thread.join();
        }
    }
}

/// A stream with its turn.
struct Turn {
    stream: Stream,
    /// Bytes served so far, divided by the weight.
    served: u64,
    /// Whether it had something to do when it was last asked.
    active: bool,
    /// Until when it is left alone because a copy was refused.
    refused: Option<Instant>,
}

struct Leaving {
    stream: Stream,
    until: Ticket,
    reply: mpsc::Sender<Option<Detached>>,
}

struct Work {
    index: usize,
    device: Arc<dyn Device>,
    notice: Arc<NoticePage>,
    inbox: mpsc::Receiver<Command>,
    bell: Arc<Doorbell>,
    asleep: Arc<AtomicBool>,
    streams: Vec<Turn>,
    leaving: Vec<Leaving>,
    /// What the last served stream had been served: a stream that comes back from
    /// idleness begins there, so that it has no arrears to claim.
    clock: u64,
}

impl Work {
    fn run(mut self) {
        let mut pause = POLL.0;
        let mut last_work = Instant::now();
        if !self.device.info().clients_can_ring {
            // without it the sleeps are longer, and nothing else is wrong
            let _: nix::Result<()> = nix::sys::prctl::set_timerslack(SLACK_NS);
        }
        let mut asleep = false;
        loop {
            if !self.obey() {
                return;
            }
            if self.work() {
                if std::mem::take(&mut asleep) {
                    self.say_asleep(false);
                }
                pause = POLL.0;
                last_work = Instant::now();
                continue;
            }
            let limit = self.rest(pause, last_work);
            if limit.is_zero() {
                thread::yield_now();
                continue;
            }
            // nobody need ring for less
            if limit > BUSY && !asleep {
                self.say_asleep(true);
                asleep = true;
                // once more: a client that changed a word before it could see us asleep
                // did not ring
                continue;
            }
            let mut bells = vec![self.bell.as_ref(), self.device.completion_bell().as_ref()];
            bells.extend(
                self.streams
                    .iter()
                    .map(|turn| turn.stream.spec.doorbell.as_ref()),
            );
            if wait_any(&bells, limit) {
                for bell in bells {
                    bell.clear();
                }
                self.say_asleep(false);
                asleep = false;
                pause = POLL.0;
            }
            let longest = (last_work.elapsed() / PATIENCE).clamp(BRISK, POLL.1);
            pause = (pause * 2).min(longest);
        }
    }

    /// How long to sleep now; zero when a copy is about to arrive. `pause` is how long it
    /// would be with nothing under way, where clients cannot ring.
    fn rest(&self, pause: Duration, last_work: Instant) -> Duration {
        if self.device.info().clients_can_ring {
            return RUNG;
        }
        match self.device.next_arrival() {
            Some(_) if last_work.elapsed() > LATE => BUSY,
            Some(arrival) => pause.min(BUSY).min(arrival.saturating_sub(EARLY)),
            // nobody looks at words; what is left of a stream is waited for above
            None if self.streams.is_empty() => RUNG,
            None => pause,
        }
    }

    fn say_asleep(&self, asleep: bool) {
        self.asleep.store(asleep, SeqCst);
        self.notice.set_asleep(self.index, asleep);
    }

    /// Carries commands out; `false` when the engine is to end.
    fn obey(&mut self) -> bool {
        loop {
            match self.inbox.try_recv() {
                Ok(Command::Attach(spec)) => {
                    let stream = Stream::new(*spec);
                    self.streams.push(Turn {
                        stream,
                        served: self.clock,
                        active: false,
                        refused: None,
                    });
                }
                Ok(Command::Detach { manager, reply }) => {
                    let found = self
                        .streams
                        .iter()
                        .position(|t| t.stream.spec.manager == manager);
                    match found {
                        Some(at) => {
                            let stream = self.streams.swap_remove(at).stream;
                            let until = stream.last();
                            self.leaving.push(Leaving {
                                stream,
                                until,
                                reply,
                            });
                        }
                        // the asker may be gone
                        None => drop(reply.send(None)),
                    }
                }
                Ok(Command::End) | Err(mpsc::TryRecvError::Disconnected) => return false,
                Err(mpsc::TryRecvError::Empty) => return true,
            }
        }
    }

    /// Does all there is to do now. `false` when there was nothing.
    fn work(&mut self) -> bool {
        let mut worked = self.let_go();
        for turn in &self.streams {
            turn.stream.tell_rpc();
        }
        while self.device.queued_bytes() < QUEUED_BYTES {
            match self.serve_one() {
                true => worked = true,
                false => break,
            }
        }
        worked
    }

    /// Serves the stream that was served least, of those that have something to do.
    fn serve_one(&mut self) -> bool {
        let mut order: Vec<usize> = (0..self.streams.len()).collect();
        order.sort_by_key(|at| self.streams[*at].served);
        for at in order {
            let turn = &mut self.streams[at];
            if turn.refused.is_some_and(|until| Instant::now() < until) {
                continue;
            }
            if !turn.active {
                turn.served = turn.served.max(self.clock);
            }
            let dry = self.device.queued_bytes() == 0;
            match turn.stream.step() {
                Ok(Some(bytes)) => {
                    if dry {
                        tracing::trace!(manager = turn.stream.spec.manager, "the link was idle");
                        turn.stream.spec.counters.count(|c| &c.link_ran_dry, 1);
                    }
                    turn.active = true;
                    self.clock = turn.served;
                    turn.served += bytes.max(4096) / u64::from(turn.stream.spec.weight.max(1));
                    return true;
                }
                Ok(None) => turn.active = false,
                Err(error) => {
                    turn.active = false;
                    turn.refused = Some(Instant::now() + REFUSED);
                    report(turn.stream.spec.manager, &error);
                }
            }
        }
        false
    }

    fn let_go(&mut self) -> bool {
        let completed = self.device.completed();
        let (done, waiting) = self
            .leaving
            .drain(..)
            .partition(|leaving: &Leaving| leaving.until <= completed);
        self.leaving = waiting;
        let done: Vec<Leaving> = done;
        let some = !done.is_empty();
        for Leaving { stream, reply, .. } in done {
            let ring = Arc::clone(&stream.spec.ring);
            let journal = stream.into_journal();
            // the asker may be gone; then ring and journal are dropped here
            drop(reply.send(Some(Detached { ring, journal })));
        }
        some
    }
}

fn report(manager: u64, error: &DeviceError) {
    tracing::error!(manager, %error, "copy refused");
}
