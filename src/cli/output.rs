//! Output of commands: tables, JSON or YAML, and errors on standard error.

use anstyle::{AnsiColor, Style};
use clap::ValueEnum;
use serde::Serialize;
use std::io::{ErrorKind, IsTerminal, Write};
use std::sync::OnceLock;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

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

/// Columns of a table where there is no terminal, and at least where there is one.
pub(crate) const COLUMNS: usize = 80;
/// The fewest columns to which a text is cut.
const TEXT_MIN: usize = 12;
/// The fewest columns to which a name is cut.
const NAME_MIN: usize = 8;

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
            Output::Table => for_terminal(&table(answer), &std::io::stdout()),
            Output::Wide => table(answer),
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
                report(&text);
                Ok(())
            }
            None => self.answer(list, table),
        }
    }

    /// Prints what was done, unless the form is JSON or YAML.
    pub fn done(&mut self, text: &str) -> anyhow::Result<()> {
        if !self.is_table() {
            return Ok(());
        }
        self.text(&for_terminal(&format!("{text}\n"), &std::io::stdout()))
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
    report(&format!("error: {error:#}"));
}

/// Prints a note below an error.
pub fn note(text: &str) {
    report(&format!("note: {text}"));
}

/// Prints a warning to standard error.
pub fn warn(text: &str) {
    report(&format!("warning: {text}"));
}

/// Prints lines to standard error, on a terminal in its width.
pub fn report(text: &str) {
    let mut stderr = std::io::stderr();
    let text = for_terminal(&format!("{}\n", text.trim_end_matches('\n')), &stderr);
    // A closed standard error leaves nowhere to report to.
    let _ = stderr.write_all(text.as_bytes());
}

/// The columns of standard output's terminal; `None` where it is no terminal.
pub(crate) fn terminal_columns() -> Option<usize> {
    columns_of(&std::io::stdout())
}

fn columns_of(stream: &(impl IsTerminal + std::os::fd::AsFd)) -> Option<usize> {
    let size = terminal_size::terminal_size_of(stream.as_fd());
    let columns = || size.map_or(COLUMNS, |(width, _)| usize::from(width.0).max(COLUMNS));
    stream.is_terminal().then(columns)
}

/// The text with its long lines continued in further ones if the stream is a terminal, which would break them inside
/// words.
fn for_terminal(text: &str, stream: &(impl IsTerminal + std::os::fd::AsFd)) -> String {
    columns_of(stream).map_or_else(|| text.to_owned(), |columns| in_columns(text, columns))
}

/// The text with lines of at most so many columns. A line continues two columns behind its beginning.
pub(crate) fn in_columns(text: &str, columns: usize) -> String {
    let mut result = String::with_capacity(text.len());
    for line in text.lines() {
        // Only tables have colours, and they fit already.
        if width(line) <= columns || line.contains('\u{1b}') {
            result += line;
            result.push('\n');
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        let (first, rest) = (" ".repeat(indent), " ".repeat(indent + 2));
        let parts = in_lines(line.trim(), columns.saturating_sub(indent + 2).max(1));
        for (place, part) in parts.iter().enumerate() {
            result += if place == 0 { &first } else { &rest };
            result += part;
            result.push('\n');
        }
    }
    result
}

/// A text in lines of at most so many columns, broken at spaces; only a word that is longer than a line is broken
/// itself. A command in backquotes stays in one line if it fits one.
pub(crate) fn in_lines(text: &str, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for piece in pieces(text, columns) {
        match lines.last_mut().filter(|line| width(line) + 1 + width(&piece) <= columns) {
            Some(line) => {
                line.push(' ');
                line.push_str(&piece);
            }
            None => lines.push(piece),
        }
    }
    lines
}

/// The parts of a text that stay together: commands in backquotes, and words; parts of words that are longer than a
/// line.
fn pieces(text: &str, columns: usize) -> Vec<String> {
    let mut pieces: Vec<String> = Vec::new();
    let mut in_command = false;
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        let joined = pieces.last().filter(|_| in_command).map(|last| format!("{last} {word}"));
        match joined.filter(|joined| width(joined) <= columns) {
            Some(joined) => {
                pieces.pop();
                pieces.push(joined);
            }
            None => pieces.push(word.to_owned()),
        }
        in_command ^= word.matches('`').count() % 2 == 1;
    }
    let broken = pieces.into_iter().flat_map(|piece| {
        let (mut parts, mut rest) = (Vec::new(), piece.as_str());
        while width(rest) > columns {
            let part = beginning(rest, columns);
            parts.push(part.to_owned());
            rest = &rest[part.len()..];
        }
        parts.push(rest.to_owned());
        parts
    });
    broken.filter(|part| !part.is_empty()).collect()
}

/// The columns that a terminal needs for a text.
fn width(text: &str) -> usize {
    UnicodeWidthStr::width(text)
}

/// As much of the beginning as fits, at least one character.
fn beginning(text: &str, columns: usize) -> &str {
    let mut used = 0;
    for (at, c) in text.char_indices() {
        used += UnicodeWidthChar::width(c).unwrap_or(0);
        if used > columns && at > 0 {
            return &text[..at];
        }
    }
    text
}

/// As much of the end as fits.
fn end(text: &str, columns: usize) -> &str {
    let mut used = 0;
    for (at, c) in text.char_indices().rev() {
        used += UnicodeWidthChar::width(c).unwrap_or(0);
        if used > columns {
            return &text[at + c.len_utf8()..];
        }
    }
    text
}

/// What a column holds, which decides how it is shortened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    /// A number, a state or a time, which is never cut.
    Whole,
    /// A name that another command takes. It is cut only on a terminal, since a pipe needs all of it, and in the
    /// middle: the names of replicas differ in their ends.
    Name,
    /// Text for people. It is cut at its end to the terminal's width, and to 80 columns where there is no terminal.
    Text,
    /// Text for people in the last column, of which all counts. On a terminal it is continued in further lines.
    Lines,
}

use Column::{Lines, Name, Text, Whole};

/// A table whose lines fit the terminal, or 80 columns as far as its texts can be cut.
pub(crate) fn fitted(head: &[(&str, Column)], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    match terminal_columns() {
        Some(columns) => fitted_to(columns, head, rows),
        None => fitted_by(COLUMNS, &[Text], head, rows),
    }
}

/// A table whose lines have at most so many columns.
pub(crate) fn fitted_to(
    columns: usize,
    head: &[(&str, Column)],
    rows: impl IntoIterator<Item = Vec<String>>,
) -> String {
    fitted_by(columns, &[Text, Lines, Name], head, rows)
}

/// Cuts columns of these kinds, the first kind first.
fn fitted_by(
    columns: usize,
    kinds: &[Column],
    head: &[(&str, Column)],
    rows: impl IntoIterator<Item = Vec<String>>,
) -> String {
    let (rows, mut widths) = measured(head.iter().map(|(head, _)| *head), rows);
    for kind in kinds {
        let min = if *kind == Name { NAME_MIN } else { TEXT_MIN };
        loop {
            let used = widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1);
            let least = |at: usize| min.max(width(head[at].0));
            // The widest one first, so that all stay as readable.
            let can_shrink = (0..head.len()).filter(|at| head[*at].1 == *kind && widths[*at] > least(*at));
            let Some(widest) = can_shrink.max_by_key(|at| widths[*at]).filter(|_| used > columns) else {
                break;
            };
            widths[widest] -= (used - columns).min(widths[widest] - least(widest)).div_ceil(2);
        }
    }
    let mut shown = Vec::with_capacity(rows.len());
    for mut row in rows {
        let mut more: Vec<String> = Vec::new();
        for ((cell, (_, kind)), columns) in row.iter_mut().zip(head).zip(&widths) {
            if width(cell) <= *columns {
                continue;
            }
            match kind {
                Whole => {}
                Name => *cell = without_middle(cell, *columns),
                Text => *cell = format!("{}...", beginning(cell, columns - 3)),
                Lines => {
                    let mut lines = in_lines(cell, *columns).into_iter();
                    *cell = lines.next().unwrap_or_default();
                    more = lines.collect();
                }
            }
        }
        shown.push(row);
        let place = head.len() - 1;
        shown.extend(more.into_iter().map(|line| {
            let mut row = vec![String::new(); place];
            row.push(line);
            row
        }));
    }
    table(&head.iter().map(|(head, _)| *head).collect::<Vec<_>>(), shown)
}

/// A name with `...` in the middle of each of its long parts, such as `namespace/pod/container`. The number of others
/// behind it, ` +9`, stays.
fn without_middle(name: &str, columns: usize) -> String {
    let number = name.rfind(" +").unwrap_or(name.len());
    let (name, number) = name.split_at(number);
    let columns = columns.saturating_sub(width(number));
    let parts: Vec<&str> = name.split('/').collect();
    let room = columns.saturating_sub(parts.len() - 1);
    // The most columns of a part with which all of them fit.
    let all_with = |most: usize| parts.iter().map(|part| width(part).min(most)).sum::<usize>();
    let most = (PART_COLUMNS_MIN..=room).rev().find(|most| all_with(*most) <= room);
    let shown = match most {
        Some(most) => {
            let part = |part: &&str| if width(part) <= most { (*part).into() } else { cut(part, most) };
            parts.iter().map(part).collect::<Vec<String>>().join("/")
        }
        None => cut(name, columns),
    };
    shown + number
}

/// Least columns of a part of a name; with fewer, the name is cut as a whole.
const PART_COLUMNS_MIN: usize = 9;

/// A text with `...` in its middle. More of its end is kept, which tells replicas apart.
fn cut(text: &str, columns: usize) -> String {
    let kept = columns.saturating_sub(3);
    let behind = (2 * kept).div_ceil(3);
    format!("{}...{}", beginning(text, kept - behind), end(text, behind))
}

/// A table with all of each cell: columns as wide as their widest cell, with two spaces between. Cells without a head
/// are left out.
pub fn table(head: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let (rows, widths) = measured(head.iter().copied(), rows);
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded = cells.zip(&widths).map(|(cell, columns)| {
            let padded = format!("{cell}{}", " ".repeat(columns.saturating_sub(width(cell))));
            coloured_cell(cell, padded)
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let mut text = line(&mut head.iter().copied());
    for row in &rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

/// The rows with [`printable`] cells, and the width of each column.
fn measured<'h>(
    head: impl Iterator<Item = &'h str>,
    rows: impl IntoIterator<Item = Vec<String>>,
) -> (Vec<Vec<String>>, Vec<usize>) {
    let rows: Vec<Vec<String>> =
        rows.into_iter().map(|row| row.iter().map(|cell| printable(cell)).collect()).collect();
    let mut widths: Vec<usize> = head.map(width).collect();
    for row in &rows {
        for (most, cell) in widths.iter_mut().zip(row) {
            *most = (*most).max(width(cell));
        }
    }
    (rows, widths)
}

/// Names and values, one pair in each line; on a terminal, long values continue below their beginning.
pub fn facts(pairs: &[(&str, String)]) -> String {
    facts_to(terminal_columns(), pairs)
}

fn facts_to(columns: Option<usize>, pairs: &[(&str, String)]) -> String {
    let names = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
    let mut text = String::new();
    for (name, value) in pairs.iter().filter(|(_, value)| !value.is_empty()) {
        let value = printable(value);
        let lines = match columns {
            Some(columns) => in_lines(&value, columns.saturating_sub(names + 2).max(TEXT_MIN)),
            None => vec![value],
        };
        for (place, line) in lines.iter().enumerate() {
            let name = if place == 0 { name } else { "" };
            text += &format!("{name:names$}  {line}\n");
        }
    }
    text
}

/// The text with escapes such as `\u{202e}` in place of characters that control a terminal or have no shape of their
/// own: texts of policies and pods must not move the cursor, or reorder what is printed.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if has_shape(c) { shown.push(c) } else { shown.extend(c.escape_default()) }
    }
    shown
}

fn has_shape(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    // The standard library escapes what is not printable. Behind a letter an accent has its shape.
    ['a', c].iter().collect::<String>().escape_debug().count() == 2
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
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [vec!["a".into(), "long one".into()], vec!["\u{65e5}\u{672c}".into(), String::new()]];
        assert_eq!(table(&["X", "Y"], rows), "X     Y\na     long one\n\u{65e5}\u{672c}\n");
    }

    #[test]
    fn what_controls_a_terminal_or_reorders_text_is_escaped() {
        for (text, shown) in [
            ("\u{1b}[31mred", "\\u{1b}[31mred"),
            ("a\u{202e}b\u{2066}c\u{200f}", "a\\u{202e}b\\u{2066}c\\u{200f}"),
            ("two\nlines\u{2028}and \u{feff}\u{e0041}", "two\\nlines\\u{2028}and \\u{feff}\\u{e0041}"),
            ("\u{9b}31m", "\\u{9b}31m"),
            // Text of any language stays as it is.
            (
                "\"quoted\" \\ caf\u{e9} cafe\u{301} \u{65e5}\u{672c} \u{1f600} \u{5e9}\u{5dc}",
                "\"quoted\" \\ caf\u{e9} cafe\u{301} \u{65e5}\u{672c} \u{1f600} \u{5e9}\u{5dc}",
            ),
        ] {
            assert_eq!(printable(text), shown);
        }
        assert!(table(&["X"], [vec!["\u{202e}x".into()]]).contains("\\u{202e}x"));
        assert!(facts(&[("x", "\u{202e}x".into())]).contains("\\u{202e}x"));
    }

    #[test]
    fn names_are_cut_in_the_middle_and_numbers_never() {
        let rows = || [vec!["1".into(), "team/a-long-name-x2x4q +9".into(), "3m".into()]];
        let head = [("ID", Whole), ("POD", Name), ("AGE", Whole)];
        assert_eq!(fitted_to(27, &head, rows()), "ID  POD                 AGE\n1   team/a-...x2x4q +9  3m\n");
        assert_eq!(fitted_to(25, &head, rows()), "ID  POD               AGE\n1   tea...e-x2x4q +9  3m\n");
        assert_eq!(fitted_to(usize::MAX, &head, rows()), table(&["ID", "POD", "AGE"], rows()));
        let wide = [vec!["123456789".into(), "team/a-long-name-x2x4q".into(), "3m".into()]];
        assert!(fitted_to(10, &head, wide).contains("123456789  t...2x4q  3m\n"));
    }

    #[test]
    fn texts_are_cut_before_names_and_long_ones_are_continued() {
        let row = || vec!["a-long-name".into(), "two words and some more of them".into()];
        let head = |text| [("NAME", Name), ("TEXT", text)];
        assert_eq!(
            fitted_to(30, &head(Text), [row()]),
            "NAME         TEXT\na-long-name  two words and ...\n"
        );
        let lines = "NAME         TEXT\na-long-name  two words and\n             some more of them\n";
        assert_eq!(fitted_to(30, &head(Lines), [row()]), lines);
    }

    #[test]
    fn lines_are_broken_between_words_and_commands_stay_whole() {
        assert_eq!(in_columns("  one two three\nshort\n", 10), "  one\n    two\n    three\nshort\n");
        let lines = in_lines("run `berth gpu list` and see", 18);
        assert_eq!(lines, ["run", "`berth gpu list`", "and see"]);
        assert_eq!(in_lines("abcdefgh ij", 4), ["abcd", "efgh", "ij"]);
        for line in in_columns(&"word `a b c` ".repeat(40), 80).lines() {
            assert!(width(line) <= 80, "{line}");
        }
    }

    #[test]
    fn empty_facts_are_left_out() {
        assert_eq!(facts_to(None, &[("a", "1".into()), ("bb", String::new())]), "a   1\n");
        assert_eq!(facts_to(Some(17), &[("a", "one two three".into())]), "a  one two three\n");
        assert_eq!(facts_to(Some(16), &[("ab", "one two three".into())]), "ab  one two\n    three\n");
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
