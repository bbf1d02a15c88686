//! Physical memory of the GPUs: memfds, so that processes share it as they share that
//! of a real one.

use std::{
    collections::{HashMap, hash_map::Entry},
    fs,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
};

use nix::sys::stat::fstat;

use super::{
    codes::{INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY, Refusable},
    space::Object,
};
use crate::memfd;

/// What the name of every memfd begins with; the UUID of its GPU follows.
const NAME: &str = "flextensord-fake-";

#[derive(Debug)]
struct Memory {
    file: OwnedFd,
    bytes: u64,
    gpu: usize,
    made_here: bool,
    handles: usize,
    mappings: usize,
}

impl Memory {
    fn is_used_here(&self) -> bool {
        self.handles + self.mappings > 0
    }
}

/// Physical memory that this process made or imported.
///
/// What it made counts as used until nobody holds it. What it imported counts only while
/// it is held here; nothing is known of memory that only others have.
#[derive(Debug, Default)]
pub(super) struct Physical {
    objects: HashMap<Object, Memory>,
    handles: HashMap<u64, Object>,
}

impl Physical {
    /// Bytes in use on a GPU.
    pub(super) fn used(&mut self, gpu: usize) -> u64 {
        self.objects.retain(|_, memory| {
            // where the kernel cannot tell, memory counts as used
            memory.is_used_here() || memfd::held_elsewhere(&memory.file).unwrap_or(true)
        });
        let of_gpu = self.objects.values().filter(|memory| memory.gpu == gpu);
        of_gpu.map(|memory| memory.bytes).sum()
    }

    /// Allocations in use by this process.
    pub(super) fn live(&self) -> usize {
        self.objects.values().filter(|m| m.is_used_here()).count()
    }

    /// Makes memory under a handle that is new.
    pub(super) fn create(
        &mut self,
        handle: u64,
        gpu: usize,
        uuid: [u8; 16],
        bytes: u64,
    ) -> Refusable<()> {
        let name = format!("{NAME}{:032x}", u128::from_be_bytes(uuid));
        let file = memfd::create(&name, bytes).map_err(|_| OUT_OF_MEMORY)?;
        // nobody may shrink it under a mapping of another process
        memfd::seal_size(file.as_fd()).map_err(|_| OUT_OF_MEMORY)?;
        let (object, _) = identity(file.as_fd())?;
        let memory = Memory {
            file,
            bytes,
            gpu,
            made_here: true,
            handles: 1,
            mappings: 0,
        };
        self.objects.insert(object, memory);
        self.handles.insert(handle, object);
        Ok(())
    }

    /// Lets a handle go.
    pub(super) fn release(&mut self, handle: u64) -> Refusable<()> {
        let object = self.handles.remove(&handle).ok_or(INVALID_HANDLE)?;
        self.count_down(object, |memory| &mut memory.handles);
        Ok(())
    }

    /// A descriptor to give away.
    pub(super) fn export(&self, handle: u64) -> Refusable<OwnedFd> {
        let (_, memory) = self.behind(handle)?;
        memfd::reopen(memory.file.as_fd(), true).map_err(|_| INVALID_VALUE)
    }

    /// What a descriptor stands for, and whether it was made here, or imported before
    /// and not let go.
    pub(super) fn recognise(&self, descriptor: BorrowedFd<'_>) -> Refusable<(bool, bool)> {
        let (object, _) = identity(descriptor)?;
        let known = self.objects.get(&object);
        let own = known.is_some_and(|memory| memory.made_here);
        let again = known.is_some_and(|memory| !memory.made_here && memory.is_used_here());
        Ok((own, again))
    }

    /// Adds a handle, which is new, to the memory behind a descriptor. `gpu_of` finds a
    /// GPU by its UUID.
    pub(super) fn import(
        &mut self,
        handle: u64,
        descriptor: BorrowedFd<'_>,
        gpu_of: impl Fn([u8; 16]) -> Option<usize>,
    ) -> Refusable<()> {
        let (object, bytes) = identity(descriptor)?;
        match self.objects.entry(object) {
            Entry::Occupied(mut known) => known.get_mut().handles += 1,
            Entry::Vacant(place) => {
                let uuid = uuid_of(descriptor).ok_or(INVALID_VALUE)?;
                let sealed = memfd::size_is_sealed(descriptor).unwrap_or(false);
                place.insert(Memory {
                    gpu: gpu_of(uuid).ok_or(INVALID_DEVICE)?,
                    // a file of its own, so that the maker can tell that we hold it
                    file: memfd::reopen(descriptor, true).map_err(|_| INVALID_VALUE)?,
                    bytes: Some(bytes).filter(|_| sealed).ok_or(INVALID_VALUE)?,
                    made_here: false,
                    handles: 1,
                    mappings: 0,
                });
            }
        }
        self.handles.insert(handle, object);
        Ok(())
    }

    /// The GPU whose memory a handle stands for.
    pub(super) fn gpu(&self, handle: u64) -> Refusable<usize> {
        self.behind(handle).map(|(_, memory)| memory.gpu)
    }

    /// What a handle stands for, its bytes and its file, to be mapped.
    pub(super) fn file(&self, handle: u64) -> Refusable<(Object, u64, BorrowedFd<'_>)> {
        let (object, memory) = self.behind(handle)?;
        Ok((object, memory.bytes, memory.file.as_fd()))
    }

    /// Counts a mapping that was made.
    pub(super) fn mapped(&mut self, object: Object) {
        if let Some(memory) = self.objects.get_mut(&object) {
            memory.mappings += 1;
        }
    }

    /// Counts a mapping that is gone.
    pub(super) fn unmapped(&mut self, object: Object) {
        self.count_down(object, |memory| &mut memory.mappings);
    }

    fn count_down(&mut self, object: Object, which: impl Fn(&mut Memory) -> &mut usize) {
        let Some(memory) = self.objects.get_mut(&object) else {
            return;
        };
        let count = which(memory);
        *count = count.saturating_sub(1);
        // an importer that kept the file to see whether others hold it would itself be
        // one of those whom the maker sees
        if !memory.made_here && !memory.is_used_here() {
            self.objects.remove(&object);
        }
    }

    fn behind(&self, handle: u64) -> Refusable<(Object, &Memory)> {
        let object = self.handles.get(&handle).ok_or(INVALID_HANDLE)?;
        let memory = self.objects.get(object).ok_or(INVALID_HANDLE)?;
        Ok((*object, memory))
    }
}

fn identity(descriptor: BorrowedFd<'_>) -> Refusable<(Object, u64)> {
    let status = fstat(descriptor).map_err(|_| INVALID_VALUE)?;
    let bytes = u64::try_from(status.st_size).map_err(|_| INVALID_VALUE)?;
    Ok(((status.st_dev, status.st_ino), bytes))
}

/// The UUID in the name of a memfd of ours.
fn uuid_of(descriptor: BorrowedFd<'_>) -> Option<[u8; 16]> {
    let link = fs::read_link(format!("/proc/self/fd/{}", descriptor.as_raw_fd())).ok()?;
    let name = link.to_str()?.strip_prefix("/memfd:")?.strip_prefix(NAME)?;
    let digits = name.split(' ').next()?;
    let uuid = u128::from_str_radix(digits, 16).ok()?;
    Some(uuid.to_be_bytes())
}
