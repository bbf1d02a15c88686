//! Element types by name and bits. Bytes are never interpreted.
//!
//! Bytes of a contiguous tensor are `elements * bits / 8`, and that division must be
//! exact: a sub-byte tensor whose elements do not fill whole bytes is refused. The
//! types of safetensors have known bits; any other name is carried as it is, where the
//! number of bytes is given and divides evenly by the number of elements.

use flextensord_proto::limit;

/// Most bits of an element of an unknown type.
const MOST_BITS: u64 = 1024;
/// Most bytes of a type's name.
const NAME_BYTES: usize = 32;

/// Why a size cannot be worked out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// The name is none that a type may have.
    #[error("dtype must be 1 to {NAME_BYTES} letters, digits and '_'")]
    Name,
    /// Too many dimensions.
    #[error(
        "shape has {dimensions} dimensions, over the limit of {}",
        limit::DIMENSIONS
    )]
    Dimensions {
        /// How many.
        dimensions: usize,
    },
    /// The product does not fit.
    #[error("the size that shape and dtype give overflows 64 bits")]
    Overflow,
    /// Elements that do not fill whole bytes.
    #[error("{elements} elements of {bits} bits do not fill whole bytes")]
    PartialByte {
        /// Elements of the tensor.
        elements: u64,
        /// Bits of each.
        bits: u32,
    },
    /// A type whose bits nobody gives.
    #[error("dtype is not one of safetensors, so its bytes must be given")]
    Unknown,
    /// Bytes of a type with unknown bits that do not divide.
    #[error("{bytes} bytes do not divide into {elements} elements of 1 to {MOST_BITS} bits")]
    Uneven {
        /// Bytes given.
        bytes: u64,
        /// Elements of the shape.
        elements: u64,
    },
    /// Strides that do not fit the shape.
    #[error("stride has {strides} values for {dimensions} dimensions")]
    StrideCount {
        /// Values of the stride.
        strides: usize,
        /// Dimensions of the shape.
        dimensions: usize,
    },
    /// A negative stride.
    #[error("stride {stride} is negative")]
    NegativeStride {
        /// The first such stride.
        stride: i64,
    },
    /// A stride in units of less than a byte.
    #[error("a strided tensor of {bits}-bit elements cannot be addressed in bytes")]
    SubByteStride {
        /// Bits of an element.
        bits: u32,
    },
}

/// Bits of an element of the type that safetensors calls `name`.
#[must_use]
pub fn bits(name: &str) -> Option<u32> {
    Some(match name {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ"
        | "F8_E5M2FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

/// Checks the name of a type, known or not.
///
/// # Errors
/// [`SizeError::Name`].
pub fn check_name(name: &str) -> Result<(), SizeError> {
    let legal = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    if name.is_empty() || name.len() > NAME_BYTES || !name.bytes().all(legal) {
        return Err(SizeError::Name);
    }
    Ok(())
}

/// Number of elements of a shape; 1 for a scalar.
///
/// # Errors
/// When there are too many dimensions, or the product overflows (also where another
/// dimension is 0: such a shape is a mistake, not a small tensor).
pub fn elements(shape: &[u64]) -> Result<u64, SizeError> {
    if shape.len() > limit::DIMENSIONS {
        return Err(SizeError::Dimensions {
            dimensions: shape.len(),
        });
    }
    let product = shape
        .iter()
        .filter(|d| **d != 0)
        .try_fold(1_u64, |product, d| product.checked_mul(*d))
        .ok_or(SizeError::Overflow)?;
    Ok(if shape.contains(&0) { 0 } else { product })
}

/// Bytes of a contiguous tensor. `given` are the bytes that the source says it has,
/// which a type with unknown bits needs.
///
/// # Errors
/// See [`SizeError`].
pub fn contiguous_bytes(dtype: &str, shape: &[u64], given: Option<u64>) -> Result<u64, SizeError> {
    check_name(dtype)?;
    let elements = elements(shape)?;
    let Some(bits) = bits(dtype) else {
        let bytes = given.ok_or(SizeError::Unknown)?;
        element_bits(bytes, elements)?;
        return Ok(bytes);
    };
    let total = u128::from(elements) * u128::from(bits);
    if total % 8 != 0 {
        return Err(SizeError::PartialByte { elements, bits });
    }
    u64::try_from(total / 8).map_err(|_| SizeError::Overflow)
}

/// Bits of an element of which `elements` take `bytes`; 8 when there are none.
fn element_bits(bytes: u64, elements: u64) -> Result<u64, SizeError> {
    let total = u128::from(bytes) * 8;
    let uneven = SizeError::Uneven { bytes, elements };
    if elements == 0 {
        return if bytes == 0 { Ok(8) } else { Err(uneven) };
    }
    let bits = u64::try_from(total / u128::from(elements)).unwrap_or(u64::MAX);
    if total % u128::from(elements) != 0 || !(1..=MOST_BITS).contains(&bits) {
        return Err(uneven);
    }
    Ok(bits)
}

/// Bytes that a strided tensor spans from its first to the end of its last element.
/// `stride` is in elements; a stride of 0 repeats.
///
/// # Errors
/// See [`SizeError`]; the type must be one of safetensors with whole bytes.
pub fn span_bytes(dtype: &str, shape: &[u64], stride: &[i64]) -> Result<u64, SizeError> {
    check_name(dtype)?;
    let count = elements(shape)?;
    if stride.len() != shape.len() {
        return Err(SizeError::StrideCount {
            strides: stride.len(),
            dimensions: shape.len(),
        });
    }
    let mut last = 0_u64;
    for (dimension, stride) in shape.iter().zip(stride) {
        let step =
            u64::try_from(*stride).map_err(|_| SizeError::NegativeStride { stride: *stride })?;
        last = dimension
            .saturating_sub(1)
            .checked_mul(step)
            .and_then(|reach| last.checked_add(reach))
            .ok_or(SizeError::Overflow)?;
    }
    let bits = bits(dtype).ok_or(SizeError::Unknown)?;
    if !bits.is_multiple_of(8) {
        return Err(SizeError::SubByteStride { bits });
    }
    if count == 0 {
        return Ok(0);
    }
    last.checked_add(1)
        .and_then(|elements| elements.checked_mul(u64::from(bits / 8)))
        .ok_or(SizeError::Overflow)
}

/// Whether `stride` is what a row-major tensor of that shape has, so that it says
/// nothing. Dimensions of one element may have any stride.
#[must_use]
pub fn is_contiguous(shape: &[u64], stride: &[i64]) -> bool {
    if shape.len() != stride.len() {
        return false;
    }
    let mut expected = Some(1_u64);
    for (dimension, stride) in shape.iter().zip(stride).rev() {
        if *dimension != 1 && u64::try_from(*stride).ok() != expected {
            return false;
        }
        expected = expected.and_then(|e| e.checked_mul(*dimension));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sub_byte_tensors_must_fill_whole_bytes() {
        assert_eq!(contiguous_bytes("F4", &[6], None), Ok(3));
        assert_eq!(
            contiguous_bytes("F4", &[5], None),
            Err(SizeError::PartialByte {
                elements: 5,
                bits: 4
            })
        );
        assert_eq!(contiguous_bytes("F6_E2M3", &[4], None), Ok(3));
        assert!(contiguous_bytes("F6_E3M2", &[3], None).is_err());
    }

    #[test]
    fn scalars_have_one_element_and_zero_dimensions_none() {
        assert_eq!(contiguous_bytes("I64", &[], None), Ok(8));
        assert_eq!(contiguous_bytes("F32", &[3, 0, 7], None), Ok(0));
    }

    #[test]
    fn products_that_overflow_and_too_many_dimensions_are_refused() {
        let wide = 1 << 33;
        assert_eq!(
            contiguous_bytes("U8", &[wide, wide], None),
            Err(SizeError::Overflow)
        );
        assert_eq!(
            contiguous_bytes("U8", &[wide, wide, 0], None),
            Err(SizeError::Overflow)
        );
        assert_eq!(
            contiguous_bytes("F64", &[1 << 62], None),
            Err(SizeError::Overflow)
        );
        assert!(contiguous_bytes("U8", &[1; 64], None).is_ok());
        assert_eq!(
            contiguous_bytes("U8", &[1; 65], None),
            Err(SizeError::Dimensions { dimensions: 65 })
        );
    }

    #[test]
    fn an_unknown_type_is_carried_where_its_bytes_divide() {
        assert_eq!(contiguous_bytes("F5_X", &[8], Some(5)), Ok(5));
        assert_eq!(
            contiguous_bytes("F5_X", &[8], None),
            Err(SizeError::Unknown)
        );
        assert!(contiguous_bytes("F5_X", &[3], Some(5)).is_err());
        assert!(contiguous_bytes("F5_X", &[0], Some(5)).is_err());
        assert!(contiguous_bytes("F5_X", &[9], Some(0)).is_err());
        assert!(contiguous_bytes("", &[1], Some(1)).is_err());
        assert!(contiguous_bytes("a b", &[1], Some(1)).is_err());
    }

    #[test]
    fn a_strided_tensor_spans_from_its_first_to_its_last_element() {
        // a transposed 3 x 4 matrix of F32, and a column of it
        assert_eq!(span_bytes("F32", &[4, 3], &[1, 4]), Ok(48));
        assert_eq!(span_bytes("F32", &[3], &[4]), Ok(36));
        assert_eq!(span_bytes("F32", &[3, 9], &[0, 1]), Ok(36));
        assert_eq!(span_bytes("F32", &[0, 9], &[7, 1]), Ok(0));
        assert_eq!(
            span_bytes("F32", &[2], &[-1]),
            Err(SizeError::NegativeStride { stride: -1 })
        );
        assert!(span_bytes("F4", &[2], &[2]).is_err());
        assert!(span_bytes("F32", &[2], &[]).is_err());
        assert_eq!(
            span_bytes("F32", &[2], &[i64::MAX]),
            Err(SizeError::Overflow)
        );
    }

    #[test]
    fn row_major_strides_are_known_as_such() {
        assert!(is_contiguous(&[2, 3], &[3, 1]));
        assert!(is_contiguous(&[1, 3], &[99, 1]));
        assert!(!is_contiguous(&[3, 2], &[1, 3]));
        assert!(is_contiguous(&[], &[]));
    }
}
