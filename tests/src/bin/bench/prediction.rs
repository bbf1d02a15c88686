//! The simulator against the CPU device with a held link: the same plan, predicted and run,
//! with compute that lasts as long as it was told. A hand-over here is the waking of threads:
//! it is measured first, with parts that each wait for the one before.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use flextensord_client::{Budget, LayerSpec, LoadOptions, OpenOptions, blocking::Client};
use flextensord_plan::{BatchKey, Input, forecast, plan};
use flextensord_tests::{
    SceneError,
    checkpoint::{self, Tensor},
    daemon::Daemon,
};

use crate::figures::{Figures, median};

const LAYERS: u32 = 24;
const TENSOR: u64 = 8 << 20;
/// Bytes of the parts that the hand-over is measured with.
const SMALL: u64 = 512 << 10;
/// Bytes per second; a tensor takes 8.4 ms.
const LINK: (&str, u64) = ("1GB/s", 1_000_000_000);
const PASSES: usize = 9;
/// A sleep is this much longer than was asked for, at most.
const OVERSLEEP: Duration = Duration::from_millis(1);

pub(crate) fn measure(daemon: &Path, figures: &mut Figures) -> Result<(), SceneError> {
    let flags = ["--log", "warn", "--cpu-link", LINK.0];
    let daemon = Daemon::start_with(daemon, Path::new("/dev/shm"), &flags)?;
    let client = daemon.client()?;
    load(&daemon, &client, "large", TENSOR)?;
    load(&daemon, &client, "small", SMALL)?;
    let handover_s = handover(&client)?;
    figures.reference("hand-over between threads", handover_s * 1e6, "us");
    for (what, share, compute_ms) in [
        ("prediction against CPU device, link alone", 0.5, 0.0),
        (
            "prediction against CPU device, link before compute",
            0.5,
            3.0,
        ),
        ("prediction against CPU device, about even", 0.5, 4.6),
        ("prediction against CPU device, compute alone", 0.5, 8.0),
        ("prediction against CPU device, least ring", 0.05, 4.0),
    ] {
        let case = Case {
            model: "large",
            tensor: TENSOR,
            share,
            compute_ms,
        };
        let (predicted, measured) = (case.predicted(handover_s)?, case.measured(&client)?);
        let apart = (predicted / measured - 1.0).abs() * 100.0;
        eprintln!(
            "predicted {:.2} ms, measured {:.2} ms",
            predicted * 1e3,
            measured * 1e3
        );
        figures.at_most(what, apart, "% apart", 5.0);
    }
    Ok(())
}

fn load(daemon: &Daemon, client: &Client, name: &str, bytes: u64) -> Result<(), SceneError> {
    let path = daemon.scratch().join(format!("{name}.safetensors"));
    let tensor = |layer: u32| Tensor {
        name: format!("layers.{layer}"),
        dtype: "U8".to_owned(),
        shape: vec![bytes],
        data: checkpoint::pattern(
            u64::from(layer) + bytes,
            usize::try_from(bytes).unwrap_or(0),
        ),
    };
    checkpoint::write(&path, &(0..LAYERS).map(tensor).collect::<Vec<_>>())?;
    client.load(&path, name, &LoadOptions::default(), |_| ())?;
    Ok(())
}

/// Seconds of a hand-over: a pass in which each part has the place of the one before is made
/// of copies, and for each of them a release that the engine sees, an arrival that the client
/// sees, and taking and giving back.
fn handover(client: &Client) -> Result<f64, SceneError> {
    let case = Case {
        model: "small",
        tensor: SMALL,
        share: 1.0 / f64::from(LAYERS) + 1e-3,
        compute_ms: 0.0,
    };
    let pass = case.measured(client)?;
    let copies = case.predicted(0.0)?;
    Ok(((pass - copies) / (2.0 * f64::from(LAYERS))).max(0.0))
}

/// A model, a budget, and what each layer computes.
#[derive(Debug, Clone, Copy)]
struct Case {
    model: &'static str,
    tensor: u64,
    share: f64,
    compute_ms: f64,
}

impl Case {
    fn budget(self) -> u64 {
        let share = format!("{:.0}", self.share * 1e3).parse().unwrap_or(0);
        u64::from(LAYERS) * self.tensor / 1000 * share
    }

    /// Seconds of a pass of the plan that the daemon makes, which knows nothing of compute.
    fn predicted(self, handover_s: f64) -> Result<f64, SceneError> {
        let failed = |error: flextensord_plan::PlanError| SceneError::Unexpected(error.to_string());
        let uses: Vec<Vec<u32>> = (0..LAYERS).map(|part| vec![part]).collect();
        let sizes = vec![self.tensor; uses.len()];
        let mut input = Input::of_sizes(&sizes, &uses, self.budget());
        input.link.bytes_per_second = LINK.1;
        let plan = plan(&input).map_err(failed)?;
        input.handover_s = handover_s;
        input.batch_keys = vec![BatchKey {
            name: "pass".to_owned(),
            weight: 1.0,
        }];
        for used in &mut input.uses {
            used.compute_s = vec![self.compute_ms * 1e-3];
        }
        Ok(forecast(&input, &plan).map_err(failed)?.step_s)
    }

    /// Seconds of a pass, the median of some that follow one another.
    fn measured(self, client: &Client) -> Result<f64, SceneError> {
        let layers: Vec<LayerSpec> = (0..LAYERS)
            .map(|layer| LayerSpec {
                name: format!("{layer}"),
                tensors: vec![format!("layers.{layer}")],
            })
            .collect();
        let mut manager = client.open(OpenOptions::default())?;
        manager.register(self.model, &layers, Budget::Bytes(self.budget()))?;
        let ids = layers
            .iter()
            .map(|l| manager.layer(&l.name))
            .collect::<Result<Vec<_>, _>>()?;
        let compute = Duration::from_secs_f64(self.compute_ms * 1e-3);
        let mut passes = Vec::new();
        for number in 0..PASSES + 2 {
            let begin = Instant::now();
            for id in &ids {
                let hold = manager.acquire(*id)?;
                last(compute);
                hold.release()?;
            }
            // the first passes fill the ring
            if number >= 2 {
                passes.push(begin.elapsed());
            }
        }
        manager.close()?;
        Ok(median(&mut passes))
    }
}

/// Lasts that long, to the microsecond, and leaves the processor to the copies.
fn last(time: Duration) {
    let begin = Instant::now();
    if let Some(sleep) = time.checked_sub(OVERSLEEP) {
        thread::sleep(sleep);
    }
    while begin.elapsed() < time {
        std::hint::spin_loop();
    }
}
