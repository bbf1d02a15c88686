//! What the hand-over does, whatever the order of steps: no client ever reads anything
//! but its part, and none waits in vain.

use super::{
    explorer::{Verdict, explore, explore_and},
    setting::{Kind, ONE_PLACE, Program, Refusals, STAGGERED, Setting, THREE_PLACES},
    walk::walk,
    world::{Broken, Doing, Stage, Task},
};

/// Asserts that every property holds in every state of a setting.
fn holds(name: &str, setting: Setting) {
    match explore(&setting) {
        Verdict::Holds { states, steps } => {
            println!("{name}, {:?}: {states} states, {steps} steps", setting.kind);
        }
        found => panic!("{name}, {:?}: {found:?}", setting.kind),
    }
}

/// The same on both kinds of device.
fn holds_on_both(name: &str, change: impl Fn(Setting) -> Setting) {
    for kind in [Kind::Cpu, Kind::Stream] {
        holds(name, change(Setting::new(kind)));
    }
}

#[test]
fn a_client_free_to_skip_and_repeat_gets_its_own_bytes_and_never_waits_in_vain() {
    holds_on_both("free", |setting| setting);
}

#[test]
fn passes_in_order_with_skips_and_with_repeats_go_on_for_ever() {
    const ORDERS: [&[u8]; 4] = [&[0, 1, 2], &[0, 2], &[2, 0, 0, 1], &[1, 1]];
    for order in ORDERS {
        holds_on_both("order", |setting| Setting {
            program: Program::Order(order),
            ..setting
        });
    }
}

#[test]
fn a_part_that_reaches_into_two_places_is_kept_apart_from_both() {
    holds_on_both("staggered", |setting| Setting {
        ranges: STAGGERED,
        deaths: 1,
        ..setting
    });
}

#[test]
fn four_parts_of_which_three_are_held_at_once() {
    holds_on_both("four parts", |setting| Setting {
        ranges: THREE_PLACES,
        program: Program::Free(3),
        ..setting
    });
}

#[test]
fn the_proof_of_a_frozen_client_covers_the_revoke_of_every_full_part() {
    holds_on_both("revokes all", |setting| Setting {
        revokes_all: true,
        deaths: 1,
        ..setting
    });
}

#[test]
fn a_wait_given_up_at_its_deadline_does_not_meet_a_revoke() {
    for revokes_all in [false, true] {
        holds(
            "gives up",
            Setting {
                gives_up: true,
                revokes_all,
                deaths: 1,
                ..Setting::new(Kind::Cpu)
            },
        );
    }
}

#[test]
fn a_part_in_several_pieces_is_published_when_the_last_has_arrived() {
    holds_on_both("pieces", |setting| Setting {
        ranges: STAGGERED,
        pieces: 2,
        deaths: 1,
        ..setting
    });
}

#[test]
fn a_copy_that_the_device_refuses_leaves_the_part_as_it_was() {
    holds_on_both("refusals", |setting| Setting {
        refusals: Refusals::First,
        deaths: 1,
        ..setting
    });
}

#[test]
fn a_refusal_of_a_later_piece_must_be_taken_back_as_well() {
    for kind in [Kind::Cpu, Kind::Stream] {
        let setting = Setting {
            ranges: STAGGERED,
            pieces: 2,
            refusals: Refusals::AnyKept,
            ..Setting::new(kind)
        };
        // the part would count as under way for ever
        let verdict = explore(&setting);
        assert!(matches!(verdict, Verdict::Deadlock(_)), "{verdict:?}");
        // what is issued next runs behind the pieces that are under way: nobody reads them
        let setting = Setting {
            refusals: Refusals::Any,
            seeks: Some(Broken::TornRead),
            ..setting
        };
        holds("refused later", setting);
    }
}

#[test]
fn two_successors_after_deaths_anywhere_go_on_from_the_journal() {
    holds_on_both("deaths", |setting| Setting {
        deaths: 2,
        ..setting
    });
}

#[test]
fn a_daemon_can_die_between_journal_submission_copy_and_publication() {
    let setting = Setting {
        deaths: 1,
        ..Setting::new(Kind::Cpu)
    };
    let mut met = [false; 5];
    let verdict = explore_and(&setting, |world| {
        // the death is still ahead: every one of these states has a step into it
        if world.deaths == 0 {
            return;
        }
        let first = world.queue.first();
        met[0] |= matches!(world.engine.task, Task::Issue(..));
        met[1] |= matches!(world.engine.task, Task::Submit(..));
        met[2] |= first.is_some_and(|job| job.stage == Stage::Queued);
        met[3] |= first.is_some_and(|job| job.stage == Stage::Arrived);
        // between the two accesses of the publication
        met[4] |= first.is_some_and(|job| !job.log.is_empty());
    });
    assert!(matches!(verdict, Verdict::Holds { .. }), "{verdict:?}");
    assert_eq!(met, [true; 5]);
}

#[test]
fn a_client_can_die_between_want_wait_in_use_use_and_release() {
    for kind in [Kind::Cpu, Kind::Stream] {
        let setting = Setting {
            mortal_clients: 1,
            deaths: 1,
            ..Setting::new(kind)
        };
        let mut met = [false; 5];
        let verdict = explore_and(&setting, |world| {
            let client = world.managers[0].client;
            let begun = !client.log.is_empty();
            let last = client.held.count_ones() == 1;
            met[0] |= matches!(client.doing, Doing::Look(_) | Doing::Pass(_)) && !begun;
            // seen full, not in use yet
            met[1] |= matches!(client.doing, Doing::Look(_)) && begun;
            met[1] |= matches!(client.doing, Doing::Mark(_));
            // in use, and `want` still stands
            met[2] |= last && client.doing == Doing::End;
            met[3] |= last && client.doing == Doing::Idle;
            met[4] |= client.held == 0 && client.doing == Doing::Idle;
        });
        assert!(matches!(verdict, Verdict::Holds { .. }), "{verdict:?}");
        assert_eq!(met, [true; 5]);
    }
}

#[test]
fn a_manager_neither_stalls_nor_reads_other_bytes_when_the_client_beside_it_dies() {
    holds(
        "two managers",
        Setting {
            managers: 2,
            ranges: ONE_PLACE,
            program: Program::Order(&[0, 1]),
            mortal_clients: 1,
            queued: 1,
            ..Setting::new(Kind::Cpu)
        },
    );
    holds(
        "two managers",
        Setting {
            managers: 2,
            ranges: ONE_PLACE,
            program: Program::Free(1),
            mortal_clients: 1,
            ..Setting::new(Kind::Stream)
        },
    );
}

#[test]
fn two_managers_are_served_across_the_death_of_their_daemon() {
    holds(
        "two managers and a death",
        Setting {
            managers: 2,
            ranges: ONE_PLACE,
            program: Program::Free(1),
            deaths: 1,
            ..Setting::new(Kind::Stream)
        },
    );
}

#[test]
fn a_sleeping_client_is_woken_unless_a_wait_was_given_up_or_the_daemon_died() {
    let setting = Setting {
        sleeps: true,
        ..Setting::new(Kind::Cpu)
    };
    holds("sleeps", setting);
    // The client sleeps on the state that it saw. A revoke that goes back to a wait given
    // up before and the copy after it may come and go between that look and the sleep:
    // full, empty, full. It then sleeps on a full part until it looks again by itself,
    // which the client library does after 50 ms.
    let gives_up = Setting {
        gives_up: true,
        ..setting
    };
    let verdict = explore(&gives_up);
    assert!(matches!(verdict, Verdict::Deadlock(_)), "{verdict:?}");
    // sleeping only on "empty" needs no second look for that
    let on_empty = Setting {
        sleeps_on_empty: true,
        ..gives_up
    };
    holds("sleeps on empty", on_empty);
    // but for a daemon that dies between a publication and the waking that belongs to it
    let verdict = explore(&Setting {
        deaths: 1,
        gives_up: false,
        ..on_empty
    });
    assert!(matches!(verdict, Verdict::Deadlock(_)), "{verdict:?}");
}

#[test]
fn long_random_runs_of_larger_rings_find_nothing() {
    for kind in [Kind::Cpu, Kind::Stream] {
        for seed in 1..=4 {
            let setting = Setting {
                ranges: &[(0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (0, 3)],
                managers: 2,
                program: Program::Free(3),
                pieces: 2,
                queued: 2,
                refusals: Refusals::First,
                gives_up: kind == Kind::Cpu,
                mortal_clients: 1,
                revokes_all: seed % 2 == 0,
                ..Setting::new(kind)
            };
            let walked = walk(&setting, seed, 250_000);
            assert_eq!(walked.broken, None, "seed {seed}");
            println!("walk, {kind:?}, seed {seed}: {walked:?}");
            assert!(walked.acquired.iter().all(|count| *count > 100));
            assert!(walked.deaths > 10);
        }
    }
}
