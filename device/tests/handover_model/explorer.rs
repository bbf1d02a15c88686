//! Visits every state that a setting can reach.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hash as _, Hasher},
};

use super::{
    client, copies, engine,
    fairness::starvation,
    setting::{Actor, Setting, Step},
    world::{Broken, NOTHING, World, breaches},
};

/// More states than any setting here has: a run that meets it is a mistake.
const MOST: usize = 6_000_000;
/// Stands for "none" among indices of states.
pub(crate) const NONE: u32 = u32::MAX;

/// What a run found.
#[derive(Debug)]
#[expect(dead_code, reason = "traces are for those who read a failure")]
pub(crate) enum Verdict {
    /// Nothing: every property holds.
    Holds {
        /// States reached.
        states: usize,
        /// Steps between them.
        steps: usize,
    },
    /// A state that must not be, and how it came about.
    Broken(Broken, String),
    /// A state from which a waiting client is never served, and how it came about.
    Deadlock(String),
    /// A client that can be passed over for ever, though all others do their part.
    Starved(String),
}

/// The graph of all states.
pub(crate) struct Graph {
    pub(crate) states: Vec<World>,
    /// For each state, where its steps begin in `steps`.
    pub(crate) starts: Vec<u32>,
    /// Who steps, and to which state.
    pub(crate) steps: Vec<(Actor, u32)>,
    from: Vec<u32>,
    by_hash: HashMap<u64, u32, BuildHasherDefault<Plain>>,
    same_hash: Vec<u32>,
}

/// Keys are hashes already.
#[derive(Default)]
struct Plain(u64);

impl Hasher for Plain {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _bytes: &[u8]) {}

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

/// A fast hash of a state; equal hashes are told apart by comparison.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 29
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(value.into());
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0.rotate_left(5) ^ value).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    fn write_isize(&mut self, value: isize) {
        self.write_u64(value.cast_unsigned() as u64);
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }
}

/// All steps out of a state.
pub(crate) fn successors(setting: &Setting, world: &World, out: &mut Vec<(Step, World)>) {
    for manager in 0..setting.managers {
        client::steps(setting, world, manager, out);
    }
    engine::steps(setting, world, out);
    copies::steps(setting, world, out);
}

impl Graph {
    fn new() -> Self {
        Self {
            states: Vec::new(),
            starts: Vec::new(),
            steps: Vec::new(),
            from: Vec::new(),
            by_hash: HashMap::default(),
            same_hash: Vec::new(),
        }
    }

    fn add(&mut self, world: World, from: u32) -> u32 {
        let mut hasher = Mix::default();
        world.hash(&mut hasher);
        let hash = hasher.finish();
        let first = self.by_hash.get(&hash).copied().unwrap_or(NONE);
        let mut at = first;
        while at != NONE {
            if self.states[at as usize] == world {
                return at;
            }
            at = self.same_hash[at as usize];
        }
        let new = u32::try_from(self.states.len()).unwrap_or(NONE);
        self.states.push(world);
        self.from.push(from);
        self.same_hash.push(first);
        self.by_hash.insert(hash, new);
        new
    }

    /// The steps out of a state.
    pub(crate) fn out(&self, state: u32) -> &[(Actor, u32)] {
        let (from, to) = (state as usize, state as usize + 1);
        &self.steps[self.starts[from] as usize..self.starts[to] as usize]
    }

    /// How a state came about, by the fewest steps.
    fn trace(&self, setting: &Setting, mut state: u32) -> String {
        let mut steps = Vec::new();
        while self.from[state as usize] != NONE {
            let before = self.from[state as usize];
            let mut out = Vec::new();
            successors(setting, &self.states[before as usize], &mut out);
            let target = self.states[state as usize];
            let step = out.into_iter().find(|(_, world)| *world == target);
            if let Some((step, _)) = step {
                let part = Some(step.part).filter(|part| *part != NOTHING);
                let part = part.map_or(String::new(), |part| format!(" {part}"));
                steps.push(format!("{:?} {}{part}", step.actor, step.what));
            }
            state = before;
        }
        steps.reverse();
        steps.join("; ")
    }
}

/// The gravest breach in a state, of those that are looked for.
pub(crate) fn breach(setting: &Setting, world: &World) -> Option<Broken> {
    let found = breaches(world, setting.ranges, setting.sequences);
    let sought = |broken: &Broken| setting.seeks.is_none_or(|sought| sought == *broken);
    let mut all = Broken::ALL.into_iter().filter(sought);
    all.find(|broken| broken.is_in(found))
}

/// Explores a setting.
pub(crate) fn explore(setting: &Setting) -> Verdict {
    explore_and(setting, |_| {})
}

/// Explores a setting, and shows each state to `visit`.
pub(crate) fn explore_and(setting: &Setting, mut visit: impl FnMut(&World)) -> Verdict {
    let mut graph = Graph::new();
    graph.add(World::new(setting.deaths), NONE);
    let mut out = Vec::new();
    let mut at = 0;
    while at < graph.states.len() {
        let world = graph.states[at];
        let index = u32::try_from(at).unwrap_or(NONE);
        visit(&world);
        if let Some(broken) = breach(setting, &world) {
            return Verdict::Broken(broken, graph.trace(setting, index));
        }
        graph
            .starts
            .push(u32::try_from(graph.steps.len()).unwrap_or(NONE));
        successors(setting, &world, &mut out);
        for (step, next) in out.drain(..) {
            let target = graph.add(next, index);
            graph.steps.push((step.actor, target));
        }
        at += 1;
        assert!(at < MOST, "the setting has too many states: {setting:?}");
    }
    graph
        .starts
        .push(u32::try_from(graph.steps.len()).unwrap_or(NONE));
    // progress needs sequences that never end; a setting that seeks a breach seeks no more
    if setting.circle && setting.seeks.is_none() {
        for manager in 0..setting.managers {
            if let Some(state) = stuck(&graph, manager) {
                return Verdict::Deadlock(graph.trace(setting, state));
            }
            if let Some(state) = starvation(&graph, manager) {
                return Verdict::Starved(graph.trace(setting, state));
            }
        }
    }
    Verdict::Holds {
        states: graph.states.len(),
        steps: graph.steps.len(),
    }
}

/// A state, the first to be reached, from which the client cannot come out of its wait
/// by anything that the others or itself should do: chances and deaths do not count.
fn stuck(graph: &Graph, manager: u8) -> Option<u32> {
    let count = graph.states.len();
    let all = 0..u32::try_from(count).unwrap_or(NONE);
    let counted = |actor: &Actor| !matches!(actor, Actor::Death | Actor::Chance);
    // the steps backwards: those into a state stand from `begins[state]` on
    let mut begins = vec![0u32; count + 1];
    for (_, target) in graph.steps.iter().filter(|(actor, _)| counted(actor)) {
        begins[*target as usize] += 1;
    }
    let mut sum = 0;
    for begin in &mut begins {
        sum += *begin;
        *begin = sum;
    }
    let mut into = vec![NONE; sum as usize];
    for state in all.clone() {
        for (_, target) in graph.out(state).iter().filter(|(actor, _)| counted(actor)) {
            let begin = &mut begins[*target as usize];
            *begin -= 1;
            into[*begin as usize] = state;
        }
    }
    let blocked = |state: &u32| {
        let world = &graph.states[*state as usize];
        client::is_blocked(&world.managers[usize::from(manager)].client)
    };
    let mut good: Vec<bool> = all.clone().map(|state| !blocked(&state)).collect();
    let mut todo: Vec<u32> = all.filter(|state| !blocked(state)).collect();
    while let Some(state) = todo.pop() {
        let (from, to) = (begins[state as usize], begins[state as usize + 1]);
        for &before in &into[from as usize..to as usize] {
            if !std::mem::replace(&mut good[before as usize], true) {
                todo.push(before);
            }
        }
    }
    let found = good.iter().position(|good| !good)?;
    u32::try_from(found).ok()
}
