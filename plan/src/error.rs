//! Why there is no plan.

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The budget is under the least in which the uses can run.
    #[error("budget of {budget} bytes is infeasible: the least feasible one is {least} bytes")]
    Infeasible {
        /// The budget.
        budget: u64,
        /// The least feasible budget.
        least: u64,
    },
    /// A use names a part that is not there.
    #[error("use {index} names part {part}, there are {parts}")]
    UnknownPart {
        /// The use.
        index: usize,
        /// The part it names.
        part: u32,
        /// How many parts there are.
        parts: usize,
    },
    /// The sum of all parts is no size.
    #[error("the sizes of {parts} parts overflow")]
    Overflow {
        /// How many parts there are.
        parts: usize,
    },
    /// A group of tied parts names one that is not there, that is in two groups, or whose
    /// size differs.
    #[error("alias group {group}: part {part} {problem}")]
    Alias {
        /// The group.
        group: usize,
        /// The part.
        part: u32,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A time or a weight is negative, no number, or too large.
    #[error("{what} is {value}, must be {rule}")]
    Quantity {
        /// Which one.
        what: String,
        /// What it is.
        value: f64,
        /// What it may be.
        rule: &'static str,
    },
    /// A use has not one time for each batch key.
    #[error("use {index} has {times} times for {keys} batch keys")]
    Times {
        /// The use.
        index: usize,
        /// How many times it has.
        times: usize,
        /// How many batch keys there are.
        keys: usize,
    },
    /// A count that cannot be.
    #[error("{what} is {value}, must be {rule}")]
    Count {
        /// Which one.
        what: &'static str,
        /// What it is.
        value: u64,
        /// What it may be.
        rule: &'static str,
    },
}
