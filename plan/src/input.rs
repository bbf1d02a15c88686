//! What is to be planned.

use serde::{Deserialize, Serialize};

/// What is to be planned. Serialisable: the same value gives the same plan anywhere.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// The parts, in order of their first use; named by their index.
    pub parts: Vec<Part>,
    /// Uses in the order of a pass. One without parts is a gap: compute that covers copies.
    pub uses: Vec<Use>,
    /// What the compute times of a use are for. Empty: compute is unknown.
    #[serde(default)]
    pub batch_keys: Vec<BatchKey>,
    /// Groups of parts that are one and the same tensor: it is placed once, and streamed for
    /// each use that names any of them.
    #[serde(default)]
    pub aliases: Vec<Vec<u32>>,
    /// How long a copy takes.
    #[serde(default)]
    pub link: Link,
    /// Seconds between the end of a copy and the start of who waited for it, and between a
    /// release and the copy into its place. Also what taking and giving back a part costs
    /// the device.
    #[serde(default = "handover")]
    pub handover_s: f64,
    /// Allocations take whole multiples of this: the ring and each block of residents.
    #[serde(default = "granularity")]
    pub granularity: u64,
    /// What the plan is to reach.
    pub goal: Goal,
    /// What is held together.
    #[serde(default)]
    pub acquire: Acquire,
    /// How the streamed parts are chosen.
    #[serde(default)]
    pub strategy: Strategy,
    /// How they lie on the device.
    #[serde(default)]
    pub layout: Layout,
}

/// Bytes of a part. Device memory and the link carry it as it is stored; decoding, if there
/// is any, is the client's, into memory of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Bytes in the segment, over the link and on the device.
    pub stored: u64,
    /// Bytes as the kernel reads it: in proportion to these, the compute of a use is split.
    pub logical: u64,
}

/// Parts that are needed at the same time.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Use {
    /// Indices of the parts, each once or more.
    #[serde(default)]
    pub parts: Vec<u32>,
    /// Seconds of compute, for each batch key. Empty: unknown, as zero.
    #[serde(default)]
    pub compute_s: Vec<f64>,
}

/// One kind of pass, such as prefill or decode.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchKey {
    /// Its name.
    pub name: String,
    /// How much its step counts, in proportion to the others.
    pub weight: f64,
}

/// A link's curve: a copy takes `latency_s + bytes / bytes_per_second`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Seconds that each copy takes beside its bytes.
    pub latency_s: f64,
    /// Bandwidth.
    pub bytes_per_second: u64,
}

impl Default for Link {
    /// What an H200 measured: `docs/performance.md`.
    fn default() -> Self {
        Self {
            latency_s: 0.0,
            bytes_per_second: 55_100_000_000,
        }
    }
}

/// The hand-over of a machine that was not measured.
pub(crate) fn handover() -> f64 {
    12e-6
}

/// Allocations of a device that makes them of any size.
pub(crate) fn granularity() -> u64 {
    1
}

/// What the plan is to reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Goal {
    /// Memory mode: the least predicted step within `budget` bytes, then the fewest bytes
    /// moved.
    Memory {
        /// Bytes that may be held: residents, ring and their labels, as allocated.
        budget: u64,
    },
    /// Latency mode: the fewest bytes held with the step within 1 % of compute; memory mode
    /// with `cap` where that cannot be had.
    Latency {
        /// All that can be granted, in bytes.
        cap: u64,
    },
}

impl Goal {
    /// Bytes that may be held.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::Memory { budget } => budget,
            Self::Latency { cap } => cap,
        }
    }
}

/// What a client holds together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Acquire {
    /// All parts of a use, for all of its compute.
    #[default]
    Use,
    /// One part after the other, as modules that own one tensor each do; the compute of the
    /// use is split in proportion to logical bytes.
    Part,
}

/// How the streamed parts are chosen.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// The best of the others by simulation.
    #[default]
    Adaptive,
    /// Everything streams, but what is small.
    Streaming,
    /// As few bytes as the budget allows, from parts of few sizes, spread over the pass.
    BudgetFill,
    /// In each use as many bytes as its compute's share, found as a subset sum.
    Knapsack,
    /// A part streams when the compute so far has paid for it.
    Greedy,
    /// Every n-th use streams, or all but every n-th.
    NthLayer,
}

impl Strategy {
    /// All that [`Strategy::Adaptive`] compares.
    pub const SIMPLE: [Self; 5] = [
        Self::BudgetFill,
        Self::Knapsack,
        Self::Greedy,
        Self::NthLayer,
        Self::Streaming,
    ];

    /// Its name in files and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Adaptive => "adaptive",
            Self::Streaming => "streaming",
            Self::BudgetFill => "budget_fill",
            Self::Knapsack => "knapsack",
            Self::Greedy => "greedy",
            Self::NthLayer => "nth_layer",
        }
    }
}

/// How streamed parts lie on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// Parts anywhere in one ring, wherever it serves.
    #[default]
    Ring,
    /// Whole uses by turns in a few blocks, each as large as its largest use.
    AllocationBlockTransfer {
        /// Most blocks.
        num_blocks: u32,
        /// Least blocks.
        min_blocks: u32,
    },
}

impl Input {
    /// An input of which nothing but sizes is known: parts of `sizes` bytes, held in `uses`,
    /// within `budget` bytes.
    #[must_use]
    pub fn of_sizes(sizes: &[u64], uses: &[Vec<u32>], budget: u64) -> Self {
        let part = |bytes: &u64| Part {
            stored: *bytes,
            logical: *bytes,
        };
        let held = |parts: &Vec<u32>| Use {
            parts: parts.clone(),
            compute_s: Vec::new(),
        };
        Self {
            parts: sizes.iter().map(part).collect(),
            uses: uses.iter().map(held).collect(),
            batch_keys: Vec::new(),
            aliases: Vec::new(),
            link: Link::default(),
            handover_s: handover(),
            granularity: granularity(),
            goal: Goal::Memory { budget },
            acquire: Acquire::default(),
            strategy: Strategy::default(),
            layout: Layout::default(),
        }
    }
}
