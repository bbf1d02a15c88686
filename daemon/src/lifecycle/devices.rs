//! The devices that the configuration names.

use std::{fmt, sync::Arc};

use flextensord_device::{
    cpu::CpuDevice,
    cuda::{self, device::CudaDevice, driver::Driver, error::CudaError, gpu},
    device::Device,
};
use flextensord_proto::layout::NOTICE_ENGINE_LIMIT;

use super::instance::StartError;
use crate::{
    configuration::{DeviceKind, Settings},
    weights::pinning::Pinner,
};

/// Where a CUDA driver comes from when a GPU is asked for.
#[derive(Clone)]
pub struct Drivers(pub Arc<dyn Fn() -> Result<Arc<dyn Driver>, CudaError> + Send + Sync>);

impl Drivers {
    /// The driver of this machine.
    #[must_use]
    pub fn of_machine() -> Self {
        Self(Arc::new(cuda::libcuda::load))
    }
}

impl fmt::Debug for Drivers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Drivers")
    }
}

/// All devices, in the order of their names.
pub(super) fn all(
    settings: &Settings,
    drivers: &Drivers,
) -> Result<Vec<Arc<dyn Device>>, StartError> {
    match &settings.device {
        DeviceKind::Cpu => cpu(settings),
        DeviceKind::Cuda(names) => gpus(settings, names, drivers),
    }
}

/// Pins segments for them: one registration serves all GPUs.
pub(super) fn pinner(settings: &Settings, devices: &[Arc<dyn Device>]) -> Pinner {
    match devices.first() {
        Some(device) if device.info().kind == "cuda" && settings.pinning.wanted != Some(false) => {
            Pinner::new(Arc::clone(device), settings.pinning.required)
        }
        _ => Pinner::none(),
    }
}

fn cpu(settings: &Settings) -> Result<Vec<Arc<dyn Device>>, StartError> {
    let count = usize::try_from(settings.cpu.devices).unwrap_or(0);
    let device = |index| {
        let (name, cpu) = (&settings.instance, settings.cpu);
        let device = CpuDevice::new(name, index, cpu.memory, cpu.link)
            .map_err(|error| StartError::setup("make a device", error))?;
        Ok(Arc::new(device) as Arc<dyn Device>)
    };
    (0..count).map(device).collect()
}

fn gpus(
    settings: &Settings,
    names: &[String],
    drivers: &Drivers,
) -> Result<Vec<Arc<dyn Device>>, StartError> {
    let unusable = |source| StartError::Device { source };
    let driver = (drivers.0)().map_err(|error| unusable(error.into()))?;
    let driver_error = |error: CudaError| unusable(error.into());
    let found = match names {
        [] => gpu::list(driver.as_ref()).map_err(driver_error)?,
        names => gpu::choose(driver.as_ref(), names).map_err(driver_error)?,
    };
    if found.is_empty() || found.len() > NOTICE_ENGINE_LIMIT {
        return Err(driver_error(CudaError::NoGpu {
            wanted: format!("in number 1 to {NOTICE_ENGINE_LIMIT}"),
            seen: format!("{} of them", found.len()),
        }));
    }
    found
        .iter()
        .map(|gpu| {
            let device = CudaDevice::new(&driver, gpu, settings.pinning.chunk).map_err(unusable)?;
            tracing::info!(
                device = device.info().name,
                gpu = gpu.name,
                uuid = gpu.uuid,
                bytes = gpu.total_bytes,
                numa_node = gpu.numa_node,
                "GPU found"
            );
            Ok(Arc::new(device) as Arc<dyn Device>)
        })
        .collect()
}
