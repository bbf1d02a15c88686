//! The header of a safetensors file, checked against the file's length.
//!
//! A file is the header's length (64-bit little-endian), the header (JSON), and the
//! tensors' bytes, which must follow each other without overlap, hole or rest. Offsets
//! need no alignment.

use std::{collections::HashSet, fmt, marker::PhantomData};

use flextensord_proto::{limit, name};
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, Visitor},
};

use super::dtype::{self, SizeError};

/// Most bytes of a header, as in the reference implementation.
pub const HEADER_BYTES: u64 = 100_000_000;
/// Bytes of the header's length.
pub const PREFIX_BYTES: u64 = 8;

/// What is wrong with a header. Messages repeat only what the file itself says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Too short to hold anything.
    #[error("it has {bytes} bytes, too few for a safetensors file")]
    Short {
        /// Bytes of the file.
        bytes: u64,
    },
    /// A header over the limit.
    #[error("header of {bytes} bytes is over the limit of {HEADER_BYTES}")]
    HeaderLength {
        /// Bytes that the file claims.
        bytes: u64,
    },
    /// A header that passes the end of the file.
    #[error("header of {bytes} bytes passes the end of the file of {file} bytes")]
    HeaderCut {
        /// Bytes that the file claims.
        bytes: u64,
        /// Bytes of the file.
        file: u64,
    },
    /// Not the JSON that it should be.
    #[error("header is not valid: {problem}")]
    Json {
        /// What the parser says.
        problem: String,
    },
    /// A tensor's name.
    #[error("tensor {tensor:?}: {problem}")]
    Name {
        /// The name.
        tensor: String,
        /// The rule it breaks.
        problem: String,
    },
    /// A tensor's size.
    #[error("tensor {tensor:?} of dtype {dtype:?}: {problem}")]
    Size {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: String,
        /// What is wrong.
        problem: SizeError,
    },
    /// Offsets that do not agree with type and shape.
    #[error(
        "tensor {tensor:?} has offsets {begin}..{end}, but dtype and shape need {needed} bytes"
    )]
    Offsets {
        /// The tensor.
        tensor: String,
        /// First byte.
        begin: u64,
        /// Byte after the last.
        end: u64,
        /// Bytes that dtype and shape give.
        needed: u64,
    },
    /// Bytes that two tensors claim.
    #[error("tensor {tensor:?} begins at {begin}, inside the tensor that ends at {expected}")]
    Overlap {
        /// The second of the two.
        tensor: String,
        /// Where it begins.
        begin: u64,
        /// Where the one before it ends.
        expected: u64,
    },
    /// Bytes that no tensor claims.
    #[error("tensor {tensor:?} begins at {begin}, which leaves a hole from {expected}")]
    Hole {
        /// The tensor after the hole.
        tensor: String,
        /// Where it begins.
        begin: u64,
        /// Where the hole begins.
        expected: u64,
    },
    /// Tensors and file end at different places.
    #[error("tensors take {tensors} bytes, the file has {file} behind its header")]
    End {
        /// Bytes of all tensors.
        tensors: u64,
        /// Bytes behind the header.
        file: u64,
    },
}

/// A tensor as the header declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileTensor {
    /// Its qualified name.
    pub name: String,
    /// Its element type.
    pub dtype: String,
    /// Its dimensions.
    pub shape: Vec<u64>,
    /// Where its bytes begin in the file.
    pub offset: u64,
    /// How many there are.
    pub bytes: u64,
}

/// The length of the header that `prefix`, the first 8 bytes, announces, for a file of
/// `file_bytes` bytes.
///
/// # Errors
/// When the length is over the limit or passes the end of the file.
pub fn header_bytes(prefix: [u8; 8], file_bytes: u64) -> Result<u64, HeaderError> {
    if file_bytes < PREFIX_BYTES {
        return Err(HeaderError::Short { bytes: file_bytes });
    }
    let bytes = u64::from_le_bytes(prefix);
    if bytes > HEADER_BYTES {
        return Err(HeaderError::HeaderLength { bytes });
    }
    if bytes > file_bytes - PREFIX_BYTES {
        let file = file_bytes;
        return Err(HeaderError::HeaderCut { bytes, file });
    }
    Ok(bytes)
}

/// The tensors of a header, in order of offset, for a file of `file_bytes` bytes.
///
/// # Errors
/// See [`HeaderError`].
pub fn parse(header: &[u8], file_bytes: u64) -> Result<Vec<FileTensor>, HeaderError> {
    let start = PREFIX_BYTES + header.len() as u64;
    let data_bytes = file_bytes
        .checked_sub(start)
        .ok_or(HeaderError::Short { bytes: file_bytes })?;
    if header.first() != Some(&b'{') {
        let problem = "it does not begin with '{'".to_owned();
        return Err(HeaderError::Json { problem });
    }
    let Header(declared) = serde_json::from_slice(header).map_err(|e| HeaderError::Json {
        problem: e.to_string(),
    })?;
    let mut tensors = Vec::with_capacity(declared.len());
    for (name, entry) in declared {
        tensors.push(entry.check(name)?);
    }
    // an empty tensor lies before the one that begins where it ends
    tensors.sort_by(|a, b| (a.offset, a.bytes, &a.name).cmp(&(b.offset, b.bytes, &b.name)));
    let mut expected = 0_u64;
    for tensor in &mut tensors {
        let begin = tensor.offset;
        let name = || tensor.name.clone();
        if begin < expected {
            let tensor = name();
            return Err(HeaderError::Overlap {
                tensor,
                begin,
                expected,
            });
        }
        if begin > expected {
            let tensor = name();
            return Err(HeaderError::Hole {
                tensor,
                begin,
                expected,
            });
        }
        // begin + bytes is the end that the file declared, so it cannot overflow
        expected = begin.saturating_add(tensor.bytes);
        tensor.offset = begin.saturating_add(start);
    }
    if expected != data_bytes {
        return Err(HeaderError::End {
            tensors: expected,
            file: data_bytes,
        });
    }
    Ok(tensors)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl Entry {
    /// The tensor, its offset still relative to the end of the header.
    fn check(self, name: String) -> Result<FileTensor, HeaderError> {
        if let Err(problem) = name::check_qualified(&name) {
            return Err(HeaderError::Name {
                tensor: name.chars().take(64).collect(),
                problem: problem.to_string(),
            });
        }
        let [begin, end] = self.data_offsets;
        let given = end.checked_sub(begin);
        let needed = match dtype::contiguous_bytes(&self.dtype, &self.shape, given) {
            Ok(needed) => needed,
            Err(problem) => {
                return Err(HeaderError::Size {
                    tensor: name,
                    dtype: self.dtype.chars().take(64).collect(),
                    problem,
                });
            }
        };
        if given != Some(needed) {
            let tensor = name;
            return Err(HeaderError::Offsets {
                tensor,
                begin,
                end,
                needed,
            });
        }
        Ok(FileTensor {
            name,
            dtype: self.dtype,
            shape: self.shape,
            offset: begin,
            bytes: needed,
        })
    }
}

/// Tensors by name, each once, without the free-form `__metadata__`.
struct Header(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("tensors by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut seen = HashSet::new();
                let mut entries = Vec::new();
                while let Some(key) = map.next_key::<String>()? {
                    if key == "__metadata__" {
                        map.next_value::<UniqueMap<String>>()?;
                    } else if entries.len() == limit::TENSORS {
                        let text = format!("more than {} tensors", limit::TENSORS);
                        return Err(A::Error::custom(text));
                    } else {
                        entries.push((key.clone(), map.next_value()?));
                    }
                    once::<A::Error>(&mut seen, key)?;
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// A JSON object whose keys are all different.
pub(crate) struct UniqueMap<V>(pub(crate) Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for UniqueMap<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs<V>(PhantomData<V>);
        impl<'de, V: Deserialize<'de>> Visitor<'de> for Pairs<V> {
            type Value = UniqueMap<V>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueMap<V>, A::Error> {
                let mut seen = HashSet::new();
                let mut pairs = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, V>()? {
                    once::<A::Error>(&mut seen, key.clone())?;
                    pairs.push((key, value));
                }
                Ok(UniqueMap(pairs))
            }
        }
        deserializer.deserialize_map(Pairs(PhantomData))
    }
}

fn once<E: serde::de::Error>(seen: &mut HashSet<String>, key: String) -> Result<(), E> {
    if seen.contains(&key) {
        let shown: String = key.chars().take(64).collect();
        return Err(E::custom(format!("key {shown:?} appears twice")));
    }
    seen.insert(key);
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(file: &[u8]) -> Result<Vec<FileTensor>, HeaderError> {
        let prefix = file.first_chunk().ok_or(HeaderError::Short {
            bytes: file.len() as u64,
        })?;
        let length = usize::try_from(header_bytes(*prefix, file.len() as u64)?).unwrap();
        parse(&file[8..8 + length], file.len() as u64)
    }

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.as_bytes());
        file.extend(vec![0; data]);
        file
    }

    const ODD: &str = r#"{"__metadata__":{"format":"pt"},
        "a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},
        "b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]},
        "c":{"dtype":"F8_E4M3","shape":[5],"data_offsets":[11,16]},
        "d":{"dtype":"F8_E8M0","shape":[1],"data_offsets":[16,17]},
        "e":{"dtype":"F4","shape":[6],"data_offsets":[17,20]},
        "f":{"dtype":"BOOL","shape":[1],"data_offsets":[20,21]},
        "g":{"dtype":"I64","shape":[],"data_offsets":[21,29]},
        "z":{"dtype":"F32","shape":[0,4],"data_offsets":[3,3]}}"#;

    #[test]
    fn odd_types_and_unaligned_offsets_are_read() {
        let header = ODD.replace("\n        ", "");
        let tensors = read(&file(&header, 29)).unwrap();
        assert_eq!(tensors.len(), 8);
        assert_eq!(tensors[1].name, "z");
        let start = 8 + header.len() as u64;
        assert_eq!((tensors[2].offset, tensors[2].bytes), (start + 3, 8));
    }

    #[test]
    fn a_file_cut_at_any_length_is_refused() {
        let whole = file(ODD, 29);
        for length in 0..whole.len() {
            assert!(read(&whole[..length]).is_err(), "{length}");
        }
        assert!(read(&whole).is_ok());
        let mut long = whole;
        long.push(0);
        assert_eq!(
            read(&long),
            Err(HeaderError::End {
                tensors: 29,
                file: 30
            })
        );
    }

    #[test]
    fn hostile_headers_are_refused_with_the_reason() {
        let tensor = |name: &str, dtype: &str, shape: &str, begin: u64, end: u64| {
            format!(
                r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#
            )
        };
        let many = format!("[{}1]", "1,".repeat(64));
        for (what, header, data) in [
            (
                "appears twice",
                format!("{{{0},{0}}}", tensor("a", "U8", "[1]", 0, 1)),
                1,
            ),
            (
                "appears twice",
                r#"{"__metadata__":{"a":"b","a":"c"}}"#.to_owned(),
                0,
            ),
            (
                "appears twice",
                r#"{"__metadata__":{},"__metadata__":{}}"#.to_owned(),
                0,
            ),
            (
                "inside the tensor",
                format!(
                    "{{{},{}}}",
                    tensor("a", "U8", "[2]", 0, 2),
                    tensor("b", "U8", "[2]", 1, 3)
                ),
                3,
            ),
            (
                "hole",
                format!(
                    "{{{},{}}}",
                    tensor("a", "U8", "[1]", 0, 1),
                    tensor("b", "U8", "[1]", 2, 3)
                ),
                3,
            ),
            ("hole", format!("{{{}}}", tensor("a", "U8", "[1]", 1, 2)), 2),
            (
                "behind its header",
                format!("{{{}}}", tensor("a", "U8", "[4]", 0, 4)),
                3,
            ),
            (
                "need 4 bytes",
                format!("{{{}}}", tensor("a", "F32", "[1]", 0, 3)),
                3,
            ),
            (
                "need 4 bytes",
                format!("{{{}}}", tensor("a", "F32", "[1]", 4, 0)),
                4,
            ),
            (
                "overflows",
                format!("{{{}}}", tensor("a", "U8", "[8589934592,8589934592]", 0, 1)),
                1,
            ),
            (
                "65 dimensions",
                format!("{{{}}}", tensor("a", "U8", &many, 0, 1)),
                1,
            ),
            (
                "whole bytes",
                format!("{{{}}}", tensor("a", "F4", "[5]", 0, 3)),
                3,
            ),
            (
                "expected u64",
                format!("{{{}}}", tensor("a", "U8", "[-1]", 0, 1)),
                1,
            ),
            (
                "u64",
                format!("{{{}}}", tensor("a", "U8", "[18446744073709551616]", 0, 1)),
                1,
            ),
            (
                "divide",
                format!("{{{}}}", tensor("a", "Q7", "[3]", 0, 1)),
                1,
            ),
            (
                "dtype must",
                format!("{{{}}}", tensor("a", "a b", "[1]", 0, 1)),
                1,
            ),
            (
                "name is empty",
                format!("{{{}}}", tensor("", "U8", "[1]", 0, 1)),
                1,
            ),
            (
                "control character",
                format!("{{{}}}", tensor("a\\u0000", "U8", "[1]", 0, 1)),
                1,
            ),
            (
                "name has 600",
                format!("{{{}}}", tensor(&"n".repeat(600), "U8", "[1]", 0, 1)),
                1,
            ),
            (
                "unknown field",
                r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":1}}"#.to_owned(),
                0,
            ),
            ("trailing characters", "{}x".to_owned(), 0),
            ("begin with", " {}".to_owned(), 0),
            ("begin with", String::new(), 0),
            ("invalid type", r#"{"__metadata__":{"a":1}}"#.to_owned(), 0),
        ] {
            let error = read(&file(&header, data)).unwrap_err().to_string();
            assert!(error.contains(what), "{header}: {error}");
        }
    }

    #[test]
    fn a_header_of_any_announced_length_allocates_nothing_before_it_is_checked() {
        for length in [u64::MAX, 1 << 63, HEADER_BYTES + 1] {
            let bytes = [length.to_le_bytes().as_slice(), b"{}"].concat();
            assert_eq!(
                read(&bytes),
                Err(HeaderError::HeaderLength { bytes: length })
            );
        }
        let bytes = [HEADER_BYTES.to_le_bytes().as_slice(), b"{}"].concat();
        assert!(matches!(read(&bytes), Err(HeaderError::HeaderCut { .. })));
    }

    #[test]
    fn a_file_without_tensors_is_valid() {
        assert_eq!(read(&file("{}", 0)), Ok(vec![]));
        assert_eq!(read(&file("{}   ", 0)), Ok(vec![]));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            shapes in prop::collection::vec(prop::collection::vec(0_u64..5, 0..5), 0..12),
            types in prop::collection::vec(
                prop::sample::select(vec!["U8", "BF16", "F32", "I64", "F8_E5M2"]), 12),
        ) {
            let mut entries = Vec::new();
            let mut expected = Vec::new();
            let mut cursor = 0;
            for (i, (shape, dtype)) in shapes.iter().zip(&types).enumerate() {
                let bytes = dtype::contiguous_bytes(dtype, shape, None).unwrap();
                entries.push(format!(
                    r#""t.{i}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{cursor},{}]}}"#,
                    cursor + bytes
                ));
                expected.push((format!("t.{i}"), bytes, cursor));
                cursor += bytes;
            }
            let header = format!("{{{}}}", entries.join(","));
            let start = 8 + header.len() as u64;
            let tensors = read(&file(&header, usize::try_from(cursor).unwrap())).unwrap();
            let mut got: Vec<_> = tensors
                .into_iter()
                .map(|t| (t.name, t.bytes, t.offset - start))
                .collect();
            got.sort();
            expected.sort();
            prop_assert_eq!(got, expected);
        }

        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _: Result<_, _> = read(&bytes);
            let _: Result<_, _> = parse(&bytes, 1 << 40);
        }
    }
}
