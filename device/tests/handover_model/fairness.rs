//! Whether a waiting client can be passed over for ever although nobody stands still.

use super::{
    client,
    explorer::{Graph, NONE},
    setting::Actor,
};

/// A state in which a client may stay in its acquire for ever while engine, copies and
/// itself go on whenever they can (weak fairness; giving up, deaths and what other
/// clients do are not counted on). Such a run ends in a strongly connected component of
/// the states in which the client is blocked, and takes a step of each of the three in
/// it, or passes a state where that one can do nothing.
pub(crate) fn starvation(graph: &Graph, manager: u8) -> Option<u32> {
    let blocked = |state: u32| {
        let world = &graph.states[state as usize];
        client::is_blocked(&world.managers[usize::from(manager)].client)
    };
    let counted = |actor: Actor| !matches!(actor, Actor::Death | Actor::Chance);
    let component = components(graph, blocked, counted);
    let count = component
        .iter()
        .filter(|c| **c != NONE)
        .max()
        .map_or(0, |most| *most + 1);
    let must = [Actor::Client(manager), Actor::Engine, Actor::Copies];
    // per component: whether it has a step at all, and who steps or rests in it
    let mut met = vec![(false, [false; 3]); count as usize];
    let mut sample = vec![NONE; count as usize];
    for (state, own) in (0u32..).zip(&component) {
        if *own == NONE {
            continue;
        }
        let entry = &mut met[*own as usize];
        let sample = &mut sample[*own as usize];
        *sample = (*sample).min(state);
        for (who, met) in must.iter().zip(&mut entry.1) {
            *met |= !graph.out(state).iter().any(|(actor, _)| actor == who);
        }
        for (actor, target) in graph.out(state) {
            if counted(*actor) && component[*target as usize] == *own {
                entry.0 = true;
                for (who, met) in must.iter().zip(&mut entry.1) {
                    *met |= actor == who;
                }
            }
        }
    }
    let unfair = met
        .iter()
        .position(|(step, all)| *step && all.iter().all(|met| *met))?;
    Some(sample[unfair])
}

/// Numbers the strongly connected components of a part of the graph (Tarjan, without
/// recursion); [`NONE`] outside of that part.
fn components(
    graph: &Graph,
    inside: impl Fn(u32) -> bool,
    counted: impl Fn(Actor) -> bool,
) -> Vec<u32> {
    let count = graph.states.len();
    let mut component = vec![NONE; count];
    let mut order = vec![NONE; count];
    let mut low = vec![NONE; count];
    let (mut next, mut found) = (0, 0);
    let mut path: Vec<(u32, usize)> = Vec::new();
    let mut open: Vec<u32> = Vec::new();
    for root in 0..u32::try_from(count).unwrap_or(NONE) {
        if order[root as usize] != NONE || !inside(root) {
            continue;
        }
        path.push((root, 0));
        while let Some((state, at)) = path.pop() {
            let here = state as usize;
            if at == 0 {
                order[here] = next;
                low[here] = next;
                next += 1;
                open.push(state);
            }
            match graph.out(state).get(at) {
                Some((actor, target)) => {
                    path.push((state, at + 1));
                    let there = *target as usize;
                    if !counted(*actor) || !inside(*target) {
                        continue;
                    }
                    if order[there] == NONE {
                        path.push((*target, 0));
                    } else if component[there] == NONE {
                        low[here] = low[here].min(order[there]);
                    }
                }
                None => {
                    if low[here] == order[here] {
                        while let Some(member) = open.pop() {
                            component[member as usize] = found;
                            if member == state {
                                break;
                            }
                        }
                        found += 1;
                    }
                    if let Some((parent, _)) = path.last() {
                        let parent = *parent as usize;
                        low[parent] = low[parent].min(low[here]);
                    }
                }
            }
        }
    }
    component
}
