//! The notice page: what the daemon tells clients without an RPC.

use std::{
    os::fd::{AsFd as _, OwnedFd},
    sync::atomic::Ordering::SeqCst,
};

use flextensord_proto::layout;

use crate::{
    control::ControlError,
    header,
    kernel::KernelError,
    mapping::{Access, Mapping},
    memfd,
};

/// What a daemon does, as its clients see it without an RPC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum NoticePhase {
    /// It takes over what its predecessor left.
    Recovering = 1,
    /// It serves.
    Serving = 2,
    /// It takes nothing new.
    Draining = 3,
    /// It is gone, or about to be.
    Stopped = 4,
}

/// The daemon's side: the only writable mapping there ever is.
#[derive(Debug)]
pub struct NoticePage {
    descriptor: OwnedFd,
    mapping: Mapping,
}

impl NoticePage {
    /// Makes the page of a daemon of this generation.
    ///
    /// # Errors
    /// When the kernel has no memory for it.
    pub fn create(generation: u64) -> Result<Self, ControlError> {
        let descriptor = memfd::create("flextensord-notice", layout::NOTICE_BYTES as u64)?;
        let mapping = Mapping::new(descriptor.as_fd(), layout::NOTICE_BYTES, Access::ReadWrite)?;
        memfd::seal_size_and_future_writes(descriptor.as_fd())?;
        mapping
            .word64(layout::MAGIC)?
            .store(layout::NOTICE_MAGIC, SeqCst);
        mapping
            .word32(layout::VERSION)?
            .store(layout::LAYOUT_VERSION, SeqCst);
        mapping
            .word64(layout::NOTICE_GENERATION)?
            .store(generation, SeqCst);
        Ok(Self {
            descriptor,
            mapping,
        })
    }

    /// A read-only descriptor to give away.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn export(&self) -> Result<OwnedFd, KernelError> {
        memfd::reopen(self.descriptor.as_fd(), false)
    }

    /// Says what the daemon does.
    pub fn set_phase(&self, phase: NoticePhase) {
        if let Ok(word) = self.mapping.word32(layout::NOTICE_PHASE) {
            word.store(phase as u32, SeqCst);
        }
    }

    /// Says whether an engine is about to sleep. After saying so the engine looks at all
    /// words once more: a client that changed one before reads the flag too late, one
    /// that changes one after sees it and rings.
    pub fn set_asleep(&self, engine: usize, asleep: bool) {
        if let Ok(word) = self.mapping.word32(asleep_offset(engine)) {
            word.store(asleep.into(), SeqCst);
        }
    }
}

/// A client's side.
#[derive(Debug)]
pub struct NoticeView {
    mapping: Mapping,
    asleep: usize,
}

impl NoticeView {
    /// Maps a page that was handed over; the client's engine is `engine`.
    ///
    /// # Errors
    /// When it is no notice page of this version.
    pub fn open(descriptor: OwnedFd, engine: usize) -> Result<Self, ControlError> {
        let mapping = Mapping::new(descriptor.as_fd(), layout::NOTICE_BYTES, Access::Read)?;
        header::check_kind(&mapping, layout::NOTICE_MAGIC)?;
        let asleep = asleep_offset(engine);
        mapping.load32(asleep)?;
        Ok(Self { mapping, asleep })
    }

    /// Whether the client's engine sleeps and must be rung.
    #[must_use]
    pub fn engine_asleep(&self) -> bool {
        self.mapping
            .load32(self.asleep)
            .is_ok_and(|asleep| asleep != 0)
    }

    /// The daemon's generation.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.mapping.load64(layout::NOTICE_GENERATION).unwrap_or(0)
    }
}

fn asleep_offset(engine: usize) -> usize {
    let within = engine.min(layout::NOTICE_ENGINE_LIMIT - 1);
    layout::NOTICE_ENGINES + layout::NOTICE_ENGINE_STRIDE * within
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_sees_its_own_engine_sleep() {
        let page = NoticePage::create(7).unwrap();
        let view = NoticeView::open(page.export().unwrap(), 2).unwrap();
        assert_eq!(view.generation(), 7);
        page.set_asleep(1, true);
        assert!(!view.engine_asleep());
        page.set_asleep(2, true);
        assert!(view.engine_asleep());
        page.set_asleep(2, false);
        assert!(!view.engine_asleep());
    }
}
