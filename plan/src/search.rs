//! The best choice of streamed parts and their places, by simulation.
//!
//! Choices come in order of their bytes. A bound that no places can beat rules most of them
//! out without a simulation; it never rules out one that would have been better, so the
//! result is the best of all that were offered, and more budget or link only ever adds to
//! them or makes them faster.

use std::{
    collections::{BTreeMap, HashSet},
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use flextensord_proto::{layout::LABEL_BYTES, limit};

use crate::{
    cycle::Cycle,
    exact,
    input::{Layout, Strategy},
    layout::{self, Addresses},
    output::Candidate,
    problem::Problem,
    residents::Residence,
    ring,
    strategy::Offer,
};

/// Most and least steps in which the streamed bytes grow; between them, so that a step of a
/// model of many parts takes as long as one of a model of few.
const RUNGS: (u64, u64) = (512, 96);
/// Parts of all rungs together.
const RUNG_PARTS: u64 = 1_000_000;
/// Most that latency mode may lose to compute.
pub(crate) const NEAR: f64 = 1.01;

/// What a search is for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Aim {
    /// The least step, then the fewest bytes moved.
    Step,
    /// The fewest bytes held with a step up to that many picoseconds, then the least step.
    Held(f64),
}

/// A choice with places.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) streams: Vec<bool>,
    pub(crate) addresses: Addresses,
    pub(crate) strategy: Strategy,
    /// Weighted mean of the steps, in picoseconds.
    step: f64,
    moved: u64,
    held: u64,
}

/// A search under way.
#[derive(Debug)]
pub(crate) struct Search<'a> {
    problem: &'a Problem,
    residence: &'a Residence,
    layout: Layout,
    aim: Aim,
    room: u64,
    pub(crate) best: Option<Found>,
    seen: HashSet<u64>,
    judged: BTreeMap<Strategy, (u64, Option<f64>)>,
}

impl<'a> Search<'a> {
    pub(crate) fn new(
        problem: &'a Problem,
        residence: &'a Residence,
        layout: Layout,
        aim: Aim,
    ) -> Self {
        Self {
            problem,
            residence,
            layout,
            aim,
            room: 0,
            best: None,
            seen: HashSet::new(),
            judged: BTreeMap::new(),
        }
    }

    /// Who was heard so far.
    pub(crate) fn candidates(&self) -> Vec<Candidate> {
        let all = self.judged.iter();
        all.map(|(strategy, (judged, best))| Candidate {
            strategy: *strategy,
            judged: *judged,
            best_step_s: best.map(|step| step / 1e12),
        })
        .collect()
    }

    /// Hears all that is offered, within `room` bytes.
    pub(crate) fn hear(&mut self, offer: &Offer<'_>, room: u64) {
        self.room = room;
        offer.fixed(&mut |strategy, streams| self.consider(strategy, streams));
        let rungs = RUNG_PARTS / (offer.len() as u64).max(1);
        let rungs = rungs.clamp(RUNGS.1, RUNGS.0);
        let target = |rung: u64| {
            let bytes = u128::from(offer.bytes) * u128::from(rung) / u128::from(rungs);
            u64::try_from(bytes).unwrap_or(u64::MAX).max(1)
        };
        let most = |rung: u64| target(rung).saturating_add(offer.largest());
        let resident = |rung: u64| self.problem.all_taken.saturating_sub(most(rung));
        let tell = |search: &mut Self, rung| {
            offer.at_least(target(rung), &mut |strategy, streams| {
                search.consider(strategy, streams);
            });
        };
        match self.aim {
            Aim::Step => {
                for rung in 1..=rungs {
                    if resident(rung) > room {
                        continue;
                    }
                    // stored bytes are fewer than those taken, by less than an alignment each
                    let padding = limit::ALIGNMENT * offer.len() as u64;
                    let moved = target(rung).saturating_sub(padding);
                    let least = self.least_step(moved, offer.largest());
                    if self.best.as_ref().is_some_and(|best| {
                        least > best.step || (least >= best.step && moved >= best.moved)
                    }) {
                        break;
                    }
                    tell(self, rung);
                }
            }
            Aim::Held(_) => {
                for rung in (1..=rungs).rev() {
                    let resident = resident(rung);
                    if resident > room || self.best.as_ref().is_some_and(|b| resident >= b.held) {
                        break;
                    }
                    tell(self, rung);
                }
            }
        }
    }

    /// No choice of at least `bytes` bytes in parts of up to `largest` has a shorter step.
    fn least_step(&self, bytes: u64, largest: u64) -> f64 {
        let problem = self.problem;
        let link = bytes as f64 * problem.picoseconds_per_byte;
        let copies = bytes.div_ceil(largest.max(1));
        let taking = copies.saturating_mul(problem.handover);
        let steps = problem.keys.iter().map(|key| {
            let compute = key.total.saturating_add(taking);
            key.weight * (compute as f64).max(link)
        });
        // sums in another order may differ in their last bit
        steps.sum::<f64>() * (1.0 - 1e-12)
    }

    fn consider(&mut self, strategy: Strategy, streams: &[bool]) {
        let problem = self.problem;
        self.judged.entry(strategy).or_default();
        let streams: Vec<bool> = streams
            .iter()
            .enumerate()
            .map(|(part, streams)| *streams && layout::allowed(self.layout, problem, part))
            .collect();
        let mut hasher = DefaultHasher::new();
        streams.hash(&mut hasher);
        if !self.seen.insert(hasher.finish()) {
            return;
        }
        let sums = Sums::new(problem, &streams);
        let floor = sums.floor(problem);
        let hopeless = match (self.aim, &self.best) {
            (Aim::Held(limit), _) if floor > limit => true,
            (Aim::Step, Some(best)) => {
                floor > best.step || (floor >= best.step && sums.moved >= best.moved)
            }
            _ => false,
        };
        if hopeless {
            return;
        }
        let resident = self.residence.bytes(problem, &streams);
        if sums.moved == 0 {
            if resident <= self.room {
                let addresses = Addresses {
                    capacity: 0,
                    offsets: vec![None; streams.len()],
                };
                self.judge(strategy, &streams, &sums, resident, addresses);
            }
            return;
        }
        let largest = ring::largest_use(problem, &streams);
        let least = resident + problem.whole(LABEL_BYTES + largest);
        let mut room = self.room;
        if let (Aim::Held(_), Some(best)) = (self.aim, &self.best) {
            room = room.min(best.held.saturating_sub(1));
        }
        if least > room {
            return;
        }
        let (layout, aim) = (self.layout, self.aim);
        // a ring up to the last whole unit
        let room = problem.whole_within(room - resident) - LABEL_BYTES;
        let smallest_first = aim != Aim::Step;
        let mut enough = false;
        layout::places(
            layout,
            problem,
            &streams,
            room,
            smallest_first,
            |addresses| {
                let held = resident + problem.whole(LABEL_BYTES + addresses.capacity);
                let step = self.judge(strategy, &streams, &sums, held, addresses);
                enough = match aim {
                    Aim::Step => step <= floor,
                    Aim::Held(limit) => step <= limit,
                };
                enough
            },
        );
        if !enough && aim == Aim::Step && layout == Layout::Ring {
            let most = self.best.as_ref().map_or(f64::INFINITY, |best| best.step);
            let step_of = |cycle: &Cycle| weighted(problem, |key| cycle.step(&key.compute));
            if let Some(addresses) = exact::best(problem, &streams, room, most, &step_of) {
                let held = resident + problem.whole(LABEL_BYTES + addresses.capacity);
                self.judge(strategy, &streams, &sums, held, addresses);
            }
        }
    }

    /// Simulates a choice with places, and keeps it if it is the best. Returns its step.
    fn judge(
        &mut self,
        strategy: Strategy,
        streams: &[bool],
        sums: &Sums,
        held: u64,
        addresses: Addresses,
    ) -> f64 {
        let cycle = Cycle::new(self.problem, &addresses.offsets, addresses.capacity);
        let step = weighted(self.problem, |key| cycle.step(&key.compute));
        let (judged, least) = self.judged.entry(strategy).or_default();
        *judged += 1;
        *least = Some(least.map_or(step, |least: f64| least.min(step)));
        let better = match (self.aim, &self.best) {
            (Aim::Held(limit), _) if step > limit => false,
            (_, None) => true,
            (Aim::Step, Some(best)) => (step, sums.moved) < (best.step, best.moved),
            (Aim::Held(_), Some(best)) => held < best.held,
        };
        if better {
            self.best = Some(Found {
                streams: streams.to_vec(),
                addresses,
                strategy,
                step,
                moved: sums.moved,
                held,
            });
        }
        step
    }
}

/// The mean of a figure of the batch keys.
fn weighted(problem: &Problem, figure: impl Fn(&crate::problem::Key) -> u64) -> f64 {
    let keys = problem.keys.iter();
    keys.map(|key| key.weight * figure(key) as f64).sum()
}

/// What a choice comes to, wherever its parts lie.
#[derive(Debug)]
struct Sums {
    moved: u64,
    link: u64,
    copies: u64,
}

impl Sums {
    fn new(problem: &Problem, streams: &[bool]) -> Self {
        let mut sums = Self {
            moved: 0,
            link: 0,
            copies: 0,
        };
        for held in &problem.uses {
            for part in held.iter().filter(|part| streams[**part as usize]) {
                sums.moved = sums.moved.saturating_add(problem.bytes[*part as usize]);
                sums.link = sums.link.saturating_add(problem.copy[*part as usize]);
                sums.copies += 1;
            }
        }
        sums
    }

    /// No places make the step shorter.
    fn floor(&self, problem: &Problem) -> f64 {
        let taking = self.copies.saturating_mul(problem.handover);
        weighted(problem, |key| {
            key.total.saturating_add(taking).max(self.link)
        })
    }
}
