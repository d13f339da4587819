//! What went wrong in a call, in the kernel's kinds and in words that help.

use wasmtime::{Error, Trap};

use super::guest::Guest;
use super::limits::{ANSWER_BYTES_MAX, FUEL_PER_CALL, GUEST_STACK_BYTES_MAX};
use berth_kernel::policy::{Fault, FaultKind, REASON_BYTES_MAX};

/// How the last line begins of a policy that refuses its parameters, as the kit for Rust writes it.
pub(super) const ABOUT_PARAMETERS: &str = "parameters: ";
/// What stands between a fault about parameters and what the policy logged before.
pub(super) const EARLIER: &str = "; before that it said: ";

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
        (Some(Trap::UnreachableCodeReached), None) => return ended_itself(guest),
        (Some(trap), None) => (FaultKind::Trap, words_of_trap(*trap)),
        (None, None) if stage == Stage::Instance => (FaultKind::Missing, words_of(error)),
        (None, None) => (FaultKind::Answer, words_of_answer(error)),
    };
    let detail = with_guest_words(words, guest);
    Fault { kind, detail }
}

/// A guest that panics or refuses its parameters says why in its last line and runs into an
/// `unreachable`: that sentence is the fault, and what was said before it comes behind.
fn ended_itself(guest: &Guest) -> Fault {
    let Some((last, before)) = guest.said.split_last() else {
        let detail = "ended itself without a word (`unreachable`)".to_owned();
        return Fault { kind: FaultKind::Trap, detail };
    };
    let about_parameters = last.starts_with(ABOUT_PARAMETERS);
    let kind = if about_parameters { FaultKind::Parameters } else { FaultKind::Trap };
    Fault { kind, detail: with_lines(last.clone(), EARLIER, before) }
}

/// The reason alone: wasmtime begins each with its own name for it.
fn words_of_trap(trap: Trap) -> String {
    let words = trap.to_string();
    format!("trapped: {}", words.strip_prefix("wasm trap: ").unwrap_or(&words))
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

/// Adds the guest's last lines.
fn with_guest_words(words: String, guest: &Guest) -> String {
    with_lines(words, "; it said: ", &guest.said)
}

/// Adds the last of these lines, as many as fit.
fn with_lines(mut words: String, before: &str, said: &[String]) -> String {
    const BETWEEN: &str = " | ";
    words.truncate(words.floor_char_boundary(REASON_BYTES_MAX));
    let mut room = REASON_BYTES_MAX.saturating_sub(words.len() + before.len());
    let mut lines = Vec::new();
    for line in said.iter().rev() {
        let end = line.floor_char_boundary(room);
        if end == 0 || end < line.len() && !lines.is_empty() {
            break;
        }
        lines.push(&line[..end]);
        room = room.saturating_sub(end + BETWEEN.len());
    }
    lines.reverse();
    if !lines.is_empty() {
        words.push_str(before);
        words.push_str(&lines.join(BETWEEN));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_own_sentence_comes_first() {
        let mut guest = Guest::default();
        assert_eq!(ended_itself(&guest).detail, "ended itself without a word (`unreachable`)");
        guest.said = vec!["one".into(), "two".into(), "parameters: no".into()];
        let fault = fault(&Trap::UnreachableCodeReached.into(), &guest, Stage::Hook, 500);
        assert_eq!(fault.to_string(), "parameters: no; before that it said: one | two");
        guest.said.push("index out of bounds".into());
        let words = ended_itself(&guest).to_string();
        assert!(words.starts_with("index out of bounds; ") && words.ends_with("(trap)"), "{words}");
        let fault = super::fault(&Trap::IntegerDivisionByZero.into(), &guest, Stage::Hook, 500);
        assert!(fault.detail.starts_with("trapped: integer divide by zero; it said: one"), "{fault}");
        guest.said = vec!["x".into(), "y".repeat(2000)];
        assert_eq!(ended_itself(&guest).detail.len(), REASON_BYTES_MAX);
    }

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
