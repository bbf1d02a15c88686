//! Telling a forked child from the process that made an object, without a system call.

use std::{
    num::NonZeroUsize, process, ptr::NonNull, sync::atomic::AtomicU8, sync::atomic::Ordering,
};

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

/// Bytes of the mark's page: the kernel rounds up to its own page size.
const SIZE: NonZeroUsize = NonZeroUsize::MIN;

/// Remembers in which process it was made. In a child of that process its page reads
/// as zero (`MADV_WIPEONFORK`), whichever way the child was forked.
#[derive(Debug)]
pub struct ForkMark {
    page: Option<NonNull<u8>>,
    pid: u32,
}

// SAFETY: the page belongs to the mark until drop, is not tied to a thread, and is only
// read through an atomic after it was made.
unsafe impl Send for ForkMark {}
// SAFETY: as above.
unsafe impl Sync for ForkMark {}

impl ForkMark {
    /// A mark of this process. Where the kernel cannot wipe pages (before Linux 4.14) it
    /// compares process ids instead, which costs a system call.
    #[must_use]
    pub fn new() -> Self {
        Self {
            page: wiped_page(),
            pid: process::id(),
        }
    }

    /// Whether this is another process than the one that made the mark.
    #[inline]
    #[must_use]
    pub fn in_child(&self) -> bool {
        match self.page {
            // SAFETY: one readable byte of a page that lives as long as self; all
            // accesses after `new` are atomic loads.
            Some(page) => unsafe { AtomicU8::from_ptr(page.as_ptr()) }.load(Ordering::Relaxed) == 0,
            None => process::id() != self.pid,
        }
    }

    /// The process that made the mark.
    #[must_use]
    pub fn made_in(&self) -> u32 {
        self.pid
    }
}

impl Default for ForkMark {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for ForkMark {
    fn drop(&mut self) {
        if let Some(page) = self.page {
            // SAFETY: the range is the one that was mapped, and nothing borrows from it.
            let _ = unsafe { munmap(page.cast(), SIZE.get()) };
        }
    }
}

fn wiped_page() -> Option<NonNull<u8>> {
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: no address is asked for, so no mapping of ours is replaced.
    let page = unsafe { mmap_anonymous(None, SIZE, protection, MapFlags::MAP_PRIVATE) }.ok()?;
    // SAFETY: the range was mapped above, is private and anonymous, as the advice asks.
    if unsafe { madvise(page, SIZE.get(), MmapAdvise::MADV_WIPEONFORK) }.is_err() {
        // SAFETY: as in drop.
        let _ = unsafe { munmap(page, SIZE.get()) };
        return None;
    }
    let page = page.cast::<u8>();
    // SAFETY: one writable byte that nobody else knows of yet.
    unsafe { page.write(1) };
    Some(page)
}

#[cfg(test)]
mod tests {
    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::{ForkResult, fork};

    use super::*;

    #[test]
    fn a_forked_child_sees_that_it_is_one() {
        let mark = ForkMark::new();
        assert!(!mark.in_child());
        // SAFETY: the child only loads a byte and leaves by _exit.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let code = i32::from(mark.in_child());
                // SAFETY: ends the child without running anything of the parent's.
                unsafe { libc::_exit(code) }
            }
            ForkResult::Parent { child } => {
                assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 1)));
            }
        }
        assert!(!mark.in_child());
        assert_eq!(mark.made_in(), process::id());
    }
}
