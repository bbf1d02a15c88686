//! The header of a safetensors file, checked against the file's length.
//!
//! A file is the header's length (64-bit little-endian), the header (JSON), and the
//! tensors' bytes, which must follow each other without overlap, hole or rest. Offsets
//! need no alignment.

mod error;
mod json;

use flextensord_proto::name;
use serde::de::DeserializeSeed as _;

pub use self::error::HeaderError;
pub(crate) use self::json::Index;
use self::json::{Entry, Header};
use super::{dtype, loader::Watch};

/// Most bytes of a header, 32 MiB. The reference implementation takes 100 MB; models of
/// a hundred thousand tensors have less than 10, and each byte becomes several of heap.
pub const HEADER_BYTES: u64 = 32 << 20;
/// Bytes of the header's length.
pub const PREFIX_BYTES: u64 = 8;

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
/// See [`HeaderError`]; any of them when `watch` says that the caller has given up.
pub fn parse(
    header: &[u8],
    file_bytes: u64,
    watch: &dyn Watch,
) -> Result<Vec<FileTensor>, HeaderError> {
    let start = PREFIX_BYTES + header.len() as u64;
    let data_bytes = file_bytes
        .checked_sub(start)
        .ok_or(HeaderError::Short { bytes: file_bytes })?;
    if header.first() != Some(&b'{') {
        let problem = "it does not begin with '{'".to_owned();
        return Err(HeaderError::Json { problem });
    }
    let mut reader = serde_json::Deserializer::from_slice(header);
    let declared = Header(watch).deserialize(&mut reader);
    let declared = declared
        .and_then(|declared| reader.end().map(|()| declared))
        .map_err(|e| HeaderError::Json {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::loader::Cancel, *};

    fn parse(header: &[u8], file_bytes: u64) -> Result<Vec<FileTensor>, HeaderError> {
        super::parse(header, file_bytes, &Cancel::default())
    }

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
                "more than 64 dimensions",
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
            ("trailing characters", "{}x".to_owned(), 0),
            ("begin with", " {}".to_owned(), 0),
            ("begin with", String::new(), 0),
            ("invalid type", r#"{"__metadata__":{"a":1}}"#.to_owned(), 0),
        ] {
            let error = read(&file(&header, data)).unwrap_err().to_string();
            assert!(error.contains(what), "{header}: {error}");
        }
    }

    /// A caller that gives up after a number of looks.
    struct Patience(std::sync::atomic::AtomicUsize);

    impl Watch for Patience {
        fn progress(&self, _done: u64, _total: u64) {}

        fn is_cancelled(&self) -> bool {
            self.0
                .fetch_update(
                    std::sync::atomic::Ordering::Relaxed,
                    std::sync::atomic::Ordering::Relaxed,
                    |left| left.checked_sub(1),
                )
                .is_err()
        }
    }

    #[test]
    fn a_header_of_many_entries_is_given_up_when_the_caller_does() {
        let metadata: Vec<_> = (0..1000).map(|i| format!(r#""{i}":"""#)).collect();
        let metadata = format!(r#"{{"__metadata__":{{{}}}}}"#, metadata.join(","));
        let entry = r#"{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
        let tensors: Vec<_> = (0..1000).map(|i| format!(r#""{i}":{entry}"#)).collect();
        let tensors = format!("{{{}}}", tensors.join(","));
        for header in [metadata, tensors] {
            for looks in [0, 1, 500] {
                let error = super::parse(
                    header.as_bytes(),
                    8 + header.len() as u64,
                    &Patience(looks.into()),
                );
                let error = error.unwrap_err().to_string();
                assert!(error.contains("given up"), "{error}");
            }
            assert!(read(&file(&header, 0)).is_ok());
        }
    }

    #[test]
    fn metadata_is_read_past_whatever_its_keys_are() {
        let header = r#"{"__metadata__":{"a":"b","a":"\u00e4\n"}}"#;
        assert_eq!(read(&file(header, 0)), Ok(vec![]));
    }

    #[test]
    fn keys_that_are_not_known_are_ignored_in_an_entry() {
        let header = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":{"y":1}}}"#;
        assert!(read(&file(header, 1)).is_ok());
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
