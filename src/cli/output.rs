//! Output of commands: tables, JSON or YAML, and errors on standard error.

use anstyle::{AnsiColor, Style};
use clap::ValueEnum;
use serde::Serialize;
use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::OnceLock;

/// How answers are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Columns that fit a terminal
    #[default]
    Table,
    /// As `table`, with all columns
    Wide,
    /// The answer of the API
    Json,
    /// The same as YAML
    Yaml,
}

/// Columns of a table if standard output is no terminal.
const COLUMNS: usize = 80;
/// The fewest characters to which a column is cut.
const CUT_MIN: usize = 12;

/// Prints answers in one of the forms.
pub struct Out {
    output: Output,
    /// The text so far, if it is captured instead of printed.
    captured: Option<String>,
    /// Whether standard output was closed (`| head`).
    closed: bool,
}

impl Out {
    /// Prints in this form.
    #[must_use]
    pub fn new(output: Output) -> Self {
        Self { output, captured: None, closed: false }
    }

    /// One of the same form that captures the text instead of printing it.
    pub fn capturing(&self) -> Self {
        Self { output: self.output, captured: Some(String::new()), closed: false }
    }

    /// The captured text.
    pub fn captured(self) -> String {
        self.captured.unwrap_or_default()
    }

    /// Whether standard output was closed.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// The form.
    pub fn form(&self) -> Output {
        self.output
    }

    /// Whether tables have all columns.
    pub fn wide(&self) -> bool {
        self.output == Output::Wide
    }

    /// Whether it prints tables, not JSON or YAML.
    pub fn is_table(&self) -> bool {
        matches!(self.output, Output::Table | Output::Wide)
    }

    /// Prints an answer: as JSON or YAML, or as the text that `table` makes of it.
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

    /// Prints a list as [`Self::answer`] does. If a table would be empty, `empty_text` is on standard error instead,
    /// as with kubectl, so that a pipe gets no line.
    pub fn list<T: Serialize>(
        &mut self,
        list: &T,
        empty_text: Option<String>,
        table: impl FnOnce(&T) -> String,
    ) -> anyhow::Result<()> {
        match empty_text.filter(|_| self.is_table()) {
            // A repeated command shows it in place of the table.
            Some(text) if self.captured.is_some() => self.text(&format!("{text}\n")),
            Some(text) => {
                let _ = writeln!(std::io::stderr(), "{text}");
                Ok(())
            }
            None => self.answer(list, table),
        }
    }

    /// Prints what was done, unless the form is JSON or YAML.
    pub fn done(&mut self, text: &str) -> anyhow::Result<()> {
        if self.is_table() { self.text(&format!("{text}\n")) } else { Ok(()) }
    }

    /// Prints text as it is. A closed standard output (`| head`) is not an error.
    pub fn text(&mut self, text: &str) -> anyhow::Result<()> {
        if let Some(captured) = &mut self.captured {
            captured.push_str(text);
            return Ok(());
        }
        self.bytes(text.as_bytes())
    }

    /// Prints bytes as they are; as [`Self::text`], but never captured.
    pub fn bytes(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        let mut stdout = std::io::stdout().lock();
        match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                self.closed = true;
                Ok(())
            }
            done => Ok(done?),
        }
    }
}

/// Prints an error with its causes to standard error.
pub fn print_error(error: &anyhow::Error) {
    // A closed standard error leaves nowhere to report to.
    let _ = writeln!(std::io::stderr(), "error: {error:#}");
}

/// Prints a note below an error.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "note: {text}");
}

/// Prints a warning to standard error.
pub fn warn(text: &str) {
    let _ = writeln!(std::io::stderr(), "warning: {text}");
}

/// What a column holds, which decides when it is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    /// Text for people. It is cut to the terminal's width, and to 80 columns where there is no terminal.
    Text,
    /// A name that another command takes. It is cut only on a terminal: a pipe needs all of it.
    Name,
}

/// A table of which one column is cut, with `...` at the end, so that the others stay in the line.
pub(crate) fn fitted(
    head: &[&str],
    column: usize,
    content: Column,
    rows: impl IntoIterator<Item = Vec<String>>,
) -> String {
    let terminal = std::io::stdout().is_terminal().then(terminal_size::terminal_size).flatten();
    let width = match (terminal, content) {
        (Some((width, _)), _) => usize::from(width.0).max(COLUMNS),
        (None, Column::Text) => COLUMNS,
        (None, Column::Name) => usize::MAX,
    };
    fitted_to(width, head, column, rows)
}

pub(crate) fn fitted_to(
    width: usize,
    head: &[&str],
    column: usize,
    rows: impl IntoIterator<Item = Vec<String>>,
) -> String {
    let mut rows: Vec<_> = rows.into_iter().collect();
    let widest = |i: usize| {
        let cells = rows.iter().filter_map(|row| row.get(i)).map(|cell| cell.chars().count());
        cells.chain([head[i].len()]).max().unwrap_or_default()
    };
    let others: usize = (0..head.len()).filter(|i| *i != column).map(|i| widest(i) + 2).sum();
    let most = width.saturating_sub(others).max(CUT_MIN);
    for cell in rows.iter_mut().filter_map(|row| row.get_mut(column)) {
        if cell.chars().count() > most {
            *cell = cell.chars().take(most - 3).collect::<String>() + "...";
        }
    }
    table(head, rows)
}

/// A table: columns as wide as their widest cell, with two spaces between. Cells without a head are left out.
pub fn table(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let rows: Vec<_> = rows.into_iter().collect();
    let mut widths: Vec<usize> = head.iter().map(|h| h.chars().count()).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded = cells.zip(&widths).map(|(cell, width)| {
            let shown = printable(cell);
            let missing = width.saturating_sub(shown.chars().count());
            let padded = format!("{shown}{}", " ".repeat(missing));
            coloured_cell(&shown, padded)
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let mut text = line(&mut head.iter().copied());
    for row in &rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

/// Names and values, one pair in each line.
pub fn facts(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    pairs
        .iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| format!("{name:width$}  {}\n", printable(value)))
        .collect()
}

/// Replaces control characters: texts of policies and pods must not send escape sequences to a terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// The values in one text.
pub fn joined<T: ToString>(values: &[T], separator: &str) -> String {
    values.iter().map(T::to_string).collect::<Vec<_>>().join(separator)
}

/// The value, or `-` if it is missing.
pub fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".into(), |v| v.to_string())
}

/// Whether tables have colours of states; none until [`decide_colours`] was called. The text is the same without them.
static ON: OnceLock<bool> = OnceLock::new();

/// Decides once: colours if standard output is a terminal that has them, and `NO_COLOR` is not set
/// (<https://no-color.org>).
pub fn decide_colours() {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    let _ = ON.set(std::io::stdout().is_terminal() && !dumb && !set("NO_COLOR"));
}

/// A padded cell of a table, in the colour of its state.
fn coloured_cell(text: &str, padded: String) -> String {
    if *ON.get().unwrap_or(&false) { coloured(text, padded) } else { padded }
}

fn coloured(text: &str, padded: String) -> String {
    let style = style(text);
    if style.is_plain() {
        return padded;
    }
    format!("{}{padded}{}", style.render(), style.render_reset())
}

/// The style of a state, by its first word: `unhealthy (XID 79)`, `cordoned by admin (fan)`.
fn style(text: &str) -> Style {
    let first = text.split([' ', ',', '(']).next().unwrap_or_default();
    match first {
        "healthy" | "open" | "live" | "granted" | "allowed" => AnsiColor::Green.on_default(),
        "degraded" | "cordoned" | "draining" | "drained" | "withdrawn" | "leaving" | "overlapped" => {
            AnsiColor::Yellow.on_default()
        }
        "unhealthy" | "vanished" | "denied" | "refused" | "fault" | "faulted" | "suspended" => {
            AnsiColor::Red.on_default()
        }
        _ => Style::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_and_escape_nothing() {
        let rows = [vec!["a".into(), "long one".into()], vec!["\u{1b}[31mred".into(), String::new()]];
        assert_eq!(table(&["X", "Y"], rows), "X         Y\na         long one\n\u{fffd}[31mred\n");
    }

    #[test]
    fn one_column_is_cut_so_that_lines_fit() {
        let rows = || [vec!["1".into(), "a long name of a pod".into(), "3m".into()]];
        let head = ["ID", "POD", "AGE"];
        assert_eq!(fitted_to(22, &head, 1, rows()), "ID  POD            AGE\n1   a long nam...  3m\n");
        assert_eq!(fitted_to(usize::MAX, &head, 1, rows()), table(&head, rows()));
    }

    #[test]
    fn empty_facts_are_left_out() {
        assert_eq!(facts(&[("a", "1".into()), ("bb", String::new())]), "a   1\n");
    }

    #[test]
    fn a_cell_is_coloured_by_its_first_word_and_keeps_its_width() {
        for (text, colour) in [
            ("healthy", "\u{1b}[32m"),
            ("unhealthy (XID 79)", "\u{1b}[31m"),
            ("cordoned by admin (fan)", "\u{1b}[33m"),
        ] {
            let padded = format!("{text}   ");
            assert_eq!(coloured(text, padded.clone()), format!("{colour}{padded}\u{1b}[0m"));
        }
        // Names of pods and models are not states.
        for text in ["healthy-pod", "NVIDIA H100", "0", ""] {
            assert_eq!(coloured(text, text.to_owned()), text);
        }
    }

    #[test]
    fn without_a_decision_there_are_none() {
        assert_eq!(coloured_cell("unhealthy", "unhealthy ".into()), "unhealthy ");
    }
}
