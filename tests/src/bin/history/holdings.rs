//! Who held which manager, for certain and perhaps, and which weight set with it.

use std::collections::BTreeMap;

use crate::{
    model::Deeds,
    record::{Answer, Call, Moment, What},
};

/// How long after its owner's end a manager may still be there: the time to resume a lost
/// stream, and the successor's patience, as the daemon is configured, and a loaded machine.
const GRACE: Moment = 8_000_000_000;

/// A weight set that a manager keeps from being dropped.
#[derive(Debug, Clone)]
pub(crate) struct Attached {
    pub(crate) set: String,
    pub(crate) content: u64,
    /// From when on, for certain.
    pub(crate) since: Moment,
}

/// A manager in one owner's hands.
#[derive(Debug, Clone)]
pub(crate) struct Holding {
    pub(crate) name: String,
    /// 0 when the answer never came.
    pub(crate) epoch: u64,
    /// For certain from here to `until`; nothing is certain when `until` comes first.
    pub(crate) from: Moment,
    pub(crate) until: Moment,
    /// Perhaps from here to `latest`.
    pub(crate) earliest: Moment,
    pub(crate) latest: Moment,
    pub(crate) attached: Option<Attached>,
    /// Deaths of the daemon: for a while its owner may not be back.
    away: Vec<Moment>,
}

impl Holding {
    pub(crate) fn is_sure(&self) -> bool {
        self.epoch > 0 && self.from < self.until
    }

    /// Whether it may be of that name: which default one it got may be unknown.
    pub(crate) fn may_be(&self, name: &str) -> bool {
        self.name == name || self.name.is_empty() && name.starts_with("default")
    }

    /// Whether it may be held at some moment of that time.
    pub(crate) fn may_meet(&self, begin: Moment, end: Moment) -> bool {
        self.earliest <= end && begin <= self.latest
    }

    /// Whether its owner may not be back from a daemon's death then.
    pub(crate) fn is_away(&self, begin: Moment, end: Moment) -> bool {
        let mut away = self.away.iter();
        away.any(|death| *death <= end && begin <= death.saturating_add(GRACE))
    }

    /// Ends it: certain until `begin`, perhaps until `end`.
    fn end(&mut self, begin: Moment, end: Moment) {
        self.until = self.until.min(begin);
        self.latest = self.latest.min(end);
    }
}

/// All holdings, and leases that were lost for no reason.
pub(crate) fn holdings(calls: &[Call], deeds: &Deeds) -> (Vec<Holding>, Vec<String>) {
    let mut all = Vec::new();
    let mut found = Vec::new();
    let mut by_actor: BTreeMap<u64, Vec<&Call>> = BTreeMap::new();
    for call in calls {
        by_actor.entry(call.who).or_default().push(call);
    }
    for (who, own) in by_actor {
        let killed = deeds.killed.iter().find(|(of, _, _)| *of == who);
        let mut now: Option<Holding> = None;
        for call in own {
            match call.what {
                What::Open => {
                    // given up with an error that left open whether it was over
                    if let Some(mut holding) = now.take() {
                        holding.end(holding.from, call.begin.saturating_add(GRACE));
                        all.push(holding);
                    }
                    now = opened(call, deeds);
                }
                What::Register | What::Use | What::Close => {
                    let is_over = match &mut now {
                        Some(holding) => went_on(holding, call, calls, deeds, &mut found),
                        None => false,
                    };
                    if is_over {
                        all.extend(now.take());
                    }
                }
                What::Load | What::Drop | What::Terminate | What::Status => {}
            }
        }
        if let (Some(holding), Some((_, before, after))) = (&mut now, killed) {
            holding.end(*before, after.saturating_add(GRACE));
        }
        all.extend(now);
    }
    for holding in &mut all {
        // whoever is told to end it may do so at any moment of that
        let told = calls
            .iter()
            .filter(|call| call.what == What::Terminate && call.name == holding.name)
            .filter(|call| !matches!(call.answer, Answer::Refused(_)))
            .filter(|call| call.end >= holding.earliest)
            .map(|call| call.begin);
        holding.until = told.fold(holding.until, Moment::min);
    }
    (all, found)
}

fn opened(call: &Call, deeds: &Deeds) -> Option<Holding> {
    let mut holding = Holding {
        name: call.name.clone(),
        epoch: call.epoch,
        from: call.end,
        until: Moment::MAX,
        earliest: call.begin,
        latest: Moment::MAX,
        attached: None,
        away: deeds.crashes.clone(),
    };
    match call.answer {
        Answer::Ok => {}
        // it may have been opened, and nobody knows
        Answer::Unknown => holding.end(0, call.end.saturating_add(GRACE)),
        // somebody ended it before its owner was told of it
        Answer::Lost => holding.end(0, call.end),
        Answer::Refused(_) => return None,
    }
    if !deeds.adopts
        && let Some(crash) = deeds.crashes.iter().find(|moment| **moment >= call.begin)
    {
        holding.end(*crash, Moment::MAX);
    }
    Some(holding)
}

/// Takes a call into account; whether the holding is over with it.
fn went_on(
    holding: &mut Holding,
    call: &Call,
    calls: &[Call],
    deeds: &Deeds,
    found: &mut Vec<String>,
) -> bool {
    match (call.what, &call.answer) {
        (What::Close, Answer::Ok) => holding.end(call.begin, call.end),
        (What::Close, _) => holding.end(call.begin, call.end.saturating_add(GRACE)),
        (_, Answer::Lost) => {
            let told = calls.iter().any(|other| {
                other.what == What::Terminate
                    && other.name == holding.name
                    && !matches!(other.answer, Answer::Refused(_))
                    && other.end >= holding.earliest
                    && other.begin <= call.end
            });
            let crashed = |moment: &Moment| holding.earliest <= *moment && *moment <= call.end;
            let excused = told || !deeds.adopts && deeds.crashes.iter().any(crashed);
            if !excused {
                found.push(format!(
                    "a lease was lost for no reason: {holding:?}, {call:?}"
                ));
            }
            // when it was lost is not known
            holding.end(holding.from, call.end);
        }
        // the actor gives up a manager with half a registration
        (What::Register, Answer::Unknown) => {
            holding.end(call.begin, call.end.saturating_add(GRACE));
        }
        (What::Register, Answer::Ok) => {
            holding.attached = call.content.map(|content| Attached {
                set: call.name.clone(),
                content,
                since: call.end,
            });
            return false;
        }
        _ => return false,
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::violations;

    fn call(who: u64, what: What, name: &str, begin: Moment, answer: Answer) -> Call {
        Call {
            who,
            what,
            name: name.to_owned(),
            begin,
            end: begin + 10,
            epoch: if what == What::Open { begin } else { 0 },
            answer,
            content: Some(0),
            error: String::new(),
            listed: Vec::new(),
        }
    }

    fn adopting() -> Deeds {
        Deeds {
            adopts: true,
            ..Deeds::default()
        }
    }

    #[test]
    fn two_owners_of_one_name_are_found() {
        let mut calls = vec![
            call(1, What::Open, "m", 100, Answer::Ok),
            call(2, What::Open, "m", 200, Answer::Ok),
            call(1, What::Close, "m", 300, Answer::Ok),
            call(2, What::Close, "m", 400, Answer::Ok),
        ];
        assert_eq!(violations(&calls, &adopting()).len(), 1);
        calls[2].begin = 150;
        calls[2].end = 160;
        assert_eq!(violations(&calls, &adopting()), Vec::<String>::new());
    }

    #[test]
    fn a_name_taken_by_nobody_and_an_epoch_that_falls_are_found() {
        let taken = Answer::Refused("MANAGER_TAKEN".to_owned());
        let calls = [call(1, What::Open, "m", 100, taken)];
        assert_eq!(violations(&calls, &adopting()).len(), 1);
        let mut calls = [
            call(1, What::Open, "a", 100, Answer::Ok),
            call(2, What::Open, "b", 200, Answer::Ok),
        ];
        assert_eq!(violations(&calls, &adopting()), Vec::<String>::new());
        calls[1].epoch = 100;
        assert_eq!(violations(&calls, &adopting()).len(), 1);
    }

    #[test]
    fn a_lease_may_be_lost_to_a_terminate_and_to_a_crash_without_adoption() {
        let mut calls = vec![
            call(1, What::Open, "m", 100, Answer::Ok),
            call(1, What::Use, "m", 300, Answer::Lost),
        ];
        let crashed = |adopts| Deeds {
            crashes: vec![200],
            adopts,
            ..Deeds::default()
        };
        assert_eq!(violations(&calls, &crashed(true)).len(), 1);
        assert_eq!(violations(&calls, &crashed(false)).len(), 0);
        calls.push(call(2, What::Terminate, "m", 200, Answer::Ok));
        assert_eq!(violations(&calls, &crashed(true)).len(), 0);
    }

    #[test]
    fn a_set_in_use_is_not_dropped_and_one_that_is_there_is_found() {
        let calls = [
            call(1, What::Load, "s", 10, Answer::Ok),
            call(1, What::Open, "m", 100, Answer::Ok),
            call(1, What::Register, "s", 200, Answer::Ok),
            call(2, What::Drop, "s", 300, Answer::Ok),
            call(1, What::Close, "m", 400, Answer::Ok),
            call(3, What::Register, "s", 500, Answer::Ok),
        ];
        assert_eq!(violations(&calls, &adopting()).len(), 2);
        let missed = Answer::Refused("NOT_FOUND".to_owned());
        let calls = [
            call(1, What::Load, "s", 10, Answer::Ok),
            call(1, What::Register, "s", 200, missed),
        ];
        assert_eq!(violations(&calls, &adopting()).len(), 1);
    }
}
