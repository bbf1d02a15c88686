//! The checker finds the faults that are put in. A test here fails when it does not.

use super::{
    explorer::{Verdict, explore},
    planted::Planted,
    setting::{Kind, Setting},
    world::{Broken, Sequences},
};

/// A setting with a fault, in which one breach is looked for.
fn seeking(kind: Kind, planted: Planted, broken: Broken) -> Setting {
    Setting {
        planted: Some(planted),
        seeks: Some(broken),
        ..Setting::new(kind)
    }
}

fn is_found(setting: &Setting) {
    let verdict = explore(setting);
    println!("{:?}, {:?}: {verdict:?}", setting.planted, setting.kind);
    assert!(
        matches!(&verdict, Verdict::Broken(broken, _) if Some(*broken) == setting.seeks),
        "not found: {setting:?}: {verdict:?}"
    );
}

fn is_not_found(setting: &Setting) {
    let verdict = explore(setting);
    println!("{:?}, {:?}: {verdict:?}", setting.planted, setting.kind);
    assert!(
        matches!(verdict, Verdict::Holds { .. }),
        "{setting:?}: {verdict:?}"
    );
}

#[test]
fn without_revoke_a_client_that_skips_waits_for_ever() {
    for kind in [Kind::Cpu, Kind::Stream] {
        let setting = Setting {
            planted: Some(Planted::NoRevoke),
            ..Setting::new(kind)
        };
        let verdict = explore(&setting);
        println!("{kind:?}: {verdict:?}");
        assert!(matches!(verdict, Verdict::Deadlock(_)), "{verdict:?}");
    }
}

#[test]
fn a_part_dropped_without_proof_is_read_torn_on_a_stream() {
    is_found(&seeking(Kind::Stream, Planted::NaiveDrop, Broken::TornRead));
}

#[test]
fn a_part_dropped_without_proof_by_exchange_is_not_read_torn_but_starves_its_client() {
    // where both sides exchange whole words, one of take and drop fails: the proof is
    // needed for progress alone
    is_not_found(&seeking(Kind::Cpu, Planted::NaiveDrop, Broken::TornRead));
    let setting = Setting {
        planted: Some(Planted::NaiveDrop),
        ..Setting::new(Kind::Cpu)
    };
    let verdict = explore(&setting);
    assert!(matches!(verdict, Verdict::Starved(_)), "{verdict:?}");
}

#[test]
fn want_looked_at_before_the_empty_word_proves_nothing() {
    let setting = Setting {
        revokes_all: true,
        ..seeking(Kind::Stream, Planted::SwappedLooks, Broken::TornRead)
    };
    is_found(&setting);
}

#[test]
fn want_looked_at_first_does_no_harm_while_only_the_wanted_place_is_cleared() {
    // what overlaps the wanted part cannot be full while that one is filled or in use,
    // and the engine issues nothing between its two looks and the revoke
    is_not_found(&Setting {
        planted: Some(Planted::SwappedLooks),
        ..Setting::new(Kind::Stream)
    });
}

/// Sequences from `base` on, that do not run in a circle: comparing them is meant to be
/// right as long as they do not wrap.
fn comparing(base: u32) -> Setting {
    Setting {
        sequences: Sequences { base, modulus: 4 },
        circle: false,
        ..seeking(Kind::Stream, Planted::Lenient, Broken::TornRead)
    }
}

#[test]
fn a_sequence_compared_by_order_breaks_where_it_wraps_and_only_there() {
    is_found(&comparing(u32::MAX - 1));
    is_not_found(&Setting {
        seeks: None,
        ..comparing(0)
    });
}

#[test]
fn a_successor_that_does_not_wait_for_the_copies_of_its_predecessor_is_found() {
    for kind in [Kind::Cpu, Kind::Stream] {
        is_found(&Setting {
            deaths: 1,
            ..seeking(kind, Planted::Impatient, Broken::TornRead)
        });
    }
}

#[test]
fn a_ring_given_away_under_a_copy_is_found() {
    for kind in [Kind::Cpu, Kind::Stream] {
        is_found(&Setting {
            mortal_clients: 1,
            ..seeking(kind, Planted::EarlyFree, Broken::FreedWritten)
        });
    }
}
