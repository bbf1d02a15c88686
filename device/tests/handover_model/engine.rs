//! The engine's steps: it answers a frozen client first, else it prefetches any part
//! that may be filled. The daemon's own order of prefetching is one of those explored,
//! so it needs no copy here.

use flextensord_device::handover::{Filler, Sight};

use super::{
    planted::{Lying, Planted},
    replay::{self, Ledger, Replay, Side},
    setting::{Actor, Kind, Refusals, Setting, Step},
    world::{Broken, Doing, Job, List, Log, NOTHING, Stage, TORN, Task, World, bits, overlap},
};

/// All that the engine can do next, its death and its successor included.
pub(crate) fn steps(setting: &Setting, world: &World, out: &mut Vec<(Step, World)>) {
    let mut add = |actor, what, part, next: World| out.push((Step { actor, what, part }, next));
    let ours = Actor::Engine;
    match world.engine.task {
        Task::Dead => {
            if world.queue.is_empty() || setting.planted == Some(Planted::Impatient) {
                let mut next = *world;
                next.engine.task = Task::Recover(0, 0);
                next.engine.turn = 0;
                add(ours, "successor takes over", NOTHING, next);
            }
            return;
        }
        Task::Idle => idle(setting, world, &mut add),
        Task::Choose(manager) => {
            for part in 0..setting.parts() {
                let mut next = *world;
                next.engine.task = Task::Clear(manager, part);
                go_on(setting, &mut next);
                add(ours, "looks whether clear", part, next);
            }
        }
        Task::Submit(_, part, _, piece) => {
            let mut next = *world;
            submit(setting, &mut next);
            add(ours, "submits", part, next);
            let refusable = match setting.refusals {
                Refusals::Never => false,
                Refusals::First => piece == 0,
                Refusals::Any | Refusals::AnyKept => true,
            };
            if refusable {
                let mut next = *world;
                refuse(setting, &mut next);
                add(Actor::Chance, "is refused a copy", part, next);
            }
        }
        task => {
            let mut next = *world;
            go_on(setting, &mut next);
            let (what, part) = name(task);
            add(ours, what, part, next);
        }
    }
    if world.deaths > 0 {
        let mut next = *world;
        next.deaths -= 1;
        next.engine.task = Task::Dead;
        next.engine.log = Log::new();
        add(Actor::Death, "daemon killed", NOTHING, next);
    }
}

fn idle(setting: &Setting, world: &World, add: &mut impl FnMut(Actor, &'static str, u8, World)) {
    for manager in 0..setting.managers {
        let ring = &world.managers[usize::from(manager)];
        let early = setting.planted == Some(Planted::EarlyFree);
        let copies = world.queue.iter().any(|job| job.manager == manager);
        if ring.attached && ring.client.doing == Doing::Dead {
            let mut next = *world;
            next.manager(manager).attached = false;
            next.manager(manager).freed = early;
            add(Actor::Engine, "detaches", manager, next);
        }
        if !ring.attached && !ring.freed && !copies {
            let mut next = *world;
            next.manager(manager).freed = true;
            add(Actor::Engine, "frees", manager, next);
        }
    }
    if world.queue.len() >= setting.queued {
        return;
    }
    let manager = world.engine.turn;
    let mut next = *world;
    if world.managers[usize::from(manager)].attached {
        next.engine.task = Task::Answer(manager);
        go_on(setting, &mut next);
        add(Actor::Engine, "looks at want", NOTHING, next);
    } else if setting.managers > 1 {
        turn(setting, &mut next);
        add(Actor::Engine, "passes over", manager, next);
    }
    if setting.planted == Some(Planted::NaiveDrop) {
        for part in 0..setting.parts() {
            let mut next = *world;
            next.engine.task = Task::Drop(manager, part);
            go_on(setting, &mut next);
            add(Actor::Engine, "drops", part, next);
        }
    }
}

/// The next manager's turn.
fn turn(setting: &Setting, world: &mut World) {
    world.engine.turn = (world.engine.turn + 1) % setting.managers;
    world.engine.task = Task::Idle;
}

/// Makes the next access of what the engine is at.
fn go_on(setting: &Setting, world: &mut World) {
    let mut log = world.engine.log;
    let parts = setting.parts();
    let sequences = setting.sequences;
    // a real filler over the journal as it stands
    let before = *world;
    let ledger = |manager: u8| Ledger::of(&before.managers[usize::from(manager)], parts, sequences);
    let overlapping =
        |part: u8| (0..parts).filter(move |other| overlap(setting.ranges, part, *other));
    let revoker = match setting.kind {
        Kind::Cpu => Side::Daemon,
        Kind::Stream => Side::Store,
    };
    let revocable = |part: u8| {
        (0..parts).filter(move |other| {
            *other != part && (setting.revokes_all || overlap(setting.ranges, part, *other))
        })
    };
    match world.engine.task {
        Task::Answer(manager) => {
            let run = |cells: &Replay<'_>| {
                let (journal, mut filler) = (ledger(manager), Filler::new(ledger(manager)));
                let cells = Lying::new(cells, &journal, setting.planted);
                let frozen = filler.frozen(&cells)?;
                let part = u8::try_from(frozen.part()).unwrap_or(NOTHING);
                if setting.planted != Some(Planted::NoRevoke) {
                    for other in revocable(part) {
                        let _: bool = frozen.revoke(other.into());
                    }
                }
                Some(part)
            };
            let who = (manager, revoker);
            world.engine.task = match replay::step(world, sequences, who, &mut log, run) {
                Some(Some(part)) => Task::Clear(manager, part),
                Some(None) => Task::Choose(manager),
                None => Task::Answer(manager),
            };
        }
        Task::Drop(manager, part) => {
            let run = |cells: &Replay<'_>| {
                let (journal, mut filler) = (ledger(manager), Filler::new(ledger(manager)));
                let mut cells = Lying::new(cells, &journal, setting.planted);
                cells.pretext = u32::from((part + 1) % parts);
                filler
                    .frozen(&cells)
                    .is_some_and(|frozen| frozen.revoke(part.into()))
            };
            let who = (manager, revoker);
            if replay::step(world, sequences, who, &mut log, run).is_some() {
                world.engine.task = Task::Idle;
            }
        }
        Task::Clear(manager, part) => {
            let run = |cells: &Replay<'_>| {
                let (journal, filler) = (ledger(manager), Filler::new(ledger(manager)));
                let cells = Lying::new(cells, &journal, setting.planted);
                let empty = |part: u8| filler.sight(&cells, part.into()) == Sight::Empty;
                empty(part) && overlapping(part).all(empty)
            };
            let who = (manager, Side::Daemon);
            match replay::step(world, sequences, who, &mut log, run) {
                Some(true) if has_room(setting, &before, manager, part) => {
                    world.engine.task = Task::Issue(manager, part);
                }
                Some(_) => turn(setting, world),
                None => {}
            }
        }
        Task::Issue(manager, part) => {
            let mut filler = Filler::new(ledger(manager));
            let sequence = sequences.index(filler.issue(part.into()));
            world.manager(manager).issued = filler.into_journal().into_issued();
            world.engine.task = Task::Submit(manager, part, sequence, 0);
        }
        Task::Recover(manager, part) => {
            let run = |cells: &Replay<'_>| {
                let filler = Filler::new(ledger(manager));
                filler.sight(cells, part.into()) == Sight::Filling
            };
            let who = (manager, Side::Daemon);
            if let Some(filling) = replay::step(world, sequences, who, &mut log, run) {
                if filling {
                    // no copy is under way any more: it never arrived
                    let mut filler = Filler::new(ledger(manager));
                    filler.withdraw(part.into());
                    world.manager(manager).issued = filler.into_journal().into_issued();
                }
                world.engine.task = match (part + 1 < parts, manager + 1 < setting.managers) {
                    (true, _) => Task::Recover(manager, part + 1),
                    (false, true) => Task::Recover(manager + 1, 0),
                    (false, false) => Task::Idle,
                };
            }
        }
        Task::Idle | Task::Choose(_) | Task::Submit(..) | Task::Dead => {}
    }
    world.engine.log = log;
}

/// Whether sequences are left for a part; they always are where they run in a circle.
fn has_room(setting: &Setting, world: &World, manager: u8, part: u8) -> bool {
    let issued = world.managers[usize::from(manager)].issued[usize::from(part)];
    setting.circle || issued + 1 < setting.sequences.modulus
}

/// Hands a piece of a copy to the device: from now on its bytes may be anything.
fn submit(setting: &Setting, world: &mut World) {
    let Task::Submit(manager, part, sequence, piece) = world.engine.task else {
        return;
    };
    let (from, to) = setting.ranges[usize::from(part)];
    let whole = piece + 1 == setting.pieces;
    let middle = from + (to - from) / setting.pieces;
    let job = Job {
        manager,
        part,
        from: if piece == 0 { from } else { middle },
        to: if whole { to } else { middle },
        sequence,
        publishes: whole,
        stage: Stage::Queued,
        log: List::new(),
    };
    let meets = |other: u8| other == part || overlap(setting.ranges, part, other);
    let held = world.managers[usize::from(manager)].client.held;
    if bits(held).any(meets) {
        world.note(Broken::WrittenInUse);
    }
    let other_copy = |queued: &Job| {
        let earlier_piece = queued.part == part && queued.sequence == sequence;
        let under_way = matches!(queued.stage, Stage::Queued | Stage::Arrived);
        queued.manager == manager && meets(queued.part) && under_way && !earlier_piece
    };
    if world.queue.iter().any(other_copy) {
        world.note(Broken::CopiesOverlap);
    }
    if piece == 0 {
        world.manager(manager).ring[usize::from(from)..usize::from(to)].fill(TORN);
    }
    world.queue.push(job);
    if whole {
        turn(setting, world);
    } else {
        world.engine.task = Task::Submit(manager, part, sequence, piece + 1);
    }
}

/// The device took no copy: the issue is taken back.
fn refuse(setting: &Setting, world: &mut World) {
    let Task::Submit(manager, part, _, piece) = world.engine.task else {
        return;
    };
    if piece > 0 && setting.refusals == Refusals::AnyKept {
        turn(setting, world);
        return;
    }
    let page = &world.managers[usize::from(manager)];
    let mut filler = Filler::new(Ledger::of(page, setting.parts(), setting.sequences));
    filler.withdraw(part.into());
    world.manager(manager).issued = filler.into_journal().into_issued();
    turn(setting, world);
}

fn name(task: Task) -> (&'static str, u8) {
    match task {
        Task::Answer(_) => ("answers", NOTHING),
        Task::Drop(_, part) => ("drops", part),
        Task::Clear(_, part) => ("looks whether clear", part),
        Task::Issue(_, part) => ("writes the journal", part),
        Task::Recover(_, part) => ("recovers", part),
        Task::Idle | Task::Choose(_) | Task::Submit(..) | Task::Dead => ("", NOTHING),
    }
}
