//! The client's steps: as the client library does them on the CPU device, and as a GPU
//! stream does.

use flextensord_device::handover::{Cells as _, end_wait, give_back, take};
use flextensord_proto::layout::State;

use super::{
    replay::{self, Side},
    setting::{Actor, Kind, Program, Setting, Step},
    world::{Broken, Client, Doing, NOTHING, World, bits, overlap},
};

const EMPTY: u8 = State::Empty as u8;
const FULL: u8 = State::Full as u8;
const IN_USE: u8 = State::InUse as u8;

/// Whether the client stands in an acquire.
pub(crate) fn is_blocked(client: &Client) -> bool {
    !matches!(client.doing, Doing::Idle | Doing::Give(_) | Doing::Dead)
}

/// All that the client of `manager` can do next.
pub(crate) fn steps(setting: &Setting, world: &World, manager: u8, out: &mut Vec<(Step, World)>) {
    let client = world.managers[usize::from(manager)].client;
    let mut add = |what, part, actor, next: World| {
        out.push((Step { actor, what, part }, next));
    };
    let us = Actor::Client(manager);
    match client.doing {
        Doing::Dead => return,
        Doing::Idle => {
            for part in choices(setting, &client) {
                let mut next = *world;
                let doing = if client.held & 1 << part != 0 {
                    Doing::Give(part)
                } else if setting.kind == Kind::Cpu {
                    Doing::Fast(part)
                } else {
                    Doing::Say(part)
                };
                next.manager(manager).client.doing = doing;
                go_on(setting, &mut next, manager);
                add(name(doing), part, us, next);
            }
        }
        // until it is woken
        Doing::Asleep(_) => {}
        Doing::Pass(part) => {
            if world.managers[usize::from(manager)].slots[usize::from(part)].low == FULL {
                let mut next = *world;
                next.manager(manager).client.doing = Doing::Mark(part);
                add("passes", part, us, next);
            }
        }
        doing => {
            let mut next = *world;
            go_on(setting, &mut next, manager);
            add(name(doing), part_of(doing), us, next);
        }
    }
    if setting.gives_up && matches!(client.doing, Doing::Sleepy(..)) {
        let mut next = *world;
        next.manager(manager).client.doing = Doing::End;
        add("gives up", part_of(client.doing), Actor::Chance, next);
    }
    if manager < setting.mortal_clients {
        let mut next = *world;
        let dying = &mut next.manager(manager).client;
        *dying = Client {
            doing: Doing::Dead,
            held: 0,
            position: 0,
            log: super::world::Log::new(),
        };
        add("client killed", manager, Actor::Death, next);
    }
}

/// Parts that an idle client may acquire or give back.
fn choices(setting: &Setting, client: &Client) -> Vec<u8> {
    match setting.program {
        Program::Order(order) => {
            let next = order[usize::from(client.position)];
            bits(client.held)
                .next()
                .map_or(vec![next], |held| vec![held])
        }
        Program::Free(most) => (0..setting.parts())
            .filter(|&part| {
                let held = client.held & 1 << part != 0;
                // acquiring a part that overlaps a held one is refused by the library
                let conflict = bits(client.held).any(|other| overlap(setting.ranges, part, other));
                held || !conflict && client.held.count_ones() < most
            })
            .collect(),
    }
}

/// Makes the next access of what the client is at.
fn go_on(setting: &Setting, world: &mut World, manager: u8) {
    let mut client = world.managers[usize::from(manager)].client;
    let who = (manager, Side::Client);
    let sequences = setting.sequences;
    let mut log = client.log;
    let taken = |client: &mut Client, part: u8| {
        client.held |= 1 << part;
        if let Program::Order(order) = setting.program {
            let length = u8::try_from(order.len()).unwrap_or(u8::MAX);
            client.position = (client.position + 1) % length;
        }
    };
    match client.doing {
        Doing::Fast(part) => {
            let run = |cells: &replay::Replay<'_>| take(cells, part.into());
            match replay::step(world, sequences, who, &mut log, run) {
                Some(true) => {
                    taken(&mut client, part);
                    client.doing = Doing::Idle;
                }
                Some(false) => client.doing = Doing::Say(part),
                None => {}
            }
        }
        Doing::Say(part) => {
            world.manager(manager).want = part;
            client.doing = match setting.kind {
                Kind::Cpu => Doing::Look(part),
                Kind::Stream => Doing::Pass(part),
            };
        }
        Doing::Look(part) => {
            let run = |cells: &replay::Replay<'_>| {
                let seen = cells.load(part.into()).state_bits();
                (seen, take(cells, part.into()))
            };
            match replay::step(world, sequences, who, &mut log, run) {
                Some((_, true)) => {
                    taken(&mut client, part);
                    client.doing = Doing::End;
                }
                Some((seen, false)) => {
                    let seen = u8::try_from(seen).unwrap_or(NOTHING);
                    let on = if setting.sleeps_on_empty { EMPTY } else { seen };
                    client.doing = Doing::Sleepy(part, on);
                }
                None => {}
            }
        }
        // the kernel compares and puts to sleep at once
        Doing::Sleepy(part, seen) => {
            let low = world.managers[usize::from(manager)].slots[usize::from(part)].low;
            client.doing = if low == seen && setting.sleeps {
                Doing::Asleep(part)
            } else {
                Doing::Look(part)
            };
        }
        Doing::Mark(part) => {
            world.manager(manager).slots[usize::from(part)].low = IN_USE;
            taken(&mut client, part);
            client.doing = Doing::End;
        }
        Doing::End => {
            let run = |cells: &replay::Replay<'_>| end_wait(cells);
            if replay::step(world, sequences, who, &mut log, run).is_some() {
                client.doing = Doing::Idle;
            }
        }
        Doing::Give(part) if setting.kind == Kind::Stream => {
            world.manager(manager).slots[usize::from(part)].low = EMPTY;
            client.held &= !(1 << part);
            client.doing = Doing::Idle;
        }
        Doing::Give(part) => {
            let run = |cells: &replay::Replay<'_>| give_back(cells, part.into());
            if let Some(given) = replay::step(world, sequences, who, &mut log, run) {
                if !given {
                    world.note(Broken::Refused);
                }
                client.held &= !(1 << part);
                client.doing = Doing::Idle;
            }
        }
        Doing::Idle | Doing::Asleep(_) | Doing::Pass(_) | Doing::Dead => {}
    }
    client.log = log;
    world.manager(manager).client = client;
}

fn name(doing: Doing) -> &'static str {
    match doing {
        Doing::Fast(_) => "tries",
        Doing::Say(_) => "writes want",
        Doing::Look(_) => "looks and takes",
        Doing::Sleepy(..) => "goes to sleep",
        Doing::Mark(_) => "writes in use",
        Doing::End => "writes want = none",
        Doing::Give(_) => "gives back",
        Doing::Idle | Doing::Asleep(_) | Doing::Pass(_) | Doing::Dead => "",
    }
}

fn part_of(doing: Doing) -> u8 {
    match doing {
        Doing::Fast(part)
        | Doing::Say(part)
        | Doing::Look(part)
        | Doing::Sleepy(part, _)
        | Doing::Asleep(part)
        | Doing::Pass(part)
        | Doing::Mark(part)
        | Doing::Give(part) => part,
        Doing::Idle | Doing::End | Doing::Dead => NOTHING,
    }
}
