//! The active stack as a table, and `berth policy download`, `history` and `unsuspend`.

use crate::age::{age, age_of};
use crate::client::{Client, escaped};
use crate::names::short_digest;
use crate::output::Column::{Lines, Name, Text, Whole};
use crate::output::{Out, fitted, or_dash, table};
use crate::policy_version::resolve_newest;
use anyhow::{Context, bail};
use berth_api::{
    Activation, ActivationList, MODULE_BYTES_MAX, OnFault, Permissions, PolicyDetail, Stack, StackEntry,
    StackSource,
};
use serde_json::Value;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

pub(crate) fn download(
    policy: &str,
    to: Option<&Path>,
    client: &Client,
    out: &mut Out,
) -> anyhow::Result<()> {
    let digest = resolve_newest(client, policy)?;
    let bytes = client.bytes(&format!("/policies/{digest}/module"), u64::try_from(MODULE_BYTES_MAX)?)?;
    if to == Some(Path::new("-")) {
        return out.bytes(&bytes);
    }
    let file = match to {
        Some(file) => file.to_owned(),
        None => {
            let detail: PolicyDetail = client.get(&format!("/policies/{digest}"))?;
            // A DNS label by the daemon's rules; escaped, so that no answer names a file elsewhere.
            PathBuf::from(format!("{}-{}.wasm", escaped(&detail.policy.name), short_digest(&digest)))
        }
    };
    let mut options = OpenOptions::new();
    let options = options.write(true);
    let opened = match to {
        Some(_) => options.create(true).truncate(true).open(&file),
        None => options.create_new(true).open(&file),
    };
    let written = opened.and_then(|mut opened| opened.write_all(&bytes));
    written.with_context(|| format!("cannot write {} (--to names another file)", file.display()))?;
    out.done(&format!("{} has {} bytes, sha256 {digest}", file.display(), bytes.len()))
}

pub(crate) fn history(list: &ActivationList, wide: bool) -> String {
    let rows = list.items.iter().map(|activation| row(activation, wide));
    let mut text = if wide {
        table(&["REVISION", "ACTIVE", "SOURCE", "SINCE", "BY", "WHY", "POLICIES"], rows)
    } else {
        let head = [
            ("REVISION", Whole),
            ("ACTIVE", Whole),
            ("SOURCE", Whole),
            ("AGE", Whole),
            ("BY", Name),
            ("WHY", Text),
            ("POLICIES", Text),
        ];
        fitted(&head, rows)
    };
    for activation in list.items.iter().filter(|a| !a.gone.is_empty()) {
        let gone = activation.gone.join(" ");
        text += &format!("revision {} cannot be rolled back to: {gone} was deleted\n", activation.revision);
    }
    text
}

/// The entries that a change has removed from the stack and added to it.
pub(crate) fn changes(before: &[StackEntry], after: &[StackEntry]) -> String {
    // All but the statistics and what follows from the digest.
    fn settings(entry: &StackEntry) -> (&str, &str, &Value, &Permissions, &OnFault) {
        (&entry.policy, &entry.digest, &entry.parameters, &entry.permissions, &entry.on_fault)
    }
    let has =
        |entries: &[StackEntry], entry: &StackEntry| entries.iter().any(|e| settings(e) == settings(entry));
    let has_same_text = |entries: &[StackEntry], entry: &StackEntry| {
        entries.iter().any(|other| with_parameters(other, true) == with_parameters(entry, true))
    };
    let line = |what: &str, entry: &StackEntry, other: &[StackEntry]| {
        let mut text = with_parameters(entry, true);
        if has_same_text(other, entry) {
            let permissions = serde_json::to_string(&entry.permissions).unwrap_or_default();
            text += &format!(
                " permissions {permissions} onFault {}",
                format!("{:?}", entry.on_fault).to_lowercase()
            );
        }
        format!("{what}: {text}\n")
    };
    let removed = before.iter().filter(|entry| !has(after, entry));
    let added = after.iter().filter(|entry| !has(before, entry));
    let text: String = removed
        .map(|entry| line("removed", entry, after))
        .chain(added.map(|entry| line("added", entry, before)))
        .collect();
    let is_in_order = before.iter().map(settings).eq(after.iter().map(settings));
    if text.is_empty() && !is_in_order { "the order of the entries has changed\n".into() } else { text }
}

/// The policy of an entry, with its parameters if it has any. Permissions and `onFault` are not shown: entries that
/// differ only in them have the same text.
fn with_parameters(entry: &StackEntry, with_digest: bool) -> String {
    let digest = if with_digest { format!("@{}", short_digest(&entry.digest)) } else { String::new() };
    let has_none = entry.parameters.as_object().is_some_and(serde_json::Map::is_empty);
    let parameters = if has_none { String::new() } else { format!(" {}", entry.parameters) };
    format!("{}{digest}{parameters}", entry.policy)
}

fn row(activation: &Activation, wide: bool) -> Vec<String> {
    let label = |e: &StackEntry| with_parameters(e, wide);
    let policies: Vec<_> = activation.entries.iter().map(label).collect();
    let since = activation.since.as_deref();
    vec![
        activation.revision.to_string(),
        if activation.active { "yes" } else { "" }.into(),
        activation.source.to_string(),
        if wide { or_dash(since) } else { age_of(since) },
        or_dash(activation.by.as_ref()),
        activation.why.clone().unwrap_or_default(),
        if policies.is_empty() { "-".into() } else { policies.join(", ") },
    ]
}

pub(crate) fn unsuspend(entry: &str, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    let stack: Stack = client.get("/stack")?;
    let named: Vec<usize> =
        (0..stack.entries.len()).filter(|place| stack.entries[*place].policy == entry).collect();
    let place = match (named.as_slice(), entry.parse::<usize>()) {
        ([place], _) => *place,
        ([], Ok(place)) if place < stack.entries.len() => place,
        ([], _) => bail!("the active stack has no entry {entry:?}; `berth policy stack` shows its entries"),
        (several, _) => {
            let places: Vec<_> = several.iter().map(ToString::to_string).collect();
            bail!("the active stack has {entry:?} several times; give its index: {}", places.join(" "))
        }
    };
    let suspended = |stack: &Stack| stack.entries[place].record.as_ref().is_some_and(|r| r.suspended);
    let was = suspended(&stack);
    let path = format!("/stack/entries/{place}/suspension");
    let now: Stack = client.delete(&path, Some(stack.revision))?;
    out.answer(&now, |s| {
        let what = if was { "is called again" } else { "was not suspended" };
        format!("{entry} {what}\n{}", stack_table(s))
    })
}

/// The active stack as a table.
pub(crate) fn stack_table(stack: &Stack) -> String {
    let source = match &stack.source {
        StackSource::Api => "API",
        StackSource::Fleet => "GPUNode",
        StackSource::BreakGlass => "break-glass",
        StackSource::File => "file",
        StackSource::Other(source) => source,
    };
    let mut text = format!("revision {}, from the {source}", stack.revision);
    if let Some(since) = &stack.since {
        text += &format!(", activated by {} {} ago ({since})", stack.by, age(since));
    }
    if let Some(why) = &stack.why {
        text += &format!(" ({why})");
    }
    if let Some(until) = &stack.until {
        text += &format!(", until {until}");
    }
    text += "\n";
    if stack.entries.is_empty() {
        text += "no policies: the baseline offers whole GPUs\n";
    } else {
        let head = [
            ("#", Whole),
            ("POLICY", Name),
            ("DIGEST", Whole),
            ("ON FAULT", Whole),
            ("CALLS", Whole),
            ("FAULTS", Whole),
            ("PARAMETERS", Lines),
        ];
        text += &fitted(&head, stack.entries.iter().enumerate().map(entry_row));
        text += &last_faults(stack);
        text += &hooks_table(stack);
    }
    if stack.file_stack.shadowed {
        let way_back = match stack.source {
            StackSource::Fleet => {
                "remove `spec.stack` from the node's GPUNode, and then `berth policy reset` activates it"
            }
            StackSource::BreakGlass => {
                "`berth policy reset` ends the break-glass, and then the node's GPUNode decides again"
            }
            _ => "`berth policy reset` activates it",
        };
        text += &format!("the configuration file's stack is not used while this one is active; {way_back}\n");
    }
    if let Some(error) = &stack.file_stack.error {
        text += &format!("the configuration file's stack cannot be used: {error}\n");
    }
    for warning in &stack.warnings {
        text += &format!("warning: {warning}\n");
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
    let head = [
        ("#", Whole),
        ("POLICY", Name),
        ("HOOK", Whole),
        ("CALLS", Whole),
        ("NO OPINION", Whole),
        ("FAULTS", Whole),
        ("P50", Whole),
        ("P99", Whole),
        ("WORST", Whole),
    ];
    format!("\n{}", fitted(&head, rows))
}

fn entry_row((place, entry): (usize, &StackEntry)) -> Vec<String> {
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
        short_digest(&entry.digest).into(),
        format!("{:?}", entry.on_fault).to_lowercase(),
        or_dash(calls),
        faults,
        entry.parameters.to_string(),
    ]
}

/// The last fault of each policy that had one, in a line of its own: it can be long.
fn last_faults(stack: &Stack) -> String {
    let fault = |(place, entry): (usize, &StackEntry)| {
        let last = entry.record.as_ref()?.faults.last.as_ref()?;
        Some(format!("last fault of {place} {}: {last}\n", entry.policy))
    };
    stack.entries.iter().enumerate().filter_map(fault).collect()
}
