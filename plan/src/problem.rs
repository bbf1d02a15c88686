//! The input in a form to calculate with: checked, tied parts as one, parts of each use
//! once, times in whole picoseconds so that sums are exact and comparisons too.

use std::time::Duration;

use flextensord_proto::limit;

use crate::{
    SMALL_BYTES,
    error::PlanError,
    input::{Acquire, Input},
};

/// Largest unit of allocations, so that sums stay in range.
const GRANULARITY: u64 = 1 << 30;
/// Picoseconds of a second.
const PER_SECOND: u128 = 1_000_000_000_000;
/// Longest pass.
const LONGEST_S: f64 = 10_000.0;

/// A checked input.
#[derive(Debug)]
pub(crate) struct Problem {
    /// Stored bytes of each part; 0 for those that need no place of their own.
    pub(crate) bytes: Vec<u64>,
    /// Bytes that each takes in device memory.
    pub(crate) taken: Vec<u64>,
    /// How long each takes to copy.
    pub(crate) copy: Vec<u64>,
    /// Which part stands for it.
    pub(crate) stands_for: Vec<u32>,
    /// The parts of each use that have bytes, each once.
    pub(crate) uses: Vec<Vec<u32>>,
    /// Which of the input's uses each is of.
    pub(crate) origin: Vec<u32>,
    /// The uses in which each part stands.
    pub(crate) uses_of: Vec<Vec<u32>>,
    /// For each batch key, how long each use computes.
    pub(crate) keys: Vec<Key>,
    /// What a hand-over costs.
    pub(crate) handover: u64,
    /// Where in the pass each use begins, from 0 to 1, by weighted compute; by bytes where
    /// that is unknown.
    pub(crate) begins: Vec<f64>,
    /// Its share of the pass.
    pub(crate) shares: Vec<f64>,
    /// Bytes that all parts take.
    pub(crate) all_taken: u64,
    /// Whether each use has at most one part.
    pub(crate) lone: bool,
    /// Whether each part stands in at most one use.
    pub(crate) single: bool,
    /// How long the link takes for a byte.
    pub(crate) picoseconds_per_byte: f64,
    /// Allocations take whole multiples of this.
    granularity: u64,
}

/// A batch key.
#[derive(Debug)]
pub(crate) struct Key {
    pub(crate) name: String,
    /// All weights together are 1.
    pub(crate) weight: f64,
    pub(crate) compute: Vec<u64>,
    pub(crate) total: u64,
}

impl Problem {
    /// What an allocation of `bytes` bytes takes.
    pub(crate) fn whole(&self, bytes: u64) -> u64 {
        bytes
            .checked_next_multiple_of(self.granularity)
            .unwrap_or(u64::MAX)
    }

    /// The largest allocation within `bytes` bytes.
    pub(crate) fn whole_within(&self, bytes: u64) -> u64 {
        bytes - bytes % self.granularity
    }

    pub(crate) fn new(input: &Input) -> Result<Self, PlanError> {
        check_sizes(input)?;
        let parts = input.parts.len();
        let stands_for = stands_for(input)?;
        let (mut uses, mut origin, mut computes) = (Vec::new(), Vec::new(), Vec::new());
        let keys = input.batch_keys.len();
        for (index, used) in input.uses.iter().enumerate() {
            if !used.compute_s.is_empty() && used.compute_s.len() != keys {
                let times = used.compute_s.len();
                return Err(PlanError::Times { index, times, keys });
            }
            let mut held: Vec<u32> = Vec::with_capacity(used.parts.len());
            let mut seen = std::collections::HashSet::new();
            for &part in &used.parts {
                let first = *stands_for
                    .get(part as usize)
                    .ok_or(PlanError::UnknownPart { index, part, parts })?;
                if input.parts[first as usize].stored > 0 && seen.insert(first) {
                    held.push(first);
                }
            }
            let time = |key: usize| {
                let compute = used.compute_s.get(key).copied().unwrap_or(0.0);
                picoseconds(compute, || format!("compute of use {index}"))
            };
            let compute = (0..keys).map(time).collect::<Result<Vec<u64>, _>>()?;
            let number = u32::try_from(index).map_err(|_| PlanError::Overflow { parts })?;
            if input.acquire == Acquire::Part && held.len() > 1 {
                for (part, compute) in split(input, &held, &compute) {
                    uses.push(vec![part]);
                    computes.push(compute);
                    origin.push(number);
                }
            } else {
                uses.push(held);
                computes.push(compute);
                origin.push(number);
            }
        }
        let mut uses_of = vec![Vec::new(); parts];
        for (index, held) in uses.iter().enumerate() {
            let index = u32::try_from(index).map_err(|_| PlanError::Overflow { parts })?;
            for part in held {
                uses_of[*part as usize].push(index);
            }
        }
        let bytes: Vec<u64> = input
            .parts
            .iter()
            .zip(&uses_of)
            .map(|(part, uses)| if uses.is_empty() { 0 } else { part.stored })
            .collect();
        let taken: Vec<u64> = bytes.iter().map(|bytes| aligned(*bytes)).collect();
        let copy = copy_times(input, &bytes)?;
        let keys = keys_of(input, &computes)?;
        let (begins, shares) = positions(&keys, &uses, &taken);
        let all_taken = taken.iter().sum();
        let lone = uses.iter().all(|held| held.len() <= 1);
        let single = uses_of.iter().all(|uses| uses.len() <= 1);
        let picoseconds_per_byte = PER_SECOND as f64 / input.link.bytes_per_second as f64;
        check_pass(&uses, &copy)?;
        Ok(Self {
            lone,
            single,
            picoseconds_per_byte,
            granularity: input.granularity,
            bytes,
            taken,
            copy,
            stands_for,
            uses,
            origin,
            uses_of,
            keys,
            handover: picoseconds(input.handover_s, || "the hand-over".to_owned())?,
            begins,
            shares,
            all_taken,
        })
    }

    /// Whether compute is unknown.
    pub(crate) fn blind(&self) -> bool {
        self.keys.iter().all(|key| key.total == 0)
    }

    /// Parts that need a place, small ones only if `small`.
    pub(crate) fn movable(&self, small: bool) -> Vec<u32> {
        (0u32..)
            .zip(&self.bytes)
            .filter(|(_, bytes)| **bytes > 0 && (small || **bytes >= SMALL_BYTES))
            .map(|(part, _)| part)
            .collect()
    }

    /// Where in the pass a part is used first, from 0 to 1.
    pub(crate) fn first_begin(&self, part: u32) -> f64 {
        let first = self.uses_of[part as usize].first();
        first.map_or(0.0, |index| self.begins[*index as usize])
    }
}

fn aligned(bytes: u64) -> u64 {
    // sums were checked
    limit::align(bytes).unwrap_or(u64::MAX)
}

fn check_sizes(input: &Input) -> Result<(), PlanError> {
    let parts = input.parts.len();
    let overflow = || PlanError::Overflow { parts };
    u32::try_from(parts).map_err(|_| overflow())?;
    if input.granularity == 0 || input.granularity > GRANULARITY {
        return Err(PlanError::Count {
            what: "granularity",
            value: input.granularity,
            rule: "1 to 1073741824 bytes",
        });
    }
    // room for labels and for twice the largest use, so that sums stay in range
    let sum = input
        .parts
        .iter()
        .try_fold(0u64, |sum, part| {
            sum.checked_add(limit::align(part.stored)?)
        })
        .ok_or_else(overflow)?;
    sum.checked_mul(64).ok_or_else(overflow)?;
    Ok(())
}

fn stands_for(input: &Input) -> Result<Vec<u32>, PlanError> {
    let parts = u32::try_from(input.parts.len()).unwrap_or(u32::MAX);
    let mut stands_for: Vec<u32> = (0..parts).collect();
    let mut grouped = vec![false; input.parts.len()];
    for (group, tied) in input.aliases.iter().enumerate() {
        let Some(&first) = tied.iter().min() else {
            continue;
        };
        for &part in tied {
            let wrong = |problem| PlanError::Alias {
                group,
                part,
                problem,
            };
            let size = input
                .parts
                .get(part as usize)
                .ok_or(wrong("is not there"))?;
            if std::mem::replace(&mut grouped[part as usize], true) {
                return Err(wrong("stands in two groups, or twice"));
            }
            if size.stored != input.parts[first as usize].stored {
                return Err(wrong("differs in size"));
            }
            stands_for[part as usize] = first;
        }
    }
    Ok(stands_for)
}

/// The parts of a use with their shares of its compute, in proportion to logical bytes.
fn split<'a>(
    input: &'a Input,
    held: &'a [u32],
    compute: &'a [u64],
) -> impl Iterator<Item = (u32, Vec<u64>)> + 'a {
    let logical = |part: &u32| u128::from(input.parts[*part as usize].logical.max(1));
    let all: u128 = held.iter().map(logical).sum();
    let mut before: u128 = 0;
    held.iter().map(move |part| {
        let after = before + logical(part);
        // differences of rounded sums: nothing is lost
        let at = |time: u64, sum: u128| u64::try_from(u128::from(time) * sum / all).unwrap_or(0);
        let share = compute
            .iter()
            .map(|time| at(*time, after) - at(*time, before))
            .collect();
        before = after;
        (*part, share)
    })
}

fn picoseconds(seconds: f64, what: impl Fn() -> String) -> Result<u64, PlanError> {
    let wrong = || PlanError::Quantity {
        what: what(),
        value: seconds,
        rule: "0 to 10000 seconds",
    };
    if !(0.0..=LONGEST_S).contains(&seconds) {
        return Err(wrong());
    }
    // nanoseconds of a thousand times as long
    let thousandfold = Duration::try_from_secs_f64(seconds * 1e3).map_err(|_| wrong())?;
    u64::try_from(thousandfold.as_nanos()).map_err(|_| wrong())
}

/// Picoseconds as seconds.
pub(crate) fn seconds(picoseconds: u64) -> f64 {
    picoseconds as f64 / 1e12
}

fn copy_times(input: &Input, bytes: &[u64]) -> Result<Vec<u64>, PlanError> {
    let rate = u128::from(input.link.bytes_per_second);
    if rate == 0 {
        return Err(PlanError::Count {
            what: "bandwidth in bytes per second",
            value: 0,
            rule: "over 0",
        });
    }
    let latency = picoseconds(input.link.latency_s, || "latency of the link".to_owned())?;
    let long = |time: f64| PlanError::Quantity {
        what: "time to copy all parts".to_owned(),
        value: time,
        rule: "0 to 10000 seconds",
    };
    let mut sum = 0.0;
    bytes
        .iter()
        .map(|&bytes| {
            if bytes == 0 {
                return Ok(0);
            }
            let time = (u128::from(bytes) * PER_SECOND).div_ceil(rate);
            let time = u64::try_from(time)
                .unwrap_or(u64::MAX)
                .saturating_add(latency);
            sum += seconds(time);
            if sum > LONGEST_S {
                Err(long(sum))
            } else {
                Ok(time)
            }
        })
        .collect()
}

/// A pass that copies parts again and again must not take longer than times can be.
fn check_pass(uses: &[Vec<u32>], copy: &[u64]) -> Result<(), PlanError> {
    let copies = uses.iter().flatten().map(|part| copy[*part as usize]);
    let pass = copies.fold(0u64, u64::saturating_add);
    if seconds(pass) > LONGEST_S {
        return Err(PlanError::Quantity {
            what: "time to copy the parts of all uses".to_owned(),
            value: seconds(pass),
            rule: "0 to 10000 seconds",
        });
    }
    Ok(())
}

fn keys_of(input: &Input, computes: &[Vec<u64>]) -> Result<Vec<Key>, PlanError> {
    let wrong = |what: String, value: f64, rule| PlanError::Quantity { what, value, rule };
    let mut sum = 0.0;
    for key in &input.batch_keys {
        if !(key.weight >= 0.0 && key.weight <= 1e9) {
            let what = format!("weight of batch key {:?}", key.name);
            return Err(wrong(what, key.weight, "0 to 1e9"));
        }
        sum += key.weight;
    }
    if input.batch_keys.is_empty() {
        return Ok(vec![Key {
            name: String::new(),
            weight: 1.0,
            compute: vec![0; computes.len()],
            total: 0,
        }]);
    }
    if sum <= 0.0 {
        let what = "sum of the weights of batch keys".to_owned();
        return Err(wrong(what, sum, "over 0"));
    }
    let mut keys = Vec::with_capacity(input.batch_keys.len());
    for (index, key) in input.batch_keys.iter().enumerate() {
        let compute: Vec<u64> = computes.iter().map(|times| times[index]).collect();
        let total = compute
            .iter()
            .fold(0u64, |sum, time| sum.saturating_add(*time));
        if seconds(total) > LONGEST_S {
            let what = format!("compute of batch key {:?}", key.name);
            return Err(wrong(what, seconds(total), "0 to 10000 seconds"));
        }
        keys.push(Key {
            name: key.name.clone(),
            weight: key.weight / sum,
            compute,
            total,
        });
    }
    Ok(keys)
}

/// Where uses begin, and their shares. Knows nothing of the link, so that the candidates do
/// not depend on it.
fn positions(keys: &[Key], uses: &[Vec<u32>], taken: &[u64]) -> (Vec<f64>, Vec<f64>) {
    let time = |index: usize| -> f64 {
        let weighted = keys
            .iter()
            .filter(|key| key.total > 0)
            .map(|key| key.weight * (key.compute[index] as f64 / key.total as f64));
        weighted.sum()
    };
    let mut lengths: Vec<f64> = (0..uses.len()).map(time).collect();
    if lengths.iter().sum::<f64>() <= 0.0 {
        let bytes = |held: &Vec<u32>| held.iter().map(|part| taken[*part as usize] as f64).sum();
        lengths = uses.iter().map(bytes).collect();
    }
    let all: f64 = lengths.iter().sum::<f64>().max(f64::MIN_POSITIVE);
    let shares: Vec<f64> = lengths.iter().map(|length| length / all).collect();
    let mut sum = 0.0;
    let begins = shares
        .iter()
        .map(|share| {
            let begin = sum;
            sum += share;
            begin
        })
        .collect();
    (begins, shares)
}
