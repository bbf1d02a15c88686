//! A device under management: its memory, its residents, its engine.

use std::sync::Arc;

use flextensord_device::{
    device::{Device, DeviceInfo},
    kernel::KernelError,
    notice::NoticePage,
};

use tokio::sync::Notify;

use super::{counters::Counters, engine::Engine, memory::DeviceMemory, residents::Residents};

/// One device with all that the daemon keeps for it.
#[derive(Debug)]
pub struct ManagedDevice {
    /// Number of its engine on the notice page.
    pub index: usize,
    /// Its memory.
    pub memory: Arc<DeviceMemory>,
    /// Blocks of residents on it.
    pub residents: Residents,
    /// The thread that fills its rings.
    pub engine: Engine,
    /// What was moved over its link, for managers that have ended too.
    pub counters: Arc<Counters>,
}

impl ManagedDevice {
    /// Takes `device` under management; `to_reclaim` is told when its memory waits for a
    /// last holder.
    ///
    /// # Errors
    /// When its engine cannot be started.
    pub fn new(
        index: usize,
        instance: &str,
        generation: u64,
        device: Arc<dyn Device>,
        notice: Arc<NoticePage>,
        to_reclaim: Arc<Notify>,
    ) -> Result<Self, KernelError> {
        let engine = Engine::start(index, Arc::clone(&device), notice)?;
        let memory = DeviceMemory::new(instance, generation, device, to_reclaim);
        Ok(Self {
            index,
            residents: Residents::new(Arc::clone(&memory)),
            memory,
            engine,
            counters: Arc::default(),
        })
    }

    /// What the device is.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        self.memory.device().info()
    }
}
