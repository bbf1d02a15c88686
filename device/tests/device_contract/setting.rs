//! The devices that the cases run on, and how a client reads their memory.

use std::{
    os::fd::AsFd as _,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use flextensord_device::{
    control::{ControlIdentity, ControlPage},
    cpu::CpuDevice,
    cuda::{
        context::Context,
        device::CudaDevice,
        driver::Driver,
        fake::{FakeDriver, FakeSettings},
        gpu, libcuda,
        memory::DeviceMapping,
    },
    device::{Device, Label, Memory, Source, Ticket},
    mapping::{Access, Mapping},
    memfd,
};

/// Bytes that one call of the driver pins at most, here.
pub(crate) const CHUNK: u64 = 3 << 20;
/// The longest that anything is waited for.
const LIMIT: Duration = Duration::from_secs(60);

/// A device under test.
pub(crate) struct Setting {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) gpu: Option<OnGpu>,
}

/// A GPU under test.
pub(crate) struct OnGpu {
    pub(crate) context: Arc<Context>,
}

pub(crate) fn cpu() -> Setting {
    Setting {
        device: Arc::new(CpuDevice::new("contract", 0, 1 << 30, None).unwrap()),
        gpu: None,
    }
}

pub(crate) fn fake() -> Setting {
    let settings = FakeSettings::from_text("gpus=1,memory=1GiB").unwrap();
    of(FakeDriver::new(settings))
}

pub(crate) fn cuda() -> Setting {
    of(libcuda::load().unwrap())
}

fn of(driver: Arc<dyn Driver>) -> Setting {
    let gpu = gpu::find(driver.as_ref(), "cuda:0").unwrap();
    let device = CudaDevice::new(&driver, &gpu, CHUNK).unwrap();
    device.start().unwrap();
    let context = device.context().unwrap();
    Setting {
        device: Arc::new(device),
        gpu: Some(OnGpu { context }),
    }
}

impl Setting {
    pub(crate) fn gpu(&self) -> &OnGpu {
        self.gpu.as_ref().unwrap()
    }

    pub(crate) fn allocate(&self, bytes: u64) -> Arc<dyn Memory> {
        self.device.allocate(bytes, &label()).unwrap()
    }

    /// A registered control page of `parts` parts.
    pub(crate) fn control(&self, parts: u32) -> Arc<ControlPage> {
        let identity = ControlIdentity {
            lease_epoch: 1,
            plan_version: 1,
            parts,
        };
        let control = ControlPage::create(identity).unwrap();
        if let Some(gpu) = &self.gpu {
            // as a client does
            control.pin(&gpu.context).unwrap();
        }
        Arc::new(control)
    }

    /// Waits until a copy has arrived.
    pub(crate) fn wait(&self, ticket: Ticket) {
        self.until("a copy arrives", || self.device.completed() >= ticket);
    }

    /// Waits until something is so. As an engine does, it asks the device meanwhile for
    /// what has arrived.
    pub(crate) fn until(&self, what: &str, is_so: impl Fn() -> bool) {
        let begin = Instant::now();
        loop {
            self.device.completed();
            if is_so() {
                return;
            }
            assert!(begin.elapsed() < LIMIT, "never: {what}");
            thread::sleep(Duration::from_micros(50));
        }
    }

    /// What a client reads there.
    pub(crate) fn read(&self, memory: &Arc<dyn Memory>, offset: u64, bytes: usize) -> Vec<u8> {
        let mut read = vec![0; bytes];
        let exported = memory.export().unwrap();
        match &self.gpu {
            Some(gpu) => DeviceMapping::import(&gpu.context, exported, memory.bytes())
                .unwrap()
                .read(offset, &mut read)
                .unwrap(),
            None => {
                let size = usize::try_from(memory.bytes()).unwrap();
                let view = Mapping::new(exported.as_fd(), size, Access::Read).unwrap();
                view.read(usize::try_from(offset).unwrap(), &mut read)
                    .unwrap();
            }
        }
        read
    }
}

pub(crate) fn label() -> Label {
    Label {
        instance: "contract".into(),
        allocation: 7,
        random: [9; 16],
    }
}

/// Host memory with bytes that tell their place.
pub(crate) fn segment(bytes: usize, seed: u64) -> Arc<Mapping> {
    let file = memfd::create("contract", bytes as u64).unwrap();
    let mapping = Mapping::new(file.as_fd(), bytes, Access::ReadWrite).unwrap();
    mapping.write(0, &pattern(bytes, seed)).unwrap();
    Arc::new(mapping)
}

/// Bytes that differ from place to place and from seed to seed.
pub(crate) fn pattern(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut words = Vec::with_capacity(bytes + 8);
    while words.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        words.extend(state.to_le_bytes());
    }
    words.truncate(bytes);
    words
}

pub(crate) fn source(segment: &Arc<Mapping>, offset: u64, bytes: u64) -> Source {
    Source {
        segment: Arc::clone(segment),
        offset,
        bytes,
    }
}
