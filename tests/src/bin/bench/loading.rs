//! Loading a page-cached checkpoint, against parallel preads into reserved shared memory.

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use flextensord_client::LoadOptions;
use flextensord_device::segment::SegmentBuilder;
use flextensord_tests::{
    SceneError,
    checkpoint::{self, Tensor},
    daemon::Daemon,
};

use crate::figures::{Figures, median};

const TENSORS: usize = 64;
const TENSOR: usize = 16 << 20;
const ROUNDS: u32 = 5;
const CHUNK: usize = 4 << 20;

pub(crate) fn measure(daemon: &Path, figures: &mut Figures) -> Result<(), SceneError> {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let count = threads.to_string();
    let flags = ["--log", "warn", "--load-threads", &count];
    let daemon = Daemon::start_with(daemon, Path::new("/dev/shm"), &flags)?;
    let path = daemon.scratch().join("model.safetensors");
    let tensor = |index: usize| Tensor {
        name: format!("layers.{index}"),
        dtype: "U8".to_owned(),
        shape: vec![TENSOR as u64],
        data: checkpoint::pattern(index as u64 + 1, TENSOR),
    };
    checkpoint::write(&path, &(0..TENSORS).map(tensor).collect::<Vec<_>>())?;
    let client = daemon.client()?;
    let load = |options: &LoadOptions| {
        let begin = Instant::now();
        client.load(&path, "model", options, |_| ())?;
        let took = begin.elapsed();
        client.drop_weight_set("model")?;
        Ok::<_, SceneError>(took)
    };
    let (mut digests, mut vouched, mut reads) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        reads.push(read(&path, threads)?);
        digests.push(load(&LoadOptions::default())?);
        let content_id = Some(format!("round-{round}"));
        vouched.push(load(&LoadOptions {
            content_id,
            ..LoadOptions::default()
        })?);
    }
    let (read, digest, vouched) = (
        median(&mut reads),
        median(&mut digests),
        median(&mut vouched),
    );
    figures.reference("pread into reserved shared memory", 1.0 / read, "GiB/s");
    figures.at_least(
        "load with digest against pread",
        read / digest * 100.0,
        "%",
        75.0,
    );
    figures.at_least(
        "load with content_id against pread",
        read / vouched * 100.0,
        "%",
        95.0,
    );
    Ok(())
}

/// Reads the file into fresh reserved shared memory, and gives it back.
fn read(path: &Path, threads: usize) -> Result<Duration, SceneError> {
    let failed = |e| SceneError::io("read", e);
    let file = File::open(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    let name = format!("flextensord-bench-{}", std::process::id());
    let begin = Instant::now();
    let mut builder = SegmentBuilder::new(Path::new("/dev/shm"), &name, bytes)
        .map_err(|e| SceneError::Unexpected(e.to_string()))?;
    let target = builder
        .bytes_mut()
        .map_err(|e| SceneError::Unexpected(e.to_string()))?;
    let mut lanes: Vec<Vec<(u64, &mut [u8])>> = (0..threads).map(|_| Vec::new()).collect();
    let mut offset = 0;
    for (index, chunk) in target.chunks_mut(CHUNK).enumerate() {
        let size = chunk.len() as u64;
        lanes[index % threads].push((offset, chunk));
        offset += size;
    }
    thread::scope(|scope| {
        let read = |lane: Vec<(u64, &mut [u8])>| {
            lane.into_iter()
                .try_for_each(|(offset, chunk)| file.read_exact_at(chunk, offset))
        };
        let lanes: Vec<_> = lanes
            .into_iter()
            .map(|lane| scope.spawn(move || read(lane)))
            .collect();
        lanes.into_iter().try_for_each(|lane| {
            lane.join()
                .unwrap_or_else(|_| Err(std::io::Error::other("a thread ended")))
        })
    })
    .map_err(failed)?;
    let took = begin.elapsed();
    drop(builder);
    Ok(took)
}
