//! The active stack as a table.

use super::output::{or_dash, printable, table};
use super::policy_version::short;
use berth_api::{Stack, StackEntry, StackSource};

pub(crate) fn stack_table(stack: &Stack) -> String {
    let source = match &stack.source {
        StackSource::Api => "API",
        StackSource::File => "file",
        StackSource::Other(source) => source,
    };
    let mut text = format!("revision {}, from the {}", stack.revision, printable(source));
    if let Some(since) = &stack.since {
        text += &format!(", activated by {} {since}", printable(&stack.by));
    }
    if let Some(why) = &stack.why {
        text += &format!(" ({})", printable(why));
    }
    text += "\n";
    if stack.entries.is_empty() {
        text += "no policies: the baseline offers whole GPUs\n";
    } else {
        let rows: Vec<_> = stack.entries.iter().enumerate().map(|(i, e)| entry_row(i, e)).collect();
        text += &table(
            &["#", "POLICY", "DIGEST", "PARAMETERS", "ON FAULT", "CALLS", "FAULTS", "LAST FAULT"],
            &rows,
        );
        text += &hooks_table(stack);
    }
    if stack.file_stack.shadowed {
        text += "the configuration file's stack is not used while this one is active; `berth policy reset` activates it\n";
    }
    if let Some(trouble) = &stack.file_stack.trouble {
        text += &format!("the configuration file's stack cannot be used: {trouble}\n");
    }
    for warning in &stack.warnings {
        text += &format!("warning: {}\n", printable(warning));
    }
    text
}

/// Calls and faults of each policy; empty before the first call.
fn hooks_table(stack: &Stack) -> String {
    let mut rows = Vec::new();
    for (place, entry) in stack.entries.iter().enumerate() {
        for (hook, record) in entry.record.iter().flat_map(|record| &record.hooks) {
            let us = |us: u64| format!("{us} us");
            rows.push(vec![
                place.to_string(),
                entry.policy.clone(),
                hook.to_string(),
                record.calls.to_string(),
                record.passes.to_string(),
                record.faults.to_string(),
                us(record.p50_microseconds),
                us(record.p99_microseconds),
                us(record.worst_microseconds),
            ]);
        }
    }
    if rows.is_empty() {
        return String::new();
    }
    let head = ["#", "POLICY", "HOOK", "CALLS", "PASSES", "FAULTS", "P50 UP TO", "P99 UP TO", "WORST"];
    format!("\n{}", table(&head, &rows))
}

fn entry_row(place: usize, entry: &StackEntry) -> Vec<String> {
    let record = entry.record.as_ref();
    let calls = record.map(|r| r.calls.values().sum::<u64>());
    let faults = record.map(|r| r.faults.by_kind.values().sum::<u64>());
    let faults = match record.is_some_and(|r| r.suspended) {
        true => format!("{} SUSPENDED", or_dash(faults)),
        false => or_dash(faults),
    };
    vec![
        place.to_string(),
        entry.policy.clone(),
        short(&entry.digest).into(),
        entry.parameters.to_string(),
        format!("{:?}", entry.on_fault).to_lowercase(),
        or_dash(calls),
        faults,
        record.and_then(|r| r.faults.last.clone()).unwrap_or_default(),
    ]
}
