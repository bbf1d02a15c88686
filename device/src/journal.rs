//! The journal file of a manager's plan: which copy of each part was issued last.
//! It lies in the daemon's state directory; page cache and tmpfs survive its death.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{fd::AsFd as _, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::atomic::Ordering::SeqCst,
};

use flextensord_proto::layout;
use rustix::fs::FallocateFlags;

use crate::{
    control::{ControlError, ControlIdentity},
    handover::Journal,
    header,
    kernel::KernelError,
    mapping::{Access, Mapping},
};

/// A mapped journal. Dropping it keeps the file, for a successor; see
/// [`JournalFile::remove`].
#[derive(Debug)]
pub struct JournalFile {
    _file: File,
    mapping: Mapping,
    path: PathBuf,
    parts: u32,
}

impl JournalFile {
    /// Makes the journal of a new plan at `path`, nothing issued.
    ///
    /// # Errors
    /// When it exists or its file system is full.
    pub fn create(path: &Path, identity: ControlIdentity) -> Result<Self, ControlError> {
        let size = layout::journal_bytes(identity.parts);
        let operation = || format!("create the journal {}", path.display());
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(|e| KernelError::new(operation(), e))?;
        let filled = (|| {
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, size as u64)
                .map_err(|e| KernelError::new(operation(), e))?;
            let mapping = Mapping::new(file.as_fd(), size, Access::ReadWrite)?;
            header::write(&mapping, layout::JOURNAL_MAGIC, identity)?;
            Ok::<_, ControlError>(mapping)
        })();
        match filled {
            Ok(mapping) => Ok(Self {
                _file: file,
                mapping,
                path: path.to_owned(),
                parts: identity.parts,
            }),
            Err(error) => {
                let _: io::Result<()> = fs::remove_file(path);
                Err(error)
            }
        }
    }

    /// Opens the journal that a dead daemon left at `path`, of the plan `identity`.
    ///
    /// # Errors
    /// When it is not there, is cut short, or belongs to another plan.
    pub fn open(path: &Path, identity: ControlIdentity) -> Result<Self, ControlError> {
        let size = layout::journal_bytes(identity.parts);
        let operation = || format!("open the journal {}", path.display());
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK)
            .open(path)
            .map_err(|e| KernelError::new(operation(), e))?;
        let found = file
            .metadata()
            .map_err(|e| KernelError::new(operation(), e))?;
        if !found.is_file() || found.len() != size as u64 {
            return Err(ControlError::Header {
                what: "journal bytes",
                found: found.len(),
                expected: size as u64,
            });
        }
        let mapping = Mapping::new(file.as_fd(), size, Access::ReadWrite)?;
        header::check(&mapping, layout::JOURNAL_MAGIC, identity)?;
        Ok(Self {
            _file: file,
            mapping,
            path: path.to_owned(),
            parts: identity.parts,
        })
    }

    /// Removes the file: the plan is over.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove(self) -> Result<(), KernelError> {
        fs::remove_file(&self.path)
            .map_err(|e| KernelError::new(format!("remove {}", self.path.display()), e))
    }

    fn offset(part: u32) -> usize {
        layout::JOURNAL_ISSUED + 4 * part as usize
    }
}

impl Journal for JournalFile {
    fn parts(&self) -> u32 {
        self.parts
    }

    fn issued(&self, part: u32) -> u32 {
        self.mapping.load32(Self::offset(part)).unwrap_or(0)
    }

    fn record(&mut self, part: u32, sequence: u32) {
        if let Ok(word) = self.mapping.word32(Self::offset(part)) {
            word.store(sequence, SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_issued_stands_in_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("j");
        let identity = ControlIdentity {
            lease_epoch: 1,
            plan_version: 1,
            parts: 3,
        };
        let mut journal = JournalFile::create(&path, identity).unwrap();
        journal.record(2, 0x0102_0304);
        assert_eq!(journal.issued(2), 0x0102_0304);
        assert_eq!(journal.issued(1), 0);
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes[layout::JOURNAL_ISSUED + 8..][..4], [4, 3, 2, 1]);
        assert!(JournalFile::create(&path, identity).is_err());
        drop(journal);
        let other = ControlIdentity {
            lease_epoch: 2,
            ..identity
        };
        assert!(JournalFile::open(&path, other).is_err());
        let longer = ControlIdentity {
            parts: 3000,
            ..identity
        };
        assert!(JournalFile::open(&path, longer).is_err());
        let journal = JournalFile::open(&path, identity).unwrap();
        assert_eq!(journal.issued(2), 0x0102_0304);
        journal.remove().unwrap();
        assert!(!path.exists());
    }
}
