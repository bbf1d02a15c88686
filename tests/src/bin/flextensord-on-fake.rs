//! The daemon with a CUDA driver in host memory, for tests without a GPU. The driver is
//! described by an environment variable.
#![forbid(unsafe_code)]

use std::{process::ExitCode, sync::Arc};

use flextensord::lifecycle::devices::Drivers;
use flextensord_device::cuda::{
    driver::Driver,
    error::CudaError,
    fake::{FakeDriver, FakeSettings},
};
use flextensord_tests::daemon::FAKE_DRIVER;

fn main() -> ExitCode {
    let text = std::env::var(FAKE_DRIVER).unwrap_or_default();
    let drivers = Drivers(Arc::new(move || {
        let settings = FakeSettings::from_text(&text).map_err(|error| CudaError::NoDriver {
            tried: error.to_string(),
        })?;
        Ok(FakeDriver::new(settings) as Arc<dyn Driver>)
    }));
    flextensord::cli::run_with(std::env::args_os(), &drivers).into()
}
