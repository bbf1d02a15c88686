//! The layer of the TOML file.

use std::{fs, path::Path};

use toml::de::{DeTable, DeValue};

use super::{
    error::ConfigurationError,
    key::{Key, nearest},
    layer::{Layer, Origin},
};

/// Reads the file at `path`.
///
/// # Errors
/// When it cannot be read, is no TOML, or has an unknown key.
pub fn read(path: &Path) -> Result<Layer, ConfigurationError> {
    let text = fs::read_to_string(path).map_err(|source| ConfigurationError::Read {
        path: path.to_owned(),
        source,
    })?;
    parse(path, &text)
}

/// Reads `text`, the contents of `path`.
fn parse(path: &Path, text: &str) -> Result<Layer, ConfigurationError> {
    let syntax = |line, message| ConfigurationError::Syntax {
        path: path.to_owned(),
        line,
        message,
    };
    let table = DeTable::parse(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        // the parser may add a hint on a line of its own
        syntax(line_of(text, at), error.message().replace('\n', "; "))
    })?;
    // in the order of the file, so that the first mistake is the one reported
    let mut entries: Vec<_> = table.get_ref().iter().collect();
    entries.sort_by_key(|(name, _)| name.span().start);
    let mut layer = Layer::default();
    for (name, value) in entries {
        let line = line_of(text, name.span().start);
        let name = name.get_ref().as_ref();
        let Some(key) = Key::named(name) else {
            return Err(ConfigurationError::UnknownKey {
                path: path.to_owned(),
                line,
                name: name.to_owned(),
                nearest: nearest(name, Key::ALL.into_iter().map(|key| key.name().to_owned())),
            });
        };
        let value = value.get_ref();
        let text = match value {
            DeValue::String(text) => text.to_string(),
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().to_owned(),
            DeValue::Boolean(truth) => truth.to_string(),
            other => {
                let kind = other.type_str();
                let message = format!(
                    "{name} is of type {kind}; string, decimal integer or boolean are allowed"
                );
                return Err(syntax(line, message));
            }
        };
        let path = path.to_owned();
        layer.set(key, text, Origin::File { path, line });
    }
    Ok(layer)
}

/// The line, from 1, of the byte at `offset`.
fn line_of(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|b| *b == b'\n').count()
}
