//! `flextensorctl plan --file model.json`: plans without a daemon.

mod document;
mod table;
mod timeline;

use std::{fs, io::Write as _, path::PathBuf};

use bytesize::ByteSize;
use clap::{Args, ValueEnum};
use flextensord_plan::{Described, Description, Goal, Layout, Plan, PlanError, Strategy, plan};

use crate::{exit::Failed, output::Output};

/// Largest file that is read.
const FILE_BYTES: u64 = 64 << 20;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The model, as docs/planner.md describes it
    #[arg(long, value_name = "PATH")]
    file: PathBuf,
    /// Bytes that may be held, such as 8GiB, or a share of the weights, such as 60%.
    /// Without budget and fraction: the fewest bytes that hide all copies
    #[arg(long, value_name = "SIZE", value_parser = budget, conflicts_with = "fraction")]
    budget: Option<Budget>,
    /// Share of the file's device_bytes that may be held, over 0 and up to 1
    #[arg(long, value_parser = share)]
    fraction: Option<f64>,
    /// How streamed parts are chosen
    #[arg(long, value_enum, default_value_t = StrategyName::Adaptive)]
    strategy: StrategyName,
    /// How they lie on the device
    #[arg(long, value_enum, default_value_t = LayoutName::Ring)]
    layout: LayoutName,
    /// Most blocks of allocation_block_transfer
    #[arg(long, default_value_t = 4)]
    num_blocks: u32,
    /// Least blocks of allocation_block_transfer
    #[arg(long, default_value_t = 2)]
    min_blocks: u32,
    /// Print a timeline of one pass as SVG
    #[arg(long, conflicts_with = "json")]
    svg: bool,
}

/// What `--budget` says.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Budget {
    Bytes(u64),
    /// Of the weights.
    Share(f64),
}

#[derive(Debug, Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
enum StrategyName {
    Adaptive,
    Streaming,
    BudgetFill,
    Knapsack,
    Greedy,
    NthLayer,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
enum LayoutName {
    Ring,
    AllocationBlockTransfer,
}

impl From<StrategyName> for Strategy {
    fn from(name: StrategyName) -> Self {
        match name {
            StrategyName::Adaptive => Self::Adaptive,
            StrategyName::Streaming => Self::Streaming,
            StrategyName::BudgetFill => Self::BudgetFill,
            StrategyName::Knapsack => Self::Knapsack,
            StrategyName::Greedy => Self::Greedy,
            StrategyName::NthLayer => Self::NthLayer,
        }
    }
}

/// A planned model.
struct Planned<'a> {
    name: &'a str,
    model: &'a Described,
    plan: &'a Plan,
}

pub(crate) fn show(output: &Output, arguments: &Arguments) -> Result<(), Failed> {
    let description = read(arguments)?;
    let mut model = description
        .resolve()
        .map_err(|error| wrong(arguments, &error.to_string()))?;
    model.input.goal = goal(arguments, &description, &model)?;
    model.input.strategy = arguments.strategy.into();
    model.input.layout = match arguments.layout {
        LayoutName::Ring => Layout::Ring,
        LayoutName::AllocationBlockTransfer => Layout::AllocationBlockTransfer {
            num_blocks: arguments.num_blocks,
            min_blocks: arguments.min_blocks,
        },
    };
    let plan = plan(&model.input).map_err(|error| match error {
        PlanError::Infeasible { .. } => Failed::Infeasible(error.to_string()),
        PlanError::Count {
            what: "num_blocks", ..
        } => Failed::Usage(error.to_string()),
        other => wrong(arguments, &other.to_string()),
    })?;
    let planned = Planned {
        name: &description.name,
        model: &model,
        plan: &plan,
    };
    if arguments.svg {
        return Ok(std::io::stdout().write_all(timeline::draw(&planned).as_bytes())?);
    }
    if output.json {
        return Ok(output.value(&document::document(&planned))?);
    }
    Ok(table::print(output, &planned)?)
}

fn read(arguments: &Arguments) -> Result<Description, Failed> {
    let path = &arguments.file;
    let unread = |error: std::io::Error| Failed::Usage(format!("{}: {error}", path.display()));
    let bytes = fs::metadata(path).map_err(unread)?.len();
    if bytes > FILE_BYTES {
        let text = format!("{bytes} bytes, at most {FILE_BYTES} are read");
        return Err(wrong(arguments, &text));
    }
    let text = fs::read(path).map_err(unread)?;
    serde_json::from_slice(&text).map_err(|error| wrong(arguments, &error.to_string()))
}

/// What is wrong with the file.
fn wrong(arguments: &Arguments, text: &str) -> Failed {
    Failed::Description(format!("{}: {text}", arguments.file.display()))
}

fn goal(
    arguments: &Arguments,
    description: &Description,
    model: &Described,
) -> Result<Goal, Failed> {
    let device = description.device_bytes;
    let budget = match (arguments.budget, arguments.fraction) {
        (Some(Budget::Bytes(bytes)), _) => bytes,
        (Some(Budget::Share(share)), _) => share_of(model.weight_bytes, share),
        (None, Some(share)) => match device {
            Some(device) => share_of(device, share),
            None => {
                return Err(wrong(
                    arguments,
                    "--fraction needs device_bytes in the file",
                ));
            }
        },
        (None, None) => {
            return Ok(Goal::Latency {
                cap: device.unwrap_or(u64::MAX),
            });
        }
    };
    Ok(Goal::Memory { budget })
}

/// A share in millionths: exact enough, and no float is cast to a size.
fn share_of(bytes: u64, share: f64) -> u64 {
    let millionths = format!("{:.0}", share * 1e6).parse::<u128>().unwrap_or(0);
    u64::try_from(u128::from(bytes) * millionths / 1_000_000).unwrap_or(u64::MAX)
}

fn budget(text: &str) -> Result<Budget, String> {
    match text.trim().strip_suffix('%') {
        Some(percent) => match percent.trim().parse::<f64>() {
            Ok(percent) if percent > 0.0 && percent <= 1000.0 => Ok(Budget::Share(percent / 100.0)),
            _ => Err("must be over 0% and up to 1000%".to_owned()),
        },
        None => match text.trim().parse::<ByteSize>() {
            Ok(size) if size.0 > 0 => Ok(Budget::Bytes(size.0)),
            _ => Err("must be a size such as 8GiB, or a share such as 60%".to_owned()),
        },
    }
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if share > 0.0 && share <= 1.0 => Ok(share),
        _ => Err("must be over 0 and up to 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_a_size_or_a_share() {
        assert_eq!(budget("8GiB"), Ok(Budget::Bytes(8 << 30)));
        assert_eq!(budget("4096"), Ok(Budget::Bytes(4096)));
        assert_eq!(budget("60%"), Ok(Budget::Share(0.6)));
        for text in ["", "0", "-1%", "0%", "x%", "NaN%", "12 parsecs"] {
            assert!(budget(text).is_err(), "{text}");
        }
        assert_eq!(share_of(13_952_000_000, 0.6), 8_371_200_000);
        assert!(share("0").is_err() && share("1.1").is_err() && share("NaN").is_err());
    }
}
