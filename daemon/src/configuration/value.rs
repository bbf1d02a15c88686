//! The rules that the text of a value must meet.

use std::{
    ops::RangeInclusive,
    path::{Path, PathBuf},
    time::Duration,
};

use bytesize::ByteSize;
use flextensord_proto::name;

use super::{
    error::ConfigurationError,
    key::Key,
    layer::{Given, Layer},
};

type Outcome<T> = Result<T, ConfigurationError>;

/// Refuses `given`, because it breaks `rule`.
pub(super) fn bad(key: Key, given: &Given, rule: impl Into<String>) -> ConfigurationError {
    ConfigurationError::Value {
        key,
        text: given.text.clone(),
        origin: given.origin.clone(),
        rule: rule.into(),
    }
}

/// Applies `parse` to the value of `key`, if there is one.
pub(super) fn optional<T>(
    layer: &Layer,
    key: Key,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Outcome<Option<T>> {
    let Some(given) = layer.get(key) else {
        return Ok(None);
    };
    parse(&given.text)
        .map(Some)
        .map_err(|rule| bad(key, given, rule))
}

/// As [`optional`], where "none" takes back what a lower layer said.
pub(super) fn unless_none<T>(
    layer: &Layer,
    key: Key,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Outcome<Option<T>> {
    let parsed = optional(layer, key, |text| match text {
        "none" => Ok(None),
        text => parse(text).map(Some),
    });
    parsed.map(Option::flatten)
}

/// The instance's name.
pub(super) fn instance(layer: &Layer) -> Outcome<String> {
    let parsed = optional(layer, Key::Instance, |text| {
        name::check(text).map_err(|error| error.to_string())?;
        Ok(text.to_owned())
    })?;
    Ok(parsed.unwrap_or_else(|| "default".to_owned()))
}

/// An absolute path: a daemon's working directory is nobody's business.
pub(super) fn directory(text: &str) -> Result<PathBuf, String> {
    if text.contains('\0') {
        return Err("must not contain NUL".to_owned());
    }
    let path = Path::new(text);
    if path.is_absolute() {
        Ok(path.to_owned())
    } else {
        Err("must be an absolute path".to_owned())
    }
}

/// A number within `range`.
pub(super) fn number(range: RangeInclusive<u32>) -> impl Fn(&str) -> Result<u32, String> {
    move |text| {
        text.parse()
            .ok()
            .filter(|number| range.contains(number))
            .ok_or_else(|| {
                format!(
                    "must be a whole number from {} to {}",
                    range.start(),
                    range.end()
                )
            })
    }
}

/// A size in bytes, over 0 and small enough to be mapped.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let rule = "must be a size over 0 such as 64MiB";
    let parsed: ByteSize = text.trim().parse().map_err(|_: String| rule.to_owned())?;
    match parsed.as_u64() {
        0 => Err(rule.to_owned()),
        bytes if i64::try_from(bytes).is_err() => Err("must be less than 8EiB".to_owned()),
        bytes => Ok(bytes),
    }
}

/// A bandwidth in bytes per second.
pub(super) fn rate(text: &str) -> Result<u64, String> {
    let rule = "must be a rate in bytes per second over 0 such as 8GB/s";
    let size_text = text.trim().strip_suffix("/s").ok_or(rule)?;
    // the size parser takes 8Gb for 8 GB; whoever writes it means bits
    if size_text.ends_with('b') {
        return Err(format!("{rule} (a small b would be bits)"));
    }
    size(size_text).map_err(|_| rule.to_owned())
}

/// A time of at most one hour.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text.trim())
        .ok()
        .filter(|time| *time <= Duration::from_secs(3600))
        .ok_or_else(|| "must be a time of at most 1h such as 5s or 500ms".to_owned())
}

/// true or false.
pub(super) fn truth(text: &str) -> Result<bool, String> {
    text.parse().map_err(|_| "must be true or false".to_owned())
}

/// A filter for events, in the syntax of `tracing_subscriber::EnvFilter`.
pub(super) fn filter(text: &str) -> Result<String, String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let rule = || {
        format!(
            "must be a level ({}) or directives such as flextensord=debug,info",
            LEVELS.join(", ")
        )
    };
    // a mistyped level would be taken for the name of a module, and silence everything
    let one_word = text.chars().all(|c| c.is_ascii_alphanumeric());
    if one_word && !LEVELS.contains(&text.to_ascii_lowercase().as_str()) {
        return Err(rule());
    }
    match tracing_subscriber::EnvFilter::try_new(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(format!("{}: {error}", rule())),
    }
}
