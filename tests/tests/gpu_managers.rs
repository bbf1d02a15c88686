//! Managers on a GPU and the real daemon, each over a driver in host memory of its own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use flextensord_client::{
    Budget, CallerStream, ClientError, ConnectOptions, Driver, LayerSpec, LeaseState, LoadOptions,
    OpenOptions, blocking,
};
use flextensord_device::cuda::{
    context::Context,
    driver::StreamHandle,
    fake::{FakeDriver, FakeSettings, Kernel},
    gpu,
    stream::Stream,
};
use flextensord_tests::{
    checkpoint,
    daemon::{Daemon, options},
    process::eventually,
};
use nix::sys::signal::Signal;

const PATIENCE: Duration = Duration::from_secs(20);

struct Scene {
    daemon: Daemon,
    driver: Arc<FakeDriver>,
    client: blocking::Client,
    stream: Stream,
    bytes: HashMap<String, Vec<u8>>,
    layers: Vec<LayerSpec>,
}

impl Scene {
    fn new() -> Self {
        Self::with(&[], Duration::from_secs(2))
    }

    fn with(flags: &[&str], patience: Duration) -> Self {
        let daemon = Daemon::start_on_fake("gpus=1,memory=256MiB", flags).unwrap();
        let tensors = checkpoint::layered(20, 2, 256 << 10);
        let path = daemon.scratch().join("m.safetensors");
        checkpoint::write(&path, &tensors).unwrap();
        let driver = FakeDriver::new(FakeSettings::default());
        driver.faults().refuse_import_twice(Some(1));
        let client = blocking::Client::connect(ConnectOptions {
            driver: Some(driver.clone()),
            patience,
            ..options(&daemon.socket())
        })
        .unwrap();
        client
            .load(&path, "m", &LoadOptions::default(), |_| ())
            .unwrap();
        let mut layers: Vec<LayerSpec> = Vec::new();
        for tensor in &tensors {
            let name = checkpoint::layer_of(&tensor.name);
            match layers.last_mut().filter(|layer| layer.name == name) {
                Some(layer) => layer.tensors.push(tensor.name.clone()),
                None => layers.push(LayerSpec {
                    name,
                    tensors: vec![tensor.name.clone()],
                }),
            }
        }
        let dynamic: Arc<dyn Driver> = driver.clone();
        let gpu = gpu::find(driver.as_ref(), "cuda:0").unwrap();
        let stream = Stream::new(&Context::open(&dynamic, &gpu).unwrap()).unwrap();
        let bytes = tensors.into_iter().map(|tensor| (tensor.name, tensor.data));
        Self {
            daemon,
            driver,
            client,
            stream,
            bytes: bytes.collect(),
            layers,
        }
    }

    fn open(&self, name: &str) -> blocking::Manager {
        let named = OpenOptions {
            name: name.to_owned(),
            ..OpenOptions::default()
        };
        let mut manager = self.client.open(named).unwrap();
        manager
            .register("m", &self.layers, Budget::Bytes(6 << 20))
            .unwrap();
        manager
    }

    fn stream(&self) -> CallerStream {
        CallerStream::from(&self.stream)
    }

    /// Queues a kernel behind each layer that compares its bytes.
    fn pass(&self, manager: &blocking::Manager, log: &Arc<Mutex<Vec<&'static str>>>) {
        for layer in &self.layers {
            let id = manager.layer(&layer.name).unwrap();
            let hold = manager.acquire_on(id, self.stream()).unwrap();
            for tensor in hold.tensors() {
                let address = tensor.address().unwrap().unwrap() as u64;
                let (expected, log) = (self.bytes[tensor.name()].clone(), log.clone());
                let compare = move |kernel: &Kernel<'_>| {
                    let mut seen = vec![0; expected.len()];
                    let read = kernel.read(address, &mut seen);
                    log.lock().unwrap().push(match read {
                        Ok(()) if seen == expected => "right",
                        Ok(()) => "wrong",
                        Err(_) => "fault",
                    });
                };
                let stream = StreamHandle(self.stream().raw());
                self.driver.run(stream, compare).unwrap();
            }
        }
    }
}

#[test]
fn two_managers_of_one_process_share_residents_and_read_right_bytes() {
    let scene = Scene::new();
    let managers = [scene.open("a"), scene.open("b")];
    let streamed = managers[0].plan().unwrap().stream_order().len();
    assert!(streamed > 0, "nothing streams");
    let log = Arc::default();
    for _ in 0..3 {
        for manager in &managers {
            scene.pass(manager, &log);
        }
    }
    let stream = StreamHandle(scene.stream().raw());
    assert!(scene.driver.settle(stream, PATIENCE).unwrap());
    assert_eq!(*log.lock().unwrap(), vec!["right"; 3 * 2 * 40]);
    // and by the host
    for layer in &scene.layers {
        let id = managers[0].layer(&layer.name).unwrap();
        let hold = managers[0].acquire_on(id, scene.stream()).unwrap();
        for tensor in hold.tensors() {
            assert!(tensor.equals(&scene.bytes[tensor.name()]).unwrap());
        }
    }
    for manager in managers {
        manager.close().unwrap();
    }
    assert_eq!(scene.driver.counts().live_allocations, 0);
}

#[test]
fn a_captured_pass_is_replayed_without_a_call() {
    let scene = Scene::new();
    let manager = scene.open("a");
    let log = Arc::default();
    let stream = StreamHandle(scene.stream().raw());
    scene.driver.begin_capture(stream).unwrap();
    scene.pass(&manager, &log);
    let graph = scene.driver.end_capture(stream).unwrap();
    for _ in 0..10 {
        scene.driver.launch(&graph, stream).unwrap();
    }
    assert!(scene.driver.settle(stream, PATIENCE).unwrap());
    assert_eq!(*log.lock().unwrap(), vec!["right"; 10 * 40]);
    manager.close().unwrap();
}

#[test]
fn a_killed_daemon_without_a_successor_lets_no_kernel_read_what_is_not_there() {
    let mut scene = Scene::new();
    let manager = scene.open("a");
    let log: Arc<Mutex<Vec<&str>>> = Arc::default();
    scene.pass(&manager, &log);
    scene.daemon.signal(Signal::SIGKILL).unwrap();
    scene.daemon.wait().unwrap();
    for _ in 0..2 {
        scene.pass(&manager, &log);
    }
    eventually("the fault", PATIENCE, || {
        log.lock().unwrap().contains(&"fault").then_some(())
    })
    .unwrap();
    assert!(!log.lock().unwrap().contains(&"wrong"));
    let id = manager.layer(&scene.layers[0].name).unwrap();
    let error = manager.acquire_on(id, scene.stream()).unwrap_err();
    assert!(
        matches!(
            error,
            ClientError::DaemonLost {
                context_lost: true,
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("restart the process"), "{error}");
}

#[test]
fn a_killed_daemon_with_a_successor_costs_no_byte_and_no_error() {
    let mut scene = Scene::with(&["--on-stop", "keep"], PATIENCE);
    let managers = [scene.open("a"), scene.open("b")];
    let allocated = || scene.daemon.status().unwrap().devices[0].allocated_bytes;
    let before = allocated();
    let log: Arc<Mutex<Vec<&str>>> = Arc::default();
    for manager in &managers {
        scene.pass(manager, &log);
    }
    for _ in 0..3 {
        scene.daemon.crash().unwrap();
        // queued while nobody serves
        for manager in &managers {
            scene.pass(manager, &log);
        }
        scene.daemon.restart().unwrap();
    }
    let stream = StreamHandle(scene.stream().raw());
    assert!(scene.driver.settle(stream, PATIENCE).unwrap());
    assert_eq!(*log.lock().unwrap(), vec!["right"; 4 * 2 * 40]);
    for manager in &managers {
        let live = || (manager.lease_state() == LeaseState::Live).then_some(());
        eventually("the lease is taken up", PATIENCE, live).unwrap();
    }
    let status = scene.daemon.status().unwrap();
    assert_eq!(status.devices[0].allocated_bytes, before);
    let pinned = || {
        let host = scene.daemon.status().ok()?.host?;
        (host.pinned_bytes > 0 && !host.degraded).then_some(())
    };
    eventually("what was taken over is pinned", PATIENCE, pinned).unwrap();
    for manager in managers {
        manager.close().unwrap();
    }
    let empty = || {
        let status = scene.daemon.status().ok()?;
        (status.devices[0].allocated_bytes == 0).then_some(())
    };
    eventually("its memory is back", PATIENCE, empty).unwrap();
}

#[test]
fn memory_that_a_client_keeps_over_the_end_of_its_lease_is_counted_until_it_lets_go() {
    let scene = Scene::new();
    let device = || scene.daemon.status().unwrap().devices.remove(0);
    let total = device().total_bytes;
    let manager = scene.open("a");
    let held = device().allocated_bytes;
    assert!(held > 0 && device().reclaiming_bytes == 0);
    let mut terminate = scene.daemon.ctl(&["terminate", "a"]).unwrap();
    assert!(terminate.output().unwrap().status.success());
    let counted = || {
        let device = device();
        (device.allocated_bytes == 0 && device.reclaiming_bytes == held).then_some(())
    };
    eventually("it is counted", PATIENCE, counted).unwrap();
    assert_eq!(device().free_bytes, total - held);
    // others go on beside it
    let mut next = scene.client.open(OpenOptions::default()).unwrap();
    assert!(
        next.register("m", &scene.layers, Budget::Bytes(6 << 20))
            .is_ok()
    );
    next.close().unwrap();
    assert_eq!(device().reclaiming_bytes, held);
    drop(manager);
    let back = || {
        let device = device();
        (device.reclaiming_bytes == 0 && device.free_bytes == total).then_some(())
    };
    eventually("it is back", PATIENCE, back).unwrap();
}

/// Case 15: a client that cannot map the daemon's memory, as in a container without the GPU.
#[test]
fn memory_that_cannot_be_mapped_is_refused_with_a_hint_and_nothing_stays() {
    let scene = Scene::new();
    scene.driver.faults().refuse_import(Some(201));
    let mut manager = scene.client.open(OpenOptions::default()).unwrap();
    let budget = Budget::Bytes(6 << 20);
    let error = manager.register("m", &scene.layers, budget).unwrap_err();
    assert!(matches!(error, ClientError::Import { .. }), "{error:?}");
    assert!(error.to_string().contains("201"), "{error}");
    assert!(
        error
            .remedy()
            .is_some_and(|text| text.contains("container"))
    );
    assert_eq!(scene.driver.counts().live_allocations, 0);
    drop(manager);
    let empty = || {
        let status = scene.daemon.status().ok()?;
        let gone = status.managers.is_empty() && status.devices[0].allocated_bytes == 0;
        gone.then_some(())
    };
    eventually("nothing is left at the daemon", PATIENCE, empty).unwrap();
    // nothing is wrong for who comes next
    scene.driver.faults().refuse_import(None);
    let log = Arc::default();
    scene.pass(&scene.open("next"), &log);
    let stream = StreamHandle(scene.stream().raw());
    assert!(scene.driver.settle(stream, PATIENCE).unwrap());
    assert_eq!(*log.lock().unwrap(), vec!["right"; 40]);
}
