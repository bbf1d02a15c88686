//! Copies: whole, in order, published after their bytes.

use std::sync::Arc;

use flextensord_device::{
    device::Publish,
    handover::{Cells as _, take},
};
use flextensord_proto::layout::{LABEL_BYTES, State, Word};

use crate::setting::{Setting, pattern, segment, source};

pub(crate) fn bytes_of_any_size_and_offset_arrive_whole(on: &Setting) {
    const SEGMENT: usize = 40 << 20;
    let from = segment(SEGMENT, 5);
    let _pins = on.device.pin_segment(&from, &[], &mut |_| true).unwrap();
    let expected = pattern(SEGMENT, 5);
    let memory = on.allocate(LABEL_BYTES + SEGMENT as u64);
    for (offset, bytes) in [
        (0_u64, 1_u64),
        (3, 5),
        (256, 256),
        (4095, 4098),
        (1 << 20, 1 << 20),
        (CUT - 100, 200),
        (777, 39 << 20),
    ] {
        let target = LABEL_BYTES + offset;
        let ticket = memory
            .fill(target, source(&from, offset, bytes), &[])
            .unwrap();
        on.wait(ticket);
        let (begin, length) = (
            usize::try_from(offset).unwrap(),
            usize::try_from(bytes).unwrap(),
        );
        let read = on.read(&memory, target, length);
        assert!(
            read == expected[begin..begin + length],
            "{bytes} at {offset}"
        );
    }
}

/// Where the first chunk of a registration ends.
const CUT: u64 = crate::setting::CHUNK;

pub(crate) fn a_publication_comes_after_its_bytes(on: &Setting) {
    const BYTES: usize = 8 << 20;
    let memory = on.allocate(LABEL_BYTES + BYTES as u64);
    let control = on.control(1);
    for round in 1..=5_u32 {
        let from = segment(BYTES, round.into());
        let publish = Publish {
            control: Arc::clone(&control),
            part: 0,
            sequence: round,
        };
        let source = source(&from, 0, BYTES as u64);
        memory.fill(LABEL_BYTES, source, &[publish]).unwrap();
        on.until("a part is full", || {
            control.load(0) == Word::new(round, State::Full)
        });
        let read = on.read(&memory, LABEL_BYTES, BYTES);
        assert!(read == pattern(BYTES, round.into()), "round {round}");
        assert!(take(control.as_ref(), 0));
        assert!(flextensord_device::handover::give_back(control.as_ref(), 0));
    }
    assert_eq!(on.device.failed_publications(), 0);
}

pub(crate) fn neighbours_go_in_one_copy_and_are_published_in_order(on: &Setting) {
    let memory = on.allocate(1 << 20);
    let control = on.control(700);
    let from = segment(700 * 256, 6);
    let publishes: Vec<Publish> = (0..700)
        .map(|part| Publish {
            control: Arc::clone(&control),
            part,
            sequence: part + 1,
        })
        .collect();
    let source = source(&from, 0, 700 * 256);
    let ticket = memory.fill(LABEL_BYTES, source, &publishes).unwrap();
    on.wait(ticket);
    for part in 0..700 {
        assert_eq!(control.load(part), Word::new(part + 1, State::Full));
    }
}

pub(crate) fn copies_arrive_in_the_order_of_their_tickets(on: &Setting) {
    let memory = on.allocate(1 << 20);
    let segments: Vec<_> = (0..50).map(|seed| segment(4096, seed)).collect();
    let mut last = on.device.completed();
    for from in &segments {
        let ticket = memory
            .fill(LABEL_BYTES, source(from, 0, 4096), &[])
            .unwrap();
        assert!(ticket > last);
        last = ticket;
    }
    on.wait(last);
    // the last one wins
    assert!(on.read(&memory, LABEL_BYTES, 4096) == pattern(4096, 49));
}

pub(crate) fn poison_is_written_in_the_order_of_the_copies(on: &Setting) {
    let memory = on.allocate(1 << 20);
    let from = segment(8192, 8);
    let ticket = memory
        .fill(LABEL_BYTES, source(&from, 0, 8192), &[])
        .unwrap();
    on.wait(ticket);
    memory.poison(LABEL_BYTES + 4096, 4096, 0xdb).unwrap();
    assert!(memory.poison(0, 16, 0).is_err());
    let ticket = memory
        .fill(LABEL_BYTES + 6144, source(&from, 0, 16), &[])
        .unwrap();
    on.wait(ticket);
    let read = on.read(&memory, LABEL_BYTES, 8192);
    let expected = pattern(8192, 8);
    assert!(read[..4096] == expected[..4096]);
    assert!(read[4096..6144].iter().all(|byte| *byte == 0xdb));
    assert!(read[6144..6160] == expected[..16]);
}

pub(crate) fn what_is_queued_is_counted_until_it_has_arrived(on: &Setting) {
    const BYTES: u64 = 16 << 20;
    let memory = on.allocate(LABEL_BYTES + BYTES);
    let from = segment(usize::try_from(BYTES).unwrap(), 9);
    let mut last = on.device.completed();
    for _ in 0..4 {
        last = memory
            .fill(LABEL_BYTES, source(&from, 0, BYTES), &[])
            .unwrap();
        assert!(on.device.queued_bytes() <= 4 * BYTES);
    }
    on.wait(last);
    assert_eq!(on.device.queued_bytes(), 0);
}
