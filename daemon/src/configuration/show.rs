//! The effective configuration, for a person and for a program.

use std::{fmt::Write as _, time::Duration};

use serde_json::{Value, json};

use super::{DeviceKind, Key, LogFormat, Origin, Settings};

/// The effective configuration as a TOML file, with the origin of each value as a
/// comment. Keys that are not set are comments.
#[must_use]
pub fn text(settings: &Settings) -> String {
    let lines: Vec<(String, &Origin)> = Key::ALL
        .into_iter()
        .map(|key| {
            let line = match written(settings, key) {
                Value::Null => format!("# {} is not set", key.name()),
                value => format!("{} = {value}", key.name()),
            };
            (line, origin(settings, key))
        })
        .collect();
    let width = lines.iter().map(|(line, _)| line.len()).max().unwrap_or(0);
    let mut text = String::new();
    for (line, origin) in lines {
        // writing to a string cannot fail
        let _: std::fmt::Result = writeln!(text, "{line:width$}  # {origin}");
    }
    text
}

/// The same as one JSON object: key to value and origin.
#[must_use]
pub fn json(settings: &Settings) -> Value {
    let entry = |key: Key| {
        let origin = origin(settings, key).to_string();
        let value = written(settings, key);
        (
            key.name().to_owned(),
            json!({"value": value, "origin": origin}),
        )
    };
    Value::Object(Key::ALL.into_iter().map(entry).collect())
}

fn origin(settings: &Settings, key: Key) -> &Origin {
    settings.origins.get(&key).unwrap_or(&Origin::Default)
}

/// The value of `key` as it may stand in a file; a JSON string, number or boolean is
/// TOML as well.
fn written(settings: &Settings, key: Key) -> Value {
    match key {
        Key::Instance => json!(settings.instance),
        Key::RuntimeDir => json!(settings.runtime_dir.to_string_lossy()),
        Key::ShmDir => json!(settings.shm_dir.to_string_lossy()),
        Key::Device => match &settings.device {
            DeviceKind::Cpu => json!("cpu"),
            DeviceKind::Cuda(names) if names.is_empty() => json!("cuda"),
            DeviceKind::Cuda(names) => json!(names.join(",")),
        },
        Key::CpuDevices => json!(settings.cpu.devices),
        Key::CpuMemory => json!(size(settings.cpu.memory)),
        Key::CpuLink => settings
            .cpu
            .link
            .map_or(Value::Null, |link| json!(format!("{}/s", size(link)))),
        Key::PinnedMemory => json!(settings.pinning.wanted),
        Key::RequirePinned => json!(settings.pinning.required),
        Key::PinChunk => json!(size(settings.pinning.chunk)),
        Key::HostMemory => settings
            .host_memory
            .map_or(Value::Null, |bytes| json!(size(bytes))),
        Key::LoadThreads => json!(settings.load_threads),
        Key::MaxManagers => json!(settings.max_managers),
        Key::ResumeGrace => json!(time(settings.resume_grace)),
        Key::DrainGrace => json!(time(settings.drain_grace)),
        Key::ClientPatience => json!(time(settings.client_patience)),
        Key::OnStop => json!(if settings.keep_on_stop {
            "keep"
        } else {
            "remove"
        }),
        Key::VerifyAdopted => json!(settings.verify_adopted),
        Key::PoisonReleased => json!(settings.poison_released),
        Key::Log => json!(settings.log),
        Key::LogFormat => match settings.log_format {
            LogFormat::Human => json!("human"),
            LogFormat::Json => json!("json"),
        },
    }
}

/// Exact: a size that was read back must be the same.
fn size(bytes: u64) -> String {
    for (unit, suffix) in [
        (bytesize::TIB, "TiB"),
        (bytesize::GIB, "GiB"),
        (bytesize::MIB, "MiB"),
        (bytesize::GB, "GB"),
        (bytesize::MB, "MB"),
        (bytesize::KIB, "KiB"),
    ] {
        if bytes.is_multiple_of(unit) {
            return format!("{}{suffix}", bytes / unit);
        }
    }
    format!("{bytes}B")
}

fn time(time: Duration) -> String {
    humantime::format_duration(time).to_string()
}
