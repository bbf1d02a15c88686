//! Faults on demand.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use super::{super::driver::Attribute, codes, lock};

/// Every attribute, to find one by its name.
const ATTRIBUTES: [Attribute; 13] = [
    Attribute::StreamMemoryOps64,
    Attribute::PosixDescriptors,
    Attribute::VirtualMemory,
    Attribute::HostRegister,
    Attribute::ComputeMode,
    Attribute::HostNumaNode,
    Attribute::AsyncEngines,
    Attribute::Integrated,
    Attribute::ComputeMajor,
    Attribute::ComputeMinor,
    Attribute::PciBus,
    Attribute::PciDevice,
    Attribute::PciDomain,
];

/// An answer of the Nth call from now.
#[derive(Debug, Clone, Copy)]
struct Countdown {
    left: u64,
    code: u32,
}

impl Countdown {
    /// Counts a call; the code when it is the one.
    fn count(slot: &mut Option<Self>) -> Option<u32> {
        let countdown = slot.as_mut()?;
        countdown.left = countdown.left.saturating_sub(1);
        if countdown.left > 0 {
            return None;
        }
        slot.take().map(|countdown| countdown.code)
    }

    fn new(nth: u64, code: u32) -> Option<Self> {
        (nth > 0).then_some(Self { left: nth, code })
    }
}

#[derive(Debug, Default)]
struct State {
    register_limit: Option<usize>,
    register_refused: Option<u32>,
    register_fails: Option<Countdown>,
    register_takes: Duration,
    unregister_fails: Option<Countdown>,
    release_takes: Duration,
    copy_breaks: Option<Countdown>,
    create_fails: Option<Countdown>,
    export_refused: Option<u32>,
    import_refused: Option<u32>,
    import_twice: Option<u32>,
    import_own: Option<u32>,
    attributes: Vec<(Attribute, i32)>,
}

/// Faults of a fake driver: a handle, clones of which share one state. They may be set
/// at any time and count from then.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    state: Arc<Mutex<State>>,
}

impl Faults {
    /// Most bytes of one register call; more is out of memory, as with the drivers whose
    /// page table of one call is bounded.
    pub fn limit_register(&self, most: Option<usize>) {
        self.state().register_limit = most;
    }

    /// Every register call fails with `code`; `None` ends that.
    pub fn refuse_register(&self, code: Option<u32>) {
        self.state().register_refused = code;
    }

    /// The `nth` register call from now fails once; 0 takes the fault back.
    pub fn fail_register(&self, nth: u64, code: u32) {
        self.state().register_fails = Countdown::new(nth, code);
    }

    /// Every register call takes this long.
    pub fn slow_register(&self, takes: Duration) {
        self.state().register_takes = takes;
    }

    /// The `nth` unregister call from now fails once; 0 takes the fault back.
    pub fn fail_unregister(&self, nth: u64, code: u32) {
        self.state().unregister_fails = Countdown::new(nth, code);
    }

    /// Every release of physical memory takes this long.
    pub fn slow_release(&self, takes: Duration) {
        self.state().release_takes = takes;
    }

    /// The `nth` copy from now breaks its context with the sticky error `code`; 0 takes
    /// the fault back.
    pub fn break_at_copy(&self, nth: u64, code: u32) {
        self.state().copy_breaks = Countdown::new(nth, code);
    }

    /// The `nth` creation of physical memory from now is out of memory, once; 0 takes
    /// the fault back.
    pub fn out_of_memory_at_create(&self, nth: u64) {
        self.state().create_fails = Countdown::new(nth, codes::OUT_OF_MEMORY);
    }

    /// Every export fails with `code`; `None` ends that.
    pub fn refuse_export(&self, code: Option<u32>) {
        self.state().export_refused = code;
    }

    /// Every import fails with `code`; `None` ends that.
    pub fn refuse_import(&self, code: Option<u32>) {
        self.state().import_refused = code;
    }

    /// The import of memory that this process has imported and not let go fails with
    /// `code`; `None` allows it.
    pub fn refuse_import_twice(&self, code: Option<u32>) {
        self.state().import_twice = code;
    }

    /// The import of memory that this process made fails with `code`; `None` allows it.
    pub fn refuse_import_of_own(&self, code: Option<u32>) {
        self.state().import_own = code;
    }

    /// Overrides an attribute of all GPUs.
    pub fn set_attribute(&self, attribute: Attribute, value: i32) {
        let mut state = self.state();
        state.attributes.retain(|(other, _)| *other != attribute);
        state.attributes.push((attribute, value));
    }

    /// Sets a fault by its name in the text form; `false` when there is none of it.
    ///
    /// # Errors
    /// When the value does not suit the fault, with what would.
    pub fn set(&self, key: &str, value: &str) -> Result<bool, &'static str> {
        match key {
            "register_limit" => {
                let most = size(value).and_then(|size| usize::try_from(size).ok());
                self.limit_register(Some(most.ok_or(SIZE)?));
            }
            "register_refuse" => self.refuse_register(Some(code(value)?)),
            "register_fail" => {
                let (nth, code) = nth_and_code(value)?;
                self.fail_register(nth, code);
            }
            "register_ms" => self.slow_register(milliseconds(value)?),
            "unregister_fail" => {
                let (nth, code) = nth_and_code(value)?;
                self.fail_unregister(nth, code);
            }
            "release_ms" => self.slow_release(milliseconds(value)?),
            "break_at_copy" => {
                let (nth, code) = nth_and_code(value)?;
                self.break_at_copy(nth, code);
            }
            "out_of_memory_at_create" => {
                self.out_of_memory_at_create(value.parse().map_err(|_| NUMBER)?);
            }
            "export_refuse" => self.refuse_export(Some(code(value)?)),
            "import_refuse" => self.refuse_import(Some(code(value)?)),
            "import_twice" => {
                self.refuse_import_twice(Some(refusal(value, codes::INVALID_VALUE)?));
            }
            "import_own" => {
                self.refuse_import_of_own(Some(refusal(value, codes::INVALID_CONTEXT)?));
            }
            _ => return self.set_named_attribute(key, value),
        }
        Ok(true)
    }

    fn set_named_attribute(&self, key: &str, value: &str) -> Result<bool, &'static str> {
        let Some(name) = key.strip_prefix("attribute.") else {
            return Ok(false);
        };
        let known = ATTRIBUTES.iter().find(|a| format!("{a:?}") == name);
        let Some(attribute) = known else {
            return Ok(false);
        };
        self.set_attribute(*attribute, value.parse().map_err(|_| NUMBER)?);
        Ok(true)
    }

    pub(super) fn at_register(&self, bytes: usize) -> Option<u32> {
        let mut state = self.state();
        // every call counts, whatever else refuses it
        let counted = Countdown::count(&mut state.register_fails);
        let too_large = state.register_limit.is_some_and(|most| bytes > most);
        counted
            .or(state.register_refused)
            .or(too_large.then_some(codes::OUT_OF_MEMORY))
    }

    pub(super) fn at_unregister(&self) -> Option<u32> {
        Countdown::count(&mut self.state().unregister_fails)
    }

    pub(super) fn at_copy(&self) -> Option<u32> {
        Countdown::count(&mut self.state().copy_breaks)
    }

    pub(super) fn at_create(&self) -> Option<u32> {
        Countdown::count(&mut self.state().create_fails)
    }

    pub(super) fn at_export(&self) -> Option<u32> {
        self.state().export_refused
    }

    /// Of an import of memory that was made here, or imported before and not let go.
    pub(super) fn at_import(&self, own: bool, again: bool) -> Option<u32> {
        let state = self.state();
        state
            .import_refused
            .or(state.import_own.filter(|_| own))
            .or(state.import_twice.filter(|_| again))
    }

    pub(super) fn register_takes(&self) -> Duration {
        self.state().register_takes
    }

    pub(super) fn release_takes(&self) -> Duration {
        self.state().release_takes
    }

    pub(super) fn attribute(&self, attribute: Attribute) -> Option<i32> {
        let state = self.state();
        let found = state.attributes.iter().find(|(a, _)| *a == attribute);
        found.map(|(_, value)| *value)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

const NUMBER: &str = "a number";
const SIZE: &str = "a number of bytes, with KiB, MiB or GiB where wanted";

fn code(value: &str) -> Result<u32, &'static str> {
    let code = value.parse().ok().filter(|code| *code > 0);
    code.ok_or("a code of the driver")
}

fn refusal(value: &str, usual: u32) -> Result<u32, &'static str> {
    match value {
        "refuse" => Ok(usual),
        _ => code(value).map_err(|_| "refuse, or a code of the driver"),
    }
}

fn nth_and_code(value: &str) -> Result<(u64, u32), &'static str> {
    const FORM: &str = "N:CODE";
    let (nth, error) = value.split_once(':').ok_or(FORM)?;
    let nth = nth.parse().map_err(|_| FORM)?;
    Ok((nth, code(error).map_err(|_| FORM)?))
}

fn milliseconds(value: &str) -> Result<Duration, &'static str> {
    let number = value.parse().map_err(|_| "a number of milliseconds")?;
    Ok(Duration::from_millis(number))
}

/// A size such as 4096 or 64MiB.
pub(super) fn size(value: &str) -> Option<u64> {
    const UNITS: [(&str, u64); 3] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
    let unit = UNITS.iter().find(|(name, _)| value.ends_with(name));
    let (digits, factor) = unit.map_or((value, 1), |(name, factor)| {
        (value.trim_end_matches(name), *factor)
    });
    digits.parse::<u64>().ok()?.checked_mul(factor)
}
