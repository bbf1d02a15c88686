//! The GPU of a manager: found by its UUID, because processes may count theirs otherwise.

use std::sync::Arc;

use flextensord_device::cuda::{context::Context, driver::Driver, error::CudaError, gpu, libcuda};

use crate::{connection::Client, error::ClientError, lease::Lease};

/// The context of the GPU that `lease` names; none for a device in host memory.
pub(crate) async fn attach(
    client: &Client,
    lease: &Lease,
) -> Result<Option<Arc<Context>>, ClientError> {
    match lease.device_kind.as_str() {
        "" | "cpu" => return Ok(None),
        "cuda" => {}
        other => {
            return Err(ClientError::Protocol {
                call: "OpenManager",
                reason: format!(
                    "device {} is a {other}, known are cpu and cuda",
                    lease.device
                ),
            });
        }
    }
    let driver = client.options().driver.clone();
    let (device, uuid) = (lease.device.clone(), lease.device_uuid.clone());
    // a context takes a tenth of a second
    let opened = client
        .runtime()?
        .spawn_blocking(move || open(driver, device, uuid));
    let opened = opened.await.unwrap_or(Err(ClientError::State(
        "the runtime ended while a context was made",
    )));
    opened.map(Some)
}

fn open(
    driver: Option<Arc<dyn Driver>>,
    device: String,
    uuid: String,
) -> Result<Arc<Context>, ClientError> {
    let driver = match driver {
        Some(driver) => driver,
        None => libcuda::load()?,
    };
    let gpu = gpu::find(driver.as_ref(), &uuid).map_err(|error| match error {
        CudaError::NoGpu { seen, .. } => ClientError::GpuNotVisible { device, uuid, seen },
        other => other.into(),
    })?;
    Ok(Context::open(&driver, &gpu)?)
}

#[cfg(test)]
mod tests {
    use flextensord_device::cuda::fake::{FakeDriver, FakeSettings};

    use super::*;

    #[test]
    fn a_gpu_is_found_by_its_uuid_however_the_process_counts() {
        let all = FakeDriver::new(FakeSettings::from_text("gpus=2").unwrap());
        let second = gpu::list(all.as_ref()).unwrap().remove(1);
        let other = FakeSettings::from_text("gpus=2,visible=1").unwrap();
        let other: Arc<dyn Driver> = FakeDriver::new(other);
        let context = open(Some(other), "cuda:1".to_owned(), second.uuid.clone()).unwrap();
        assert_eq!(context.gpu().ordinal.0, 0);
        assert_eq!(context.gpu().uuid, second.uuid);
    }

    #[test]
    fn a_gpu_that_is_not_visible_is_named_with_those_that_are() {
        let all = FakeDriver::new(FakeSettings::from_text("gpus=2").unwrap());
        let gpus = gpu::list(all.as_ref()).unwrap();
        let other = FakeSettings::from_text("gpus=2,visible=1").unwrap();
        let other: Arc<dyn Driver> = FakeDriver::new(other);
        let uuid = gpus[0].uuid.clone();
        let error = open(Some(other), "cuda:0".to_owned(), uuid.clone()).unwrap_err();
        assert!(
            matches!(error, ClientError::GpuNotVisible { .. }),
            "{error}"
        );
        let text = error.to_string();
        assert!(
            text.contains(&uuid) && text.contains(&gpus[1].uuid),
            "{text}"
        );
    }
}
