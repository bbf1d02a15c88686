//! A small model of the daemon: what may be true when, from what was asked and answered.
//!
//! A call takes effect at some moment between its begin and its answer. So each fact has a
//! time for which it certainly holds and a longer one for which it may, and an answer is
//! wrong when no moment of its call allows it.

use crate::{
    holdings::{Holding, holdings},
    record::{Answer, Call, Moment, What},
};

/// What else happened.
#[derive(Debug, Default)]
pub(crate) struct Deeds {
    /// When actors were killed: before the signal, and when they were found dead.
    pub(crate) killed: Vec<(u64, Moment, Moment)>,
    /// When the daemon was killed.
    pub(crate) crashes: Vec<Moment>,
    /// Whether a successor takes over what a dead one left.
    pub(crate) adopts: bool,
}

/// Every answer that cannot be, in words.
pub(crate) fn violations(calls: &[Call], deeds: &Deeds) -> Vec<String> {
    let (held, mut found) = holdings(calls, deeds);
    one_owner_a_name(&held, &mut found);
    taken_only_by_somebody(calls, &held, &mut found);
    epochs_grow(calls, &mut found);
    status_tells_what_is(calls, &held, &mut found);
    for (number, call) in calls.iter().enumerate() {
        match (call.what, &call.answer) {
            (What::Drop, Answer::Ok) => in_use_is_not_dropped(call, &held, &mut found),
            (What::Register, Answer::Refused(kind)) if kind == "NOT_FOUND" => {
                if let Some(load) = certainly_there(calls, call, deeds) {
                    let text = "a set that is there was not found";
                    found.push(format!("{text}: {call:?} after {load:?}"));
                }
            }
            (What::Register, Answer::Ok) if certainly_gone(calls, number) => {
                found.push(format!("a set that is not there was found: {call:?}"));
            }
            (What::Load, Answer::Ok) => one_content(call, &held, &mut found),
            _ => {}
        }
    }
    found
}

fn one_owner_a_name(held: &[Holding], found: &mut Vec<String>) {
    let mut sure: Vec<&Holding> = held.iter().filter(|h| h.is_sure()).collect();
    sure.sort_by(|a, b| (&a.name, a.from).cmp(&(&b.name, b.from)));
    for pair in sure.windows(2) {
        if pair[0].name == pair[1].name && pair[1].from < pair[0].until {
            found.push(format!("two owners of one name: {pair:?}"));
        }
    }
}

fn taken_only_by_somebody(calls: &[Call], held: &[Holding], found: &mut Vec<String>) {
    let taken = |call: &&Call| call.answer == Answer::Refused("MANAGER_TAKEN".to_owned());
    for call in calls.iter().filter(taken) {
        let may = |h: &&Holding| h.may_be(&call.name) && h.may_meet(call.begin, call.end);
        if !held.iter().any(|h| may(&h)) {
            found.push(format!("taken by nobody: {call:?}"));
        }
    }
}

fn epochs_grow(calls: &[Call], found: &mut Vec<String>) {
    let opened = |call: &&Call| call.what == What::Open && call.answer == Answer::Ok;
    let mut begun: Vec<&Call> = calls.iter().filter(opened).collect();
    let mut ended = begun.clone();
    begun.sort_by_key(|call| call.begin);
    ended.sort_by_key(|call| call.end);
    let (mut highest, mut next) = (0, 0);
    for call in begun {
        while let Some(before) = ended.get(next).filter(|b| b.end < call.begin) {
            highest = highest.max(before.epoch);
            next += 1;
        }
        if call.epoch <= highest {
            found.push(format!("epoch not over {highest}: {call:?}"));
        }
    }
}

fn status_tells_what_is(calls: &[Call], held: &[Holding], found: &mut Vec<String>) {
    let status = |call: &&Call| call.what == What::Status && call.answer == Answer::Ok;
    for call in calls.iter().filter(status) {
        for holding in held.iter().filter(|h| h.is_sure()) {
            let throughout = holding.from <= call.begin && call.end <= holding.until;
            let entry = (holding.name.clone(), holding.epoch);
            // a manager that a successor keeps is none of its own until its owner is back
            let comes_back = |h: &Holding| h.is_away(call.begin, call.end);
            if throughout && !call.listed.contains(&entry) && !comes_back(holding) {
                found.push(format!("not in a status: {holding:?}, {call:?}"));
            }
        }
        for (name, epoch) in &call.listed {
            let may = |h: &&Holding| {
                h.may_be(name)
                    && (h.epoch == *epoch || h.epoch == 0)
                    && h.may_meet(call.begin, call.end)
            };
            if !held.iter().any(|h| may(&h)) {
                let before = before(calls, name, call.end);
                let text = format!("{name} of epoch {epoch} is nobody's: {call:?}");
                found.push(format!("{text} after {before:?}"));
            }
        }
    }
}

/// The last calls that may have made a manager of that name.
fn before<'a>(calls: &'a [Call], name: &str, end: Moment) -> Vec<&'a Call> {
    let of = |call: &&Call| {
        call.what == What::Open && (call.name == name || call.name.is_empty()) && call.begin < end
    };
    let mut opens: Vec<&Call> = calls.iter().filter(of).collect();
    opens.sort_by_key(|call| std::cmp::Reverse(call.begin));
    opens.truncate(4);
    opens
}

fn in_use_is_not_dropped(call: &Call, held: &[Holding], found: &mut Vec<String>) {
    let used = held.iter().filter(|h| h.is_sure()).find(|h| {
        let attached = h.attached.as_ref().filter(|a| a.set == call.name);
        attached.is_some_and(|a| a.since <= call.begin && call.end <= h.until)
    });
    if let Some(holding) = used {
        found.push(format!("dropped in use: {call:?}, {holding:?}"));
    }
}

fn one_content(call: &Call, held: &[Holding], found: &mut Vec<String>) {
    let other = held.iter().filter(|h| h.is_sure()).find(|h| {
        let attached = h.attached.as_ref().filter(|a| a.set == call.name);
        attached.is_some_and(|a| {
            a.since <= call.begin && call.end <= h.until && Some(a.content) != call.content
        })
    });
    if let Some(holding) = other {
        found.push(format!("two contents of one name: {call:?}, {holding:?}"));
    }
}

/// Whether a load or drop may have changed something.
fn may_have(call: &Call) -> bool {
    matches!(call.answer, Answer::Ok | Answer::Unknown)
}

/// The load that made the set which `at` names, if that is there during all of `at`.
fn certainly_there<'a>(calls: &'a [Call], at: &'a Call, deeds: &Deeds) -> Option<&'a Call> {
    let of = |what: What| {
        calls
            .iter()
            .filter(move |call| call.what == what && call.name == at.name)
    };
    let mut loads = of(What::Load).filter(|l| l.answer == Answer::Ok && l.end <= at.begin);
    loads.find(|load| {
        let dropped = of(What::Drop)
            .any(|drop| may_have(drop) && drop.end >= load.begin && drop.begin <= at.end);
        let crashed = |moment: &Moment| load.begin <= *moment && *moment <= at.end;
        !dropped && (deeds.adopts || !deeds.crashes.iter().any(crashed))
    })
}

/// Whether the set that a call names is not there at any moment of it. None is there when a
/// round begins.
fn certainly_gone(calls: &[Call], number: usize) -> bool {
    let at = &calls[number];
    let of = |what: What| {
        calls
            .iter()
            .filter(move |call| call.what == what && call.name == at.name)
    };
    let mut loads = of(What::Load).filter(|load| may_have(load) && load.begin <= at.end);
    if loads.next().is_none() {
        return true;
    }
    let mut drops = of(What::Drop).filter(|d| d.answer == Answer::Ok && d.end <= at.begin);
    drops.any(|drop| {
        !of(What::Load).any(|load| may_have(load) && load.end >= drop.begin && load.begin <= at.end)
    })
}
