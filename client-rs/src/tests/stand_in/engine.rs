//! The thread that fills parts.

use std::{sync::atomic::Ordering, time::Duration};

use flextensord_device::{
    doorbell,
    handover::{Filler, Journal, Sight},
};

use super::Stage;

/// Longer than any acquire in a test waits: a wake-up that is lost shows as a failure.
const SLEEP: Duration = Duration::from_secs(20);

/// A GPU that writes a word rings nobody.
const POLL: Duration = Duration::from_millis(1);

struct Issued(Vec<u32>);

impl Journal for Issued {
    fn parts(&self) -> u32 {
        u32::try_from(self.0.len()).unwrap()
    }
    fn issued(&self, part: u32) -> u32 {
        self.0[part as usize]
    }
    fn record(&mut self, part: u32, sequence: u32) {
        self.0[part as usize] = sequence;
    }
}

/// The bytes of a part.
pub(crate) fn bytes_of(part: u32, length: u64) -> Vec<u8> {
    let seed = part.wrapping_mul(37).wrapping_add(11);
    (0..length)
        .map(|at| u8::try_from((u64::from(seed) + at * 7) % 251).unwrap())
        .collect()
}

pub(crate) fn run(stage: &Stage) {
    for (part, at) in (0u32..).zip(&stage.parts).filter(|(_, at)| !at.streamed) {
        write(stage, part, at.place);
    }
    let mut filler = Filler::new(Issued(vec![0; stage.parts.len()]));
    let mut next = 0;
    while !stage.stopped.load(Ordering::SeqCst) {
        if step(stage, &mut filler, &mut next) {
            continue;
        }
        let asleep = |asleep| stage.notice.lock().unwrap().set_asleep(3, asleep);
        asleep(true);
        // looks once more: who changed a word before that may not have rung
        if !step(stage, &mut filler, &mut next) {
            let on_gpu = stage.memory.gpu_uuid().is_some();
            doorbell::wait_any(&[&stage.doorbell], if on_gpu { POLL } else { SLEEP });
            stage.doorbell.clear();
        }
        asleep(false);
    }
}

/// Fills one part, if one may be filled.
fn step(stage: &Stage, filler: &mut Filler<Issued>, next: &mut usize) -> bool {
    let overlapping: Vec<Vec<u32>> = (0u32..)
        .zip(&stage.parts)
        .map(|(one, _)| overlapping(stage, one))
        .collect();
    let frozen = filler.frozen(&stage.control).map(|frozen| {
        let part = frozen.part();
        for &other in &overlapping[part as usize] {
            let _ = frozen.revoke(other);
        }
        part
    });
    let order: Vec<u32> = (0u32..)
        .zip(&stage.parts)
        .filter_map(|(part, at)| at.streamed.then_some(part))
        .collect();
    if order.is_empty() {
        return false;
    }
    let wanted = frozen.and_then(|part| order.iter().position(|&other| other == part));
    let position = wanted.unwrap_or(*next % order.len());
    let part = order[position];
    let empty = |part: &u32| filler.sight(&stage.control, *part) == Sight::Empty;
    let ready = empty(&part) && overlapping[part as usize].iter().all(empty);
    if !ready || stage.withheld.lock().unwrap().contains(&part) {
        return false;
    }
    let sequence = filler.issue(part);
    write(stage, part, stage.parts[part as usize].place);
    assert!(stage.control.publish(part, sequence));
    *next = position + 1;
    true
}

fn overlapping(stage: &Stage, part: u32) -> Vec<u32> {
    let range = |part: u32| {
        let at = stage.parts[part as usize];
        (at.place * 256, at.place * 256 + at.bytes)
    };
    let (begin, end) = range(part);
    (0u32..)
        .zip(&stage.parts)
        .map(|(other, at)| (other, at.streamed))
        .filter(|&(other, streamed)| {
            let (other_begin, other_end) = range(other);
            other != part && streamed && begin < other_end && other_begin < end
        })
        .map(|(other, _)| other)
        .collect()
}

fn write(stage: &Stage, part: u32, place: u64) {
    let bytes = bytes_of(part, stage.parts[part as usize].bytes);
    stage.memory.write(place * 256, &bytes);
}
