//! Converts errors of calls to the kernel's faults, with a message for the policy's author.

use wasmtime::{Error, Trap};

use super::guest::Guest;
use super::limits::{ANSWER_BYTES_MAX, FUEL_PER_CALL, GUEST_STACK_BYTES_MAX};
use berth_kernel::policy::hooks::{Fault, FaultKind, REASON_BYTES_MAX};

/// Prefix of the last log line of a policy that refuses its parameters. The Rust SDK writes it.
pub(super) const PARAMETERS_PREFIX: &str = "parameters: ";
/// Separator between the policy's last log line and the lines before.
pub(super) const EARLIER_LINES: &str = "; logged before: ";

/// The stage of a call in which an error happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Instantiation, which runs `start` functions.
    Instance,
    /// The hook, including the conversion of its answer.
    Hook,
}

/// The fault of a wasmtime error.
pub(super) fn fault(error: &Error, guest: &Guest, stage: Stage, wall_ms: u64) -> Fault {
    let (kind, detail) = match (error.downcast_ref::<Trap>(), &guest.refused) {
        (Some(Trap::OutOfFuel), _) => (FaultKind::Fuel, format!("used up its {FUEL_PER_CALL} units of fuel")),
        (Some(Trap::Interrupt), _) => (FaultKind::Time, format!("ran longer than {wall_ms} ms")),
        (Some(Trap::StackOverflow), _) => {
            let kib = GUEST_STACK_BYTES_MAX >> 10;
            (FaultKind::Memory, format!("used up its {kib} KiB of stack"))
        }
        (Some(_), Some(refused)) => {
            (FaultKind::Memory, format!("requested {refused}, was refused, and trapped"))
        }
        (None, Some(refused)) => (FaultKind::Memory, format!("requested {refused}")),
        (Some(Trap::UnreachableCodeReached), None) => return aborted(guest),
        (Some(trap), None) => (FaultKind::Trap, trap_message(*trap)),
        (None, None) if stage == Stage::Instance => (FaultKind::Missing, error_chain(error)),
        (None, None) => (FaultKind::Answer, answer_error(error)),
    };
    let detail = with_lines(detail, "; it logged: ", &guest.log_lines);
    Fault { kind, detail }
}

/// The fault of a guest that ran into `unreachable`, as it does after a panic and after refusing its parameters. Its
/// last log line has the reason and comes first.
fn aborted(guest: &Guest) -> Fault {
    let Some((last, earlier)) = guest.log_lines.split_last() else {
        let detail = "aborted without a message (`unreachable`)".to_owned();
        return Fault { kind: FaultKind::Trap, detail };
    };
    let is_about_parameters = last.starts_with(PARAMETERS_PREFIX);
    let kind = if is_about_parameters { FaultKind::Parameters } else { FaultKind::Trap };
    Fault { kind, detail: with_lines(last.clone(), EARLIER_LINES, earlier) }
}

/// The reason of a trap, without wasmtime's prefix.
fn trap_message(trap: Trap) -> String {
    let message = trap.to_string();
    format!("trapped: {}", message.strip_prefix("wasm trap: ").unwrap_or(&message))
}

/// The fault of an invalid answer.
pub(super) fn answer(detail: String) -> Fault {
    Fault { kind: FaultKind::Answer, detail }
}

/// The fault of a call that could not be made.
pub(super) fn missing(detail: String) -> Fault {
    Fault { kind: FaultKind::Missing, detail }
}

/// An error and its sources on one line.
pub(super) fn error_chain(error: &Error) -> String {
    let messages: Vec<_> = error.chain().map(ToString::to_string).collect();
    messages.join(": ").replace('\n', " ")
}

fn answer_error(error: &Error) -> String {
    let message = error_chain(error);
    // The type of this error is private to wasmtime; a test checks its text.
    if message.contains("fuel allocated for hostcalls") {
        return format!("passed more than {} KiB to the host at once", ANSWER_BYTES_MAX >> 10);
    }
    format!("passed malformed data to the host: {message}")
}

/// Appends `separator` and the last lines that fit.
fn with_lines(mut message: String, separator: &str, log_lines: &[String]) -> String {
    const BETWEEN: &str = " | ";
    message.truncate(message.floor_char_boundary(REASON_BYTES_MAX));
    let mut bytes_left = REASON_BYTES_MAX.saturating_sub(message.len() + separator.len());
    let mut lines = Vec::new();
    for line in log_lines.iter().rev() {
        let end = line.floor_char_boundary(bytes_left);
        if end == 0 || end < line.len() && !lines.is_empty() {
            break;
        }
        lines.push(&line[..end]);
        bytes_left = bytes_left.saturating_sub(end + BETWEEN.len());
    }
    lines.reverse();
    if !lines.is_empty() {
        message.push_str(separator);
        message.push_str(&lines.join(BETWEEN));
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_log_line_comes_first() {
        let mut guest = Guest::default();
        assert_eq!(aborted(&guest).detail, "aborted without a message (`unreachable`)");
        guest.log_lines = vec!["one".into(), "two".into(), "parameters: no".into()];
        let fault = fault(&Trap::UnreachableCodeReached.into(), &guest, Stage::Hook, 500);
        assert_eq!(fault.to_string(), "parameters: no; logged before: one | two");
        guest.log_lines.push("index out of bounds".into());
        let message = aborted(&guest).to_string();
        assert!(message.starts_with("index out of bounds; ") && message.ends_with("(trap)"), "{message}");
        let fault = super::fault(&Trap::IntegerDivisionByZero.into(), &guest, Stage::Hook, 500);
        assert!(fault.detail.starts_with("trapped: integer divide by zero; it logged: one"), "{fault}");
        guest.log_lines = vec!["x".into(), "y".repeat(2000)];
        assert_eq!(aborted(&guest).detail.len(), REASON_BYTES_MAX);
    }

    #[test]
    fn the_last_lines_that_fit_are_shown() {
        let mut log_lines = vec!["x".repeat(900), "second".into(), "last".into()];
        let message = with_lines("wasm trap".into(), "; it logged: ", &log_lines);
        assert!(message.starts_with("wasm trap; it logged: xxx"), "{message}");
        assert!(message.ends_with("x | second | last"), "{message}");
        log_lines[0] = "x".repeat(1024);
        let message = with_lines("wasm trap".into(), "; it logged: ", &log_lines);
        assert_eq!(message, "wasm trap; it logged: second | last");
    }

    #[test]
    fn a_long_line_is_truncated_and_not_dropped() {
        let message = with_lines("wasm trap".into(), "; it logged: ", &["\u{e9}".repeat(1024)]);
        assert!(message.len() <= REASON_BYTES_MAX && message.len() > REASON_BYTES_MAX - 8);
    }
}
