//! Managers on a GPU, over a driver in host memory and a stand-in for the daemon.

mod captures;
mod endings;
mod orders;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use flextensord_device::cuda::{
    context::Context,
    driver::{Driver, StreamHandle},
    fake::FakeDriver,
    gpu,
    stream::{CallerStream, Stream},
};

use crate::{
    LayerId, blocking,
    fastpath::tests::open,
    tests::stand_in::{StagePart, StandIn, bytes_of},
};

/// How long a stream may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Eight streamed parts of 1000 bytes in a ring with room for two, and a resident one.
fn parts() -> Vec<StagePart> {
    let streamed = (0..8).map(|n| StagePart {
        streamed: true,
        place: 4 + (n % 2) * 4,
        bytes: 1000,
    });
    let resident = StagePart {
        streamed: false,
        place: 100,
        bytes: 300,
    };
    streamed.chain([resident]).collect()
}

/// A manager on a GPU with two streams of its caller.
struct Bench {
    // dropped first: it waits for the streams
    manager: blocking::Manager,
    one: Stream,
    two: Stream,
    driver: Arc<FakeDriver>,
    stand_in: StandIn,
    log: Arc<Mutex<Vec<String>>>,
}

impl Bench {
    fn new(layers: &[&[u32]]) -> Self {
        Self::with(&parts(), layers)
    }

    fn with(parts: &[StagePart], layers: &[&[u32]]) -> Self {
        let stand_in = StandIn::start_on_gpu(parts);
        let driver = stand_in.driver.clone().unwrap();
        let manager = open(&stand_in, layers);
        let context = context(&driver);
        Self {
            manager,
            one: Stream::new(&context).unwrap(),
            two: Stream::new(&context).unwrap(),
            driver,
            stand_in,
            log: Arc::default(),
        }
    }

    fn layer(&self, name: &str) -> LayerId {
        self.manager.layer(name).unwrap()
    }

    fn one(&self) -> CallerStream {
        CallerStream::from(&self.one)
    }

    fn two(&self) -> CallerStream {
        CallerStream::from(&self.two)
    }

    /// Queues a kernel that reads the tensor of `part` after `pause`, and logs whether its
    /// bytes are right.
    fn read_after(&self, stream: CallerStream, part: u32, pause: Duration) {
        let tensor = format!("t{part}");
        let plan = self.manager.plan().unwrap();
        let place = plan.tensors().iter().find(|place| place.name == tensor);
        let place = place.unwrap();
        let address = self.manager.tensor_address(place).unwrap().unwrap() as u64;
        let (expected, log) = (bytes_of(part, place.bytes), self.log.clone());
        let kernel = move |kernel: &flextensord_device::cuda::fake::Kernel<'_>| {
            std::thread::sleep(pause);
            let mut bytes = vec![0; expected.len()];
            let word = match kernel.read(address, &mut bytes) {
                Ok(()) if bytes == expected => "right",
                Ok(()) => "wrong",
                Err(_) => "fault",
            };
            log.lock().unwrap().push(format!("{tensor} {word}"));
        };
        self.driver.run(handle(stream), kernel).unwrap();
    }

    fn read(&self, stream: CallerStream, part: u32) {
        self.read_after(stream, part, Duration::ZERO);
    }

    fn say(&self, stream: CallerStream, word: &'static str) {
        let log = self.log.clone();
        let kernel = move |_: &flextensord_device::cuda::fake::Kernel<'_>| {
            log.lock().unwrap().push(word.to_owned());
        };
        self.driver.run(handle(stream), kernel).unwrap();
    }

    /// Waits until both streams are done.
    fn settle(&self) {
        for stream in [self.one(), self.two()] {
            let done = self.driver.settle(handle(stream), PATIENCE).unwrap();
            assert!(done, "a stream waits on; said so far: {:?}", self.said());
        }
    }

    fn said(&self) -> Vec<String> {
        self.log.lock().unwrap().clone()
    }

    /// Whether all that is queued on a stream is done now.
    fn is_done(&self, stream: CallerStream) -> bool {
        self.driver
            .settle(handle(stream), Duration::from_millis(100))
            .unwrap()
    }
}

fn handle(stream: CallerStream) -> StreamHandle {
    StreamHandle(stream.raw())
}

fn context(driver: &Arc<FakeDriver>) -> Arc<Context> {
    let driver: Arc<dyn Driver> = Arc::clone(driver) as _;
    let gpu = gpu::find(driver.as_ref(), "cuda:0").unwrap();
    Context::open(&driver, &gpu).unwrap()
}

/// A kernel that runs until it is let go.
fn block(bench: &Bench, stream: CallerStream) -> Arc<AtomicBool> {
    let go = Arc::new(AtomicBool::new(false));
    let theirs = go.clone();
    let kernel = move |_: &flextensord_device::cuda::fake::Kernel<'_>| {
        while !theirs.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    bench.driver.run(handle(stream), kernel).unwrap();
    go
}
