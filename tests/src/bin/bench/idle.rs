//! What an idle daemon costs, and how soon it is awake.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use flextensord_client::{Budget, LayerSpec, LoadOptions, OpenOptions};
use flextensord_tests::{SceneError, checkpoint, daemon::Daemon};

use crate::figures::{Figures, median};

const MANAGERS: usize = 8;
const WATCHED: Duration = Duration::from_secs(10);

pub(crate) fn measure(daemon: &Path, quick: bool, figures: &mut Figures) -> Result<(), SceneError> {
    let daemon = Daemon::start_with(daemon, Path::new("/dev/shm"), &["--log", "warn"])?;
    let path = daemon.scratch().join("model.safetensors");
    checkpoint::write(&path, &checkpoint::layered(8, 1, 400_000))?;
    let client = daemon.client()?;
    client.load(&path, "model", &LoadOptions::default(), |_| ())?;
    let layers: Vec<LayerSpec> = (0..8)
        .map(|layer| LayerSpec {
            name: format!("{layer}"),
            tensors: vec![format!("layers.{layer}.0")],
        })
        .collect();
    let mut managers = Vec::new();
    for _ in 0..MANAGERS {
        let mut manager = client.open(OpenOptions::default())?;
        manager.register("model", &layers, Budget::Bytes(900_000))?;
        for layer in &layers {
            manager.acquire(manager.layer(&layer.name)?)?.release()?;
        }
        managers.push(manager);
    }
    thread::sleep(Duration::from_millis(500));
    let before = ticks(daemon.pid());
    thread::sleep(WATCHED);
    let used = ticks(daemon.pid()).saturating_sub(before);
    let share = f64::from(u32::try_from(used).unwrap_or(u32::MAX)) / 100.0 / WATCHED.as_secs_f64();
    figures.at_most(
        "idle daemon, 8 managers with streamed parts",
        share * 100.0,
        "% of a core",
        0.5,
    );
    figures.at_most(
        "its memory beside segments and device",
        private(daemon.pid()),
        "MiB",
        64.0,
    );

    thread::sleep(if quick {
        Duration::from_secs(3)
    } else {
        Duration::from_secs(60)
    });
    // three layers further on than the ring reaches: it must be copied first
    let mut times = Vec::new();
    for manager in &managers {
        let layer = manager.layer("5")?;
        let begin = Instant::now();
        manager.acquire(layer)?.release()?;
        times.push(begin.elapsed());
    }
    let seen = median(&mut times) * 1e3;
    figures.at_most("wake-up after idleness to 400 kB copied", seen, "ms", 2.0);
    Ok(())
}

/// Clock ticks (a hundredth of a second) that a process has used.
fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let field = |at| fields.split_ascii_whitespace().nth(at)?.parse::<u64>().ok();
    field(11).unwrap_or(0) + field(12).unwrap_or(0)
}

/// Resident memory of a process that is not shared memory, in MiB.
fn private(pid: u32) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let kibibytes = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name))?;
        line.split_ascii_whitespace().nth(1)?.parse::<u32>().ok()
    };
    f64::from(kibibytes("RssAnon").unwrap_or(0) + kibibytes("RssFile").unwrap_or(0)) / 1024.0
}
