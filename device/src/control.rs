//! The control page of a manager's plan: slot words, `want`, `plan_ack`.

use std::{
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::{Arc, OnceLock, atomic::Ordering::SeqCst},
    time::Duration,
};

use flextensord_proto::layout::{self, WANT_NONE, Word};

use crate::{
    cuda::{context::Context, registration::RegistrationError, slots::SlotWords},
    futex,
    handover::{self, Cells},
    header,
    kernel::KernelError,
    mapping::{Access, Mapping, RangeError},
    memfd,
};

/// Why a control page is refused.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// A system call failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The header is not that of a control page of this version, epoch and plan.
    #[error("control page has {what} {found}, expected {expected}")]
    Header {
        /// The field.
        what: &'static str,
        /// What stands there.
        found: u64,
        /// What should.
        expected: u64,
    },
    /// The object's size can be changed under us.
    #[error("control page is not sealed against changes of its size")]
    NotSealed,
    /// The page is too small for its parts.
    #[error(transparent)]
    Range(#[from] RangeError),
}

/// Which lease and plan a control page belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControlIdentity {
    /// The lease epoch.
    pub lease_epoch: u64,
    /// The plan version.
    pub plan_version: u64,
    /// Number of parts.
    pub parts: u32,
}

/// A mapped control page. Every part was checked to lie in it when it was made.
#[derive(Debug)]
pub struct ControlPage {
    /// As a GPU sees it; before the mapping, so that it is unregistered first.
    slots: OnceLock<SlotWords>,
    descriptor: OwnedFd,
    mapping: Arc<Mapping>,
    identity: ControlIdentity,
}

impl ControlPage {
    /// Makes the page of a new plan, all parts empty.
    ///
    /// # Errors
    /// When the kernel has no memory for it.
    pub fn create(identity: ControlIdentity) -> Result<Self, ControlError> {
        let size = layout::control_bytes(identity.parts);
        let descriptor = memfd::create("flextensord-control", size as u64)?;
        memfd::seal_size(descriptor.as_fd())?;
        let mapping = Mapping::new(descriptor.as_fd(), size, Access::ReadWrite)?;
        header::write(&mapping, layout::CONTROL_MAGIC, identity)?;
        mapping.word32(layout::WANT)?.store(WANT_NONE, SeqCst);
        Ok(Self {
            slots: OnceLock::new(),
            descriptor,
            mapping: Arc::new(mapping),
            identity,
        })
    }

    /// Maps a page that was handed over, and checks that it is the one expected.
    ///
    /// # Errors
    /// When it is not sealed, too small, or belongs to another lease or plan.
    pub fn open(descriptor: OwnedFd, identity: ControlIdentity) -> Result<Self, ControlError> {
        if !memfd::size_is_sealed(descriptor.as_fd())? {
            return Err(ControlError::NotSealed);
        }
        let size = layout::control_bytes(identity.parts);
        let mapping = Mapping::new(descriptor.as_fd(), size, Access::ReadWrite)?;
        header::check(&mapping, layout::CONTROL_MAGIC, identity)?;
        Ok(Self {
            slots: OnceLock::new(),
            descriptor,
            mapping: Arc::new(mapping),
            identity,
        })
    }

    /// Takes the page of a dead predecessor back from its client.
    ///
    /// # Errors
    /// As [`ControlPage::open`], and when it is no object of this user's.
    pub fn take_back(
        descriptor: BorrowedFd<'_>,
        identity: ControlIdentity,
    ) -> Result<Self, ControlError> {
        let size = layout::control_bytes(identity.parts) as u64;
        Self::open(memfd::take_back(descriptor, size)?, identity)
    }

    /// Which lease and plan it belongs to.
    #[must_use]
    pub fn identity(&self) -> ControlIdentity {
        self.identity
    }

    /// A descriptor of its own for the other side.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn export(&self) -> Result<OwnedFd, KernelError> {
        memfd::reopen(self.descriptor.as_fd(), true)
    }

    /// Whether another process still has it; `None` when the kernel cannot tell.
    #[must_use]
    pub fn held_elsewhere(&self) -> Option<bool> {
        memfd::held_elsewhere(&self.descriptor)
    }

    /// Registers the page with the driver, so that streams of `context` can wait for its
    /// words and write them. Repeated calls do nothing.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn pin(&self, context: &Arc<Context>) -> Result<(), RegistrationError> {
        if self.slots.get().is_none() {
            let slots = SlotWords::pin(context, &self.mapping, self.identity.parts)?;
            // two at once: the driver has refused the second registration already
            let _ = self.slots.set(slots);
        }
        Ok(())
    }

    /// The words as streams use them, once the page is registered.
    #[must_use]
    pub fn slots(&self) -> Option<&SlotWords> {
        self.slots.get()
    }

    /// Client: makes every word say full, so that what waits for one in a stream goes on,
    /// with no regard to whether there are bytes. Only for a client whose lease is over
    /// and who can read the ring no more: the page is never given to another lease.
    pub fn release_waiters(&self) {
        for part in 0..self.identity.parts {
            // the low half comes first; the high one is the daemon's
            if let Ok(state) = self.mapping.word32(layout::slot(part))
                && state.load(SeqCst) != layout::State::Full as u32
            {
                state.store(layout::State::Full as u32, SeqCst);
            }
        }
    }

    /// A number that changes when a slot word or `want` does.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        // FNV-1a over words instead of bytes
        const PRIME: u64 = 0x0000_0100_0000_01b3;
        let mix = |sum: u64, word: u64| (sum ^ word).wrapping_mul(PRIME).rotate_left(17);
        // `want` is mixed as the words are: beside the first word as it stands, a client that
        // gives part 0 back and then waits for part 1 would change nothing
        (0..self.identity.parts).fold(mix(0, self.want().into()), |sum, part| {
            mix(sum, self.load(part).0)
        })
    }

    /// Number of parts whose word says in use.
    #[must_use]
    pub fn parts_in_use(&self) -> u32 {
        let in_use = |part: &u32| self.load(*part).state() == Some(layout::State::InUse);
        u32::try_from((0..self.identity.parts).filter(in_use).count()).unwrap_or(u32::MAX)
    }

    /// Daemon: publishes a copy (see [`handover::publish`]) and wakes who waits for it.
    pub fn publish(&self, part: u32, sequence: u32) -> bool {
        let published = handover::publish(self, part, sequence);
        if self.want() == part {
            self.wake(part);
        }
        published
    }

    /// Wakes who waits for `part`.
    pub fn wake(&self, part: u32) {
        if let Ok(word) = self.mapping.word32(layout::slot(part)) {
            futex::wake(word);
        }
    }

    /// Client: sleeps until the state of `part` is no longer that of `seen`, at most for
    /// `limit`.
    pub fn wait_change(&self, part: u32, seen: Word, limit: Duration) {
        if let Ok(word) = self.mapping.word32(layout::slot(part)) {
            futex::wait(word, seen.state_bits(), limit);
        }
    }
}

impl Cells for ControlPage {
    fn load(&self, part: u32) -> Word {
        // a part outside the page reads as one that nobody may touch
        self.mapping
            .load64(layout::slot(part))
            .map_or(Word(u64::MAX), Word)
    }

    fn exchange(&self, part: u32, from: Word, to: Word) -> Result<(), Word> {
        let Ok(word) = self.mapping.word64(layout::slot(part)) else {
            return Err(Word(u64::MAX));
        };
        word.compare_exchange(from.0, to.0, SeqCst, SeqCst)
            .map(drop)
            .map_err(Word)
    }

    fn want(&self) -> u32 {
        self.mapping.load32(layout::WANT).unwrap_or(WANT_NONE)
    }

    fn set_want(&self, part: u32) {
        if let Ok(want) = self.mapping.word32(layout::WANT) {
            want.store(part, SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handover::{give_back, take};

    const IDENTITY: ControlIdentity = ControlIdentity {
        lease_epoch: 3,
        plan_version: 1,
        parts: 5,
    };

    #[test]
    fn both_sides_see_one_page() {
        let ours = ControlPage::create(IDENTITY).unwrap();
        let theirs = ControlPage::open(ours.export().unwrap(), IDENTITY).unwrap();
        assert_eq!(ours.held_elsewhere(), Some(true));
        assert!(ours.publish(4, 1));
        assert!(take(&theirs, 4));
        assert_eq!(ours.parts_in_use(), 1);
        theirs.set_want(2);
        assert_eq!(ours.want(), 2);
    }

    #[test]
    fn a_client_that_gives_the_first_part_back_and_waits_for_the_second_is_seen() {
        let ours = ControlPage::create(IDENTITY).unwrap();
        assert!(ours.publish(0, 7));
        ours.set_want(0);
        let before = ours.fingerprint();
        assert!(take(&ours, 0) && give_back(&ours, 0));
        ours.set_want(1);
        assert_ne!(ours.fingerprint(), before);
    }

    #[test]
    fn a_page_of_another_lease_or_one_that_can_shrink_is_refused() {
        let ours = ControlPage::create(IDENTITY).unwrap();
        let other = ControlIdentity {
            lease_epoch: 4,
            ..IDENTITY
        };
        assert!(matches!(
            ControlPage::open(ours.export().unwrap(), other),
            Err(ControlError::Header {
                what: "lease epoch",
                ..
            })
        ));
        let bare = memfd::create("t", 8192).unwrap();
        assert!(matches!(
            ControlPage::open(bare, IDENTITY),
            Err(ControlError::NotSealed)
        ));
    }

    #[test]
    fn released_waiters_see_every_part_full_and_sequences_stay() {
        let ours = ControlPage::create(IDENTITY).unwrap();
        assert!(ours.publish(1, 9));
        assert!(take(&ours, 1));
        ours.release_waiters();
        let words = (0..5).map(|part| ours.load(part));
        assert!(words.eq([0, 9, 0, 0, 0].map(|sequence| Word::new(sequence, layout::State::Full))));
    }

    #[test]
    fn a_part_outside_the_page_is_never_full_and_never_changed() {
        let ours = ControlPage::create(IDENTITY).unwrap();
        assert!(!take(&ours, 100_000));
        assert!(!ours.publish(100_000, 1));
    }
}
