//! Pinning segments for the copies of a device.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use flextensord_device::{
    cuda::code,
    device::{Device, DeviceError, Pins},
    mapping::Mapping,
};

use super::{error::WeightError, loader::Watch, manifest::Manifest};

/// Pins segments, or says why not.
#[derive(Clone)]
pub struct Pinner {
    /// Pins for all devices of its kind; `None` where nothing is to be pinned.
    device: Option<Arc<dyn Device>>,
    /// Whether a segment that cannot be pinned is refused.
    required: bool,
    /// The daemon stops: nothing more is pinned.
    closed: Arc<AtomicBool>,
}

impl fmt::Debug for Pinner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinner")
            .field("device", &self.device.as_ref().map(|device| device.info()))
            .field("required", &self.required)
            .finish()
    }
}

/// What came of pinning a segment.
#[derive(Debug, Default)]
pub(crate) struct Pinned {
    pub(crate) pins: Pins,
    /// Why it is not pinned although the device would be faster so.
    pub(crate) degraded: Option<String>,
}

impl Pinner {
    /// For devices that need no pinned memory.
    #[must_use]
    pub fn none() -> Self {
        Self {
            device: None,
            required: false,
            closed: Arc::default(),
        }
    }

    /// Pins through `device`, whose driver serves all devices of its kind.
    #[must_use]
    pub fn new(device: Arc<dyn Device>, required: bool) -> Self {
        Self {
            device: Some(device),
            required,
            closed: Arc::default(),
        }
    }

    /// Bytes of segments that the driver does not let go of: their memory stays for good.
    pub(crate) fn stuck_bytes(&self) -> u64 {
        self.device
            .as_ref()
            .map_or(0, |device| device.stuck_bytes())
    }

    /// Gives up what is being pinned, after the chunk in hand.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Whether nothing more is to be pinned.
    pub(super) fn is_closed(&self) -> bool {
        self.device.is_none() || self.closed.load(Ordering::Relaxed)
    }

    /// Pins whole pages of a segment that was taken over. What cannot be pinned is
    /// degraded, whatever the configuration says: its bytes are right, and in use.
    pub(super) fn pin_range(&self, segment: &Arc<Mapping>, offset: u64, bytes: u64) -> Pinned {
        let Some(device) = &self.device else {
            return Pinned::default();
        };
        let pins = device
            .start()
            .and_then(|()| device.pin_range(segment, offset, bytes));
        match pins {
            Ok(pins) => Pinned {
                pins,
                degraded: None,
            },
            Err(error) => {
                tracing::warn!(%error, offset, bytes, "a segment that was taken over is not pinned");
                Pinned {
                    pins: Pins::none(),
                    degraded: Some(error.to_string()),
                }
            }
        }
    }

    /// The NUMA node that segments are best put on.
    #[must_use]
    pub fn numa_node(&self) -> Option<u32> {
        self.device
            .as_ref()
            .and_then(|device| device.info().numa_node)
    }

    /// Pins a filled segment, in chunks that end where tensors begin.
    pub(crate) fn pin(
        &self,
        segment: &Arc<Mapping>,
        manifest: &Manifest,
        watch: &dyn Watch,
    ) -> Result<Pinned, WeightError> {
        let Some(device) = &self.device else {
            return Ok(Pinned::default());
        };
        let begin = Instant::now();
        let cuts: Vec<u64> = manifest.storages().iter().map(|s| s.offset).collect();
        let total = segment.size() as u64;
        watch.progress(0, total);
        let given_up = || watch.is_cancelled() || self.closed.load(Ordering::Relaxed);
        let mut progress = |done| {
            watch.progress(done, total);
            !given_up()
        };
        match device
            .start()
            .and_then(|()| device.pin_segment(segment, &cuts, &mut progress))
        {
            Ok(pins) => {
                tracing::info!(
                    bytes = pins.bytes(),
                    seconds = begin.elapsed().as_secs_f64(),
                    "pinned"
                );
                Ok(Pinned {
                    pins,
                    degraded: None,
                })
            }
            Err(_) if self.closed.load(Ordering::Relaxed) => Err(WeightError::stopping()),
            Err(_) if given_up() => Err(WeightError::Aborted {
                what: "load",
                reason: "the caller is gone or has given up while the segment was pinned"
                    .to_owned(),
            }),
            Err(error) if self.required || is_broken(&error) => Err(error.into()),
            Err(error) => {
                tracing::warn!(%error, "a segment is not pinned: copies from it are slow");
                Ok(Pinned {
                    pins: Pins::none(),
                    degraded: Some(error.to_string()),
                })
            }
        }
    }
}

/// Whether going on without pinned memory makes no sense.
fn is_broken(error: &DeviceError) -> bool {
    error.driver().is_none_or(|error| match error.code() {
        Some(code::NOT_INITIALIZED | code::INVALID_CONTEXT) | None => true,
        Some(_) => error.is_sticky(),
    })
}
