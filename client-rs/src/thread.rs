//! The one thread that acquires and releases for a manager.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use crate::error::ClientError;

static NEXT: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// Number of this thread, never used again by another.
    static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
}

/// Remembers a thread, and names it in messages.
#[derive(Debug)]
pub(crate) struct OwnerThread {
    number: AtomicU64,
    name: Mutex<String>,
}

impl OwnerThread {
    /// The thread that calls.
    pub(crate) fn current() -> Self {
        Self {
            number: AtomicU64::new(NUMBER.with(|number| *number)),
            name: Mutex::new(describe()),
        }
    }

    /// Makes the thread that calls the owner.
    pub(crate) fn rebind(&self) {
        let mut name = self.name.lock().unwrap_or_else(PoisonError::into_inner);
        *name = describe();
        self.number
            .store(NUMBER.with(|number| *number), Ordering::Release);
    }

    /// Whether the owner calls.
    pub(crate) fn is_current(&self) -> bool {
        NUMBER.with(|number| *number) == self.number.load(Ordering::Acquire)
    }

    /// Refuses another thread.
    pub(crate) fn check(&self) -> Result<(), ClientError> {
        if self.is_current() {
            return Ok(());
        }
        let name = self.name.lock().unwrap_or_else(PoisonError::into_inner);
        Err(ClientError::WrongThread {
            owner: name.clone(),
            caller: describe(),
        })
    }
}

fn describe() -> String {
    let number = NUMBER.with(|number| *number);
    match thread::current().name() {
        Some(name) => format!("thread {number} ({name})"),
        None => format!("thread {number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_thread_is_refused_with_both_names_until_it_is_bound() {
        let owner = OwnerThread::current();
        assert!(owner.check().is_ok());
        thread::scope(|scope| {
            let other = thread::Builder::new().name("other".to_owned());
            let checked = other.spawn_scoped(scope, || {
                let error = owner.check().unwrap_err().to_string();
                owner.rebind();
                assert!(owner.check().is_ok());
                error
            });
            let error = checked.unwrap().join().unwrap();
            assert!(error.contains("(other)"), "{error}");
            assert!(error.contains("another_thread_is_refused"), "{error}");
        });
        assert!(owner.check().is_err());
    }
}
