//! The steps of copies: they arrive in order, and are published in order.

use flextensord_device::handover::{Cells as _, publish};
use flextensord_proto::layout::State;

use super::{
    replay::{self, Replay, Side},
    setting::{Actor, Kind, Setting, Step},
    world::{Broken, Doing, Job, List, Slot, Stage, Task, World},
};

/// All that the queue can do next.
pub(crate) fn steps(setting: &Setting, world: &World, out: &mut Vec<(Step, World)>) {
    let Some(first) = world.queue.first() else {
        return;
    };
    let mut add = |what, part, next: World| {
        let actor = Actor::Copies;
        out.push((Step { actor, what, part }, next));
    };
    let next_copy = world
        .queue
        .iter()
        .position(|job| job.stage == Stage::Queued);
    if let Some(at) = next_copy.filter(|at| *at == 0 || setting.kind == Kind::Stream) {
        let mut next = *world;
        arrive(&mut next, at);
        add("copy arrives", world.queue[at].part, next);
    }
    if first.stage != Stage::Queued {
        let mut next = *world;
        finish(setting, &mut next, *first);
        let what = match first.stage {
            Stage::Waking => "wakes",
            Stage::Published => "looks who waits",
            _ => "publishes",
        };
        add(what, first.part, next);
    }
    // of a dead daemon's copies, those that have not arrived may never do
    if world.engine.task == Task::Dead {
        let mut next = *world;
        next.queue = List::new();
        add("copies are lost", first.part, next);
    }
}

fn arrive(world: &mut World, at: usize) {
    let job = world.queue[at];
    world.queue[at].stage = Stage::Arrived;
    let manager = world.manager(job.manager);
    for cell in &mut manager.ring[usize::from(job.from)..usize::from(job.to)] {
        *cell = job.part;
    }
    if manager.freed {
        world.note(Broken::FreedWritten);
    }
}

/// Makes the next access of the first copy's publication.
fn finish(setting: &Setting, world: &mut World, mut job: Job) {
    let who = (job.manager, Side::Daemon);
    let part = usize::from(job.part);
    let mut log = job.log;
    let over = match (job.stage, setting.kind) {
        _ if !job.publishes => true,
        (_, Kind::Stream) => {
            let slot = &mut world.manager(job.manager).slots[part];
            let taken = u32::from(slot.low) == State::InUse as u32;
            *slot = Slot {
                sequence: job.sequence,
                low: State::Full as u8,
            };
            if taken {
                world.note(Broken::WordTaken);
            }
            true
        }
        (Stage::Published, Kind::Cpu) => {
            let run = |cells: &Replay<'_>| cells.want() == u32::from(job.part);
            let wanted = replay::step(world, setting.sequences, who, &mut log, run);
            job.stage = Stage::Waking;
            wanted == Some(false)
        }
        (Stage::Waking, Kind::Cpu) => {
            let client = &mut world.manager(job.manager).client;
            if client.doing == Doing::Asleep(job.part) {
                client.doing = Doing::Look(job.part);
            }
            true
        }
        (_, Kind::Cpu) => {
            let sequence = setting.sequences.real(job.sequence);
            let run = |cells: &Replay<'_>| publish(cells, job.part.into(), sequence);
            match replay::step(world, setting.sequences, who, &mut log, run) {
                Some(published) => {
                    job.stage = Stage::Published;
                    if !published {
                        world.note(Broken::Refused);
                    }
                    !setting.sleeps
                }
                None => false,
            }
        }
    };
    job.log = log;
    if over {
        world.queue.remove(0);
    } else {
        world.queue[0] = job;
    }
}
