//! Memory: counted, labelled, exported, freed.

use std::os::fd::AsFd as _;

use flextensord_device::{
    cuda::memory::DeviceMapping,
    device::{DeviceError, Ticket},
};
use flextensord_proto::layout::LABEL_BYTES;

use crate::setting::{Setting, label, pattern, segment, source};

pub(crate) fn memory_is_counted_until_it_is_dropped(on: &Setting) {
    assert_eq!(on.device.allocated_bytes(), 0);
    let memory = on.allocate(8 << 20);
    assert!(memory.bytes() >= 8 << 20);
    assert!(memory.bytes().is_multiple_of(on.device.granularity()));
    assert_eq!(on.device.allocated_bytes(), memory.bytes());
    drop(memory);
    assert_eq!(on.device.allocated_bytes(), 0);
}

pub(crate) fn more_than_there_is_is_refused_with_figures(on: &Setting) {
    let most = on.device.info().total_bytes;
    let error = on.device.allocate(2 * most, &label()).unwrap_err();
    let (DeviceError::Exhausted { total, free, .. } | DeviceError::Refused { total, free, .. }) =
        error
    else {
        panic!("{error}");
    };
    assert_eq!(total, most);
    assert!(free <= total);
    // it is no fault of the device
    assert_eq!(on.device.failure(), None);
    drop(on.allocate(4096));
}

pub(crate) fn a_label_stands_at_the_begin(on: &Setting) {
    let memory = on.allocate(4096);
    assert_eq!(on.read(&memory, 0, 256), label().encode());
}

pub(crate) fn a_copy_outside_its_memory_or_over_its_label_is_refused(on: &Setting) {
    let memory = on.allocate(8192);
    let segment = segment(4096, 1);
    let end = memory.bytes();
    let fill = |offset, from, bytes| memory.fill(offset, source(&segment, from, bytes), &[]);
    assert!(fill(end - 1024, 0, 2048).is_err());
    assert!(fill(0, 0, 16).is_err());
    assert!(fill(256, 4000, 200).is_err());
    assert!(fill(u64::MAX, 0, 16).is_err());
    assert_eq!(on.device.queued_bytes(), 0);
    assert_eq!(on.device.completed(), Ticket(0));
}

/// The driver may map an allocation twice in a process, also in the one that made it.
pub(crate) fn memory_imported_twice_reads_the_same(on: &Setting) {
    let memory = on.allocate(1 << 20);
    let from = segment(4096, 2);
    let ticket = memory
        .fill(LABEL_BYTES, source(&from, 0, 4096), &[])
        .unwrap();
    on.wait(ticket);
    let import = || {
        let given = memory.export().unwrap();
        DeviceMapping::import(&on.gpu().context, given, memory.bytes()).unwrap()
    };
    let (one, two) = (import(), import());
    assert_ne!(one.address(), two.address());
    for view in [&one, &two] {
        let mut bytes = vec![0; 4096];
        view.read(LABEL_BYTES, &mut bytes).unwrap();
        assert!(bytes == pattern(4096, 2));
    }
    drop(one);
    let mut bytes = vec![0; 4096];
    two.read(LABEL_BYTES, &mut bytes).unwrap();
    assert!(bytes == pattern(4096, 2));
}

pub(crate) fn what_was_let_go_stays_while_an_import_maps_it(on: &Setting) {
    let free = on.device.free_bytes();
    let memory = on.allocate(64 << 20);
    let from = segment(4096, 3);
    let ticket = memory
        .fill(LABEL_BYTES, source(&from, 0, 4096), &[])
        .unwrap();
    on.wait(ticket);
    let given = memory.export().unwrap();
    let bytes = memory.bytes();
    let copy = given.as_fd().try_clone_to_owned().unwrap();
    let view = DeviceMapping::import(&on.gpu().context, given, bytes).unwrap();
    drop(memory);
    assert!(on.device.free_bytes() <= free - bytes);
    let mut read = vec![0; 4096];
    view.read(LABEL_BYTES, &mut read).unwrap();
    assert!(read == pattern(4096, 3));
    drop((view, copy));
    assert!(on.device.free_bytes() >= free);
}
