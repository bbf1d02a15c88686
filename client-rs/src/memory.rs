//! The memory of a plan as this process sees it: mapped from the host's or from a GPU's.

use std::{io, os::fd::OwnedFd, sync::Arc};

use flextensord_device::mapping::{Mapping, RangeError};

use crate::{error::ClientError, gpu::Imported};

/// Bytes of a GPU that are compared at once.
const STRIDE: usize = 16 << 20;

/// The memory of one allocation. Its bytes are the daemon's to write, so they are copied
/// or compared, never borrowed.
#[derive(Debug)]
pub(crate) enum PlaneMemory {
    /// Of the device in host memory, with its descriptor for a successor of the daemon.
    Host(Mapping, OwnedFd),
    /// Of a GPU.
    Device(Arc<Imported>),
}

impl PlaneMemory {
    /// Copies bytes out. On a GPU whoever calls sees to it that they are there.
    pub(crate) fn read(&self, offset: u64, target: &mut [u8]) -> Result<(), ClientError> {
        match self {
            Self::Host(mapping, _) => mapping.read(index(offset)?, target).map_err(outside),
            Self::Device(imported) => Ok(imported.mapping().read(offset, target)?),
        }
    }

    /// Whether the bytes at `offset` are `expected`.
    pub(crate) fn equals(&self, offset: u64, expected: &[u8]) -> Result<bool, ClientError> {
        let imported = match self {
            Self::Host(mapping, _) => {
                return mapping.equals(index(offset)?, expected).map_err(outside);
            }
            Self::Device(imported) => imported,
        };
        let mut bytes = vec![0; expected.len().min(STRIDE)];
        let mut at = offset;
        for piece in expected.chunks(STRIDE) {
            bytes.truncate(piece.len());
            imported.mapping().read(at, &mut bytes)?;
            if bytes != piece {
                return Ok(false);
            }
            at = at.saturating_add(piece.len() as u64);
        }
        Ok(true)
    }

    /// A descriptor of it, to hand back to a successor of the daemon.
    pub(crate) fn descriptor(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Host(_, descriptor) => descriptor.try_clone(),
            Self::Device(imported) => imported.mapping().export(),
        }
    }

    /// The address of a range, in the device's own count.
    pub(crate) fn address(&self, offset: u64, bytes: u64) -> Result<usize, ClientError> {
        match self {
            Self::Host(mapping, _) => mapping
                .address(index(offset)?, index(bytes)?)
                .map_err(outside),
            Self::Device(imported) => index(imported.mapping().at(offset, bytes)?),
        }
    }
}

/// A number of the wire as this process counts.
fn index(value: u64) -> Result<usize, ClientError> {
    usize::try_from(value).map_err(|_| ClientError::Range {
        what: "an offset or size in device memory, in bytes,".to_owned(),
        value,
        rule: "more than this process can address".to_owned(),
    })
}

fn outside(error: RangeError) -> ClientError {
    ClientError::Page(error.into())
}
