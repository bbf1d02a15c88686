//! `flextensorctl load NAME PATH`.

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use clap::Args;
use flextensord_client::{LoadOptions, LoadStep, blocking::Client};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::{
    exit::Failed,
    output::{Output, bytes},
    weights,
};

/// Time between two lines where no bar can be drawn.
const LINE_EVERY: Duration = Duration::from_secs(2);
const BAR: &str = "{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}";

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Name of the weight set; empty names it by its content
    name: String,
    /// A .safetensors file, an index (.safetensors.index.json), or a directory
    path: PathBuf,
    /// Vouch for the content with an id instead of having it hashed
    #[arg(long, value_name = "ID")]
    content_id: Option<String>,
    /// Let other users attach (read-only)
    #[arg(long)]
    share: bool,
}

pub(crate) fn load(client: &Client, output: &Output, arguments: &Arguments) -> Result<(), Failed> {
    let options = LoadOptions {
        content_id: arguments.content_id.clone(),
        share: arguments.share,
    };
    let begin = Instant::now();
    let mut shown = Shown::new(output);
    let loaded = client.load(&arguments.path, &arguments.name, &options, |step| {
        shown.step(output, step, begin.elapsed());
    });
    shown.end();
    let loaded = loaded?;
    let took = begin.elapsed();
    let rate = rate(loaded.set.logical_bytes, took);
    if output.json {
        let value = json!({
            "set": weights::document(&loaded.set),
            "attached": loaded.attached,
            "seconds": took.as_secs_f64(),
            "bytes_per_second": rate,
        });
        return Ok(output.value(&value)?);
    }
    let set = &loaded.set;
    let text = if loaded.attached {
        format!(
            "{}: the content is loaded already, attached: {} tensors, {}",
            set.name,
            set.tensors,
            bytes(set.logical_bytes)
        )
    } else {
        format!(
            "{}: loaded {} tensors, {} in {:.2} s ({}/s), segment {}",
            set.name,
            set.tensors,
            bytes(set.logical_bytes),
            took.as_secs_f64(),
            bytes(rate),
            bytes(set.segment_bytes)
        )
    };
    Ok(output.line(&text)?)
}

/// Bytes per second.
fn rate(bytes: u64, took: Duration) -> u64 {
    let nanoseconds = took.as_nanos().max(1);
    u64::try_from(u128::from(bytes) * 1_000_000_000 / nanoseconds).unwrap_or(u64::MAX)
}

/// What is shown while the daemon reads.
enum Shown {
    Bar(ProgressBar),
    Lines { last: Option<Duration> },
}

impl Shown {
    fn new(output: &Output) -> Self {
        if !output.shows_progress() {
            return Self::Lines { last: None };
        }
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template(BAR) {
            bar.set_style(style);
        }
        Self::Bar(bar)
    }

    fn step(&mut self, output: &Output, step: LoadStep, at: Duration) {
        match self {
            Self::Bar(bar) => {
                bar.set_length(step.bytes_total);
                bar.set_position(step.bytes_done);
            }
            Self::Lines { last } => {
                // the daemon has not read the headers yet
                if step.bytes_total == 0 {
                    return;
                }
                let due = last.is_none_or(|last| at.saturating_sub(last) >= LINE_EVERY);
                if due || step.bytes_done >= step.bytes_total {
                    *last = Some(at);
                    let (done, total) = (bytes(step.bytes_done), bytes(step.bytes_total));
                    let rate = bytes(rate(step.bytes_done, at));
                    output.note(&format!("{done} of {total}, {rate}/s"));
                }
            }
        }
    }

    fn end(&self) {
        if let Self::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}
