//! Printing: tables for people, JSON and YAML for programs, errors with what to do.

use super::Output;
use serde::Serialize;
use std::io::{ErrorKind, Write};

/// Where answers go.
pub(super) struct Out {
    output: Output,
}

impl Out {
    pub(super) fn new(output: Output) -> Self {
        Self { output }
    }

    /// For whom it prints.
    pub(super) fn form(&self) -> Output {
        self.output
    }

    /// Prints an answer: as it is for programs, or by `table` for people.
    pub(super) fn answer<T: Serialize>(
        &mut self,
        answer: &T,
        table: impl FnOnce(&T) -> String,
    ) -> anyhow::Result<()> {
        let text = match self.output {
            Output::Table => table(answer),
            Output::Json => serde_json::to_string_pretty(answer)? + "\n",
            Output::Yaml => serde_norway::to_string(answer)?,
        };
        self.text(&text)
    }

    /// Says what was done; programs read the exit code.
    pub(super) fn say(&mut self, text: &str) -> anyhow::Result<()> {
        match self.output {
            Output::Table => self.text(&format!("{text}\n")),
            Output::Json | Output::Yaml => Ok(()),
        }
    }

    /// Prints text as it is. A reader that has gone (`| head`) is no error.
    pub(super) fn text(&mut self, text: &str) -> anyhow::Result<()> {
        let mut stdout = std::io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
            _ => Ok(()),
        }
    }
}

/// Prints an error with its causes.
pub(super) fn complain(error: &anyhow::Error) {
    // Nobody is left to tell if standard error is gone.
    let _ = writeln!(std::io::stderr(), "error: {error:#}");
}

/// Adds a line to an error that was printed elsewhere.
pub(super) fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "note: {text}");
}

/// What was done, and may yet surprise.
pub(super) fn warn(text: &str) {
    let _ = writeln!(std::io::stderr(), "warning: {text}");
}

/// Columns with two spaces between, as wide as their widest cell.
pub(super) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|h| h.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded = cells.zip(&widths).map(|(cell, width)| {
            let shown = printable(cell);
            let missing = width.saturating_sub(shown.chars().count());
            shown + &" ".repeat(missing)
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let mut text = line(&mut head.iter().copied());
    for row in rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

/// Names and values, one pair a line.
pub(super) fn facts(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    pairs
        .iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| format!("{name:width$}  {}\n", printable(value)))
        .collect()
}

/// Texts of policies and pods reach a terminal: no escape sequence among them.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// A value that may be missing.
pub(super) fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".into(), |v| v.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_and_escape_nothing() {
        let rows = [vec!["a".into(), "long one".into()], vec!["\u{1b}[31mred".into(), String::new()]];
        assert_eq!(table(&["X", "Y"], &rows), "X         Y\na         long one\n\u{fffd}[31mred\n");
    }

    #[test]
    fn empty_facts_are_left_out() {
        assert_eq!(facts(&[("a", "1".into()), ("bb", String::new())]), "a   1\n");
    }
}
