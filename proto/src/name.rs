//! Which names are legal for managers, weight sets, instances, layers and tensors.

use crate::limit;

/// Why a name is refused. The message names the rule, never another's names.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The name has no byte.
    #[error("name is empty")]
    Empty,
    /// The name is longer than its limit.
    #[error("name has {bytes} bytes, over the limit of {limit}")]
    TooLong {
        /// Bytes of the name.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// A character outside letters, digits, '.', '_' and '-'.
    #[error("name contains {character:?}; allowed are letters, digits, '.', '_' and '-'")]
    Character {
        /// The first such character.
        character: char,
    },
    /// A leading dot would hide it, or climb.
    #[error("name starts with '.'")]
    LeadingDot,
    /// A control character in a qualified name.
    #[error("name contains the control character {character:?}")]
    Control {
        /// The first such character.
        character: char,
    },
}

/// Checks the name of a manager, weight set or instance: 1 to 128 bytes of ASCII
/// letters, digits, '.', '_' and '-', not starting with '.'. Such a name is safe as
/// part of a file name.
pub fn check(name: &str) -> Result<(), NameError> {
    length(name, limit::NAME_BYTES)?;
    if let Some(character) = name
        .chars()
        .find(|c| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')))
    {
        return Err(NameError::Character { character });
    }
    if name.starts_with('.') {
        return Err(NameError::LeadingDot);
    }
    Ok(())
}

/// Checks the qualified name of a tensor or layer: 1 to 512 bytes of UTF-8 without
/// control characters. Never used as part of a file name.
pub fn check_qualified(name: &str) -> Result<(), NameError> {
    length(name, limit::QUALIFIED_NAME_BYTES)?;
    match name.chars().find(|c| c.is_control()) {
        Some(character) => Err(NameError::Control { character }),
        None => Ok(()),
    }
}

fn length(name: &str, limit: usize) -> Result<(), NameError> {
    match name.len() {
        0 => Err(NameError::Empty),
        bytes if bytes > limit => Err(NameError::TooLong { bytes, limit }),
        _ => Ok(()),
    }
}

/// A key that orders qualified names naturally: runs of digits compare as numbers,
/// so that `layers.2.w` comes before `layers.10.w`.
#[must_use]
pub fn natural_key(name: &str) -> Vec<(String, u128, usize)> {
    let mut key = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let text_len = rest
            .find(|c: char| c.is_ascii_digit())
            .unwrap_or(rest.len());
        let (text, tail) = rest.split_at(text_len);
        let digits_len = tail
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(tail.len());
        let (digits, tail) = tail.split_at(digits_len);
        // a run too long for u128 sorts after all numbers, then by its length
        let number = if digits.is_empty() {
            0
        } else {
            digits.parse().unwrap_or(u128::MAX)
        };
        key.push((text.to_owned(), number, digits.len()));
        rest = tail;
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_their_directory_are_refused() {
        for bad in [
            "",
            "a/b",
            "..",
            ".",
            ".hidden",
            "a\0b",
            "ä",
            "a b",
            &"x".repeat(129),
        ] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
        for good in ["a", "llama-3.1_8B", &"x".repeat(128)] {
            assert_eq!(check(good), Ok(()), "{good:?}");
        }
    }

    #[test]
    fn numeric_segments_sort_as_numbers() {
        let mut names = vec!["l.10.w", "l.2.w", "l.2.b", "l.w", "l.02.w", "a"];
        names.sort_by_key(|n| natural_key(n));
        assert_eq!(names, ["a", "l.2.b", "l.2.w", "l.02.w", "l.10.w", "l.w"]);
    }

    #[test]
    fn qualified_names_may_be_long_but_not_control() {
        assert!(check_qualified("model.layers.0.weight").is_ok());
        assert!(check_qualified("a/b:c").is_ok());
        assert!(check_qualified("a\nb").is_err());
        assert!(check_qualified(&"x".repeat(513)).is_err());
    }
}
