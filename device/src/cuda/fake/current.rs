//! Which context is that of the calling thread.

use std::{cell::RefCell, sync::Arc};

use super::{
    super::driver::ContextHandle,
    FakeDriver,
    codes::{INVALID_CONTEXT, Refusable},
};

thread_local! {
    /// Contexts that this thread pushed, of all fake drivers of the process: the state of
    /// each, by address, and the index of its GPU.
    static STACK: RefCell<Vec<(usize, usize)>> = const { RefCell::new(Vec::new()) };
}

/// What the handle of GPU 0 is; the others follow.
const FIRST: usize = 0xc000;

/// The handle of a GPU's primary context.
pub(super) fn handle(gpu: usize) -> ContextHandle {
    ContextHandle(FIRST + gpu)
}

impl FakeDriver {
    fn identity(&self) -> usize {
        Arc::as_ptr(&self.shared).addr()
    }

    pub(super) fn push_context(&self, context: ContextHandle) -> Refusable<()> {
        let gpu = context.0.checked_sub(FIRST).ok_or(INVALID_CONTEXT)?;
        let known = self.shared.gpus.get(gpu).ok_or(INVALID_CONTEXT)?;
        if known.retained.load(std::sync::atomic::Ordering::SeqCst) == 0 {
            return Err(INVALID_CONTEXT);
        }
        STACK.with_borrow_mut(|stack| stack.push((self.identity(), gpu)));
        Ok(())
    }

    pub(super) fn pop_context(&self) -> Refusable<()> {
        STACK.with_borrow_mut(|stack| {
            let mine = stack.iter().rposition(|(of, _)| *of == self.identity());
            stack.remove(mine.ok_or(INVALID_CONTEXT)?);
            Ok(())
        })
    }

    /// The GPU of the current context, whatever its state.
    pub(super) fn current(&self) -> Refusable<usize> {
        STACK.with_borrow(|stack| {
            let mine = stack.iter().rev().find(|(of, _)| *of == self.identity());
            mine.map(|(_, gpu)| *gpu).ok_or(INVALID_CONTEXT)
        })
    }

    /// The GPU of the current context, which is not broken.
    pub(super) fn current_sound(&self) -> Refusable<usize> {
        let gpu = self.current()?;
        self.shared.sound(gpu)?;
        Ok(gpu)
    }
}
