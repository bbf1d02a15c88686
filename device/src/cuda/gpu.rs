//! Which GPUs this process sees, by UUID, and whether they can carry the data plane.

use std::sync::Arc;

use super::{
    driver::{Attribute, Driver, Ordinal},
    error::CudaError,
};

/// A GPU, or a MIG device of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its number in this process; other processes may count otherwise.
    pub ordinal: Ordinal,
    /// The product's name.
    pub name: String,
    /// "GPU-" and 32 hexadecimal digits in groups: the same in every process.
    pub uuid: String,
    /// Bytes of its memory.
    pub total_bytes: u64,
    /// The NUMA node of the host memory next to it, where there are several.
    pub numa_node: Option<u32>,
}

/// All GPUs of this process, in its own order.
///
/// # Errors
/// What the driver says.
pub fn list(driver: &dyn Driver) -> Result<Vec<Gpu>, CudaError> {
    (0..driver.count()?)
        .map(|number| {
            let ordinal = Ordinal(number);
            let node = driver.attribute(ordinal, Attribute::HostNumaNode);
            Ok(Gpu {
                ordinal,
                name: driver.name(ordinal)?,
                uuid: uuid_text(driver.uuid(ordinal)?),
                total_bytes: driver.total_bytes(ordinal)?,
                // a driver that does not know the attribute knows of no nodes
                numa_node: node.ok().and_then(|node| u32::try_from(node).ok()),
            })
        })
        .collect()
}

/// The GPU that `wanted` names: "cuda:N" or "N" by its number here, or a UUID with or
/// without "GPU-" or "MIG-" before it.
///
/// # Errors
/// [`CudaError::NoGpu`] with what there is.
pub fn find(driver: &dyn Driver, wanted: &str) -> Result<Gpu, CudaError> {
    let gpus = list(driver)?;
    let number = wanted.strip_prefix("cuda:").unwrap_or(wanted);
    let found = match number.parse::<i32>() {
        Ok(number) => gpus.iter().find(|gpu| gpu.ordinal == Ordinal(number)),
        Err(_) => gpus
            .iter()
            .find(|gpu| bare_uuid(&gpu.uuid) == bare_uuid(wanted)),
    };
    found.cloned().ok_or_else(|| CudaError::NoGpu {
        wanted: wanted.to_owned(),
        seen: if gpus.is_empty() {
            "none".to_owned()
        } else {
            let text = |gpu: &Gpu| format!("cuda:{} {} {}", gpu.ordinal.0, gpu.name, gpu.uuid);
            gpus.iter().map(text).collect::<Vec<_>>().join(", ")
        },
    })
}

/// The GPUs that `names` name, in their order: see [`find`].
///
/// # Errors
/// [`CudaError::NoGpu`] with what there is; [`CudaError::Twice`] where two names stand for
/// one GPU, whose memory and link would be given out twice.
pub fn choose(driver: &dyn Driver, names: &[String]) -> Result<Vec<Gpu>, CudaError> {
    let mut chosen: Vec<Gpu> = Vec::with_capacity(names.len());
    for name in names {
        let gpu = find(driver, name)?;
        let earlier = chosen.iter().position(|other| other.uuid == gpu.uuid);
        if let Some(first) = earlier.and_then(|at| names.get(at)) {
            return Err(CudaError::Twice {
                first: first.clone(),
                second: name.clone(),
                gpu: format!("cuda:{} {}", gpu.ordinal.0, gpu.uuid),
            });
        }
        chosen.push(gpu);
    }
    Ok(chosen)
}

/// Whether two names, as [`find`] takes them, stand for one GPU on any machine. Only a
/// driver knows which number has which UUID.
#[must_use]
pub fn is_same_name(one: &str, other: &str) -> bool {
    let number = |name: &str| {
        let digits = name.strip_prefix("cuda:").unwrap_or(name);
        digits.parse::<i32>().ok()
    };
    match (number(one), number(other)) {
        (Some(one), Some(other)) => one == other,
        (None, None) => bare_uuid(one) == bare_uuid(other),
        _ => false,
    }
}

/// Refuses a GPU that lacks something the promises of the data plane rest on.
///
/// # Errors
/// [`CudaError::Unfit`] naming the first thing that it lacks.
pub fn check(driver: &Arc<dyn Driver>, gpu: &Gpu) -> Result<(), CudaError> {
    let needs = [
        (
            Attribute::StreamMemoryOps64,
            "64-bit stream memory operations",
        ),
        (Attribute::VirtualMemory, "virtual memory management"),
        (
            Attribute::PosixDescriptors,
            "export of memory as file descriptors",
        ),
        (Attribute::HostRegister, "registration of host memory"),
    ];
    let unfit = |what| CudaError::Unfit {
        gpu: format!("{} ({})", gpu.name, gpu.uuid),
        what,
    };
    for (attribute, what) in needs {
        if driver.attribute(gpu.ordinal, attribute)? == 0 {
            return Err(unfit(what));
        }
    }
    match driver.attribute(gpu.ordinal, Attribute::ComputeMode)? {
        2 => Err(unfit(
            "contexts at all: its compute mode is PROHIBITED; an administrator can change that \
             with nvidia-smi -c DEFAULT",
        )),
        3 => Err(unfit(
            "second context: its compute mode is EXCLUSIVE_PROCESS, so clients could not use it \
             beside the daemon; an administrator can change that with nvidia-smi -c DEFAULT",
        )),
        _ => Ok(()),
    }
}

/// The text of a UUID as the NVIDIA tools write it.
fn uuid_text(bytes: [u8; 16]) -> String {
    let mut text = "GPU-".to_owned();
    for (at, byte) in bytes.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// The digits alone: a MIG device's UUID is written with another word before it.
fn bare_uuid(text: &str) -> String {
    let text = ["GPU-", "MIG-"]
        .iter()
        .find_map(|prefix| text.strip_prefix(prefix))
        .unwrap_or(text);
    text.replace('-', "").to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_one_gpu_are_the_same_however_they_are_written() {
        let uuid = "GPU-a5b10203-0405-0607-0809-0a0b0c0d0eff";
        let mig = "MIG-A5B10203-0405-0607-0809-0A0B0C0D0EFF";
        assert!(is_same_name("cuda:0", "cuda:00") && is_same_name(uuid, mig));
        assert!(!is_same_name("cuda:0", "cuda:1") && !is_same_name("cuda:0", uuid));
    }

    #[test]
    fn a_uuid_is_written_as_the_tools_write_it() {
        let text = uuid_text([0xa5, 0xb1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xff]);
        assert_eq!(text, "GPU-a5b10203-0405-0607-0809-0a0b0c0d0eff");
        assert_eq!(
            bare_uuid("MIG-a5b10203-0405-0607-0809-0A0B0C0D0EFF"),
            bare_uuid(&text)
        );
    }
}
