//! Memory of the daemon in this process. Residents are shared by the managers of a
//! process, and a driver may refuse to import one allocation twice: they are mapped once.

use std::{
    collections::HashMap,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use flextensord_device::cuda::{context::Context, error::CudaError, memory::DeviceMapping};

/// How long the unmapping of an allocation by another thread may take.
const LIMIT: Duration = Duration::from_secs(10);

/// What is mapped in this process.
static MAPPED: Mutex<Option<HashMap<Key, Weak<Imported>>>> = Mutex::new(None);
/// Something was unmapped.
static UNMAPPED: Condvar = Condvar::new();

/// Which allocation of which daemon, and where.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    /// A forked child has nothing of its parent's.
    process: u32,
    source: Source,
    allocation: u64,
    gpu: String,
}

/// The daemon that made an allocation.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Source {
    /// Its socket.
    pub(crate) socket: PathBuf,
    pub(crate) generation: u64,
}

/// An allocation of the daemon's, mapped for reading.
#[derive(Debug)]
pub(crate) struct Imported {
    // unmapped before its entry goes
    mapping: DeviceMapping,
    entry: Option<Entry>,
}

impl Imported {
    /// The ring of a manager, which is that manager's alone.
    pub(crate) fn ring(
        context: &Arc<Context>,
        descriptor: OwnedFd,
        bytes: u64,
    ) -> Result<Arc<Self>, CudaError> {
        Ok(Arc::new(Self {
            mapping: DeviceMapping::import(context, descriptor, bytes)?,
            entry: None,
        }))
    }

    /// Residents, which managers of this process may share.
    pub(crate) fn residents(
        context: &Arc<Context>,
        source: &Source,
        allocation: u64,
        descriptor: OwnedFd,
        bytes: u64,
    ) -> Result<Arc<Self>, CudaError> {
        let key = Key {
            process: std::process::id(),
            source: source.clone(),
            allocation,
            gpu: context.gpu().uuid.clone(),
        };
        let begin = Instant::now();
        let mut mapped = mapped();
        while let Some(found) = mapped.get_or_insert_default().get(&key) {
            if let Some(found) = found.upgrade() {
                return Ok(found);
            }
            // its last user unmaps it just now
            if begin.elapsed() > LIMIT {
                return Err(CudaError::State(
                    "residents are unmapped by another thread, which does not come to an end",
                ));
            }
            let woken = UNMAPPED.wait_timeout(mapped, LIMIT);
            mapped = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        // under the lock, so that another thread waits instead of importing it too
        let imported = Arc::new(Self {
            mapping: DeviceMapping::import(context, descriptor, bytes)?,
            entry: Some(Entry(key.clone())),
        });
        let all = mapped.get_or_insert_default();
        all.insert(key, Arc::downgrade(&imported));
        Ok(imported)
    }

    pub(crate) fn mapping(&self) -> &DeviceMapping {
        &self.mapping
    }

    pub(crate) fn is_ring(&self) -> bool {
        self.entry.is_none()
    }
}

/// Takes what is unmapped out of the table.
#[derive(Debug)]
struct Entry(Key);

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(all) = mapped().as_mut() {
            all.remove(&self.0);
        }
        UNMAPPED.notify_all();
    }
}

fn mapped() -> MutexGuard<'static, Option<HashMap<Key, Weak<Imported>>>> {
    MAPPED.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use flextensord_device::cuda::{
        driver::Driver,
        fake::{FakeDriver, FakeSettings},
        gpu,
    };

    use super::*;

    const BYTES: u64 = 2 << 20;

    fn context(driver: &Arc<FakeDriver>) -> Arc<Context> {
        let driver: Arc<dyn Driver> = Arc::clone(driver) as _;
        let gpu = gpu::find(driver.as_ref(), "cuda:0").unwrap();
        Context::open(&driver, &gpu).unwrap()
    }

    fn source(socket: &str) -> Source {
        Source {
            socket: socket.into(),
            generation: 1,
        }
    }

    #[test]
    fn managers_of_a_process_map_shared_residents_once_and_anew_when_all_are_gone() {
        let daemon = context(&FakeDriver::new(FakeSettings::default()));
        let memory = DeviceMapping::create(&daemon, BYTES).unwrap();
        memory.write(256, b"resident").unwrap();
        let ours = FakeDriver::new(FakeSettings::default());
        ours.faults().refuse_import_twice(Some(1));
        // each manager has a context of its own
        let import = |source: &Source| {
            let descriptor = memory.export().unwrap();
            Imported::residents(&context(&ours), source, 4, descriptor, BYTES)
        };
        let source = source("/managers-of-a-process");
        let (one, two) = (import(&source).unwrap(), import(&source).unwrap());
        assert!(Arc::ptr_eq(&one, &two));
        drop(one);
        let mut bytes = [0; 8];
        two.mapping().read(256, &mut bytes).unwrap();
        assert_eq!(&bytes, b"resident");
        let other = Source {
            generation: 2,
            ..source.clone()
        };
        assert!(
            import(&other).is_err(),
            "another daemon's is another allocation"
        );
        drop(two);
        assert!(import(&source).is_ok());
        assert_eq!(ours.counts().live_allocations, 0);
    }

    #[test]
    fn many_threads_that_come_and_go_never_import_twice() {
        let daemon = context(&FakeDriver::new(FakeSettings::default()));
        let memory = DeviceMapping::create(&daemon, BYTES).unwrap();
        let ours = FakeDriver::new(FakeSettings::default());
        ours.faults().refuse_import_twice(Some(1));
        let context = context(&ours);
        let source = source("/many-threads");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let descriptor = memory.export().unwrap();
                        Imported::residents(&context, &source, 1, descriptor, BYTES).unwrap();
                    }
                });
            }
        });
    }
}
