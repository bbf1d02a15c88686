//! Looks at the driver and tries each GPU: what the daemon and a client do with it, small
//! and in a bounded time.

use std::{
    collections::VecDeque,
    fs,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use flextensord_device::{
    control::{ControlIdentity, ControlPage},
    cuda::{
        device::CudaDevice,
        driver::{Attribute, Driver, Ordinal},
        error::CudaError,
        gpu::{self, Gpu},
        memory::DeviceMapping,
        stream::{CallerStream, Stream},
    },
    device::{Device, DeviceError, Label, Memory, Publish, Source, Ticket},
    handover::Cells as _,
    kernel::KernelError,
    mapping::{Access, Mapping},
    memfd,
};
use flextensord_proto::layout::{LABEL_BYTES, State, Word};

use super::probe::{
    DriverFacts, DriverTrouble, GpuFacts, Link, MpsFacts, OneGpu, Step, Trial, TrialFailure,
};
use crate::{
    configuration::{DeviceKind, Settings},
    lifecycle::devices::Drivers,
};

/// How long the driver has to start: it does within a second, or hangs.
const START: Duration = Duration::from_secs(20);
/// How long the trial of a GPU may take: it takes less than a second.
const TRIAL: Duration = Duration::from_secs(30);
/// How long one copy may take, or a stream to see a word.
const STEP: Duration = Duration::from_secs(5);
/// Bytes of GPU memory that are made, shared and filled: the usual granularity.
const SHARED: u64 = 2 << 20;
/// Bytes of host memory that are pinned.
const PINNED: usize = 64 << 20;
/// Bytes of a copy that is timed.
const COPY: u64 = 32 << 20;
/// How long copies are timed.
const TIMED: Duration = Duration::from_millis(300);
/// Copies that are queued at the same time, so that the link never waits for us.
const QUEUED: usize = 3;

/// What there is, and what came of trying it.
pub(super) fn facts(settings: &Settings, drivers: &Drivers) -> GpuFacts {
    let (asked, names) = match &settings.device {
        DeviceKind::Cpu => (false, Vec::new()),
        DeviceKind::Cuda(names) => (true, names.clone()),
    };
    let open = Arc::clone(&drivers.0);
    let driver = within(START, move || open())
        .ok_or(DriverTrouble::Hung(START))
        .and_then(|opened| opened.map_err(DriverTrouble::Refused))
        .and_then(|driver| look(&driver, &names, settings.pinning.chunk));
    GpuFacts {
        asked,
        driver,
        visible: std::env::var_os("CUDA_VISIBLE_DEVICES")
            .map(|list| list.to_string_lossy().into_owned()),
        mps: mps(),
        nodes: fs::read_to_string("/sys/devices/system/node/online")
            .ok()
            .and_then(|text| count(text.trim())),
    }
}

/// Runs `work` on a thread of its own, since a driver that hangs cannot be interrupted;
/// the thread is left to itself when the time is over.
fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (tell, told) = mpsc::channel();
    let spawned = thread::Builder::new().spawn(move || {
        // nobody listens any more when the time is over
        let _: Result<(), _> = tell.send(work());
    });
    spawned.ok()?;
    told.recv_timeout(limit).ok()
}

fn look(
    driver: &Arc<dyn Driver>,
    names: &[String],
    chunk: u64,
) -> Result<DriverFacts, DriverTrouble> {
    let version = driver.version().map_err(DriverTrouble::Refused)?;
    let found: Result<Vec<_>, CudaError> = match names {
        [] => gpu::list(driver.as_ref()).map(|gpus| gpus.into_iter().map(Ok).collect()),
        // others are left alone: somebody else may work on them
        names => Ok(names
            .iter()
            .enumerate()
            .map(|(at, name)| {
                // a GPU is tried once, and its second name is refused
                let twice = |earlier: &String| {
                    let both = [earlier.clone(), name.clone()];
                    gpu::choose(driver.as_ref(), &both)
                        .err()
                        .filter(|error| matches!(error, CudaError::Twice { .. }))
                };
                match names.iter().take(at).find_map(twice) {
                    Some(error) => Err(error),
                    None => gpu::find(driver.as_ref(), name),
                }
            })
            .collect()),
    };
    let gpus = found.map(|gpus| {
        gpus.into_iter()
            .map(|gpu| gpu.map(|gpu| examine(driver, gpu, chunk)))
            .collect()
    });
    Ok(DriverFacts {
        version,
        module: fs::read_to_string("/sys/module/nvidia/version")
            .ok()
            .map(|text| text.trim().to_owned()),
        gpus,
    })
}

fn examine(driver: &Arc<dyn Driver>, gpu: Gpu, chunk: u64) -> OneGpu {
    let trial = match gpu::check(driver, &gpu) {
        Err(error) => Trial::Unfit(error),
        Ok(()) => {
            let (driver, gpu) = (Arc::clone(driver), gpu.clone());
            within(TRIAL, move || try_out(&driver, &gpu, chunk)).unwrap_or(Trial::Hung(TRIAL))
        }
    };
    OneGpu {
        compute_mode: driver.attribute(gpu.ordinal, Attribute::ComputeMode).ok(),
        // after the copies: an idle link may run slower to save power
        bus: bus(driver.as_ref(), gpu.ordinal),
        gpu,
        trial,
    }
}

fn try_out(driver: &Arc<dyn Driver>, gpu: &Gpu, chunk: u64) -> Trial {
    let begin = Instant::now();
    let tried = (|| {
        let device = CudaDevice::new(driver, gpu, chunk).map_err(at(Step::Context))?;
        device.start().map_err(at(Step::Context))?;
        let segment = host_memory(gpu).map_err(at(Step::HostMemory))?;
        let memory = device
            .allocate(SHARED, &label())
            .map_err(at(Step::Memory))?;
        let context = device.context().map_err(at(Step::Context))?;
        let view = memory.export().map_err(at(Step::Sharing))?;
        let view = DeviceMapping::import(&context, view, memory.bytes())
            .map_err(|error| at(Step::Sharing)(error.into()))?;
        let pins = device
            .pin_segment(&segment, &[], &mut |_| true)
            .map_err(at(Step::Pinning))?;
        hand_over(&device, &memory, &segment)?;
        compare(&view, &segment)?;
        let took = begin.elapsed();
        let link = time_copies(&device, &segment).map_err(|error| error.to_string());
        drop(pins);
        Ok(Trial::Passed { took, link })
    })();
    tried.unwrap_or_else(Trial::Failed)
}

fn label() -> Label {
    Label {
        instance: "flextensord-doctor".to_owned(),
        allocation: 0,
        random: [0; 16],
    }
}

/// Names the step in which an error came up.
fn at(step: Step) -> impl FnOnce(DeviceError) -> TrialFailure {
    move |error| {
        // an allocation is exported at once
        let export = matches!(&error, DeviceError::Cuda(CudaError::Call { call, .. })
            if call.contains("ShareableHandle"));
        TrialFailure {
            step: if export { Step::Sharing } else { step },
            code: error.driver().and_then(CudaError::code),
            pinning: matches!(&error, DeviceError::Registration(refused)
                if refused.driver().is_some_and(CudaError::refuses_pinning)),
            exhausted: matches!(
                error,
                DeviceError::Exhausted { .. } | DeviceError::Refused { .. }
            ),
            error: error.to_string(),
        }
    }
}

/// Host memory as a segment is: shared, touched, next to the GPU.
fn host_memory(gpu: &Gpu) -> Result<Arc<Mapping>, DeviceError> {
    let file = memfd::create("flextensord-doctor", PINNED as u64)?;
    let mapping = Mapping::new(file.as_fd(), PINNED, Access::ReadWrite)?;
    if let Some(node) = gpu.numa_node {
        // refused in some containers: the link is slower then, which its figure shows
        let _: Result<(), KernelError> = mapping.prefer_node(node);
    }
    // of an odd length, so that bytes that went to a wrong place are seen
    let mut block = Vec::with_capacity((1 << 20) + 4099);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    while block.len() < (1 << 20) + 4091 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        block.extend(state.to_le_bytes());
    }
    let mut offset = 0;
    while offset < PINNED {
        let bytes = block.len().min(PINNED - offset);
        mapping.write(offset, &block[..bytes])?;
        offset += bytes;
    }
    Ok(Arc::new(mapping))
}

/// A stream waits for a part, which is copied and published, takes it and gives it back.
fn hand_over(
    device: &CudaDevice,
    memory: &Arc<dyn Memory>,
    segment: &Arc<Mapping>,
) -> Result<(), TrialFailure> {
    let identity = ControlIdentity {
        lease_epoch: 1,
        plan_version: 1,
        parts: 1,
    };
    let failed = |text: String| TrialFailure {
        step: Step::HandOver,
        code: None,
        pinning: false,
        exhausted: false,
        error: text,
    };
    let control = ControlPage::create(identity).map_err(|error| failed(error.to_string()))?;
    let control = Arc::new(control);
    let cuda = |error: CudaError| at(Step::HandOver)(error.into());
    let context = device.context().map_err(at(Step::Context))?;
    control
        .pin(&context)
        .map_err(|error| at(Step::Pinning)(error.into()))?;
    let stream = Stream::new(&context).map_err(cuda)?;
    let slots = control
        .slots()
        .ok_or_else(|| failed("a pinned control page has no slots".to_owned()))?;
    let queue = || {
        slots
            .take(CallerStream::from(&stream), &[0])
            .map_err(cuda)?;
        slots
            .give_back(CallerStream::from(&stream), &[0])
            .map_err(cuda)?;
        let source = Source {
            segment: Arc::clone(segment),
            offset: 0,
            bytes: SHARED - LABEL_BYTES,
        };
        let publish = Publish {
            control: Arc::clone(&control),
            part: 0,
            sequence: 1,
        };
        memory
            .fill(LABEL_BYTES, source, &[publish])
            .map_err(at(Step::HandOver))
    };
    let outcome = queue().and_then(|_| {
        let given_back = || control.load(0) == Word::new(1, State::Empty);
        match wait(device, given_back) {
            Wait::Done => Ok(()),
            Wait::Broken(error) => Err(failed(error)),
            Wait::Late => Err(failed(format!(
                "after {} s the slot word is {:#x}, the stream waits for part {:#x}",
                STEP.as_secs(),
                control.load(0).0,
                control.want()
            ))),
        }
    });
    if outcome.is_err() {
        // the stream must not wait for a word that goes
        control.release_waiters();
        let done = || stream.is_done().unwrap_or(true);
        if !matches!(wait(device, done), Wait::Done) && context.failure().is_none() {
            std::mem::forget(Arc::clone(&control));
        }
    }
    outcome
}

fn compare(view: &DeviceMapping, segment: &Mapping) -> Result<(), TrialFailure> {
    let bytes = usize::try_from(SHARED - LABEL_BYTES).unwrap_or(0);
    let mut read = vec![0; bytes];
    view.read(LABEL_BYTES, &mut read)
        .map_err(|error| at(Step::Bytes)(error.into()))?;
    let equal = segment
        .equals(0, &read)
        .map_err(|error| at(Step::Bytes)(error.into()))?;
    if equal {
        return Ok(());
    }
    Err(TrialFailure {
        step: Step::Bytes,
        code: None,
        pinning: false,
        exhausted: false,
        error: format!("some of {bytes} bytes are not those that were copied"),
    })
}

/// Copies one after the other for a while.
fn time_copies(device: &CudaDevice, segment: &Arc<Mapping>) -> Result<Link, DeviceError> {
    let memory = device.allocate(LABEL_BYTES + COPY, &label())?;
    let mut queued: VecDeque<Ticket> = VecDeque::with_capacity(QUEUED);
    let mut times = Vec::new();
    let begin = Instant::now();
    let mut last = begin;
    let mut number = 0;
    loop {
        while queued.len() < QUEUED && begin.elapsed() < TIMED {
            let source = Source {
                segment: Arc::clone(segment),
                offset: number % 2 * COPY,
                bytes: COPY,
            };
            queued.push_back(memory.fill(LABEL_BYTES, source, &[])?);
            number += 1;
        }
        let Some(ticket) = queued.pop_front() else {
            break;
        };
        match wait(device, || device.completed() >= ticket) {
            Wait::Done => {}
            Wait::Broken(_) | Wait::Late => {
                return Err(DeviceError::Cuda(CudaError::State(
                    "a copy of 32 MiB did not arrive within 5 s",
                )));
            }
        }
        times.push(last.elapsed());
        last = Instant::now();
    }
    // the first has waited for the queue to begin
    let mut rest = times.split_off(1.min(times.len().saturating_sub(1)));
    rest.sort_unstable();
    let median = rest
        .get(rest.len() / 2)
        .map_or(1, Duration::as_nanos)
        .max(1);
    let rate = u128::from(COPY) * 1_000_000_000 / median;
    Ok(Link {
        rate: u64::try_from(rate).unwrap_or(u64::MAX),
        copies: rest.len(),
    })
}

enum Wait {
    Done,
    Late,
    Broken(String),
}

/// Looks without sleep: a copy takes a millisecond, and its time is measured.
fn wait(device: &CudaDevice, is_so: impl Fn() -> bool) -> Wait {
    /// How often the driver is asked whether something broke.
    const LOOK: Duration = Duration::from_millis(100);
    let begin = Instant::now();
    let mut looked = begin;
    while !is_so() {
        // what has arrived is published by who asks
        device.completed();
        if begin.elapsed() > STEP {
            return Wait::Late;
        }
        if looked.elapsed() > LOOK {
            looked = Instant::now();
            if let Some(failure) = device.failure() {
                return Wait::Broken(failure.to_string());
            }
        }
        thread::yield_now();
    }
    Wait::Done
}

/// The link as the kernel sees it, such as "PCIe 32.0 GT/s x16 of 32.0 GT/s x16".
fn bus(driver: &dyn Driver, gpu: Ordinal) -> Option<String> {
    let number = |attribute| driver.attribute(gpu, attribute).ok();
    let (domain, bus, device) = (
        number(Attribute::PciDomain)?,
        number(Attribute::PciBus)?,
        number(Attribute::PciDevice)?,
    );
    let folder = format!("/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{device:02x}.0");
    let read = |name: &str| {
        let text = fs::read_to_string(Path::new(&folder).join(name)).ok()?;
        Some(text.trim().replace(" PCIe", ""))
    };
    Some(format!(
        "PCIe {} x{} of {} x{}",
        read("current_link_speed")?,
        read("current_link_width")?,
        read("max_link_speed")?,
        read("max_link_width")?
    ))
}

fn mps() -> Option<MpsFacts> {
    let named = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").map(PathBuf::from);
    let is_named = named.is_some();
    let pipe = named.unwrap_or_else(|| PathBuf::from("/tmp/nvidia-mps"));
    let serves = pipe.join("control").exists();
    (is_named || serves).then_some(MpsFacts { pipe, serves })
}

/// How many numbers a list of the kernel's such as "0-1,4" has.
fn count(list: &str) -> Option<usize> {
    list.split(',')
        .map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
            Some(last.checked_sub(first)? + 1)
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_counted_as_the_kernel_lists_them() {
        assert_eq!(count("0"), Some(1));
        assert_eq!(count("0-1,4"), Some(3));
        assert_eq!(count(""), None);
        assert_eq!(count("3-1"), None);
    }

    #[test]
    fn what_hangs_is_left_to_itself() {
        assert_eq!(within(STEP, || 7), Some(7));
        let begin = Instant::now();
        let hung = within(Duration::from_millis(10), || thread::sleep(STEP));
        assert_eq!(hung, None);
        assert!(begin.elapsed() < STEP);
    }
}
