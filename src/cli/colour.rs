//! Colours of states on a terminal. The text is the same without them.

use anstyle::{AnsiColor, Style};
use std::io::IsTerminal;
use std::sync::OnceLock;

/// Whether tables have colours; none until [`decide`] was called.
static ON: OnceLock<bool> = OnceLock::new();

/// Decides once: colours if standard output is a terminal that has them, and `NO_COLOR` is not set
/// (<https://no-color.org>).
pub fn decide() {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    let _ = ON.set(std::io::stdout().is_terminal() && !dumb && !set("NO_COLOR"));
}

/// A padded cell of a table, in the colour of its state.
pub(crate) fn cell(said: &str, padded: String) -> String {
    if *ON.get().unwrap_or(&false) { coloured(said, padded) } else { padded }
}

fn coloured(said: &str, padded: String) -> String {
    let style = style(said);
    if style.is_plain() {
        return padded;
    }
    format!("{}{padded}{}", style.render(), style.render_reset())
}

/// The style of a state, by its first word: `unhealthy (XID 79)`, `cordoned by admin (fan)`.
fn style(said: &str) -> Style {
    let first = said.split([' ', ',', '(']).next().unwrap_or_default();
    match first {
        "healthy" | "active" | "live" | "granted" | "allowed" => AnsiColor::Green.on_default(),
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
    fn a_cell_is_coloured_by_its_first_word_and_keeps_its_width() {
        for (said, colour) in [
            ("healthy", "\u{1b}[32m"),
            ("unhealthy (XID 79)", "\u{1b}[31m"),
            ("cordoned by admin (fan)", "\u{1b}[33m"),
        ] {
            let padded = format!("{said}   ");
            assert_eq!(coloured(said, padded.clone()), format!("{colour}{padded}\u{1b}[0m"));
        }
        // Names of pods and models are not states.
        for said in ["healthy-pod", "NVIDIA H100", "0", ""] {
            assert_eq!(coloured(said, said.to_owned()), said);
        }
    }

    #[test]
    fn without_a_decision_there_are_none() {
        assert_eq!(cell("unhealthy", "unhealthy ".into()), "unhealthy ");
    }
}
