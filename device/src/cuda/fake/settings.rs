//! What a fake driver pretends to be.

use super::faults::{Faults, size};

/// A text of settings that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("fake driver: {item}: {why}")]
pub struct SettingsError {
    /// The item of the text.
    pub item: String,
    /// What is wrong with it.
    pub why: String,
}

/// What a fake driver pretends to be. Not cloneable: clones would share their faults.
#[derive(Debug)]
pub struct FakeSettings {
    /// GPUs of the machine.
    pub gpus: usize,
    /// Bytes of memory of each. A context costs none, unlike a real one.
    pub memory: u64,
    /// Unit of physical memory, a power of two of at least a page.
    pub granularity: u64,
    /// Which GPUs this process sees, in its own order; those after the first unknown one
    /// are not seen, as with `CUDA_VISIBLE_DEVICES`. All, when it is `None`.
    pub visible: Option<Vec<usize>>,
    /// Bytes a second that all copies of a GPU may move together.
    pub bandwidth: Option<u64>,
    /// UUIDs are derived from it: processes with the same seed see the same GPUs.
    pub seed: String,
    /// Version of the CUDA API.
    pub version: i32,
    /// Faults from the beginning.
    pub faults: Faults,
}

impl Default for FakeSettings {
    fn default() -> Self {
        Self {
            gpus: 1,
            memory: 1 << 30,
            granularity: 2 << 20,
            visible: None,
            bandwidth: None,
            seed: "fake".to_owned(),
            version: 13_000,
            faults: Faults::default(),
        }
    }
}

impl FakeSettings {
    /// Reads settings such as `gpus=2,memory=64MiB,visible=1,0,register_limit=4MiB`:
    /// the fields by their names, and the faults by those of [`Faults::set`]:
    /// `register_limit=SIZE`, `register_refuse=CODE`, `register_fail=N:CODE`,
    /// `register_ms=MS`, `unregister_fail=N:CODE`, `release_ms=MS`,
    /// `break_at_copy=N:CODE`, `out_of_memory_at_create=N`, `export_refuse=CODE`,
    /// `import_refuse=CODE`, `import_twice=refuse`, `import_own=refuse`,
    /// `attribute.NAME=VALUE` with the names of
    /// [`Attribute`](super::super::driver::Attribute). An empty text is the default.
    ///
    /// # Errors
    /// An unknown key, a key given twice, or a value that does not suit its key.
    pub fn from_text(text: &str) -> Result<Self, SettingsError> {
        let mut settings = Self::default();
        let mut seen: Vec<&str> = Vec::new();
        for item in text.split(',').filter(|_| !text.is_empty()) {
            let refused = |why: &str| SettingsError {
                item: item.to_owned(),
                why: why.to_owned(),
            };
            let Some((key, value)) = item.split_once('=') else {
                let list = settings.visible.as_mut();
                let list = list.filter(|_| seen.last() == Some(&"visible"));
                let index = item.parse().map_err(|_| refused("no key=value"))?;
                list.ok_or_else(|| refused("no key=value"))?.push(index);
                continue;
            };
            if seen.contains(&key) {
                return Err(refused("is given twice"));
            }
            seen.push(key);
            let known = settings
                .set(key, value)
                .map_err(|wanted| refused(&format!("wants {wanted}")))?;
            if !known {
                return Err(refused("unknown key"));
            }
        }
        Ok(settings)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<bool, &'static str> {
        const NUMBER: &str = "a number";
        const BYTES: &str = "a number of bytes, with KiB, MiB or GiB where wanted";
        match key {
            "gpus" => self.gpus = value.parse().map_err(|_| NUMBER)?,
            "memory" => self.memory = size(value).ok_or(BYTES)?,
            "granularity" => {
                let fits = |unit: &u64| unit.is_power_of_two() && *unit >= super::PAGE as u64;
                let unit = size(value).filter(fits);
                self.granularity = unit.ok_or("a power of two of at least a page")?;
            }
            "visible" if value.is_empty() => self.visible = Some(Vec::new()),
            "visible" => self.visible = Some(vec![value.parse().map_err(|_| NUMBER)?]),
            "bandwidth" => {
                let rate = size(value).filter(|rate| *rate > 0);
                self.bandwidth = Some(rate.ok_or(BYTES)?);
            }
            "seed" => value.clone_into(&mut self.seed),
            "version" => self.version = value.parse().map_err(|_| NUMBER)?,
            _ => return self.faults.set(key, value),
        }
        Ok(true)
    }

    /// Indices of the GPUs that this process sees, by ordinal.
    pub(super) fn seen(&self) -> Vec<usize> {
        match &self.visible {
            None => (0..self.gpus).collect(),
            Some(list) => {
                let known = list.iter().take_while(|index| **index < self.gpus);
                known.copied().collect()
            }
        }
    }

    /// The UUID of a GPU: FNV-1a over seed and index, which no version of Rust changes.
    pub(super) fn uuid(&self, index: usize) -> [u8; 16] {
        let digest = |salt: u64| {
            let mut hash = 0xcbf2_9ce4_8422_2325_u64 ^ salt;
            for byte in self.seed.bytes().chain(index.to_le_bytes()) {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
            hash
        };
        let both = (u128::from(digest(0)) << 64) | u128::from(digest(u64::MAX));
        both.to_be_bytes()
    }
}
