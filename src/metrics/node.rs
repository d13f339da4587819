//! The daemon and its record: which build, which stack, what came of decisions, how much is kept.

use super::Seen;
use super::families::Families;
use prometheus_client::registry::Unit;
use std::fmt;

pub(super) fn tell(seen: &Seen, families: &mut Families<'_>) -> fmt::Result {
    let version = [("version", env!("CARGO_PKG_VERSION"))];
    families.info("build", "Which berth this is.", &version)?;
    let gauge = |value: u64| [(Vec::new(), value)];
    let revision = seen.ledger.stack.revision;
    families.gauge("stack_revision", "Counts activations of stacks of policies.", None, gauge(revision))?;
    families.counter(
        "decisions",
        "Questions to the stack, by hook and by what came of them.",
        seen.tally
            .decisions
            .iter()
            .map(|((hook, outcome), n)| (vec![("hook", hook.as_str()), ("outcome", *outcome)], *n)),
    )?;
    let Some(journal) = seen.journal else { return Ok(()) };
    families.gauge("journal_kept", "Decisions on the record.", None, gauge(journal.kept))?;
    families.gauge("journal", "Room that the record takes.", Some(&Unit::Bytes), gauge(journal.bytes))?;
    let help = "Decisions that left the record for want of room or by their age.";
    families.counter("journal_dropped", help, gauge(journal.dropped))?;
    let help = "Decisions that were never put down: too many at once, or the disk failed.";
    families.counter("journal_lost", help, gauge(journal.lost))
}
