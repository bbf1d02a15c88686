//! A plan: a value that says everything the engine needs, and what it promises.

use serde::{Deserialize, Serialize};

use crate::input::{Layout, Link, Strategy};

/// Where a part lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// It has no bytes, or stands in no use: it needs no place.
    Nowhere,
    /// In block `block` of the residents, at `offset` bytes from its begin.
    Resident {
        /// Index into [`Plan::blocks`].
        block: u32,
        /// Bytes from the block's begin, its label included.
        offset: u64,
    },
    /// In the ring, at `offset` bytes from its begin.
    Streamed {
        /// Bytes from the ring's begin, its label included.
        offset: u64,
    },
}

/// One allocation of residents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// Its bytes, label included.
    pub bytes: u64,
    /// Its parts, in order of offset.
    pub parts: Vec<u32>,
}

/// A plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Where each part lies, by its index. Tied parts lie in the same place.
    pub places: Vec<Place>,
    /// Allocations of residents.
    pub blocks: Vec<Block>,
    /// Bytes of the ring, label included; 0 when nothing streams.
    pub ring_bytes: u64,
    /// Streamed parts in the order in which a pass needs them; a part occurs once for
    /// each use it stands in. Of tied parts the first stands for all.
    pub stream_order: Vec<u32>,
    /// Bytes of all blocks.
    pub resident_bytes: u64,
    /// Bytes that one pass moves over the link.
    pub streamed_bytes: u64,
    /// The least budget for which there is a plan: the largest use, and its label.
    pub least_feasible: u64,
    /// Stored bytes of all parts that are used, tied ones once.
    pub weight_bytes: u64,
    /// What is predicted.
    pub forecast: Forecast,
    /// How it was found.
    pub choice: Choice,
}

impl Plan {
    /// Bytes that the plan holds on the device.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.resident_bytes + self.ring_bytes
    }
}

/// What a plan promises, in seconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// Weighted mean of the predicted steps; the same mean of the figures below.
    pub step_s: f64,
    /// No plan of this budget is faster: compute, or what must stream over the link,
    /// whichever is longer.
    pub budget_bound_s: f64,
    /// No ring makes this choice of streamed parts faster: compute, or its bytes over the
    /// link.
    pub plan_floor_s: f64,
    /// Compute alone.
    pub compute_s: f64,
    /// The link that was reckoned with.
    pub link: Link,
    /// The step less the budget bound: what better planning could gain at most.
    pub slack_s: f64,
    /// One for each batch key; a nameless one where compute is unknown.
    pub keys: Vec<KeyForecast>,
}

/// What is predicted for a batch key, in seconds of a steady pass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KeyForecast {
    /// The key.
    pub name: String,
    /// Its weight.
    pub weight: f64,
    /// A pass.
    pub step_s: f64,
    /// See [`Forecast::budget_bound_s`].
    pub budget_bound_s: f64,
    /// See [`Forecast::plan_floor_s`].
    pub plan_floor_s: f64,
    /// Compute of a pass.
    pub compute_s: f64,
    /// What taking and giving back parts costs in a pass.
    pub handover_s: f64,
    /// How long compute waits for copies in a pass.
    pub wait_s: f64,
    /// Share of a pass in which the link copies.
    pub link_use: f64,
    /// Each copy of a pass, in order.
    pub transfers: Vec<Transfer>,
    /// Each use of a pass, in order: when its compute starts and ends.
    pub computes: Vec<Span>,
}

/// A copy: seconds from the begin of the pass; one that runs ahead begins before it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Transfer {
    /// The part.
    pub part: u32,
    /// Index of the use it is for.
    pub used_by: u32,
    /// When the copy starts.
    pub start_s: f64,
    /// When it ends.
    pub end_s: f64,
    /// How long its use waits for it.
    pub wait_s: f64,
}

/// A stretch of time: seconds from the begin of the pass.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Index of the use.
    pub of: u32,
    /// When it starts.
    pub start_s: f64,
    /// When it ends.
    pub end_s: f64,
}

/// How a plan was found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// What was followed in the end.
    pub mode: Mode,
    /// Whose choice of streamed parts it is; never [`Strategy::Adaptive`].
    pub strategy: Strategy,
    /// How they lie.
    pub layout: Layout,
    /// Who was heard.
    pub candidates: Vec<Candidate>,
}

/// What was followed in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Least step within the budget.
    Memory,
    /// Fewest bytes held, with the step within 1 % of compute.
    Latency,
    /// Latency mode was asked for, and no plan within what can be granted comes within 1 % of
    /// compute: least step within that.
    LatencyFellBack,
    /// Latency mode was asked for, and compute is unknown: least step within what can be
    /// granted.
    LatencyWithoutCompute,
}

/// What a strategy had to offer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// The strategy.
    pub strategy: Strategy,
    /// How many of its plans were simulated; the bounds ruled the others out.
    pub judged: u64,
    /// The least step among them.
    pub best_step_s: Option<f64>,
}
