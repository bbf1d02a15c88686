use std::collections::HashSet;

use flextensord_proto::v1::{Allocation, PlanLayer, PlanMemory, PlanPage, PlanPart};
use proptest::prelude::*;

use super::*;

/// A plan whose part `n` lies at the `n`-th place (in units of 256 bytes) of a ring.
fn plan(places: &[u64], layers: &[Vec<u32>]) -> Plan {
    let parts = (0u32..).zip(places).map(|(part, place)| PlanPart {
        part,
        streamed: true,
        allocation: 0,
        offset: place * 256,
        stored_bytes: 512,
        logical_bytes: 512,
        tensors: Vec::new(),
    });
    let layers = (0..).zip(layers).map(|(n, parts): (u32, _)| PlanLayer {
        name: n.to_string(),
        parts: parts.clone(),
    });
    let (parts, layers): (Vec<_>, Vec<_>) = (parts.collect(), layers.collect());
    let memory = PlanMemory {
        plan_version: 1,
        parts: u32::try_from(parts.len()).unwrap(),
        layers: u32::try_from(layers.len()).unwrap(),
        allocations: vec![Allocation {
            bytes: 1 << 20,
            ring: true,
            ..Allocation::default()
        }],
        ..PlanMemory::default()
    };
    let page = PlanPage {
        memory: Some(memory),
        parts,
        layers,
    };
    Plan::read(vec![page]).unwrap().0
}

#[test]
fn only_the_first_acquire_and_the_last_release_touch_a_part() {
    let mut table = HoldTable::new(&plan(&[0, 2, 4], &[]));
    let mut taken = Vec::new();
    let mut acquire = |table: &mut HoldTable, parts: &[u32]| {
        table.check(parts).unwrap();
        taken.clear();
        let take = |part| {
            taken.push(part);
            Ok::<(), ()>(())
        };
        table.acquire(parts, take, |_| ()).unwrap();
        taken.clone()
    };
    assert_eq!(acquire(&mut table, &[0, 1]), [0, 1]);
    assert_eq!(acquire(&mut table, &[1, 2]), [2]);
    let mut given = Vec::new();
    table.release(&[0, 1], |part| given.push(part));
    assert_eq!(given, [0]);
    table.release(&[1, 2], |part| given.push(part));
    assert_eq!(given, [0, 1, 2]);
    assert!(table.held().is_empty());
}

#[test]
fn a_part_that_overlaps_a_held_one_is_refused_before_anything_is_touched() {
    let mut table = HoldTable::new(&plan(&[0, 2, 1], &[]));
    table.acquire(&[0], |_| Ok::<(), ()>(()), |_| ()).unwrap();
    let overlap = Overlap { part: 2, held: 0 };
    assert_eq!(table.check(&[1, 2]), Err(overlap));
    assert_eq!(table.held(), [0]);
    assert_eq!(
        table.check(&[0, 1]),
        Ok(()),
        "a held part does not meet itself"
    );
    table.release(&[0], |_| ());
    assert_eq!(table.check(&[2]), Ok(()));
}

#[test]
fn a_layer_whose_own_parts_overlap_is_found() {
    let plan = plan(&[0, 2, 3], &[vec![0, 1], vec![0, 1, 2]]);
    assert_eq!(overlap_within(&plan, &plan.layers()[0]), None);
    let overlap = Overlap { part: 2, held: 1 };
    assert_eq!(overlap_within(&plan, &plan.layers()[1]), Some(overlap));
}

#[test]
fn an_acquire_that_fails_leaves_the_table_as_it_was() {
    let mut table = HoldTable::new(&plan(&[0, 2, 4, 6], &[]));
    table.acquire(&[1], |_| Ok::<(), ()>(()), |_| ()).unwrap();
    let mut undone = Vec::new();
    let failed = table.acquire(
        &[0, 1, 2, 3],
        |part| if part == 3 { Err("late") } else { Ok(()) },
        |part| undone.push(part),
    );
    assert_eq!(failed, Err("late"));
    assert_eq!(undone, [2, 0]);
    assert_eq!((table.held(), table.count(1)), (&[1u32][..], 1));
}

proptest! {
    /// Against a model that is a plain list of holds: words are touched exactly when
    /// the set of held parts changes, held parts never overlap, and nothing is left.
    #[test]
    fn the_table_agrees_with_a_list_of_holds(
        places in prop::collection::vec(0u64..24, 12),
        steps in prop::collection::vec((any::<bool>(), prop::collection::btree_set(0u32..12, 1..4), 0u32..20), 1..80),
    ) {
        let plan = plan(&places, &[]);
        let mut table = HoldTable::new(&plan);
        let mut holds: Vec<Vec<u32>> = Vec::new();
        let mut words: HashSet<u32> = HashSet::new();
        let meets = |one: u32, two: u32| one != two && places[one as usize].abs_diff(places[two as usize]) < 2;
        for (acquire, parts, fail) in steps {
            let parts: Vec<u32> = parts.into_iter().collect();
            let within = parts.iter().any(|&one| parts.iter().any(|&two| meets(one, two)));
            if acquire && !within {
                let conflict = parts.iter().filter(|part| !words.contains(part))
                    .any(|&part| words.iter().any(|&held| meets(part, held)));
                prop_assert_eq!(table.check(&parts).is_err(), conflict);
                if conflict { continue; }
                let before = words.clone();
                let cell = std::cell::RefCell::new(&mut words);
                let outcome = table.acquire(
                    &parts,
                    |part| if part == fail { Err(()) } else { assert!(cell.borrow_mut().insert(part)); Ok(()) },
                    |part| assert!(cell.borrow_mut().remove(&part)),
                );
                match outcome {
                    Ok(()) => holds.push(parts),
                    Err(()) => prop_assert_eq!(&words, &before),
                }
            } else if !acquire && !holds.is_empty() {
                let parts = holds.swap_remove(fail as usize % holds.len());
                table.release(&parts, |part| assert!(words.remove(&part)));
            }
            let held: HashSet<u32> = holds.iter().flatten().copied().collect();
            prop_assert_eq!(&words, &held);
            prop_assert_eq!(table.held().iter().copied().collect::<HashSet<_>>(), held);
            prop_assert!(words.iter().all(|&one| words.iter().all(|&two| !meets(one, two))));
        }
        for parts in holds { table.release(&parts, |part| assert!(words.remove(&part))); }
        prop_assert!(words.is_empty() && table.held().is_empty());
    }
}
