//! The heap of this process.

/// Gives free pages of the heap back to the kernel. The allocator keeps what it once had,
/// which after a burst of small allocations is most of it.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointer and changes no live allocation; it may be called from any
    // thread at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Bytes from which on an allocation is mapped by itself, and from which on the free end
/// of a heap is given back: more than a message of a peer has.
#[cfg(target_env = "gnu")]
const LARGE: libc::c_int = 4 << 20;

/// Has the allocator give large allocations back when they are freed. Left to itself it
/// takes the largest that was ever freed as the measure of what to keep, in each of its
/// heaps, and [`trim`] does not reach the end of those.
pub fn keep_little() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointer; changes limits under the allocator's own lock, and no
    // allocation that there is.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
        libc::mallopt(libc::M_TRIM_THRESHOLD, LARGE);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_is_in_use_stays() {
        let kept: Vec<String> = (0..1000).map(|i| i.to_string()).collect();
        super::keep_little();
        super::trim();
        assert_eq!(kept[999], "999");
    }
}
