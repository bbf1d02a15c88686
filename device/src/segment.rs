//! Segments: POSIX shared memory objects that hold the bytes of weight sets.
//!
//! A segment is built under a temporary name with mode 0600 and its pages reserved,
//! filled by its one maker, then set to 0400 and renamed: a visible segment is
//! always complete. The kernel has no seals for named shared memory, so against the
//! daemon's own user and root a segment rests on trust.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use nix::sys::statvfs::statvfs;
use rustix::fs::FallocateFlags;

use crate::{
    failpoint::{self, Point},
    kernel::KernelError,
    mapping::{Access, Mapping, RangeError},
    memfd,
};

/// Why a segment cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// The file system has no room.
    #[error("shared memory at {} has {free} bytes free, {wanted} are wanted", directory.display())]
    Full {
        /// Bytes of the segment.
        wanted: u64,
        /// Bytes free in the file system.
        free: u64,
        /// Where it is mounted.
        directory: PathBuf,
    },
    /// The size is none that can be mapped.
    #[error("a segment of {bytes} bytes cannot be mapped")]
    Size {
        /// The size asked for.
        bytes: u64,
    },
    /// Whoever asked for it has given up.
    #[error("a segment of {wanted} bytes was given up after {reserved} were reserved")]
    GivenUp {
        /// Bytes of the segment.
        wanted: u64,
        /// Bytes that were reserved by then.
        reserved: u64,
    },
    /// What lies there is not what a dead daemon left.
    #[error("{} is not the segment that was left: {what}", path.display())]
    Unlike {
        /// Where it lies.
        path: PathBuf,
        /// What it is instead.
        what: String,
    },
    /// A system call failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Bytes that are reserved before whoever asked is asked whether to go on: the kernel
/// clears pages while it reserves them, so that a large segment takes seconds.
pub const STEP: u64 = 256 << 20;

/// The name in `directory` that a segment has until it is published.
#[must_use]
pub fn building_path(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.new"))
}

/// Bytes free for this user in the file system of `directory`.
///
/// # Errors
/// When the directory cannot be looked at.
pub fn free_bytes(directory: &Path) -> Result<u64, KernelError> {
    let figures = statvfs(directory)
        .map_err(|e| KernelError::new(format!("look at {}", directory.display()), e))?;
    Ok(figures
        .blocks_available()
        .saturating_mul(figures.fragment_size()))
}

/// Maps the pages of a range of a segment under construction at once, instead of one
/// fault each when it is first written. Costs nothing where they are mapped already.
pub fn populate(range: &mut [u8]) {
    const PAGE: usize = 4096;
    let start = range.as_mut_ptr();
    let skip = start.align_offset(PAGE);
    let whole = range.len().saturating_sub(skip) / PAGE * PAGE;
    if whole == 0 {
        return;
    }
    // SAFETY: skip + whole bytes lie within the exclusive borrow, and populating changes
    // none of them. A kernel without it (before 5.14) answers EINVAL, a file system
    // without room EFAULT: then the pages come by faults, as they would have.
    unsafe { libc::madvise(start.add(skip).cast(), whole, libc::MADV_POPULATE_WRITE) };
}

/// A segment under construction; dropped before [`SegmentBuilder::publish`] it leaves
/// nothing behind.
#[derive(Debug)]
pub struct SegmentBuilder {
    file: File,
    mapping: Mapping,
    temporary: TemporaryName,
    target: PathBuf,
    bytes: u64,
    misplaced: Option<KernelError>,
}

#[derive(Debug)]
struct TemporaryName(Option<PathBuf>);

impl Drop for TemporaryName {
    fn drop(&mut self) {
        if let Some(path) = self.0.take() {
            // it may have been removed from outside; there is nothing left to undo
            let _: io::Result<()> = fs::remove_file(path);
        }
    }
}

impl SegmentBuilder {
    /// Reserves `bytes` bytes for the segment `name` in `directory`.
    ///
    /// # Errors
    /// [`SegmentError::Full`] when the file system has too little room; nothing is
    /// left behind then.
    pub fn new(directory: &Path, name: &str, bytes: u64) -> Result<Self, SegmentError> {
        Self::on_node(directory, name, bytes, None, &mut |_| true)
    }

    /// As [`SegmentBuilder::new`], its pages on the NUMA node `node` as long as that has
    /// room and the kernel allows it ([`SegmentBuilder::misplaced`]). `proceed` is told how many bytes are reserved, first 0, then after each
    /// [`STEP`], and says whether to go on.
    ///
    /// # Errors
    /// As [`SegmentBuilder::new`]; [`SegmentError::GivenUp`] when `proceed` says so.
    pub fn on_node(
        directory: &Path,
        name: &str,
        bytes: u64,
        node: Option<u32>,
        proceed: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Self, SegmentError> {
        let size = usize::try_from(bytes)
            .ok()
            .filter(|size| *size > 0 && isize::try_from(*size).is_ok())
            .ok_or(SegmentError::Size { bytes })?;
        let target = directory.join(name);
        let path = building_path(directory, name);
        let operation = || format!("create {}", path.display());
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW)
            .open(&path)
            .map_err(|e| KernelError::new(operation(), e))?;
        let temporary = TemporaryName(Some(path.clone()));
        // held for as long as the daemon has the file open, also after it was renamed:
        // it tells a daemon that cleans up whether the maker still lives
        file.try_lock()
            .map_err(|e| KernelError::new(format!("lock {}", path.display()), e))?;
        let free = free_bytes(directory)?;
        let full = || SegmentError::Full {
            wanted: bytes,
            free,
            directory: directory.to_owned(),
        };
        // fallocate of a size far beyond the file system would first take all there is
        if bytes > free {
            return Err(full());
        }
        // the policy belongs to the object: it must stand before the first page does
        let mut misplaced = None;
        let bound = match node {
            Some(node) => {
                file.set_len(bytes)
                    .map_err(|e| KernelError::new(format!("size {}", path.display()), e))?;
                let mapping = Mapping::new(file.as_fd(), size, Access::ReadWrite)?;
                // a container may forbid it: far pages are slower, and right
                misplaced = mapping.prefer_node(node).err();
                Some(mapping)
            }
            None => None,
        };
        let mut reserved = 0;
        loop {
            if !proceed(reserved) {
                let wanted = bytes;
                return Err(SegmentError::GivenUp { wanted, reserved });
            }
            let step = (bytes - reserved).min(STEP);
            if step == 0 {
                break;
            }
            let taken = rustix::fs::fallocate(&file, FallocateFlags::empty(), reserved, step);
            taken.map_err(|e| match e {
                rustix::io::Errno::NOSPC | rustix::io::Errno::NOMEM => full(),
                e => {
                    let operation = format!("reserve {bytes} bytes for {}", path.display());
                    KernelError::new(operation, e).into()
                }
            })?;
            reserved += step;
        }
        let mapping = match bound {
            Some(mapping) => mapping,
            None => Mapping::new(file.as_fd(), size, Access::ReadWrite)?,
        };
        Ok(Self {
            file,
            mapping,
            temporary,
            target,
            bytes,
            misplaced,
        })
    }

    /// Why its pages do not lie on the NUMA node that was asked for, if so.
    #[must_use]
    pub fn misplaced(&self) -> Option<&KernelError> {
        self.misplaced.as_ref()
    }

    /// The bytes to fill. The pages are reserved and read as zero.
    ///
    /// # Errors
    /// Never for a builder made by [`SegmentBuilder::new`].
    pub fn bytes_mut(&mut self) -> Result<&mut [u8], RangeError> {
        self.mapping.exclusive()
    }

    /// Makes the segment read-only and visible under its name.
    ///
    /// # Errors
    /// When the kernel refuses; nothing is left behind then.
    pub fn publish(mut self) -> Result<Segment, KernelError> {
        let operation = || format!("publish {}", self.target.display());
        failpoint::pass(Point::Seal)?;
        self.file
            .set_permissions(fs::Permissions::from_mode(0o400))
            .map_err(|e| KernelError::new(operation(), e))?;
        let inode = self
            .file
            .metadata()
            .map_err(|e| KernelError::new(operation(), e))?
            .ino();
        failpoint::pass(Point::Publish)?;
        if let Some(path) = &self.temporary.0 {
            fs::rename(path, &self.target).map_err(|e| KernelError::new(operation(), e))?;
        }
        self.temporary.0 = None;
        failpoint::cross(Point::Published);
        Ok(Segment {
            keep: AtomicBool::new(false),
            file: self.file.into(),
            mapping: Arc::new(self.mapping),
            path: self.target,
            inode,
            bytes: self.bytes,
        })
    }
}

/// A complete segment. Dropping it removes the name, if that is still its own and is not
/// kept for a successor; the memory goes when the last process has unmapped it.
#[derive(Debug)]
pub struct Segment {
    keep: AtomicBool,
    file: OwnedFd,
    mapping: Arc<Mapping>,
    path: PathBuf,
    inode: u64,
    bytes: u64,
}

impl Segment {
    /// Takes over the segment `name` of `bytes` bytes that a dead maker left in
    /// `directory`. Its pages stay as they are.
    ///
    /// # Errors
    /// [`SegmentError::Unlike`] when what lies there is no such segment, or its maker
    /// lives; whatever it is stays as it was.
    pub fn adopt(directory: &Path, name: &str, bytes: u64) -> Result<Self, SegmentError> {
        let path = directory.join(name);
        let failed = |what: &str| {
            let operation = format!("{what} {}", path.display());
            move |error| KernelError::new(operation, error)
        };
        let unlike = |what: String| SegmentError::Unlike {
            path: path.clone(),
            what,
        };
        let seen = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&path)
            .map_err(failed("open"))?;
        let found = seen.metadata().map_err(failed("look at"))?;
        let own = nix::unistd::geteuid().as_raw();
        if !found.is_file() || found.uid() != own {
            return Err(unlike("no regular file of this user".to_owned()));
        }
        if found.len() != bytes {
            return Err(unlike(format!("{} bytes instead of {bytes}", found.len())));
        }
        if seen.try_lock().is_err() {
            return Err(unlike("locked by a maker that lives".to_owned()));
        }
        // pinning needs a writable mapping, which the mode forbids to all but root
        let mode = |mode| fs::Permissions::from_mode(mode);
        seen.set_permissions(mode(0o600))
            .map_err(failed("open for writing"))?;
        let file = memfd::reopen(seen.as_fd(), true);
        seen.set_permissions(mode(0o400)).map_err(failed("seal"))?;
        let file = file?;
        let locked = memfd::file(&file)?;
        // the lock belongs to the open file: the other one gives it up
        drop(seen);
        if locked.try_lock().is_err() {
            return Err(unlike("locked by somebody else".to_owned()));
        }
        let size = usize::try_from(bytes).map_err(|_| SegmentError::Size { bytes })?;
        let mapping = Mapping::new(file.as_fd(), size, Access::ReadWrite)?;
        Ok(Self {
            keep: AtomicBool::new(false),
            inode: found.ino(),
            file,
            mapping: Arc::new(mapping),
            path,
            bytes,
        })
    }

    /// Leaves the name there when this is dropped, for a successor.
    pub fn keep(&self) {
        self.keep.store(true, Ordering::Relaxed);
    }

    /// Removes its name, if that is still its own; the memory stays for who holds it.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn unlink(&self) -> Result<(), KernelError> {
        if self.is_unlinked() {
            return Ok(());
        }
        let failed = |error| KernelError::new(format!("remove {}", self.path.display()), error);
        fs::remove_file(&self.path).map_err(failed)
    }

    /// The daemon's mapping of it.
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Bytes that were asked for.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where it is visible.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A read-only descriptor of it, to give away.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn export(&self) -> Result<OwnedFd, KernelError> {
        memfd::reopen(self.file.as_fd(), false)
    }

    /// Whether its name is gone, or names another file.
    #[must_use]
    pub fn is_unlinked(&self) -> bool {
        !fs::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if !self.keep.load(Ordering::Relaxed) {
            // a failure leaves a name that the next start reaps under the lock
            let _: Result<(), KernelError> = self.unlink();
        }
    }
}

#[cfg(test)]
mod tests;
