//! Long random runs, for rings with too many states to visit them all.

use super::{
    client::is_blocked,
    explorer::{breach, successors},
    setting::{Actor, Setting},
    world::{Broken, Doing, World},
};

/// What a run met.
#[derive(Debug, Default)]
pub(crate) struct Walked {
    pub(crate) broken: Option<Broken>,
    /// Waits that ended with the part, per manager.
    pub(crate) acquired: [u32; 2],
    /// How often the daemon was killed.
    pub(crate) deaths: u32,
}

/// Takes `count` steps: an actor by lot, then one of its steps by lot. Of two thousand
/// daemons' steps one is its death. A client that was killed comes back as a new
/// manager once its ring is free.
pub(crate) fn walk(setting: &Setting, seed: u64, count: u32) -> Walked {
    let mut lot = Lot(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut walked = Walked::default();
    let mut world = World::new(0);
    let mut out = Vec::new();
    for _ in 0..count {
        world.deaths = u8::from(lot.below(2000) == 0);
        out.clear();
        successors(setting, &world, &mut out);
        if world.deaths == 0 && lot.below(2000) != 0 {
            out.retain(|(step, _)| step.actor != Actor::Death);
        } else {
            walked.deaths += u32::from(world.deaths);
        }
        let mut actors: Vec<Actor> = out.iter().map(|(step, _)| step.actor).collect();
        actors.dedup();
        let dies = actors.iter().position(|actor| *actor == Actor::Death);
        let actor = actors[dies.unwrap_or_else(|| lot.below(actors.len()))];
        out.retain(|(step, _)| step.actor == actor);
        let next = out[lot.below(out.len())].1;
        for (count, (before, after)) in walked
            .acquired
            .iter_mut()
            .zip(world.managers.iter().zip(&next.managers))
        {
            let got = after.client.held & !before.client.held != 0;
            *count += u32::from(is_blocked(&before.client) && got);
        }
        world = next;
        for manager in &mut world.managers {
            if manager.freed && manager.client.doing == Doing::Dead {
                *manager = World::new(0).managers[0];
            }
        }
        walked.broken = breach(setting, &world);
        if walked.broken.is_some() {
            break;
        }
    }
    walked
}

/// Draws lots (xorshift).
struct Lot(u64);

impl Lot {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let limit = u64::try_from(limit).unwrap_or(1).max(1);
        usize::try_from((self.0 >> 11) % limit).unwrap_or(0)
    }
}
