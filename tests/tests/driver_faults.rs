//! Faults of GPU drivers that users have met, each as a scenario on the real daemon over
//! a driver in host memory.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::{
    fs,
    path::PathBuf,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use flextensord_client::{ClientError, LoadOptions, LoadStep, kind::Kind};
use flextensord_device::cuda::{
    driver::Driver,
    fake::{FakeDriver, FakeSettings},
    gpu,
};
use flextensord_tests::{
    checkpoint,
    daemon::{Daemon, FAKE_DRIVER, SOON},
    process::{binary, eventually},
};
use nix::sys::signal::Signal;

const DRIVER: &str = "gpus=1,memory=256MiB";
fn on_fake(faults: &str, flags: &[&str]) -> Daemon {
    Daemon::start_on_fake(&format!("{DRIVER}{faults}"), flags).unwrap()
}

/// A checkpoint of about ten mebibytes in forty tensors.
fn ten_mebibytes(daemon: &Daemon) -> PathBuf {
    let path = daemon.scratch().join("m.safetensors");
    checkpoint::write(&path, &checkpoint::layered(20, 2, 256 << 10)).unwrap();
    path
}

fn load(daemon: &Daemon, name: &str) -> Result<(), ClientError> {
    let path = ten_mebibytes(daemon);
    let client = daemon.client().unwrap();
    client
        .load(&path, name, &LoadOptions::default(), |_| ())
        .map(drop)
}

fn refusal(daemon: &Daemon, name: &str) -> flextensord_client::kind::Failure {
    match load(daemon, name) {
        Err(ClientError::Refused(failure)) => failure,
        other => panic!("{other:?}"),
    }
}

/// Case 1: one call of the driver takes no more than so much.
#[test]
fn a_segment_larger_than_a_call_of_the_driver_takes_is_pinned_in_chunks() {
    let faults = ",register_limit=4194304";
    let daemon = on_fake(faults, &["--pin-chunk", "3MiB"]);
    load(&daemon, "m").unwrap();
    let status = daemon.status().unwrap();
    let set = &status.weight_sets[0];
    assert_eq!(set.pinned_bytes, set.segment_bytes.next_multiple_of(4096));
    assert_eq!(status.host.unwrap().pinned_bytes, set.pinned_bytes);
    drop(daemon);
    // whoever leaves the chunks too large is told which one, and its size
    let daemon = on_fake(faults, &["--pin-chunk", "8MiB"]);
    let failure = refusal(&daemon, "m");
    assert_eq!(failure.kind, Kind::Pinning);
    assert!(failure.message.contains("chunk 1 of 2"), "{failure}");
    assert_eq!(daemon.segments(), Vec::<String>::new());
}

/// Case 1: a chunk in the middle is refused.
#[test]
fn when_a_chunk_is_refused_nothing_of_the_segment_stays() {
    let daemon = on_fake(",register_fail=3:2", &["--pin-chunk", "3MiB"]);
    let failure = refusal(&daemon, "m");
    assert_eq!(failure.kind, Kind::Pinning);
    assert_eq!(failure.details["bytes"], (3 << 20).to_string());
    assert_eq!(failure.details["code"], "2");
    for remedy in ["LimitMEMLOCK", "--ulimit memlock=-1", "require_pinned"] {
        assert!(failure.details["remedy"].contains(remedy), "{failure}");
    }
    assert_eq!(daemon.segments(), Vec::<String>::new());
    assert_eq!(daemon.status().unwrap().devices[0].failed_drops, 0);
    // only that one call was to fail
    load(&daemon, "m").unwrap();
}

/// A context that is broken, or a call that is wrong, is no matter of limits.
#[test]
fn a_driver_that_fails_while_pinning_is_not_taken_for_a_limit_of_memory() {
    for code in ["700", "1", "201"] {
        let daemon = on_fake(&format!(",register_fail=1:{code}"), &[]);
        let failure = refusal(&daemon, "m");
        assert_eq!(failure.kind, Kind::Device, "{failure}");
        assert!(!failure.retryable, "{failure}");
        assert_eq!(failure.details["code"], code);
        assert_eq!(failure.details["operation"], "cuMemHostRegister");
        assert!(!failure.details["remedy"].contains("MEMLOCK"), "{failure}");
    }
}

/// Case 2: what is not pinned says so, and its error shows nowhere else.
#[test]
fn an_unpinned_set_is_refused_or_shown_as_degraded_and_its_error_stays_with_it() {
    let daemon = on_fake(",register_fail=1:801", &["--require-pinned", "false"]);
    load(&daemon, "m").unwrap();
    let status = daemon.status().unwrap();
    assert_eq!(status.weight_sets[0].pinned_bytes, 0);
    assert!(status.weight_sets[0].degraded.contains("801"), "{status:?}");
    assert!(status.host.unwrap().degraded);
    let other = daemon.scratch().join("n.safetensors");
    checkpoint::write(&other, &checkpoint::layered(2, 2, 5000)).unwrap();
    let client = daemon.client().unwrap();
    let loaded = client.load(&other, "n", &LoadOptions::default(), |_| ());
    assert!(loaded.unwrap().set.pinned_bytes > 0);
    assert_eq!(daemon.status().unwrap().devices[0].failure, "");
}

/// Case 8: a low limit of locked memory is no reason by itself.
#[test]
fn a_low_limit_of_locked_memory_stops_nobody_whom_the_driver_serves() {
    let directory = flextensord_tests::daemon::directory().unwrap();
    let run = directory.path().join("run");
    let mut limited = Command::new("prlimit");
    limited
        .args(["--memlock=65536"])
        .arg(binary("flextensord-on-fake").unwrap())
        .args(["serve", "--device", "cuda", "--instance", "low"])
        .arg("--runtime-dir")
        .arg(&run)
        .arg("--shm-dir")
        .arg(directory.path())
        .env(FAKE_DRIVER, DRIVER);
    let mut child = flextensord_tests::process::Guarded(limited.spawn().unwrap());
    let socket = run.join("low/flextensord.sock");
    let client = eventually("the daemon serves", SOON, || {
        flextensord_client::blocking::Client::connect(flextensord_tests::daemon::options(&socket))
            .ok()
            .filter(|client| client.status().is_ok_and(|s| s.phase == "serving"))
    })
    .unwrap();
    let path = directory.path().join("m.safetensors");
    checkpoint::write(&path, &checkpoint::layered(4, 2, 300_000)).unwrap();
    let loaded = client.load(&path, "m", &LoadOptions::default(), |_| ());
    assert!(loaded.unwrap().set.pinned_bytes > 2_000_000);
    child.kill().unwrap();
}

/// Case 16: nobody waits in the dark, and a stop does not wait for the whole.
#[test]
fn pinning_tells_how_far_it_is_and_a_stop_in_the_middle_undoes_it() {
    let mut daemon = on_fake(",register_ms=200", &["--pin-chunk", "512KiB"]);
    let path = ten_mebibytes(&daemon);
    let socket = daemon.socket();
    let (told, figures) = std::sync::mpsc::channel();
    let loading = std::thread::spawn(move || {
        let options = flextensord_tests::daemon::options(&socket);
        let client = flextensord_client::blocking::Client::connect(options).unwrap();
        let note = |step: LoadStep| {
            let _: Result<(), _> = told.send(step);
        };
        client.load(&path, "m", &LoadOptions::default(), note)
    });
    // all is read long before the first chunks are pinned, so these are pinned bytes
    let mut pinned = Vec::new();
    while pinned.len() < 4 {
        let step: LoadStep = figures.recv_timeout(SOON).unwrap();
        // figures of the reading may come first: those of the pinning begin anew
        if pinned.last().is_some_and(|last| *last > step.bytes_done) {
            pinned.clear();
        }
        if step.bytes_done > 0 && step.bytes_done < step.bytes_total {
            pinned.push(step.bytes_done);
        }
    }
    // others are served meanwhile
    assert_eq!(daemon.status().unwrap().phase, "serving");
    let begin = Instant::now();
    daemon.signal(Signal::SIGTERM).unwrap();
    assert!(daemon.wait().unwrap().success());
    assert!(begin.elapsed() < Duration::from_secs(5));
    assert!(loading.join().unwrap().is_err());
    assert_eq!(daemon.segments(), Vec::<String>::new());
}

/// Case 30: a context that is broken for good ends the daemon instead of every request.
#[test]
fn a_broken_context_turns_health_and_ends_the_daemon_and_the_next_start_is_clean() {
    let mut daemon = on_fake(",break_at_copy=3:700", &[]);
    load(&daemon, "m").unwrap();
    // the call that waits is told what happened, and that waiting does not help
    match register(&daemon) {
        Err(ClientError::Refused(failure)) => {
            assert_eq!(failure.kind, Kind::Device, "{failure}");
            assert_eq!(failure.details["code"], "700");
            assert!(!failure.retryable, "{failure}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(daemon.wait().unwrap().code(), Some(70));
    let (directory, shm) = daemon.kill().unwrap();
    let next = Daemon::start_on_fake_in(directory, shm, DRIVER, &[]).unwrap();
    assert_eq!(next.segments(), Vec::<String>::new());
    load(&next, "m").unwrap();
}

/// Case 30: too little memory is no broken context.
#[test]
fn too_little_device_memory_is_refused_and_ends_nobody() {
    let daemon = on_fake(",out_of_memory_at_create=1", &[]);
    load(&daemon, "m").unwrap();
    let mut manager = daemon
        .client()
        .unwrap()
        .open(flextensord_client::OpenOptions::default())
        .unwrap();
    let layers = layers();
    let budget = flextensord_client::Budget::Bytes(8 << 20);
    match manager.register("m", &layers, budget) {
        Err(ClientError::Refused(failure)) => {
            assert_eq!(failure.kind, Kind::DeviceMemory);
            // the driver refuses although it counts enough: both are said
            assert_eq!(failure.details["operation"], "cuMemCreate");
            assert_eq!(failure.details["code"], "2");
            assert_eq!(failure.details["available"], (256 << 20).to_string());
            let refused = "refuses 4194304 bytes: cuMemCreate failed";
            assert!(failure.message.contains(refused), "{failure}");
        }
        other => panic!("{other:?}"),
    }
    std::thread::sleep(Duration::from_millis(600));
    let status = daemon.status().unwrap();
    assert_eq!(
        (status.phase.as_str(), status.devices[0].failure.as_str()),
        ("serving", "")
    );
    assert_eq!(status.devices[0].allocated_bytes, 0);
}

/// Allocations take whole units of the driver: what they are rounded up by is granted too.
#[test]
fn a_budget_is_not_overspent_by_the_units_of_the_driver() {
    let daemon = on_fake("", &[]);
    load(&daemon, "m").unwrap();
    for budget in [3_000_000, 4 << 20, 5_500_000, 7_000_001, (12 << 20) + 1] {
        let mut manager = daemon
            .client()
            .unwrap()
            .open(flextensord_client::OpenOptions::default())
            .unwrap();
        let asked = flextensord_client::Budget::Bytes(budget);
        let least = match manager.register("m", &layers(), asked) {
            Err(ClientError::Refused(failure)) => {
                assert_eq!(failure.kind, Kind::BudgetInfeasible, "{failure}");
                let least: u64 = failure.details["wanted"].parse().unwrap();
                let enough = flextensord_client::Budget::Bytes(least);
                manager.register("m", &layers(), enough).unwrap();
                least
            }
            other => other.map(|_| budget).unwrap(),
        };
        let status = daemon.status().unwrap();
        let (held, granted) = (
            status.devices[0].allocated_bytes,
            status.managers[0].granted_bytes,
        );
        assert!(
            held <= granted && granted <= least,
            "{held} {granted} {least}"
        );
        manager.close().unwrap();
    }
}

/// A driver that will not let go of memory: shown, and nothing else is wrong.
#[test]
fn a_segment_that_cannot_be_unpinned_is_shown_and_the_daemon_goes_on() {
    let daemon = on_fake(",unregister_fail=1:999", &[]);
    load(&daemon, "m").unwrap();
    let client = daemon.client().unwrap();
    client.drop_weight_set("m").unwrap();
    let status = daemon.status().unwrap();
    let (device, host) = (&status.devices[0], status.host.clone().unwrap());
    assert_eq!(device.failed_drops, 1);
    assert!(device.failed_drop_reasons[0].contains("999"), "{device:?}");
    // its pages stay taken, in the books too
    let stuck = host.stuck_bytes;
    assert!((10 << 20..11 << 20).contains(&stuck), "{host:?}");
    assert_eq!(host.segment_bytes, 0);
    let told = |arguments: &[&str]| {
        let output = daemon.ctl(arguments).unwrap().output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let text = told(&["status"]);
    let lines = ["FREE", "1 resources could not be given back", "(999)"];
    for line in lines.into_iter().chain(["stuck: "]) {
        assert!(text.contains(line), "{line}: {text}");
    }
    let json: serde_json::Value = serde_json::from_str(&told(&["--json", "status"])).unwrap();
    assert_eq!(json["host"]["stuck_bytes"], stuck);
    assert_eq!(json["host"]["degraded"], false);
    assert_eq!(json["devices"][0]["failed_drops"], 1);
    assert_eq!(json["devices"][0]["failure"], "");
    assert_eq!(json["devices"][0]["free_bytes"], device.free_bytes);
    let dump = told(&["dump"]);
    for field in ["failed_drop_reasons", "free_bytes", "stuck_bytes"] {
        assert!(dump.contains(field), "{field}: {dump}");
    }
    load(&daemon, "m").unwrap();
    client.drop_weight_set("m").unwrap();
    assert_eq!(daemon.status().unwrap().devices[0].failed_drops, 1);
}

/// Bytes that no set has and that stay taken leave less room for the next one.
#[test]
fn what_cannot_be_unpinned_counts_against_the_host_budget() {
    let flags = ["--host-memory", "15MiB"];
    let daemon = on_fake(",unregister_fail=1:999", &flags);
    load(&daemon, "m").unwrap();
    daemon.client().unwrap().drop_weight_set("m").unwrap();
    assert_eq!(refusal(&daemon, "n").kind, Kind::HostMemory);
}

/// No GPU: said with what was tried, and no other device in its place.
#[test]
fn a_daemon_asked_for_a_gpu_that_is_not_there_does_not_start() {
    let run = |device: &str, driver: Option<&str>| {
        let directory = flextensord_tests::daemon::directory().unwrap();
        let name = driver.map_or("flextensord", |_| "flextensord-on-fake");
        let mut command = Command::new(binary(name).unwrap());
        command
            .args(["serve", "--device", device, "--runtime-dir"])
            .arg(directory.path());
        if let Some(driver) = driver {
            command.env(FAKE_DRIVER, driver);
        }
        let output = command.output().unwrap();
        // the instance is as it was
        assert!(!fs::exists(directory.path().join("default/flextensord.sock")).unwrap());
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).into_owned()
                + &String::from_utf8_lossy(&output.stderr),
        )
    };
    let (code, text) = run("cuda", None);
    assert_eq!(code, Some(69), "{text}");
    assert!(text.contains("libcuda.so"), "{text}");
    let (code, text) = run("cuda:3", Some("gpus=2,memory=64MiB"));
    assert_eq!(code, Some(69), "{text}");
    assert!(text.contains("cuda:3") && text.contains("GPU-"), "{text}");
    let unfit = "gpus=1,memory=64MiB,attribute.StreamMemoryOps64=0";
    let (code, text) = run("cuda", Some(unfit));
    assert_eq!(code, Some(69), "{text}");
    assert!(text.contains("64-bit stream memory operations"), "{text}");
    let driver: Arc<dyn Driver> = FakeDriver::new(FakeSettings::default());
    let uuid = gpu::find(driver.as_ref(), "cuda:0").unwrap().uuid;
    let mig = uuid.replace("GPU-", "MIG-");
    for twice in ["cuda:00", &uuid, &mig] {
        let names = format!("cuda:0,{twice}");
        let (code, text) = run(&names, Some("gpus=2,memory=64MiB"));
        assert_eq!(code, Some(78), "{text}");
        let both = format!("cuda:0 and {twice} name the same GPU");
        assert!(text.contains(&both), "{text}");
    }
    let exclusive = "gpus=1,memory=64MiB,attribute.ComputeMode=3";
    let (code, text) = run("cuda", Some(exclusive));
    assert_eq!(code, Some(69), "{text}");
    assert!(text.contains("EXCLUSIVE_PROCESS"), "{text}");
}

fn layers() -> Vec<flextensord_client::LayerSpec> {
    let mut layers: Vec<flextensord_client::LayerSpec> = Vec::new();
    for tensor in checkpoint::layered(20, 2, 256 << 10) {
        let name = checkpoint::layer_of(&tensor.name);
        match layers.last_mut().filter(|layer| layer.name == name) {
            Some(layer) => layer.tensors.push(tensor.name),
            None => layers.push(flextensord_client::LayerSpec {
                name,
                tensors: vec![tensor.name],
            }),
        }
    }
    layers
}

/// Registers a model over the set "m".
fn register(daemon: &Daemon) -> Result<(), ClientError> {
    let mut manager = daemon
        .client()
        .unwrap()
        .open(flextensord_client::OpenOptions::default())
        .unwrap();
    let budget = flextensord_client::Budget::Bytes(8 << 20);
    manager.register("m", &layers(), budget).map(drop)
}

/// A copy that does not end holds up a registration; the stop does not wait for it.
#[test]
fn a_stop_while_residents_are_filled_answers_the_call_and_leaves_no_segment() {
    let mut daemon = Daemon::start_on_fake(&format!("{DRIVER},bandwidth=64KiB"), &[]).unwrap();
    load(&daemon, "m").unwrap();
    assert_eq!(daemon.segments().len(), 1);
    let answer = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| register(&daemon));
        eventually("the residents are being filled", SOON, || {
            let device = daemon.status().ok()?.devices.remove(0);
            (device.queued_bytes > 0).then_some(())
        })
        .unwrap();
        daemon.signal(Signal::SIGTERM).unwrap();
        waiting.join().unwrap()
    });
    assert!(daemon.wait().unwrap().success());
    assert_eq!(daemon.segments(), Vec::<String>::new());
    match answer {
        Err(ClientError::Refused(failure)) => {
            let kinds = [Kind::Draining, Kind::Aborted, Kind::LeaseLost];
            assert!(kinds.contains(&failure.kind), "{failure}");
        }
        Err(ClientError::LeaseLost { .. }) => {}
        other => panic!("{other:?}"),
    }
}
