//! Anonymous shared memory objects: mode 0600, close-on-exec, of fixed size.

use std::{
    fs::File,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use rustix::fs::{FallocateFlags, MemfdFlags, Mode as RustixMode, SealFlags};

use crate::kernel::KernelError;

/// Creates a memfd whose `bytes` bytes are reserved, so that touching them can
/// never fail later.
///
/// # Errors
/// When the kernel has no memory or descriptors for it.
pub fn create(name: &str, bytes: u64) -> Result<OwnedFd, KernelError> {
    let operation = || format!("create {bytes} bytes of shared memory for {name}");
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let created =
        rustix::fs::memfd_create(name, flags).map_err(|e| KernelError::new(operation(), e))?;
    rustix::fs::fchmod(&created, RustixMode::RUSR | RustixMode::WUSR)
        .map_err(|e| KernelError::new(operation(), e))?;
    if bytes > 0 {
        rustix::fs::fallocate(&created, FallocateFlags::empty(), 0, bytes)
            .map_err(|e| KernelError::new(operation(), e))?;
    }
    // a memfd is born open without being counted as open for writing; reopened it is
    // counted, which `held_elsewhere` relies on
    reopen(created.as_fd(), true)
}

/// Forbids that anyone changes the size of a memfd, or its seals.
///
/// # Errors
/// When the kernel refuses.
pub fn seal_size(descriptor: BorrowedFd<'_>) -> Result<(), KernelError> {
    add_seals(
        descriptor,
        SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
    )
}

/// Forbids that anyone changes the size, or maps or writes it anew. Mappings that
/// exist stay writable.
///
/// # Errors
/// When the kernel refuses.
pub fn seal_size_and_future_writes(descriptor: BorrowedFd<'_>) -> Result<(), KernelError> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    add_seals(descriptor, seals)
}

/// Whether nobody can change the size of the object.
///
/// # Errors
/// When it has no seals (it is not a memfd).
pub fn size_is_sealed(descriptor: BorrowedFd<'_>) -> Result<bool, KernelError> {
    let seals = rustix::fs::fcntl_get_seals(descriptor)
        .map_err(|e| KernelError::new("read the seals of a shared memory object", e))?;
    Ok(seals.contains(SealFlags::SHRINK | SealFlags::GROW))
}

fn add_seals(descriptor: BorrowedFd<'_>, seals: SealFlags) -> Result<(), KernelError> {
    rustix::fs::fcntl_add_seals(descriptor, seals)
        .map_err(|e| KernelError::new("seal a shared memory object", e))
}

/// Opens the object behind `descriptor` once more: a descriptor of its own, with its
/// own rights, to give away.
///
/// # Errors
/// When `/proc` is not mounted or the rights do not allow it.
pub fn reopen(descriptor: BorrowedFd<'_>, writable: bool) -> Result<OwnedFd, KernelError> {
    let path = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    let access = if writable {
        OFlag::O_RDWR
    } else {
        OFlag::O_RDONLY
    };
    open(path.as_str(), access | OFlag::O_CLOEXEC, Mode::empty())
        .map_err(|e| KernelError::new("reopen a shared memory object", e))
}

/// A descriptor of our own, open for writing, of an object of exactly `bytes` bytes that
/// [`create`] of a predecessor made and a client hands back: the client's shares its
/// open file with that, so that [`held_elsewhere`] could not tell the two apart.
///
/// # Errors
/// When it is no sealed shared memory object of that size, or not one of this user's.
pub fn take_back(descriptor: BorrowedFd<'_>, bytes: u64) -> Result<OwnedFd, KernelError> {
    let unlike = |what: String| {
        let error = std::io::Error::new(std::io::ErrorKind::InvalidData, what);
        KernelError::new("take shared memory back", error)
    };
    // nothing but shared memory has seals: what is opened anew below cannot block
    if !size_is_sealed(descriptor)? {
        return Err(unlike("its size can change".to_owned()));
    }
    let found =
        rustix::fs::fstat(descriptor).map_err(|e| KernelError::new("look at shared memory", e))?;
    let size = u64::try_from(found.st_size).unwrap_or(0);
    if size != bytes || found.st_uid != nix::unistd::geteuid().as_raw() {
        let user = found.st_uid;
        return Err(unlike(format!(
            "{size} bytes of user {user} instead of {bytes} of ours"
        )));
    }
    reopen(descriptor, true)
}

/// Whether anyone beside `file` has the object open or mapped, by asking for a write
/// lease: the kernel grants one only while no other open file of the object exists
/// (fcntl(2), F_SETLEASE). `None` when the kernel cannot tell. The object must have
/// been made by [`create`], and every descriptor given away by [`reopen`].
pub fn held_elsewhere(file: &OwnedFd) -> Option<bool> {
    // SAFETY: file is open for the whole call; F_SETLEASE takes an int by value.
    let set = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) };
    if set == 0 {
        // SAFETY: as above; giving a lease back that we hold.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
        return Some(false);
    }
    (std::io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN)).then_some(true)
}

/// A `File` for positioned reads and writes on a descriptor of its own.
///
/// # Errors
/// When no descriptor can be made.
pub fn file(descriptor: &OwnedFd) -> Result<File, KernelError> {
    let own = descriptor
        .try_clone()
        .map_err(|e| KernelError::new("duplicate a descriptor", e))?;
    Ok(File::from(own))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::{Access, Mapping};

    #[test]
    fn a_mapping_alone_counts_as_a_holder_until_it_is_gone() {
        let ours = create("t", 8192).unwrap();
        let own = Mapping::new(ours.as_fd(), 8192, Access::ReadWrite).unwrap();
        assert_eq!(held_elsewhere(&ours), Some(false));
        let given = reopen(ours.as_fd(), false).unwrap();
        assert_eq!(held_elsewhere(&ours), Some(true));
        let theirs = Mapping::new(given.as_fd(), 8192, Access::Read).unwrap();
        drop(given);
        assert_eq!(held_elsewhere(&ours), Some(true));
        drop(theirs);
        assert_eq!(held_elsewhere(&ours), Some(false));
        drop(own);
    }

    #[test]
    fn a_sealed_object_cannot_be_truncated_nor_mapped_for_writing_anew() {
        let page = create("t", 4096).unwrap();
        let ours = Mapping::new(page.as_fd(), 4096, Access::ReadWrite).unwrap();
        seal_size_and_future_writes(page.as_fd()).unwrap();
        assert!(size_is_sealed(page.as_fd()).unwrap());
        assert!(file(&page).unwrap().set_len(0).is_err());
        assert!(Mapping::new(page.as_fd(), 4096, Access::ReadWrite).is_err());
        assert!(Mapping::new(page.as_fd(), 4096, Access::Read).is_ok());
        ours.write(0, &[1]).unwrap();
    }

    #[test]
    fn what_is_taken_back_is_ours_alone_again_once_the_giver_is_gone() {
        let made = create("t", 8192).unwrap();
        seal_size(made.as_fd()).unwrap();
        let theirs = reopen(made.as_fd(), false).unwrap();
        drop(made);
        assert!(take_back(theirs.as_fd(), 4096).is_err());
        assert!(take_back(std::fs::File::open("/dev/null").unwrap().as_fd(), 0).is_err());
        let ours = take_back(theirs.as_fd(), 8192).unwrap();
        let mapping = Mapping::new(ours.as_fd(), 8192, Access::ReadWrite).unwrap();
        assert_eq!(held_elsewhere(&ours), Some(true));
        drop(theirs);
        assert_eq!(held_elsewhere(&ours), Some(false));
        mapping.write(0, &[1]).unwrap();
    }

    #[test]
    fn a_read_only_descriptor_cannot_be_mapped_for_writing() {
        let page = create("t", 4096).unwrap();
        let given = reopen(page.as_fd(), false).unwrap();
        assert!(Mapping::new(given.as_fd(), 4096, Access::ReadWrite).is_err());
    }
}
