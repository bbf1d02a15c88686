//! Streams that wait for words, write them, and wait for each other.

use std::{sync::Arc, thread, time::Duration};

use flextensord_device::{
    cuda::{
        event::Event,
        stream::{CallerStream, Stream},
    },
    device::Publish,
    handover::Cells as _,
};
use flextensord_proto::layout::{LABEL_BYTES, State, WANT_NONE, Word};

use crate::setting::{Setting, segment, source};

pub(crate) fn a_stream_waits_for_a_part_marks_it_and_gives_it_back(on: &Setting) {
    let context = &on.gpu().context;
    let control = on.control(4);
    let slots = control.slots().unwrap();
    let stream = Stream::new(context).unwrap();
    slots.take(CallerStream::from(&stream), &[2]).unwrap();
    on.until("the stream says what it waits for", || control.want() == 2);
    thread::sleep(Duration::from_millis(20));
    assert!(!stream.is_done().unwrap());
    let memory = on.allocate(4096);
    let publish = Publish {
        control: Arc::clone(&control),
        part: 2,
        sequence: 7,
    };
    let source = source(&segment(256, 21), 0, 256);
    memory.fill(LABEL_BYTES, source, &[publish]).unwrap();
    on.until("the part is taken", || {
        control.load(2) == Word::new(7, State::InUse) && control.want() == WANT_NONE
    });
    slots.give_back(CallerStream::from(&stream), &[2]).unwrap();
    on.until("the part is given back", || {
        control.load(2) == Word::new(7, State::Empty)
    });
    assert!(control.load(2).is_empty(7));
}

pub(crate) fn a_publication_from_the_host_satisfies_a_wait_for_its_low_half(on: &Setting) {
    let context = &on.gpu().context;
    let control = on.control(1);
    let stream = Stream::new(context).unwrap();
    let memory = on.allocate(4096);
    for sequence in [1, u32::MAX, 0, 1] {
        let taken = control
            .slots()
            .unwrap()
            .take(CallerStream::from(&stream), &[0]);
        taken.unwrap();
        let publish = Publish {
            control: Arc::clone(&control),
            part: 0,
            sequence,
        };
        let source = source(&segment(256, 22), 0, 256);
        memory.fill(LABEL_BYTES, source, &[publish]).unwrap();
        on.until("the part is taken", || {
            control.load(0) == Word::new(sequence, State::InUse)
        });
        let slots = control.slots().unwrap();
        slots.give_back(CallerStream::from(&stream), &[0]).unwrap();
        on.until("the part is given back", || {
            control.load(0).is_empty(sequence)
        });
    }
}

/// One event serves many waits: each stands for the recording before it.
pub(crate) fn an_event_holds_up_what_it_stood_for_when_it_was_asked(on: &Setting) {
    let context = &on.gpu().context;
    let control = on.control(2);
    let slots = control.slots().unwrap();
    let (one, two) = (Stream::new(context).unwrap(), Stream::new(context).unwrap());
    let (first, second) = (CallerStream::from(&one), CallerStream::from(&two));
    let event = Event::new(context).unwrap();
    // recorded behind nothing, waited for, and recorded again behind a wait
    event.record(first).unwrap();
    event.hold_up(second).unwrap();
    slots.take(first, &[0]).unwrap();
    event.record(first).unwrap();
    on.until("what waited for the first recording goes on", || {
        two.is_done().unwrap()
    });
    assert!(!event.has_passed().unwrap());
    event.hold_up(second).unwrap();
    slots.give_back(second, &[1]).unwrap();
    thread::sleep(Duration::from_millis(20));
    assert!(!two.is_done().unwrap());
    let memory = on.allocate(4096);
    let publish = Publish {
        control: Arc::clone(&control),
        part: 0,
        sequence: 1,
    };
    let source = source(&segment(256, 23), 0, 256);
    memory.fill(LABEL_BYTES, source, &[publish]).unwrap();
    on.until("both go on", || {
        one.is_done().unwrap() && two.is_done().unwrap()
    });
    assert!(event.has_passed().unwrap());
}

pub(crate) fn many_parts_are_taken_in_batches(on: &Setting) {
    const PARTS: u32 = 600;
    let control = on.control(PARTS);
    let slots = control.slots().unwrap();
    let stream = Stream::new(&on.gpu().context).unwrap();
    let all: Vec<u32> = (0..PARTS).collect();
    slots.take(CallerStream::from(&stream), &all).unwrap();
    let memory = on.allocate(4096);
    let from = segment(256, 24);
    for part in 0..PARTS {
        let publish = Publish {
            control: Arc::clone(&control),
            part,
            sequence: 1,
        };
        let source = source(&from, 0, 256);
        memory.fill(LABEL_BYTES, source, &[publish]).unwrap();
    }
    on.until("all are taken", || stream.is_done().unwrap());
    assert_eq!(control.parts_in_use(), PARTS);
    slots.give_back(CallerStream::from(&stream), &all).unwrap();
    on.until("all are given back", || control.parts_in_use() == 0);
}

pub(crate) fn a_part_that_the_page_has_not_is_refused(on: &Setting) {
    let control = on.control(3);
    let stream = Stream::new(&on.gpu().context).unwrap();
    let slots = control.slots().unwrap();
    assert!(slots.take(CallerStream::from(&stream), &[0, 3]).is_err());
    assert!(
        slots
            .give_back(CallerStream::from(&stream), &[u32::MAX])
            .is_err()
    );
    assert!(stream.is_done().unwrap());
    assert_eq!(control.want(), WANT_NONE);
}
