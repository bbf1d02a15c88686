//! Calls and the fast path when nothing waits; start and stop.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use flextensord_client::{
    Budget, LayerSpec, LoadOptions, OpenOptions,
    blocking::{Client, Manager},
};
use flextensord_tests::{SceneError, checkpoint, daemon::Daemon};

use crate::figures::{Figures, median};

const CALLS: usize = 2000;
const PAIRS: u32 = 200_000;

pub(crate) fn measure(daemon: &Path, figures: &mut Figures) -> Result<(), SceneError> {
    starts(daemon, figures)?;
    let daemon = Daemon::start_with(daemon, Path::new("/dev/shm"), &["--log", "warn"])?;
    let path = daemon.scratch().join("model.safetensors");
    checkpoint::write(&path, &checkpoint::layered(8, 2, 400_000))?;
    let client = daemon.client()?;
    client.load(&path, "model", &LoadOptions::default(), |_| ())?;
    let mut times = time(CALLS, || client.status().map(drop))?;
    figures.at_most("gRPC Status, p50", median(&mut times) * 1e6, "us", 250.0);
    resident(&client, figures)?;
    streamed(&client, figures)
}

fn starts(daemon: &Path, figures: &mut Figures) -> Result<(), SceneError> {
    let (mut starts, mut stops) = (Vec::new(), Vec::new());
    for _ in 0..7 {
        let begin = Instant::now();
        let mut daemon = Daemon::start_with(daemon, Path::new("/dev/shm"), &["--log", "warn"])?;
        starts.push(begin.elapsed());
        let begin = Instant::now();
        daemon.stop()?;
        stops.push(begin.elapsed());
    }
    figures.at_most(
        "daemon start to serving",
        median(&mut starts) * 1e3,
        "ms",
        100.0,
    );
    figures.at_most("clean stop", median(&mut stops) * 1e3, "ms", 1000.0);
    Ok(())
}

fn time<E>(count: usize, mut call: impl FnMut() -> Result<(), E>) -> Result<Vec<Duration>, E> {
    (0..count)
        .map(|_| {
            let begin = Instant::now();
            call().map(|()| begin.elapsed())
        })
        .collect()
}

/// A manager with the model's eight layers, within `budget` bytes.
fn manager(client: &Client, budget: u64) -> Result<Manager, SceneError> {
    let mut manager = client.open(OpenOptions::default())?;
    let layers: Vec<LayerSpec> = (0..8)
        .map(|layer| LayerSpec {
            name: format!("{layer}"),
            tensors: (0..2)
                .map(|tensor| format!("layers.{layer}.{tensor}"))
                .collect(),
        })
        .collect();
    manager.register("model", &layers, Budget::Bytes(budget))?;
    Ok(manager)
}

fn resident(client: &Client, figures: &mut Figures) -> Result<(), SceneError> {
    let manager = manager(client, 64 << 20)?;
    let layer = manager.layer("0")?;
    let mut times = time(CALLS, || {
        let hold = manager.acquire_rpc(layer)?;
        manager.release_rpc(hold)
    })?;
    let seen = median(&mut times) * 1e6;
    figures.at_most(
        "Acquire + Release by RPC, resident layer, p50",
        seen,
        "us",
        400.0,
    );
    let seen = pairs(|| manager.acquire(layer)?.release())?;
    figures.at_most("fast path pair, resident layer", seen, "us", 1.0);
    Ok(())
}

/// A streamed part is taken and given back while a copy keeps the engine awake.
fn streamed(client: &Client, figures: &mut Figures) -> Result<(), SceneError> {
    let manager = manager(client, 2_000_000)?;
    let (first, second) = (manager.layer("0")?, manager.layer("1")?);
    let outer = manager.acquire(first)?;
    let seen = pairs(|| manager.acquire(first)?.release())?;
    figures.at_most(
        "fast path pair, streamed layer that is held already",
        seen,
        "us",
        1.0,
    );
    outer.release()?;
    // each pair waits for its copy: the whole way of a part
    let mut times = Vec::new();
    for _ in 0..400 {
        for layer in [first, second] {
            let begin = Instant::now();
            manager.acquire(layer)?.release()?;
            times.push(begin.elapsed());
        }
    }
    figures.reference(
        "acquire + release of 800 kB that must be copied first",
        median(&mut times) * 1e6,
        "us",
    );
    Ok(())
}

/// Microseconds of one call, over many.
fn pairs<E>(mut pair: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    let begin = Instant::now();
    for _ in 0..PAIRS {
        pair()?;
    }
    Ok(begin.elapsed().as_secs_f64() * 1e6 / f64::from(PAIRS))
}
