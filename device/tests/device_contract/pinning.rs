//! Pinned host memory: in chunks, all or nothing, given back.

use flextensord_device::{
    cuda::registration::{Registration, RegistrationError},
    device::DeviceError,
};
use flextensord_proto::layout::LABEL_BYTES;

use crate::setting::{CHUNK, Setting, pattern, segment, source};

const POOL: usize = 10 << 20;

pub(crate) fn a_segment_is_pinned_in_chunks_and_copied_across_them(on: &Setting) {
    let from = segment(POOL, 11);
    let mut steps = Vec::new();
    let mut note = |done| {
        steps.push(done);
        true
    };
    let pins = on.device.pin_segment(&from, &[], &mut note).unwrap();
    assert_eq!(pins.bytes(), POOL as u64);
    assert_eq!(steps, [CHUNK, 2 * CHUNK, 3 * CHUNK, POOL as u64]);
    let memory = on.allocate(LABEL_BYTES + POOL as u64);
    let whole = source(&from, 0, POOL as u64);
    let ticket = memory.fill(LABEL_BYTES, whole, &[]).unwrap();
    on.wait(ticket);
    assert!(on.read(&memory, LABEL_BYTES, POOL) == pattern(POOL, 11));
    drop(pins);
    assert_eq!(on.device.failed_drops().0, 0);
}

pub(crate) fn pinning_and_unpinning_two_hundred_times_leaves_nothing(on: &Setting) {
    let from = segment(POOL, 12);
    for _ in 0..200 {
        let pins = on.device.pin_segment(&from, &[], &mut |_| true).unwrap();
        assert_eq!(pins.bytes(), POOL as u64);
    }
    assert_eq!(on.device.failed_drops(), (0, Vec::new()));
}

pub(crate) fn pinning_can_be_given_up_between_chunks(on: &Setting) {
    let from = segment(POOL, 13);
    let error = on
        .device
        .pin_segment(&from, &[], &mut |done| done < 2 * CHUNK);
    assert!(matches!(
        error,
        Err(DeviceError::Registration(RegistrationError::Cancelled { done, .. }))
            if done == 2 * CHUNK
    ));
    // what had been pinned is not any more
    on.device.pin_segment(&from, &[], &mut |_| true).unwrap();
}

pub(crate) fn a_range_is_not_pinned_twice(on: &Setting) {
    let from = segment(POOL, 14);
    let context = &on.gpu().context;
    let first = Registration::new(context, &from, CHUNK, &[], &mut |_| true).unwrap();
    let error = Registration::new(context, &from, CHUNK, &[], &mut |_| true).unwrap_err();
    // CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    assert_eq!(error.driver().and_then(|e| e.code()), Some(712), "{error}");
    drop(first);
    Registration::new(context, &from, CHUNK, &[], &mut |_| true).unwrap();
    assert_eq!(context.failure(), None);
}

pub(crate) fn unpinned_memory_is_copied_all_the_same(on: &Setting) {
    let from = segment(POOL, 15);
    let memory = on.allocate(LABEL_BYTES + POOL as u64);
    let whole = source(&from, 0, POOL as u64);
    let ticket = memory.fill(LABEL_BYTES, whole, &[]).unwrap();
    on.wait(ticket);
    assert!(on.read(&memory, LABEL_BYTES, POOL) == pattern(POOL, 15));
}
