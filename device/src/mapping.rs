//! A shared mapping of a descriptor, with checked access.

use std::{
    io,
    num::NonZeroUsize,
    os::fd::BorrowedFd,
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64},
};

use nix::sys::{
    mman::{MapFlags, ProtFlags, mmap, munmap},
    stat::fstat,
};

use crate::kernel::KernelError;

/// What a mapping may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Loads only; a store faults.
    Read,
    /// Loads and stores.
    ReadWrite,
}

/// An access outside a mapping, or not aligned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "range of {bytes} bytes at offset {offset} does not lie in a mapping of {size} bytes, or is not aligned or not writable"
)]
pub struct RangeError {
    /// Where the access begins.
    pub offset: usize,
    /// How long it is.
    pub bytes: usize,
    /// Size of the mapping.
    pub size: usize,
}

/// `MAP_SHARED` memory of a descriptor, unmapped on drop. Other processes may map
/// the same object, so its bytes are only touched through raw copies and atomics,
/// never through references to plain data.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    size: usize,
    access: Access,
}

// SAFETY: the memory belongs to the mapping until drop, is not tied to a thread, and
// every access goes through atomics or raw copies.
unsafe impl Send for Mapping {}
// SAFETY: as above; concurrent raw copies of the same bytes are kept apart by the
// hand-over protocol, and a violation of it garbles bytes, not memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `size` bytes of `descriptor`, which must have that many.
    ///
    /// # Errors
    /// When the object is smaller than `size`, `size` is 0, or the kernel refuses.
    pub fn new(
        descriptor: BorrowedFd<'_>,
        size: usize,
        access: Access,
    ) -> Result<Self, KernelError> {
        let operation = || format!("map {size} bytes");
        let actual = fstat(descriptor)
            .map_err(|e| KernelError::new(operation(), e))?
            .st_size;
        let length = NonZeroUsize::new(size)
            .filter(|_| u64::try_from(actual).is_ok_and(|actual| actual >= size as u64));
        let Some(length) = length else {
            let text = format!("object has {actual} bytes");
            return Err(KernelError::new(operation(), io::Error::other(text)));
        };
        let protection = match access {
            Access::Read => ProtFlags::PROT_READ,
            Access::ReadWrite => ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
        };
        // SAFETY: no address is asked for, so no mapping of ours is replaced; the
        // object is at least `length` long, so that touching the range cannot fault
        // unless it is truncated later, which seals (memfds) or file modes (segments)
        // prevent.
        let start = unsafe {
            mmap(
                None,
                length,
                protection,
                MapFlags::MAP_SHARED,
                descriptor,
                0,
            )
        }
        .map_err(|e| KernelError::new(operation(), e))?;
        Ok(Self {
            start: start.cast(),
            size,
            access,
        })
    }

    /// Puts pages that the object gets from here on onto the NUMA node `node`, as long as
    /// that has room.
    ///
    /// # Errors
    /// When the kernel knows no such node, or does not allow it.
    pub fn prefer_node(&self, node: u32) -> Result<(), KernelError> {
        // linux/mempolicy.h; libc has no mbind
        const PREFERRED: libc::c_int = 1;
        const BITS: u32 = 64;
        let mut nodes = [0_u64; 16];
        let at = usize::try_from(node / BITS).unwrap_or(usize::MAX);
        let failed = |e| KernelError::new(format!("prefer NUMA node {node}"), e);
        let Some(word) = nodes.get_mut(at) else {
            return Err(failed(io::Error::from_raw_os_error(libc::EINVAL)));
        };
        *word = 1 << (node % BITS);
        // SAFETY: the range is that of the mapping, which lives as long as self; the mask
        // has as many bits as is said, and is only read.
        let done = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.start.as_ptr(),
                self.size,
                PREFERRED,
                nodes.as_ptr(),
                nodes.len() * 64,
                0,
            )
        };
        match done {
            0 => Ok(()),
            _ => Err(failed(io::Error::last_os_error())),
        }
    }

    /// Maps the pages of a range at once, instead of one fault each, and changes none of
    /// their bytes. Costs nothing where they are mapped already.
    pub fn populate(&self, offset: usize, bytes: usize) {
        const PAGE: usize = 4096;
        let end = offset.saturating_add(bytes).min(self.size);
        let first = offset.next_multiple_of(PAGE);
        if first >= end {
            return;
        }
        // SAFETY: the range lies in the mapping, and populating changes none of its bytes.
        // A kernel without it (before 5.14) answers EINVAL: then the pages come by faults.
        unsafe {
            libc::madvise(
                self.start.as_ptr().add(first).cast(),
                end - first,
                libc::MADV_POPULATE_WRITE,
            )
        };
    }

    /// Bytes of the mapping.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Its first address.
    pub(crate) fn start(&self) -> usize {
        self.start.as_ptr().expose_provenance()
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// When the range does not lie in the mapping; nothing is copied then.
    pub fn read(&self, offset: usize, target: &mut [u8]) -> Result<(), RangeError> {
        let source = self.at(offset, target.len())?;
        let bytes = target.len();
        // SAFETY: `at` proved that source has target.len() bytes within the mapping,
        // which lives as long as self; target is exclusive and elsewhere.
        unsafe { source.copy_to_nonoverlapping(NonNull::from(target).cast(), bytes) };
        Ok(())
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// When the range does not lie in the mapping or that is read-only.
    pub fn write(&self, offset: usize, source: &[u8]) -> Result<(), RangeError> {
        let target = self.writable_at(offset, source.len())?;
        // SAFETY: target has source.len() writable bytes within the mapping; source
        // is an ordinary slice, elsewhere.
        unsafe { target.copy_from_nonoverlapping(NonNull::from(source).cast(), source.len()) };
        Ok(())
    }

    /// Copies `bytes` bytes from `source` to `target`, which are different mappings.
    ///
    /// # Errors
    /// When either range does not lie in its mapping.
    pub fn copy(
        source: &Mapping,
        source_offset: usize,
        target: &Mapping,
        target_offset: usize,
        bytes: usize,
    ) -> Result<(), RangeError> {
        let from = source.at(source_offset, bytes)?;
        let to = target.writable_at(target_offset, bytes)?;
        // SAFETY: both ranges were proved to lie in their mappings, which are borrowed
        // here; copy_to allows overlap, should both map one object.
        unsafe { from.copy_to(to, bytes) };
        Ok(())
    }

    /// Whether the bytes at `offset` equal `expected`.
    ///
    /// # Errors
    /// When the range does not lie in the mapping.
    pub fn equals(&self, offset: usize, expected: &[u8]) -> Result<bool, RangeError> {
        let start = self.at(offset, expected.len())?;
        // SAFETY: both ranges are expected.len() bytes long and readable; memcmp makes
        // no reference to the shared bytes.
        let order = unsafe {
            libc::memcmp(
                start.as_ptr().cast(),
                expected.as_ptr().cast(),
                expected.len(),
            )
        };
        Ok(order == 0)
    }

    /// The 32-bit word at `offset`.
    ///
    /// # Errors
    /// When it does not lie in the mapping, is not aligned, or the mapping is
    /// read-only (use [`Mapping::load32`] there).
    pub fn word32(&self, offset: usize) -> Result<&AtomicU32, RangeError> {
        let at = self.aligned::<4>(self.writable_at(offset, 4)?, offset)?;
        // SAFETY: four aligned, writable bytes within the mapping, borrowed from self;
        // any bit pattern is a valid u32, and all sides use atomics on it.
        Ok(unsafe { AtomicU32::from_ptr(at.cast().as_ptr()) })
    }

    /// The 64-bit word at `offset`.
    ///
    /// # Errors
    /// As [`Mapping::word32`].
    pub fn word64(&self, offset: usize) -> Result<&AtomicU64, RangeError> {
        let at = self.aligned::<8>(self.writable_at(offset, 8)?, offset)?;
        // SAFETY: as word32, with eight bytes.
        Ok(unsafe { AtomicU64::from_ptr(at.cast().as_ptr()) })
    }

    /// Loads the 32-bit word at `offset`, sequentially consistent; also from a
    /// read-only mapping.
    ///
    /// # Errors
    /// When it does not lie in the mapping or is not aligned.
    pub fn load32(&self, offset: usize) -> Result<u32, RangeError> {
        let at = self.aligned::<4>(self.at(offset, 4)?, offset)?;
        // SAFETY: four aligned readable bytes; a relaxed or stronger 32-bit atomic load
        // does not write on any target we build for.
        let word = unsafe { AtomicU32::from_ptr(at.cast().as_ptr()) };
        Ok(word.load(std::sync::atomic::Ordering::SeqCst))
    }

    /// Loads the 64-bit word at `offset`, as [`Mapping::load32`].
    ///
    /// # Errors
    /// When it does not lie in the mapping or is not aligned.
    pub fn load64(&self, offset: usize) -> Result<u64, RangeError> {
        let at = self.aligned::<8>(self.at(offset, 8)?, offset)?;
        // SAFETY: as load32, with eight bytes on a 64-bit target.
        let word = unsafe { AtomicU64::from_ptr(at.cast().as_ptr()) };
        Ok(word.load(std::sync::atomic::Ordering::SeqCst))
    }

    /// The address of a range, for a device that reads it itself.
    ///
    /// # Errors
    /// When the range does not lie in the mapping.
    pub fn address(&self, offset: usize, bytes: usize) -> Result<usize, RangeError> {
        Ok(self.at(offset, bytes)?.as_ptr().addr())
    }

    /// All bytes, for the one owner of an object that nobody else maps yet.
    pub(crate) fn exclusive(&mut self) -> Result<&mut [u8], RangeError> {
        let start = self.writable_at(0, self.size)?;
        // SAFETY: the caller (a segment under construction, mode 0600, temporary name)
        // is the only one who maps the object; &mut self keeps our own side exclusive.
        Ok(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), self.size) })
    }

    fn at(&self, offset: usize, bytes: usize) -> Result<NonNull<u8>, RangeError> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.size) {
            return Err(RangeError {
                offset,
                bytes,
                size: self.size,
            });
        }
        // SAFETY: offset <= size, so the result stays within the mapping or one past it.
        Ok(unsafe { self.start.add(offset) })
    }

    fn writable_at(&self, offset: usize, bytes: usize) -> Result<NonNull<u8>, RangeError> {
        match self.access {
            Access::ReadWrite => self.at(offset, bytes),
            Access::Read => Err(RangeError {
                offset,
                bytes,
                size: self.size,
            }),
        }
    }

    fn aligned<const N: usize>(
        &self,
        at: NonNull<u8>,
        offset: usize,
    ) -> Result<NonNull<u8>, RangeError> {
        if at.addr().get().is_multiple_of(N) {
            Ok(at)
        } else {
            Err(RangeError {
                offset,
                bytes: N,
                size: self.size,
            })
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: start and size are those of the mmap; nothing borrows from self now.
        // munmap of a range that we mapped whole cannot fail.
        let _ = unsafe { munmap(self.start.cast(), self.size) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;
    use crate::memfd;

    #[test]
    fn accesses_outside_the_mapping_are_refused() {
        let file = memfd::create("t", 4096).unwrap();
        let map = Mapping::new(file.as_fd(), 4096, Access::ReadWrite).unwrap();
        for (offset, bytes) in [
            (0, 4097),
            (4096, 1),
            (1, 4096),
            (usize::MAX, 2),
            (usize::MAX, 0),
        ] {
            assert!(map.address(offset, bytes).is_err(), "{offset} {bytes}");
        }
        assert!(map.address(4096, 0).is_ok());
        assert!(map.word64(4).is_err());
        assert!(map.word32(4094).is_err());
    }

    #[test]
    fn a_read_only_mapping_lends_no_writable_word() {
        let file = memfd::create("t", 4096).unwrap();
        let map = Mapping::new(file.as_fd(), 4096, Access::Read).unwrap();
        assert!(map.word32(0).is_err());
        assert!(map.write(0, &[1]).is_err());
        assert_eq!(map.load32(0), Ok(0));
    }

    #[test]
    fn an_object_smaller_than_the_mapping_is_refused() {
        let file = memfd::create("t", 4096).unwrap();
        assert!(Mapping::new(file.as_fd(), 8192, Access::Read).is_err());
        assert!(Mapping::new(file.as_fd(), 0, Access::Read).is_err());
    }
}
