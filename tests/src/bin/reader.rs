//! A client process: runs passes over a model through the daemon and compares every byte
//! of every tensor that it holds with the checkpoint. Says what it does as JSON lines.
#![forbid(unsafe_code)]

use std::{
    collections::HashMap,
    io::{self, Read as _},
    path::PathBuf,
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use clap::{Parser, ValueEnum};
use flextensord_client::{
    Budget, CallerStream, ClientError, CudaError, Driver, Hold, LayerId, LayerSpec, OpenOptions,
    blocking::{Client, Manager},
};
use flextensord_device::cuda::{
    context::Context,
    fake::{FakeDriver, FakeSettings},
    gpu,
    stream::Stream,
};
use flextensord_tests::{
    SceneError,
    checkpoint::{self, Tensor, layer_of},
    daemon::options,
};
use serde_json::json;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Order {
    /// As registered.
    Registered,
    /// Layers at random: skips and repeats.
    Random,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Via {
    Fast,
    Rpc,
    /// Each acquire by one or the other, and two holds of a layer at a time.
    Mixed,
}

/// Runs passes over a model and compares every byte.
#[derive(Debug, Parser)]
struct Flags {
    #[arg(long)]
    socket: PathBuf,
    #[arg(long)]
    checkpoint: PathBuf,
    #[arg(long)]
    weight_set: String,
    /// Empty takes a default name.
    #[arg(long, default_value = "")]
    manager: String,
    #[arg(long, default_value = "")]
    device: String,
    #[arg(long, default_value_t = 0)]
    link_weight: u32,
    /// Bytes; without it, the fraction counts.
    #[arg(long)]
    budget: Option<u64>,
    #[arg(long, default_value_t = 1.0)]
    fraction: f64,
    #[arg(long, default_value_t = 1)]
    passes: u64,
    #[arg(long, value_enum, default_value = "registered")]
    order: Order,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[arg(long, value_enum, default_value = "fast")]
    via: Via,
    /// In this pass, half-way, keep a layer held and wait for the end of standard input.
    #[arg(long)]
    hold_in_pass: Option<u64>,
    /// Wait for the end of standard input between registering and the first pass.
    #[arg(long)]
    wait: bool,
    /// Most seconds that a wait and a call may take, and the patience.
    #[arg(long)]
    limit: Option<u64>,
    /// Rest so many milliseconds after each pass.
    #[arg(long, default_value_t = 0)]
    rest: u64,
    /// Layers are held on a stream of a GPU of the driver in host memory.
    #[arg(long)]
    on_fake: bool,
}

/// The stream that layers are held on.
struct Gpu {
    stream: Stream,
}

impl Gpu {
    fn new(driver: &Arc<dyn Driver>) -> Result<Self, SceneError> {
        let failed = |error: CudaError| SceneError::Client(error.into());
        let gpu = gpu::find(driver.as_ref(), "cuda:0").map_err(failed)?;
        let context = Context::open(driver, &gpu).map_err(failed)?;
        let stream = Stream::new(&context).map_err(failed)?;
        Ok(Self { stream })
    }
}

fn main() -> ExitCode {
    match run(&Flags::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(json!({ "event": "failed", "why": why(&error), "error": error.to_string() }));
            eprintln!("reader: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What kind of end that is, for those who judge it.
fn why(error: &SceneError) -> &'static str {
    match error {
        SceneError::Client(ClientError::LeaseLost { .. } | ClientError::DaemonLost { .. }) => {
            "lost"
        }
        SceneError::Client(ClientError::Refused(_)) => "refused",
        SceneError::Client(
            ClientError::Transport { .. }
            | ClientError::Unreachable { .. }
            | ClientError::Channel { .. },
        ) => "connection",
        SceneError::Client(ClientError::Deadline { .. }) => "late",
        SceneError::Client(ClientError::Kernel(_)) => "kernel",
        _ => "wrong",
    }
}

fn say(event: serde_json::Value) {
    println!("{event}");
}

fn wait_for_end_of_input() -> Result<(), SceneError> {
    let read = io::stdin().read_to_end(&mut Vec::new());
    read.map(drop).map_err(|e| SceneError::io("wait", e))
}

fn run(flags: &Flags) -> Result<(), SceneError> {
    let tensors = checkpoint::read(&flags.checkpoint)?;
    let mut options = options(&flags.socket);
    if let Some(limit) = flags.limit.map(Duration::from_secs) {
        options.patience = limit;
        options.call_timeout = limit;
        options.long_timeout = limit;
    }
    let driver: Option<Arc<dyn Driver>> = match flags.on_fake {
        true => Some(FakeDriver::new(FakeSettings::default())),
        false => None,
    };
    options.driver.clone_from(&driver);
    let gpu = driver.as_ref().map(Gpu::new).transpose()?;
    let client = Client::connect(options)?;
    let mut manager = client.open(OpenOptions {
        name: flags.manager.clone(),
        device: flags.device.clone(),
        link_weight: flags.link_weight,
        client: "reader".to_owned(),
    })?;
    if let Some(limit) = flags.limit.map(Duration::from_secs) {
        manager.set_acquire_limit(limit);
    }
    let layers = layers(&client, &flags.weight_set)?;
    let budget = flags
        .budget
        .map_or(Budget::Fraction(flags.fraction), Budget::Bytes);
    let answer = *manager.register(&flags.weight_set, &layers, budget)?;
    say(json!({
        "event": "registered", "manager": manager.name(), "layers": answer.layers,
        "parts": answer.parts, "granted_bytes": answer.granted_bytes,
        "resident_bytes": answer.resident_bytes, "shared_bytes": answer.resident_bytes_shared,
        "streamed_bytes": answer.streamed_bytes, "ring_bytes": answer.ring_bytes,
        "least_feasible_bytes": answer.least_feasible_bytes,
    }));
    if flags.wait {
        wait_for_end_of_input()?;
    }
    let ids = layers
        .iter()
        .map(|layer| manager.layer(&layer.name))
        .collect::<Result<Vec<LayerId>, _>>()?;
    let mut random = Random(flags.seed.wrapping_mul(0x2545_f491_4f6c_dd1d) | 1);
    let expected: HashMap<&str, &Tensor> = tensors
        .iter()
        .map(|tensor| (tensor.name.as_str(), tensor))
        .collect();
    let mut compared = 0;
    for pass in 0..flags.passes {
        for at in 0..ids.len() {
            let id = match flags.order {
                Order::Registered => ids[at],
                Order::Random => ids[random.below(ids.len())],
            };
            let holds = acquire(&manager, gpu.as_ref(), id, flags.via, &mut random)?;
            for hold in &holds {
                compared += compare(hold, &expected)?;
            }
            if flags.hold_in_pass == Some(pass) && at == ids.len() / 2 {
                say(json!({ "event": "holding", "layer": layers[at].name, "pass": pass }));
                wait_for_end_of_input()?;
            }
            for hold in holds {
                if hold.is_rpc() {
                    manager.release_rpc(hold)?
                } else {
                    hold.release()?
                }
            }
        }
        manager.report_pass(1)?;
        std::thread::sleep(Duration::from_millis(flags.rest));
    }
    let waited_ns = u64::try_from(manager.waited().as_nanos()).unwrap_or(u64::MAX);
    manager.close()?;
    say(json!({
        "event": "done", "passes": flags.passes, "compared_bytes": compared,
        "waited_ns": waited_ns,
    }));
    Ok(())
}

fn acquire(
    manager: &Manager,
    gpu: Option<&Gpu>,
    layer: LayerId,
    via: Via,
    random: &mut Random,
) -> Result<Vec<Hold>, SceneError> {
    let one = |rpc: bool| match (rpc, gpu) {
        (true, _) => manager.acquire_rpc(layer),
        (false, Some(gpu)) => manager.acquire_on(layer, CallerStream::from(&gpu.stream)),
        (false, None) => manager.acquire(layer),
    };
    Ok(match via {
        Via::Fast => vec![one(false)?],
        Via::Rpc => vec![one(true)?],
        Via::Mixed => {
            let first = random.below(2) == 0;
            let mut holds = vec![one(first)?, one(!first)?];
            if random.below(2) == 0 {
                holds.reverse();
            }
            holds
        }
    })
}

/// Compares all tensors of a hold; returns how many bytes that were.
fn compare(hold: &Hold, expected: &HashMap<&str, &Tensor>) -> Result<u64, SceneError> {
    let mut bytes = 0;
    for tensor in hold.tensors() {
        let wrong = |what: &str| {
            SceneError::Unexpected(format!("tensor {:?}: wrong {what}", tensor.name()))
        };
        let right = expected.get(tensor.name()).ok_or_else(|| wrong("name"))?;
        if tensor.dtype() != right.dtype || tensor.shape() != right.shape {
            return Err(wrong("type or shape"));
        }
        if tensor.bytes() != right.data.len() as u64 || !tensor.equals(&right.data)? {
            return Err(wrong("bytes"));
        }
        bytes += tensor.bytes();
    }
    Ok(bytes)
}

/// Layers by the tensors' names, in natural order as the daemon lists them.
fn layers(client: &Client, weight_set: &str) -> Result<Vec<LayerSpec>, SceneError> {
    let mut layers: Vec<LayerSpec> = Vec::new();
    for tensor in client.weight_set(weight_set)?.tensors {
        let name = layer_of(&tensor.name);
        match layers.iter_mut().find(|layer| layer.name == name) {
            Some(layer) => layer.tensors.push(tensor.name),
            None => layers.push(LayerSpec {
                name,
                tensors: vec![tensor.name],
            }),
        }
    }
    Ok(layers)
}

/// xorshift: a seed tells the whole order.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 16).unwrap_or(0) % bound.max(1)
    }
}
