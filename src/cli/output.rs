//! Printing: tables for people, JSON and YAML for programs, errors with what to do.

use super::args::Output;
use super::colour;
use serde::Serialize;
use std::io::{ErrorKind, Write};

/// Where answers go.
pub struct Out {
    output: Output,
    /// What was said, where it is not to be printed at once.
    heard: Option<String>,
    /// Whether the reader has gone (`| head`).
    deserted: bool,
}

impl Out {
    /// Prints in this form.
    #[must_use]
    pub fn new(output: Output) -> Self {
        Self { output, heard: None, deserted: false }
    }

    /// The same, that keeps what it is told.
    pub fn listening(&self) -> Self {
        Self { output: self.output, heard: Some(String::new()), deserted: false }
    }

    /// What it was told.
    pub fn heard(self) -> String {
        self.heard.unwrap_or_default()
    }

    /// Whether nobody reads any more.
    pub fn deserted(&self) -> bool {
        self.deserted
    }

    /// For whom it prints.
    pub fn form(&self) -> Output {
        self.output
    }

    /// Whether people want all columns.
    pub fn wide(&self) -> bool {
        self.output == Output::Wide
    }

    /// Whether it prints for people.
    pub fn for_people(&self) -> bool {
        matches!(self.output, Output::Table | Output::Wide)
    }

    /// Prints an answer: as it is for programs, or by `table` for people.
    pub fn answer<T: Serialize>(
        &mut self,
        answer: &T,
        table: impl FnOnce(&T) -> String,
    ) -> anyhow::Result<()> {
        let text = match self.output {
            Output::Table | Output::Wide => table(answer),
            Output::Json => serde_json::to_string_pretty(answer)? + "\n",
            Output::Yaml => berth_files::yaml::to_string(answer)?,
        };
        self.text(&text)
    }

    /// Says what was done; programs read the exit code.
    pub fn say(&mut self, text: &str) -> anyhow::Result<()> {
        if self.for_people() { self.text(&format!("{text}\n")) } else { Ok(()) }
    }

    /// Prints text as it is. A reader that has gone (`| head`) is no error.
    pub fn text(&mut self, text: &str) -> anyhow::Result<()> {
        if let Some(heard) = &mut self.heard {
            heard.push_str(text);
            return Ok(());
        }
        let mut stdout = std::io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                self.deserted = true;
                Ok(())
            }
            done => Ok(done?),
        }
    }
}

/// Prints an error with its causes.
pub fn complain(error: &anyhow::Error) {
    // Nobody is left to tell if standard error is gone.
    let _ = writeln!(std::io::stderr(), "error: {error:#}");
}

/// Adds a line to an error that was printed elsewhere.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "note: {text}");
}

/// What was done, and may yet surprise.
pub fn warn(text: &str) {
    let _ = writeln!(std::io::stderr(), "warning: {text}");
}

/// Columns with two spaces between, as wide as their widest cell.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
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
            let padded = format!("{shown}{}", " ".repeat(missing));
            colour::cell(&shown, padded)
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
pub fn facts(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    pairs
        .iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| format!("{name:width$}  {}\n", printable(value)))
        .collect()
}

/// Texts of policies and pods reach a terminal: no escape sequence among them.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// A value that may be missing.
pub fn or_dash<T: ToString>(value: Option<T>) -> String {
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
