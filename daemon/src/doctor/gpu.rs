//! Judges the CUDA driver and the GPUs.

use bytesize::ByteSize;
use flextensord_device::cuda::{code, error::CudaError, gpu::Gpu};

use super::{
    probe::{
        DriverFacts, DriverTrouble, GpuFacts, Link, MpsFacts, OneGpu, Step, Trial, TrialFailure,
    },
    report::Check,
};

/// Below this a link is slower than two lanes of PCIe 5 or eight of PCIe 3.
const SLOW: u64 = 5_000_000_000;
/// What helps a process that finds no driver, or no GPU.
const CONTAINER: &str = "in a container: docker run --gpus all (NVIDIA Container Toolkit)";
/// What helps when host memory cannot be pinned.
const PINNING: &str = "raise the limit of locked memory (LimitMEMLOCK=infinity in the unit, \
                       docker run --ulimit memlock=-1), free host memory, or lower pin_chunk";

/// Whether `--device cuda` works, and how fast. What is wrong is a failure where the
/// configuration asks for it, and a warning where it does not.
#[must_use]
pub fn judge(facts: &GpuFacts) -> Vec<Check> {
    let found = match &facts.driver {
        Ok(found) => found,
        Err(trouble) => return vec![no_driver(facts, trouble), numa(facts, &[])],
    };
    let mut checks = vec![driver(facts, found)];
    let gpus = found.gpus.as_deref().unwrap_or_default();
    for looked_at in gpus {
        match looked_at {
            Ok(one) => checks.extend(gpu(facts, one)),
            Err(error) => checks.push(Check::fail(
                "GPU",
                format!("{error}{}", visible(facts)),
                format!("name one of those as --device; {CONTAINER}"),
            )),
        }
    }
    checks.push(numa(facts, gpus));
    checks.extend(facts.mps.as_ref().map(mps));
    checks
}

fn bad(facts: &GpuFacts, name: &'static str, found: String, remedy: String) -> Check {
    if facts.asked {
        Check::fail(name, found, remedy)
    } else {
        Check::warn(name, found, remedy)
    }
}

fn visible(facts: &GpuFacts) -> String {
    facts.visible.as_ref().map_or_else(String::new, |list| {
        format!(" (CUDA_VISIBLE_DEVICES={list})")
    })
}

fn no_driver(facts: &GpuFacts, trouble: &DriverTrouble) -> Check {
    const NAME: &str = "CUDA driver";
    let (found, remedy) = match trouble {
        // a machine without a GPU is as good as any for the cpu device
        DriverTrouble::Refused(error @ CudaError::NoDriver { .. }) if !facts.asked => {
            let found = format!("no GPU driver: --device cuda will not work ({error})");
            return Check::ok(NAME, found);
        }
        DriverTrouble::Refused(error @ CudaError::NoDriver { .. }) => (
            error.to_string(),
            format!("install the NVIDIA driver; {CONTAINER}"),
        ),
        DriverTrouble::Refused(error @ CudaError::MissingSymbol { .. }) => (
            error.to_string(),
            "install a newer NVIDIA driver, and look that no stub of a toolkit is found first"
                .to_owned(),
        ),
        DriverTrouble::Refused(error) => (
            format!("{error}{}", visible(facts)),
            start_remedy(error.code()),
        ),
        DriverTrouble::Hung(limit) => (
            format!("did not start within {} s", limit.as_secs()),
            "look for Xid in the kernel's log, for an MPS server that serves another user, and \
             whether nvidia-smi answers"
                .to_owned(),
        ),
    };
    bad(facts, NAME, found, remedy)
}

/// What helps when the driver is there and does not start.
fn start_remedy(code: Option<u32>) -> String {
    match code {
        Some(100) => format!(
            "the driver sees no GPU: look at CUDA_VISIBLE_DEVICES and whether nvidia-smi -L \
             lists one; {CONTAINER}"
        ),
        Some(802) => {
            "start nvidia-fabricmanager, of the driver's own version, and wait until it is ready"
                .to_owned()
        }
        Some(803 | 804) => {
            "library and kernel module are of different versions: reboot, or load the module \
             again; a container must not bring a libcuda of its own"
                .to_owned()
        }
        _ => format!("look whether nvidia-smi answers, and into the kernel's log; {CONTAINER}"),
    }
}

fn driver(facts: &GpuFacts, found: &DriverFacts) -> Check {
    const NAME: &str = "CUDA driver";
    let (major, minor) = (found.version / 1000, found.version % 1000 / 10);
    let module = found
        .module
        .as_ref()
        .map_or_else(String::new, |module| format!(", kernel module {module}"));
    let text = format!("speaks CUDA {major}.{minor}{module}{}", visible(facts));
    match &found.gpus {
        Ok(gpus) if gpus.is_empty() => {
            let text = format!("{text}; this process sees no GPU");
            bad(facts, NAME, text, start_remedy(Some(100)))
        }
        Ok(_) => Check::ok(NAME, text),
        Err(error) => bad(
            facts,
            NAME,
            format!("{text}; {error}"),
            start_remedy(error.code()),
        ),
    }
}

fn gpu(facts: &GpuFacts, one: &OneGpu) -> Vec<Check> {
    const NAME: &str = "GPU";
    let described = described(one);
    if let Trial::Unfit(error) = &one.trial {
        let remedy = match (error, one.compute_mode) {
            (CudaError::Unfit { .. }, Some(2 | 3)) => format!(
                "nvidia-smi -i {} -c DEFAULT, as root: clients make contexts of their own beside \
                 the daemon's",
                one.gpu.uuid
            ),
            _ => "a newer driver, or another GPU: virtual GPUs and WSL lack some of what the data \
                  plane needs"
                .to_owned(),
        };
        return vec![bad(facts, NAME, format!("{described}; {error}"), remedy)];
    }
    let mut checks = vec![Check::ok(NAME, described), self_test(facts, one)];
    if let Trial::Passed { link, .. } = &one.trial {
        checks.push(measured(one, link));
    }
    checks
}

fn described(one: &OneGpu) -> String {
    let Gpu {
        name,
        uuid,
        total_bytes,
        ..
    } = &one.gpu;
    let mut text = format!("{} {name} {uuid}, {}", place(one), ByteSize(*total_bytes));
    if let Some(node) = one.gpu.numa_node {
        text.push_str(&format!(", NUMA node {node}"));
    }
    // the driver names a MIG device after its GPU and profile
    if name.contains(" MIG ") {
        text.push_str("; a MIG device: the tools write its UUID as MIG-…, --device takes either");
    }
    text
}

fn place(one: &OneGpu) -> String {
    format!("cuda:{}", one.gpu.ordinal.0)
}

fn self_test(facts: &GpuFacts, one: &OneGpu) -> Check {
    const NAME: &str = "GPU self-test";
    let place = place(one);
    match &one.trial {
        Trial::Passed { took, .. } => Check::ok(
            NAME,
            format!(
                "{place}: context, memory, export and import, 64 MiB pinned, a part handed over \
                 and every byte of it right, in {} ms",
                took.as_millis()
            ),
        ),
        Trial::Hung(limit) => bad(
            facts,
            NAME,
            format!("{place}: did not end within {} s", limit.as_secs()),
            "look for Xid in the kernel's log, for an MPS server that serves another user, and \
             whether nvidia-smi answers"
                .to_owned(),
        ),
        Trial::Failed(failure) => {
            let TrialFailure { step, error, .. } = failure;
            let found = format!("{place}: {} failed: {error}", step.name());
            let remedy = trial_remedy(failure);
            // somebody else's memory comes back; a GPU that is full is not broken
            if failure.exhausted {
                Check::warn(NAME, found, remedy)
            } else {
                bad(facts, NAME, found, remedy)
            }
        }
        Trial::Unfit(error) => bad(facts, NAME, format!("{place}: {error}"), String::new()),
    }
}

fn trial_remedy(failure: &TrialFailure) -> String {
    if failure.exhausted {
        return "other processes hold the GPU's memory: see nvidia-smi; a daemon that serves holds \
                rings and residents"
            .to_owned();
    }
    let text = match failure.step {
        _ if failure.pinning => PINNING,
        Step::Context if failure.code == Some(code::OUT_OF_MEMORY) => {
            "other processes hold the GPU's memory: see nvidia-smi"
        }
        Step::Context | Step::Memory | Step::Pinning => {
            "see nvidia-smi for the state of the GPU, and the kernel's log for Xid"
        }
        Step::Sharing => {
            "memory is shared as descriptors through the driver's own device files: a container \
             needs /dev/nvidiactl, /dev/nvidia-uvm and the same GPUs visible as the daemon's and \
             clients' (--gpus all, or the same UUIDs), and no sandbox that keeps descriptors of \
             the driver from being passed"
        }
        Step::HostMemory => "give the daemon room for shared memory: see host memory above",
        Step::HandOver => {
            "the GPU does not do what a stream asks: look for Xid in the kernel's log, and update \
             the driver"
        }
        Step::Bytes => {
            "do not serve from this GPU: see nvidia-smi -q -d ECC and the kernel's log for Xid"
        }
    };
    text.to_owned()
}

fn measured(one: &OneGpu, link: &Result<Link, String>) -> Check {
    const NAME: &str = "GPU link";
    let place = place(one);
    let link = match link {
        Ok(link) => link,
        Err(error) => {
            return Check::warn(
                NAME,
                format!("{place}: not measured: {error}"),
                "free memory of the GPU: 33 MiB are needed for it",
            );
        }
    };
    let (whole, hundredths) = (link.rate / 1_000_000_000, link.rate / 10_000_000 % 100);
    let bus = one
        .bus
        .as_ref()
        .map_or_else(String::new, |bus| format!("; {bus}"));
    let found = format!(
        "{place}: {whole}.{hundredths:02} GB/s from pinned memory, median of {} copies of 32 MiB\
         {bus}",
        link.copies
    );
    if link.rate < SLOW {
        let remedy = "compare width and generation of the PCIe link with what the slot can \
                      (nvidia-smi -q -d PCIE, lspci -vv); run on the GPU's NUMA node; nothing else \
                      may copy meanwhile, a serving daemon neither";
        Check::warn(NAME, found, remedy)
    } else {
        Check::ok(NAME, found)
    }
}

fn numa(facts: &GpuFacts, gpus: &[Result<OneGpu, CudaError>]) -> Check {
    const NAME: &str = "NUMA";
    let Some(nodes) = facts.nodes else {
        return Check::ok(NAME, "the kernel does not tell its nodes");
    };
    if nodes <= 1 {
        return Check::ok(NAME, "1 node: all host memory is as near");
    }
    let at = |one: &OneGpu| match one.gpu.numa_node {
        Some(node) => format!(", {} at node {node}", place(one)),
        None => format!(", {} at a node that the driver does not tell", place(one)),
    };
    let gpus: String = gpus.iter().flatten().map(at).collect();
    Check::ok(NAME, format!("{nodes} nodes{gpus}"))
}

fn mps(facts: &MpsFacts) -> Check {
    const NAME: &str = "MPS";
    let pipe = facts.pipe.display();
    if !facts.serves {
        return Check::ok(
            NAME,
            format!("CUDA_MPS_PIPE_DIRECTORY is {pipe}, where no server is: not used"),
        );
    }
    Check::warn(
        NAME,
        format!(
            "a server at {pipe}: it serves one user at a time, so clients of another uid than the \
             daemon's wait until the daemon ends, and a fault of one client ends all, the daemon too"
        ),
        "run daemon and clients without MPS (CUDA_MPS_PIPE_DIRECTORY=/nonexistent), or all as one \
         user, or start nvidia-cuda-mps-control -d -multiuser-server",
    )
}
