//! Host memory pinned for the copy engines: in place, in bounded chunks, all or nothing.

use std::{ops::Range, sync::Arc};

use super::{context::Context, driver::DeviceAddress, error::CudaError};
use crate::mapping::Mapping;

/// Bytes of a page of host memory: registrations are made of whole pages.
const PAGE: usize = 4096;

/// Why memory is not pinned.
#[derive(Debug, thiserror::Error)]
pub enum RegistrationError {
    /// The driver refused a chunk; those before it were unregistered again.
    #[error(
        "pinning chunk {chunk} of {chunks} ({bytes} bytes at offset {offset} of {total}) failed: {source}"
    )]
    Chunk {
        /// Its number, from 1.
        chunk: usize,
        /// Chunks in all.
        chunks: usize,
        /// Where it begins in the memory.
        offset: usize,
        /// Its bytes.
        bytes: usize,
        /// Bytes of the memory.
        total: usize,
        /// What the driver said.
        source: CudaError,
    },
    /// Whoever asked does not want it any more; nothing is pinned.
    #[error("pinning was given up after {done} of {total} bytes")]
    Cancelled {
        /// Bytes that were pinned by then.
        done: u64,
        /// Bytes of the memory.
        total: u64,
    },
}

impl RegistrationError {
    /// The driver's error, if it is one.
    #[must_use]
    pub fn driver(&self) -> Option<&CudaError> {
        match self {
            Self::Chunk { source, .. } => Some(source),
            Self::Cancelled { .. } => None,
        }
    }
}

/// Chunks of registered memory; unregistered last to first when the last clone is gone.
/// A chunk that cannot be unregistered keeps its memory mapped for ever.
#[derive(Debug)]
pub struct Pinned {
    context: Arc<Context>,
    mapping: Arc<Mapping>,
    chunks: Vec<Range<usize>>,
}

impl Pinned {
    /// The end of the chunk that `address` lies in.
    pub(super) fn chunk_end(&self, address: usize) -> Option<usize> {
        let at = self.chunks.partition_point(|chunk| chunk.end <= address);
        let chunk = self.chunks.get(at)?;
        chunk.contains(&address).then_some(chunk.end)
    }

    /// Registers one more chunk, offsets into the mapping that begin on a page.
    fn register(&mut self, chunk: Range<usize>, mapped: bool) -> Result<(), CudaError> {
        let whole = chunk.len().next_multiple_of(PAGE);
        let first = self.mapping.start() + chunk.start;
        let context = &self.context;
        // SAFETY: the chunk lies in the mapping's whole pages, which self keeps mapped
        // until it has unregistered them.
        context.with(|driver| unsafe { driver.register(first, whole, mapped) })?;
        self.chunks.push(first..first + whole);
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.chunks.iter().map(ExactSizeIterator::len).sum()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let mut stuck = false;
        for chunk in self.chunks.iter().rev() {
            self.context.remove_range(chunk.start);
            let what = format!("unregister {} bytes of host memory", chunk.len());
            // SAFETY: the chunk was registered at this address; copies under way hold an
            // Arc of self, and owners of words in it wait for their streams.
            let given = self
                .context
                .give_back(&what, |driver| unsafe { driver.unregister(chunk.start) });
            stuck |= !given;
        }
        if stuck {
            // the driver still holds the pages: they must not become anything else
            std::mem::forget(Arc::clone(&self.mapping));
            let (start, bytes) = (self.mapping.start(), self.mapping.size());
            self.context.add_stuck(start, bytes);
        }
    }
}

/// Memory that is registered for as long as this lives.
#[derive(Debug, Clone)]
pub struct Registration {
    pinned: Arc<Pinned>,
}

impl Registration {
    /// Registers all of `mapping` in chunks of at most `limit` bytes. A chunk ends at one
    /// of `cuts` (rising offsets, where tensors begin) if one lies on a page boundary in
    /// its second half, else at its limit: copies are cut where chunks end. `progress` is
    /// told the bytes pinned so far after each chunk, and says whether to go on.
    ///
    /// # Errors
    /// When the driver refuses a chunk or `progress` does; nothing stays registered.
    pub fn new(
        context: &Arc<Context>,
        mapping: &Arc<Mapping>,
        limit: u64,
        cuts: &[u64],
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Self, RegistrationError> {
        Self::register(context, mapping, limit, cuts, false, progress)
    }

    /// Registers the pages of `range` in `mapping` with one call.
    ///
    /// # Errors
    /// When it does not begin on a page, lies outside, or the driver refuses.
    pub fn part(
        context: &Arc<Context>,
        mapping: &Arc<Mapping>,
        range: Range<usize>,
    ) -> Result<Self, RegistrationError> {
        let total = mapping.size();
        let failed = |source| RegistrationError::Chunk {
            chunk: 1,
            chunks: 1,
            offset: range.start,
            bytes: range.len(),
            total,
            source,
        };
        if range.is_empty() || !range.start.is_multiple_of(PAGE) || range.end > total {
            return Err(failed(CudaError::State("no range of whole pages")));
        }
        let mut pinned = Pinned {
            context: Arc::clone(context),
            mapping: Arc::clone(mapping),
            chunks: Vec::with_capacity(1),
        };
        pinned.register(range.clone(), false).map_err(failed)?;
        Ok(Self::visible(context, pinned))
    }

    /// Registers all of `mapping`, which is small, so that kernels see it too.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn mapped(
        context: &Arc<Context>,
        mapping: &Arc<Mapping>,
    ) -> Result<(Self, DeviceAddress), RegistrationError> {
        let limit = u64::MAX;
        let whole = Self::register(context, mapping, limit, &[], true, &mut |_| true)?;
        let start = mapping.start();
        let address = context.with(|driver| driver.device_address(start));
        let address = address.map_err(|source| RegistrationError::Chunk {
            chunk: 1,
            chunks: 1,
            offset: 0,
            bytes: mapping.size(),
            total: mapping.size(),
            source,
        })?;
        Ok((whole, address))
    }

    /// Bytes pinned.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.pinned.bytes() as u64
    }

    fn register(
        context: &Arc<Context>,
        mapping: &Arc<Mapping>,
        limit: u64,
        cuts: &[u64],
        mapped: bool,
        progress: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Self, RegistrationError> {
        let planned = chunks(mapping.size(), limit, cuts);
        let total = mapping.size();
        let mut pinned = Pinned {
            context: Arc::clone(context),
            mapping: Arc::clone(mapping),
            chunks: Vec::with_capacity(planned.len()),
        };
        for (number, chunk) in planned.iter().enumerate() {
            let registered = pinned.register(chunk.clone(), mapped);
            // what was registered before goes with `pinned`, last to first
            registered.map_err(|source| RegistrationError::Chunk {
                chunk: number + 1,
                chunks: planned.len(),
                offset: chunk.start,
                bytes: chunk.len(),
                total,
                source,
            })?;
            let done = chunk.end.min(total) as u64;
            if !progress(done) && number + 1 < planned.len() {
                let total = total as u64;
                return Err(RegistrationError::Cancelled { done, total });
            }
        }
        Ok(Self::visible(context, pinned))
    }

    /// Tells the context of it, whose copies are cut where chunks end.
    fn visible(context: &Context, pinned: Pinned) -> Self {
        let pinned = Arc::new(pinned);
        for chunk in &pinned.chunks {
            context.add_range(chunk.start, &pinned);
        }
        Self { pinned }
    }
}

/// Cuts `bytes` bytes, rounded up to whole pages, into chunks.
fn chunks(bytes: usize, limit: u64, cuts: &[u64]) -> Vec<Range<usize>> {
    let end = bytes.next_multiple_of(PAGE);
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let limit = (limit / PAGE * PAGE).max(PAGE);
    let mut chunks = Vec::new();
    let mut begin = 0;
    while begin < end {
        let most = begin.saturating_add(limit);
        let at = if most >= end {
            end
        } else {
            let fitting = cuts.partition_point(|cut| *cut <= most as u64);
            cuts.iter()
                .take(fitting)
                .rev()
                .filter_map(|cut| usize::try_from(*cut).ok())
                .take_while(|cut| *cut > begin + limit / 2)
                .find(|cut| cut.is_multiple_of(PAGE))
                .unwrap_or(most)
        };
        chunks.push(begin..at);
        begin = at;
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_end_at_a_tensor_on_a_page_boundary_if_there_is_one() {
        let cuts = [0, 3000, 8192, 12_288, 20_000];
        assert_eq!(
            chunks(30_000, 16_384, &cuts),
            [0..12_288, 12_288..28_672, 28_672..32_768]
        );
        let whole = chunks(4097, 1 << 30, &[]);
        assert_eq!((whole.len(), whole[0].clone()), (1, 0..8192));
        assert_eq!(chunks(9000, 1, &[]), [0..4096, 4096..8192, 8192..12_288]);
        assert!(chunks(0, 4096, &[]).is_empty());
    }

    #[test]
    fn a_pool_of_ten_mebibytes_needs_four_chunks_of_three() {
        assert_eq!(chunks(10 << 20, 3 << 20, &[]).len(), 4);
    }
}
