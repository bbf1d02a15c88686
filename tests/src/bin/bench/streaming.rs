//! Streaming with the link unlimited, against a memcpy of the same bytes by the engine's
//! own number of threads.

use std::{os::fd::AsFd as _, path::Path, time::Instant};

use flextensord_client::{Budget, LayerSpec, LoadOptions, OpenOptions};
use flextensord_device::{
    mapping::{Access, Mapping},
    memfd,
};
use flextensord_tests::{
    SceneError,
    checkpoint::{self, Tensor},
    daemon::Daemon,
};

use crate::figures::{Figures, median};

const LAYERS: usize = 32;
const TENSOR: usize = 8 << 20;
const ROUNDS: usize = 9;

pub(crate) fn measure(daemon: &Path, figures: &mut Figures) -> Result<(), SceneError> {
    let daemon = Daemon::start_with(daemon, Path::new("/dev/shm"), &["--log", "warn"])?;
    let path = daemon.scratch().join("model.safetensors");
    let tensor = |layer: usize| Tensor {
        name: format!("layers.{layer}"),
        dtype: "U8".to_owned(),
        shape: vec![TENSOR as u64],
        data: checkpoint::pattern(layer as u64 + 1, TENSOR),
    };
    checkpoint::write(&path, &(0..LAYERS).map(tensor).collect::<Vec<_>>())?;
    let client = daemon.client()?;
    client.load(&path, "model", &LoadOptions::default(), |_| ())?;
    let mut manager = client.open(OpenOptions::default())?;
    let layers: Vec<LayerSpec> = (0..LAYERS)
        .map(|layer| LayerSpec {
            name: format!("{layer}"),
            tensors: vec![format!("layers.{layer}")],
        })
        .collect();
    let ring = 4 * TENSOR as u64;
    let answer = *manager.register("model", &layers, Budget::Bytes(ring + 8192))?;
    let ids = layers
        .iter()
        .map(|l| manager.layer(&l.name))
        .collect::<Result<Vec<_>, _>>()?;
    let bytes = answer.streamed_bytes;
    let copy = Reference::new(bytes, answer.ring_bytes)?;
    let pass = || {
        let begin = Instant::now();
        for id in &ids {
            manager.acquire(*id)?.release()?;
        }
        Ok::<_, SceneError>(begin.elapsed())
    };
    pass()?;
    copy.run()?;
    let (mut passes, mut copies) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        passes.push(pass()?);
        copies.push(copy.run()?);
    }
    let (pass, copy) = (median(&mut passes), median(&mut copies));
    let gigabytes = f64::from(u32::try_from(bytes >> 20).unwrap_or(0)) * 1.048_576e-3;
    figures.reference("streaming, link unlimited", gigabytes / pass, "GB/s");
    figures.reference(
        "memcpy of the same bytes, one thread",
        gigabytes / copy,
        "GB/s",
    );
    figures.at_least("streaming against memcpy", copy / pass * 100.0, "%", 85.0);
    Ok(())
}

/// Memory of the shape that the engine copies between.
struct Reference {
    source: Mapping,
    target: Mapping,
}

impl Reference {
    fn new(source: u64, target: u64) -> Result<Self, SceneError> {
        let map = |bytes: u64| {
            let failed =
                |e: flextensord_device::kernel::KernelError| SceneError::Unexpected(e.to_string());
            let file = memfd::create("bench", bytes).map_err(failed)?;
            let size = usize::try_from(bytes).unwrap_or(0);
            Mapping::new(file.as_fd(), size, Access::ReadWrite).map_err(failed)
        };
        Ok(Self {
            source: map(source)?,
            target: map(target)?,
        })
    }

    /// Copies all of the source into the target, around and around, in strides of a
    /// mebibyte.
    fn run(&self) -> Result<std::time::Duration, SceneError> {
        const STRIDE: usize = 1 << 20;
        let begin = Instant::now();
        let room = self.target.size() / STRIDE;
        for at in 0..self.source.size() / STRIDE {
            let to = at % room.max(1) * STRIDE;
            Mapping::copy(&self.source, at * STRIDE, &self.target, to, STRIDE)
                .map_err(|e| SceneError::Unexpected(e.to_string()))?;
        }
        Ok(begin.elapsed())
    }
}
