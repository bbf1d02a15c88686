//! What an actor did, as it says it on its standard output: a line before each call and one
//! after, so that of one that was killed it is known what it was about to do.

use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

/// Nanoseconds on a clock that all processes share.
pub(crate) type Moment = u64;

/// Now.
pub(crate) fn now() -> Moment {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC);
    let now = now.map(std::time::Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// A call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// Of a manager, by name.
    Open,
    /// Of a model with a weight set.
    Register,
    /// An acquire, or what else tells that a lease is over.
    Use,
    /// Of a manager.
    Close,
    /// Of a weight set, with one of two contents.
    Load,
    /// Of a weight set.
    Drop,
    /// Of a manager.
    Terminate,
    /// Of the daemon.
    Status,
}

impl What {
    const ALL: [(Self, &'static str); 8] = [
        (Self::Open, "open"),
        (Self::Register, "register"),
        (Self::Use, "use"),
        (Self::Close, "close"),
        (Self::Load, "load"),
        (Self::Drop, "drop"),
        (Self::Terminate, "terminate"),
        (Self::Status, "status"),
    ];

    pub(crate) fn name(self) -> &'static str {
        Self::ALL
            .iter()
            .find(|(it, _)| *it == self)
            .map_or("", |(_, name)| name)
    }

    fn named(name: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .find(|(_, it)| *it == name)
            .map(|(it, _)| *it)
    }
}

/// What came of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Done.
    Ok,
    /// Refused, nothing changed; with the kind.
    Refused(String),
    /// The lease is over.
    Lost,
    /// The connection failed, or the process was killed: it may have been done or not.
    Unknown,
}

/// A call with its answer.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) who: u64,
    pub(crate) what: What,
    /// Of the manager or the weight set.
    pub(crate) name: String,
    pub(crate) begin: Moment,
    /// When its answer came, or its caller was found dead.
    pub(crate) end: Moment,
    pub(crate) answer: Answer,
    pub(crate) epoch: u64,
    /// Which of the two contents.
    pub(crate) content: Option<u64>,
    /// What was said of a refusal.
    pub(crate) error: String,
    /// Names and epochs in a status.
    pub(crate) listed: Vec<(String, u64)>,
}

/// Says that a call begins.
pub(crate) fn begin(what: What, name: &str, content: Option<u64>) {
    let line = json!({
        "call": what.name(), "name": name, "begin": now(), "content": content,
    });
    println!("{line}");
}

/// Says what came of it.
pub(crate) fn end(answer: &Answer, more: &Value) {
    let (text, kind) = match answer {
        Answer::Ok => ("ok", ""),
        Answer::Refused(kind) => ("refused", kind.as_str()),
        Answer::Lost => ("lost", ""),
        Answer::Unknown => ("unknown", ""),
    };
    println!(
        "{}",
        json!({ "answer": text, "kind": kind, "end": now(), "more": more })
    );
}

/// The calls in what an actor said; a call without an answer ended with it, at `death`. A
/// line that is neither is an error of its own.
pub(crate) fn read(who: u64, lines: &[Value], death: Moment) -> Result<Vec<Call>, String> {
    let mut calls: Vec<Call> = Vec::new();
    let mut is_open = false;
    for line in lines {
        if let Some(what) = line["call"].as_str().and_then(What::named) {
            calls.push(Call {
                who,
                what,
                name: line["name"].as_str().unwrap_or_default().to_owned(),
                begin: line["begin"].as_u64().unwrap_or(0),
                end: death,
                answer: Answer::Unknown,
                epoch: 0,
                content: line["content"].as_u64(),
                error: String::new(),
                listed: Vec::new(),
            });
            is_open = true;
        } else if let Some(answer) = line["answer"].as_str()
            && let Some(call) = calls.last_mut().filter(|_| is_open)
        {
            is_open = false;
            call.end = line["end"].as_u64().unwrap_or(death);
            call.answer = match answer {
                "ok" => Answer::Ok,
                "lost" => Answer::Lost,
                "refused" => Answer::Refused(line["kind"].as_str().unwrap_or_default().to_owned()),
                _ => Answer::Unknown,
            };
            let more = &line["more"];
            call.epoch = more["epoch"].as_u64().unwrap_or(0);
            call.error = more["error"].as_str().unwrap_or_default().to_owned();
            if let Some(name) = more["name"].as_str() {
                name.clone_into(&mut call.name);
            }
            call.content = more["content"].as_u64().or(call.content);
            for entry in more["listed"].as_array().into_iter().flatten() {
                let name = entry[0].as_str().unwrap_or_default().to_owned();
                call.listed.push((name, entry[1].as_u64().unwrap_or(0)));
            }
        } else {
            return Err(format!("actor {who}: {line}"));
        }
    }
    Ok(calls)
}
