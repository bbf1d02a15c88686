//! Addresses: reserved ranges, what is mapped there and what a GPU may do with it.
//! Device addresses are host addresses.

use std::{collections::BTreeMap, num::NonZeroUsize, os::fd::BorrowedFd, ptr::NonNull};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};

use super::{
    super::driver::DeviceAccess,
    codes::{INVALID_VALUE, OPERATING_SYSTEM, OUT_OF_MEMORY, Refusable},
};

/// Which physical memory: device and inode of its memfd.
pub(super) type Object = (u64, u64);

/// A mapping of physical memory.
#[derive(Debug)]
struct Mapped {
    bytes: usize,
    object: Object,
    /// By index of the GPU; what is not listed may do nothing.
    access: Vec<(usize, DeviceAccess)>,
}

impl Mapped {
    fn access_of(&self, gpu: usize) -> DeviceAccess {
        let found = self.access.iter().find(|(of, _)| *of == gpu);
        found.map_or(DeviceAccess::None, |(_, access)| *access)
    }

    /// What the pages must allow, so that every GPU can do what it may.
    fn protection(&self) -> ProtFlags {
        let mut all = ProtFlags::PROT_NONE;
        for (_, access) in &self.access {
            all |= match access {
                DeviceAccess::None => ProtFlags::PROT_NONE,
                DeviceAccess::Read => ProtFlags::PROT_READ,
                DeviceAccess::ReadWrite => ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
            };
        }
        all
    }
}

/// Reserved ranges of the process; dropping it unmaps them.
#[derive(Debug, Default)]
pub(super) struct Space {
    reserved: BTreeMap<usize, usize>,
    mapped: BTreeMap<usize, Mapped>,
}

impl Space {
    /// Reserves `bytes` at a multiple of `unit`.
    pub(super) fn reserve(&mut self, bytes: usize, unit: usize) -> Refusable<usize> {
        if bytes == 0 || !bytes.is_multiple_of(unit) {
            return Err(INVALID_VALUE);
        }
        let wide = bytes.checked_add(unit).and_then(NonZeroUsize::new);
        let wide = wide.ok_or(INVALID_VALUE)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: no address is asked for, so nothing of ours is replaced; the pages
        // cannot be touched, and belong to this space until it gives them back.
        let start = unsafe { mmap_anonymous(None, wide, ProtFlags::PROT_NONE, flags) }
            .map_err(|_| OUT_OF_MEMORY)?
            .addr()
            .get();
        let aligned = start.next_multiple_of(unit);
        let (head, tail) = (aligned - start, unit - (aligned - start));
        for (edge, excess) in [(start, head), (aligned + bytes, tail)] {
            if excess > 0 {
                // SAFETY: both edges lie in the mapping just made, outside the part kept,
                // and nobody else knows it yet.
                unsafe { give_back(edge, excess)? };
            }
        }
        self.reserved.insert(aligned, bytes);
        Ok(aligned)
    }

    pub(super) fn unreserve(&mut self, address: usize, bytes: usize) -> Refusable<()> {
        let known = self.reserved.get(&address) == Some(&bytes);
        if !known || self.mapped.range(address..address + bytes).next().is_some() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the range was reserved by us with these bytes, and nothing is mapped
        // there, so no engine uses it.
        unsafe { give_back(address, bytes)? };
        self.reserved.remove(&address);
        Ok(())
    }

    /// Maps an object of `bytes` bytes with no access.
    pub(super) fn map(
        &mut self,
        address: usize,
        bytes: usize,
        object: Object,
        memory: BorrowedFd<'_>,
    ) -> Refusable<()> {
        let end = address.checked_add(bytes).ok_or(INVALID_VALUE)?;
        let around = self.reserved.range(..=address).next_back();
        let inside = around.is_some_and(|(start, size)| end <= start + size);
        let below = self.mapped.range(..end).next_back();
        let free = below.is_none_or(|(start, other)| start + other.bytes <= address);
        if bytes == 0 || !inside || !free {
            return Err(INVALID_VALUE);
        }
        let (at, length) = sized(address, bytes)?;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
        // SAFETY: the range lies in one that we reserved and where nothing is mapped, so
        // only our own inaccessible pages are replaced.
        unsafe { mmap(Some(at), length, ProtFlags::PROT_NONE, flags, memory, 0) }
            .map_err(|_| OPERATING_SYSTEM)?;
        let mapped = Mapped {
            bytes,
            object,
            access: Vec::new(),
        };
        self.mapped.insert(address, mapped);
        Ok(())
    }

    /// Takes whole mappings away; the objects that were mapped.
    pub(super) fn unmap(&mut self, address: usize, bytes: usize) -> Refusable<Vec<Object>> {
        let starts = self.whole(address, bytes)?;
        let (at, length) = sized(address, bytes)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED;
        // SAFETY: the range is tiled by mappings of ours, which the caller's exclusive
        // borrow keeps every engine from; they become reserved pages again.
        unsafe { mmap_anonymous(Some(at), length, ProtFlags::PROT_NONE, flags) }
            .map_err(|_| OPERATING_SYSTEM)?;
        let gone = starts.iter().filter_map(|start| self.mapped.remove(start));
        Ok(gone.map(|mapped| mapped.object).collect())
    }

    /// Sets what a GPU may do with whole mappings.
    pub(super) fn set_access(
        &mut self,
        address: usize,
        bytes: usize,
        gpu: usize,
        access: DeviceAccess,
    ) -> Refusable<()> {
        for start in self.whole(address, bytes)? {
            let Some(mapped) = self.mapped.get_mut(&start) else {
                continue;
            };
            mapped.access.retain(|(other, _)| *other != gpu);
            mapped.access.push((gpu, access));
            let at = NonNull::new(std::ptr::with_exposed_provenance_mut(start));
            let at = at.ok_or(INVALID_VALUE)?;
            // SAFETY: the mapping is ours and whole; engines check what is recorded here
            // before they touch it, under the lock that the caller holds for writing.
            unsafe { mprotect(at, mapped.bytes, mapped.protection()) }
                .map_err(|_| OPERATING_SYSTEM)?;
        }
        Ok(())
    }

    /// Whether any of a range is mapped, whatever may be done with it.
    pub(super) fn is_mapped(&self, address: usize) -> bool {
        let below = self.mapped.range(..=address).next_back();
        below.is_some_and(|(start, mapped)| address < start + mapped.bytes)
    }

    /// Whether a GPU may load, or also store, all of a range.
    pub(super) fn allows(&self, gpu: usize, address: usize, bytes: usize, store: bool) -> bool {
        let Some(end) = address.checked_add(bytes) else {
            return false;
        };
        let mut at = address;
        while at < end {
            let below = self.mapped.range(..=at).next_back();
            let Some((start, mapped)) = below.filter(|(start, m)| at < **start + m.bytes) else {
                return false;
            };
            match mapped.access_of(gpu) {
                DeviceAccess::ReadWrite => {}
                DeviceAccess::Read if !store => {}
                _ => return false,
            }
            at = start + mapped.bytes;
        }
        true
    }

    /// The mappings that tile a range exactly.
    fn whole(&self, address: usize, bytes: usize) -> Refusable<Vec<usize>> {
        let end = address.checked_add(bytes).ok_or(INVALID_VALUE)?;
        let mut at = address;
        let mut starts = Vec::new();
        while at < end {
            let mapped = self.mapped.get(&at).ok_or(INVALID_VALUE)?;
            starts.push(at);
            at += mapped.bytes;
        }
        (at == end && bytes > 0)
            .then_some(starts)
            .ok_or(INVALID_VALUE)
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        for (address, bytes) in &self.reserved {
            // SAFETY: all mappings lie in reserved ranges, which are ours; every engine
            // holds this space by a counted reference, so none is left.
            let _: Refusable<()> = unsafe { give_back(*address, *bytes) };
        }
    }
}

fn sized(address: usize, bytes: usize) -> Refusable<(NonZeroUsize, NonZeroUsize)> {
    let both = NonZeroUsize::new(address).zip(NonZeroUsize::new(bytes));
    both.ok_or(INVALID_VALUE)
}

/// # Safety
/// The range is of ours alone, and not used again.
unsafe fn give_back(address: usize, bytes: usize) -> Refusable<()> {
    let at = NonNull::new(std::ptr::with_exposed_provenance_mut(address));
    // SAFETY: as the caller vouches.
    unsafe { munmap(at.ok_or(INVALID_VALUE)?, bytes) }.map_err(|_| OPERATING_SYSTEM)
}
