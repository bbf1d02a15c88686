//! What streams do: every access is checked against what the GPU may do, so that a
//! violation breaks a context and not the process.

use std::{
    fmt, panic,
    ptr::{with_exposed_provenance, with_exposed_provenance_mut},
    sync::atomic::{
        AtomicU32, AtomicU64,
        Ordering::{Acquire, Release},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    super::{
        driver::{DeviceAddress, Outcome, StreamOp},
        error::CudaError,
    },
    SLICE,
    codes::{ILLEGAL_ADDRESS, INVALID_VALUE, LAUNCH_FAILED, Refusable},
    shared::Shared,
    stream::{Direction, Step, Stream},
};

/// Bytes moved between two checks of the access.
const STRIDE: usize = 256 << 10;
/// A wait for a word looks this often at first, and less often later.
const POLL: Duration = Duration::from_micros(20);
const LATE_POLL: Duration = Duration::from_micros(100);
const EAGER: Duration = Duration::from_millis(20);

impl Shared {
    /// Does a step; the code that breaks the context otherwise.
    pub(super) fn execute(&self, stream: &Stream, step: &Step) -> Refusable<()> {
        match step {
            Step::Copy {
                target,
                source,
                bytes,
                direction,
            } => self.copy(stream, (*target, *source, *bytes), *direction),
            Step::Fill {
                target,
                byte,
                bytes,
            } => strides(*bytes).try_for_each(|(offset, bytes)| {
                // SAFETY: write_bytes stays within the stride, which `touch` has proved
                // to be writable memory that cannot go while it runs.
                self.touch(stream.gpu, *target + offset, bytes, true, |at| unsafe {
                    with_exposed_provenance_mut::<u8>(at).write_bytes(*byte, bytes);
                })
            }),
            Step::Words(ops) => ops.iter().try_for_each(|op| self.word(stream, *op)),
            Step::Record(event, recording) => {
                event.pass(*recording);
                Ok(())
            }
            Step::Wait(event, recording) => {
                while !self.is_stopped(stream) && !event.wait(*recording, SLICE) {}
                Ok(())
            }
            Step::Run(work) => {
                let kernel = Kernel {
                    shared: self,
                    stream,
                };
                // a test that asserts in a kernel must see its stream fail, not hang
                panic::catch_unwind(panic::AssertUnwindSafe(|| work(&kernel)))
                    .map_err(|_| LAUNCH_FAILED)
            }
        }
    }

    fn copy(
        &self,
        stream: &Stream,
        (target, source, bytes): (usize, usize, usize),
        direction: Direction,
    ) -> Refusable<()> {
        while !self.gate.pass(SLICE) {
            if self.is_stopped(stream) {
                return Ok(());
            }
        }
        if let Some(code) = self.faults.at_copy() {
            return Err(code);
        }
        for (offset, bytes) in strides(bytes) {
            self.pace(stream, bytes);
            if self.is_stopped(stream) {
                return Ok(());
            }
            let (target, source) = (target + offset, source + offset);
            let (device, store) = match direction {
                Direction::In => (target, true),
                Direction::Out => (source, false),
            };
            self.touch(stream.gpu, device, bytes, store, |_| {
                let from = with_exposed_provenance::<u8>(source);
                // SAFETY: `touch` has proved the device side and keeps it while this
                // runs; the caller of the copy vouches for the host side until it is
                // done. Both may overlap, which `copy_to` allows.
                unsafe { from.copy_to(with_exposed_provenance_mut(target), bytes) };
            })?;
        }
        super::lock(&self.counts).copies_done += 1;
        Ok(())
    }

    /// Sleeps until the link of the GPU would have moved `bytes` more.
    fn pace(&self, stream: &Stream, bytes: usize) {
        let Some(rate) = self.bandwidth else {
            return;
        };
        let nanoseconds = bytes as u128 * 1_000_000_000 / u128::from(rate);
        let takes = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
        let mut free_at = super::lock(&self.gpus[stream.gpu].link_free_at);
        let now = Instant::now();
        let done = now.max(free_at.unwrap_or(now)).checked_add(takes);
        let done = done.unwrap_or(now);
        *free_at = Some(done);
        drop(free_at);
        while !self.is_stopped(stream) {
            let left = done.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            thread::sleep(left.min(SLICE));
        }
    }

    fn word(&self, stream: &Stream, op: StreamOp) -> Refusable<()> {
        let gpu = stream.gpu;
        match op {
            StreamOp::WaitEqual32 { address, value } => {
                let begun = Instant::now();
                while self.load32(gpu, address)? != value && !self.is_stopped(stream) {
                    let late = begun.elapsed() > EAGER;
                    thread::sleep(if late { LATE_POLL } else { POLL });
                }
                Ok(())
            }
            StreamOp::Write32 { address, value } => {
                // SAFETY: `touch` has proved that the word is writable memory that cannot
                // go while this runs; it was queued as aligned, and all sides use atomics.
                self.touch(gpu, host(address)?, 4, true, |at| unsafe {
                    AtomicU32::from_ptr(with_exposed_provenance_mut(at)).store(value, Release);
                })
            }
            StreamOp::Write64 { address, value } => {
                // SAFETY: as above, with eight bytes.
                self.touch(gpu, host(address)?, 8, true, |at| unsafe {
                    AtomicU64::from_ptr(with_exposed_provenance_mut(at)).store(value, Release);
                })
            }
        }
    }

    fn load32(&self, gpu: usize, address: DeviceAddress) -> Refusable<u32> {
        let mut value = 0;
        // SAFETY: `touch` has proved that the word is readable memory that cannot
        // go while this runs; it was queued as aligned, and an atomic load of 32 bits
        // does not write.
        self.touch(gpu, host(address)?, 4, false, |at| unsafe {
            value = AtomicU32::from_ptr(with_exposed_provenance_mut(at)).load(Acquire);
        })?;
        Ok(value)
    }

    /// Runs `access` on a range that the GPU may load, or store, with everything that
    /// could take the range away locked out meanwhile. Words (4 and 8 bytes) were
    /// checked for alignment when they were queued.
    fn touch(
        &self,
        gpu: usize,
        address: usize,
        bytes: usize,
        store: bool,
        access: impl FnOnce(usize),
    ) -> Refusable<()> {
        let memory = self.memory();
        let allowed =
            memory.space.allows(gpu, address, bytes, store) || memory.pages.allows(address, bytes);
        if !allowed {
            return Err(ILLEGAL_ADDRESS);
        }
        access(address);
        Ok(())
    }
}

/// What a kernel that a test queues may do: touch memory as its GPU does.
pub struct Kernel<'a> {
    shared: &'a Shared,
    stream: &'a Stream,
}

impl fmt::Debug for Kernel<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").finish_non_exhaustive()
    }
}

impl Kernel<'_> {
    /// Reads device memory, or registered host memory.
    ///
    /// # Errors
    /// When the GPU may not read all of it: the context is broken from here on.
    pub fn read(&self, address: DeviceAddress, target: &mut [u8]) -> Outcome<()> {
        let result = host(address).and_then(|start| {
            strides(target.len()).try_for_each(|(offset, bytes)| {
                let to = target[offset..offset + bytes].as_mut_ptr();
                self.shared
                    .touch(self.stream.gpu, start + offset, bytes, false, |at| {
                        // SAFETY: `touch` has proved the source and keeps it; the target
                        // is the stride of an exclusive slice.
                        unsafe { with_exposed_provenance::<u8>(at).copy_to(to, bytes) };
                    })
            })
        });
        self.settle(result)
    }

    /// Writes device memory, or registered host memory.
    ///
    /// # Errors
    /// When the GPU may not write all of it: the context is broken from here on.
    pub fn write(&self, address: DeviceAddress, source: &[u8]) -> Outcome<()> {
        let result = host(address).and_then(|start| {
            strides(source.len()).try_for_each(|(offset, bytes)| {
                let from = source[offset..offset + bytes].as_ptr();
                self.shared
                    .touch(self.stream.gpu, start + offset, bytes, true, |at| {
                        // SAFETY: `touch` has proved the target and keeps it; the source
                        // is the stride of a borrowed slice.
                        unsafe { from.copy_to(with_exposed_provenance_mut(at), bytes) };
                    })
            })
        });
        self.settle(result)
    }

    fn settle(&self, result: Refusable<()>) -> Outcome<()> {
        result.map_err(|_| {
            self.shared.break_context(self.stream.gpu, ILLEGAL_ADDRESS);
            CudaError::Call {
                call: "kernel",
                code: ILLEGAL_ADDRESS,
            }
        })
    }
}

/// A device address as the host's.
pub(super) fn host(address: DeviceAddress) -> Refusable<usize> {
    usize::try_from(address).map_err(|_| INVALID_VALUE)
}

/// Offsets and sizes of the pieces of a range.
fn strides(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    let pieces = (0..bytes).step_by(STRIDE);
    pieces.map(move |offset| (offset, STRIDE.min(bytes - offset)))
}
