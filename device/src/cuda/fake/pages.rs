//! Host memory that is registered.

use std::{collections::BTreeMap, fs};

use super::{
    PAGE,
    codes::{ALREADY_REGISTERED, INVALID_VALUE, NOT_REGISTERED, Refusable},
};

#[derive(Debug)]
struct Registration {
    address: usize,
    bytes: usize,
    end: usize,
    mapped: bool,
    gpu: usize,
}

/// Registered ranges, in whole pages.
#[derive(Debug, Default)]
pub(super) struct Pages {
    /// By the address of the first page.
    ranges: BTreeMap<usize, Registration>,
}

impl Pages {
    /// Registers a range from the context of `gpu`.
    pub(super) fn register(
        &mut self,
        address: usize,
        bytes: usize,
        mapped: bool,
        gpu: usize,
    ) -> Refusable<()> {
        let end = address
            .checked_add(bytes)
            .and_then(|end| end.checked_next_multiple_of(PAGE));
        let end = end.filter(|_| bytes > 0).ok_or(INVALID_VALUE)?;
        let first = address - address % PAGE;
        if self.touched(first, end).next().is_some() {
            return Err(ALREADY_REGISTERED);
        }
        if !is_writable(first, end) {
            return Err(INVALID_VALUE);
        }
        let registration = Registration {
            address,
            bytes,
            end,
            mapped,
            gpu,
        };
        self.ranges.insert(first, registration);
        Ok(())
    }

    /// Takes back what was registered at exactly `address`; its bytes.
    pub(super) fn unregister(&mut self, address: usize) -> Refusable<usize> {
        let first = address - address % PAGE;
        let found = self.ranges.get(&first).filter(|r| r.address == address);
        let bytes = found.ok_or(NOT_REGISTERED)?.bytes;
        self.ranges.remove(&first);
        Ok(bytes)
    }

    /// Forgets what was registered from the context of a GPU; bytes of each.
    pub(super) fn forget(&mut self, gpu: usize) -> Vec<(usize, usize)> {
        let gone = self.ranges.extract_if(.., |_, r| r.gpu == gpu);
        gone.map(|(_, r)| (r.address, r.bytes)).collect()
    }

    /// Whether kernels may touch all of a range: registered at once, and mapped.
    pub(super) fn allows(&self, address: usize, bytes: usize) -> bool {
        let below = self.ranges.range(..=address).next_back();
        below.is_some_and(|(_, r)| {
            let end = address.checked_add(bytes);
            r.mapped && address < r.end && end.is_some_and(|end| end <= r.end)
        })
    }

    /// Whether a range lies in one registration or in none.
    pub(super) fn holds_or_spares(&self, address: usize, bytes: usize) -> bool {
        let Some(end) = address.checked_add(bytes) else {
            return false;
        };
        match self.touched(address, end).next() {
            None => true,
            Some((first, r)) => *first <= address && end <= r.end,
        }
    }

    fn touched(&self, address: usize, end: usize) -> impl Iterator<Item = (&usize, &Registration)> {
        let below = self.ranges.range(..end).rev();
        below.take_while(move |(_, r)| r.end > address)
    }
}

/// Whether all of a range is mapped for writing. A kernel that tells nothing is trusted.
fn is_writable(first: usize, end: usize) -> bool {
    let Ok(maps) = fs::read_to_string("/proc/self/maps") else {
        return true;
    };
    let mut at = first;
    for line in maps.lines() {
        let mut fields = line.split(' ');
        let range = fields.next().and_then(|range| range.split_once('-'));
        let hex = |text: &str| usize::from_str_radix(text, 16).ok();
        let Some((Some(low), Some(high))) = range.map(|(low, high)| (hex(low), hex(high))) else {
            continue;
        };
        if low > at {
            return false;
        }
        if high > at {
            if !fields.next().is_some_and(|rights| rights.starts_with("rw")) {
                return false;
            }
            at = high;
        }
        if at >= end {
            return true;
        }
    }
    false
}
