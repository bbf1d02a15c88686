//! Tables for people, JSON for programs.

use std::io::{self, IsTerminal as _, Write as _};

use bytesize::ByteSize;
use comfy_table::presets::UTF8_BORDERS_ONLY;
use serde_json::Value;

/// Where and how results are printed.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) json: bool,
    terminal: bool,
}

/// Rows under headers.
#[derive(Debug, Default)]
pub(crate) struct Table {
    headers: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(headers: &[&'static str]) -> Self {
        Self {
            headers: headers.to_vec(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().map(printable).collect());
    }

    /// Columns of equal width, two spaces apart.
    fn plain(&self) -> String {
        let header = self.headers.iter().map(|header| (*header).to_owned());
        let lines: Vec<Vec<String>> = std::iter::once(header.collect())
            .chain(self.rows.iter().cloned())
            .collect();
        let width = |column: usize| {
            let cells = lines.iter().filter_map(|line| line.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.headers.len()).map(width).collect();
        let mut text = String::new();
        for line in &lines {
            let cells = line.iter().zip(&widths);
            let cells: Vec<String> = cells
                .map(|(cell, &width)| format!("{cell:width$}"))
                .collect();
            text.push_str(cells.join("  ").trim_end());
            text.push('\n');
        }
        text
    }

    fn bordered(&self) -> String {
        let mut table = comfy_table::Table::new();
        table.load_style(UTF8_BORDERS_ONLY);
        table.set_header(self.headers.iter().copied());
        table.add_rows(self.rows.iter().cloned());
        format!("{table}\n")
    }
}

impl Output {
    pub(crate) fn new(json: bool) -> Self {
        Self {
            json,
            terminal: io::stdout().is_terminal(),
        }
    }

    /// Whether a person looks at stderr, where progress is shown.
    pub(crate) fn shows_progress(&self) -> bool {
        !self.json && io::stderr().is_terminal()
    }

    pub(crate) fn table(&self, table: &Table) -> io::Result<()> {
        let text = if self.terminal {
            table.bordered()
        } else {
            table.plain()
        };
        io::stdout().write_all(text.as_bytes())
    }

    pub(crate) fn line(&self, text: &str) -> io::Result<()> {
        writeln!(io::stdout(), "{}", printable(text.to_owned()))
    }

    /// Says how things go, to a person or a log.
    pub(crate) fn note(&self, text: &str) {
        if !self.json {
            let _ = writeln!(io::stderr(), "{}", printable(text.to_owned()));
        }
    }

    pub(crate) fn value(&self, value: &Value) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        serde_json::to_writer_pretty(&mut stdout, value)?;
        writeln!(stdout)
    }
}

/// Bytes for a person, such as "86.7 MiB".
pub(crate) fn bytes(bytes: u64) -> String {
    ByteSize(bytes).display().iec().to_string()
}

/// A duration for a person, to the second.
pub(crate) fn duration_ms(milliseconds: u64) -> String {
    let whole = std::time::Duration::from_secs(milliseconds / 1000);
    humantime::format_duration(whole).to_string()
}

/// Names come from others: no control character reaches the terminal.
fn printable(text: String) -> String {
    if text.chars().any(char::is_control) {
        text.chars()
            .map(|c| if c.is_control() { '\u{fffd}' } else { c })
            .collect()
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_columns_are_aligned_and_names_cannot_move_the_cursor() {
        let mut table = Table::new(&["NAME", "BYTES"]);
        table.row(["a\x1b[2J".to_owned(), "1".to_owned()]);
        table.row(["longer-name".to_owned(), "22".to_owned()]);
        let expected = "NAME         BYTES\na\u{fffd}[2J        1\nlonger-name  22\n";
        assert_eq!(table.plain(), expected);
        assert!(table.bordered().contains("longer-name"));
    }

    #[test]
    fn sizes_and_durations_are_for_people() {
        assert_eq!(bytes(90_900_000), "86.7 MiB");
        assert_eq!(duration_ms(61_500), "1m 1s");
    }
}
