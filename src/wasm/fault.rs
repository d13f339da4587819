//! What went wrong in a call, in the kernel's kinds and in words that help.

use wasmtime::{Error, Trap};

use super::guest::Guest;
use super::limits::{ANSWER_BYTES_MAX, FUEL_PER_CALL, GUEST_STACK_BYTES_MAX};
use crate::kernel::policy::{Fault, FaultKind, REASON_BYTES_MAX};

/// How far a call had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Making the instance; `start` functions run here.
    Instance,
    /// Running the hook, and reading its answer.
    Hook,
}

/// Sorts an error of wasmtime into the kinds of fault.
pub(super) fn fault(error: &Error, guest: &Guest, stage: Stage, wall_ms: u64) -> Fault {
    let (kind, words) = match (error.downcast_ref::<Trap>(), guest.refused) {
        (Some(Trap::OutOfFuel), _) => {
            let words = format!("used up its {FUEL_PER_CALL} units of fuel");
            (FaultKind::Fuel, words)
        }
        (Some(Trap::Interrupt), _) => (FaultKind::Time, format!("ran longer than {wall_ms} ms")),
        (Some(Trap::StackOverflow), _) => {
            let kib = GUEST_STACK_BYTES_MAX >> 10;
            (FaultKind::Memory, format!("used up its {kib} KiB of stack"))
        }
        (Some(_), Some(refused)) => {
            let words = format!("asked for {refused}, was refused, and trapped");
            (FaultKind::Memory, words)
        }
        (None, Some(refused)) => (FaultKind::Memory, format!("asked for {refused}")),
        (Some(trap), None) => (FaultKind::Trap, trap.to_string()),
        (None, None) if stage == Stage::Instance => (FaultKind::Missing, words_of(error)),
        (None, None) => (FaultKind::Answer, words_of_answer(error)),
    };
    let detail = with_guest_words(words, guest);
    Fault { kind, detail }
}

/// A fault of what a policy answered.
pub(super) fn answer(words: String) -> Fault {
    Fault { kind: FaultKind::Answer, detail: words }
}

/// The call could not be made at all.
pub(super) fn missing(words: String) -> Fault {
    Fault { kind: FaultKind::Missing, detail: words }
}

/// The whole chain of an error on one line.
pub(super) fn words_of(error: &Error) -> String {
    let words: Vec<_> = error.chain().map(ToString::to_string).collect();
    words.join(": ").replace('\n', " ")
}

fn words_of_answer(error: &Error) -> String {
    let words = words_of(error);
    // The type of this error is private to wasmtime; a test holds the text.
    if words.contains("fuel allocated for hostcalls") {
        return format!("handed over more than {} KiB at once", ANSWER_BYTES_MAX >> 10);
    }
    format!("what it handed over is malformed: {words}")
}

/// Adds the guest's last lines, as many as fit: a panic's text is the last of them.
fn with_guest_words(mut words: String, guest: &Guest) -> String {
    const BEFORE: &str = "; it said: ";
    const BETWEEN: &str = " | ";
    words.truncate(words.floor_char_boundary(REASON_BYTES_MAX));
    let mut room = REASON_BYTES_MAX.saturating_sub(words.len() + BEFORE.len());
    let mut lines = Vec::new();
    for line in guest.said.iter().rev() {
        let end = line.floor_char_boundary(room);
        if end < line.len() && !lines.is_empty() {
            break;
        }
        lines.push(&line[..end]);
        room = room.saturating_sub(end + BETWEEN.len());
    }
    lines.reverse();
    if !lines.is_empty() {
        words.push_str(BEFORE);
        words.push_str(&lines.join(BETWEEN));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_that_fit_are_told() {
        let mut guest = Guest::default();
        guest.said = vec!["x".repeat(900), "second".into(), "last".into()];
        let told = with_guest_words("wasm trap".into(), &guest);
        assert!(told.starts_with("wasm trap; it said: xxx"), "{told}");
        assert!(told.ends_with("x | second | last"), "{told}");
        guest.said[0] = "x".repeat(1024);
        let told = with_guest_words("wasm trap".into(), &guest);
        assert_eq!(told, "wasm trap; it said: second | last");
    }

    #[test]
    fn a_long_line_is_cut_rather_than_lost() {
        let mut guest = Guest::default();
        guest.said = vec!["\u{e9}".repeat(1024)];
        let told = with_guest_words("wasm trap".into(), &guest);
        assert!(told.len() <= REASON_BYTES_MAX && told.len() > REASON_BYTES_MAX - 8);
    }
}
