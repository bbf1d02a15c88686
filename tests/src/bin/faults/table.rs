//! The matrix as a table.

use std::collections::BTreeMap;

use comfy_table::Table;
use flextensord_device::failpoint::Point;
use flextensord_tests::SceneError;

use crate::{
    cell::{Action, Cell, Machine},
    scene::Played,
};

/// One row a point and device: how the clients of each cell ended.
pub(crate) fn matrix(cells: &[Cell], results: &[Option<Result<Played, SceneError>>]) -> Table {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::ASCII_BORDERS_ONLY_CONDENSED);
    let mut header = vec!["point", "device"];
    header.extend(Action::ALL.map(Action::name));
    table.set_header(header);
    for point in Point::ALL {
        for machine in [Machine::Cpu, Machine::Fake] {
            let of = |action: Action| {
                let all = cells.iter().zip(results);
                let mut found = all.filter(|(cell, _)| {
                    (cell.point, cell.machine, cell.action) == (*point, machine, action)
                });
                found.next().and_then(|(_, result)| result.as_ref())
            };
            let row = Action::ALL.map(|action| of(action).map_or_else(String::new, text));
            if row.iter().any(|text| !text.is_empty()) {
                let begin = [point.name().to_owned(), format!("{machine:?}")];
                table.add_row(begin.into_iter().chain(row));
            }
        }
    }
    table
}

/// "2 done, 1 killed".
fn text(result: &Result<Played, SceneError>) -> String {
    let Ok(played) = result else {
        return "FAILED".to_owned();
    };
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for outcome in &played.outcomes {
        *counts.entry(outcome.name()).or_default() += 1;
    }
    if counts.is_empty() {
        return "ok".to_owned();
    }
    let counts: Vec<_> = counts
        .iter()
        .map(|(name, n)| format!("{n} {name}"))
        .collect();
    counts.join(", ")
}
