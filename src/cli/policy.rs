//! `berth policy`.

use super::args::PolicyCommand;
use super::client::{Client, escaped};
use super::output::{Out, facts, or_dash, printable, table};
use super::{parameters, stack_file, trial, upload, versions};
use anyhow::{Context, bail};
use berth_api::{NewStack, NewStackEntry, Policy, PolicyDetail, PolicyList, Stack, StackEntry};
use std::io::Read;
use std::path::Path;

/// Largest stack file, bytes: as large as a configuration file may be.
const STACK_BYTES_MAX: u64 = 1024 * 1024;

pub(crate) fn run(command: &PolicyCommand, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    match command {
        PolicyCommand::List => out.answer(&client.get::<PolicyList>("/policies")?, list),
        PolicyCommand::Show { policy } => {
            let path = format!("/policies/{}", resolve(client, policy)?);
            out.answer(&client.get::<PolicyDetail>(&path)?, show)
        }
        PolicyCommand::Push(args) => upload::run(args, client, out),
        PolicyCommand::Trial(command) => trial::run(command, client, out),
        PolicyCommand::Delete { policy } => {
            let version = find(client, policy)?;
            let label = label(&version);
            client
                .remove(&format!("/policies/{}", escaped(&version.digest)))
                .with_context(|| format!("{label} is not deleted"))?;
            out.say(&format!("policy {label} is deleted"))
        }
        PolicyCommand::Activate { file, if_revision, word } => {
            let stack =
                NewStack { entries: read_stack(file)?, by: word.by.clone(), reason: word.reason.clone() };
            out.answer(&client.put::<Stack>("/stack", &stack, *if_revision)?, |s| {
                format!("active:\n{}", stack_table(s))
            })
        }
        PolicyCommand::Reset(word) => {
            let path = format!("/stack/override{}", word.query());
            out.answer(&client.delete::<Stack>(&path)?, |s| format!("active:\n{}", stack_table(s)))
        }
        PolicyCommand::Versions(command) => versions::run(command, client, out),
        PolicyCommand::Stack => out.answer(&client.get::<Stack>("/stack")?, stack_table),
    }
}

/// The digest that is meant by one, the beginning of one, or `name@` and that.
pub(crate) fn resolve(client: &Client, given: &str) -> anyhow::Result<String> {
    Ok(escaped(&find(client, given)?.digest))
}

/// As [`resolve`], the version itself.
fn find(client: &Client, given: &str) -> anyhow::Result<Policy> {
    let PolicyList { items, .. } = client.get("/policies")?;
    let (name, digest) = match given.split_once('@') {
        Some((name, digest)) => (Some(name), digest),
        None => (None, given),
    };
    let meant =
        |p: &&Policy| name.is_none_or(|n| p.name == n) && !digest.is_empty() && p.digest.starts_with(digest);
    let named = |p: &&Policy| p.name == given;
    let mut found: Vec<_> = items.iter().filter(meant).collect();
    if found.is_empty() {
        found = items.iter().filter(named).collect();
    }
    match found.as_slice() {
        [policy] => Ok((*policy).clone()),
        [] => bail!("this node knows no policy {given:?}; `berth policy list` shows what it knows"),
        several => {
            bail!("{given:?} means several versions, so type one of: {}", marked(several))
        }
    }
}

/// Versions, newest first, with what sets them apart.
fn marked(versions: &[&Policy]) -> String {
    let mut versions = versions.to_vec();
    // All times are UTC and of one length, so their texts are in order.
    versions.sort_unstable_by(|a, b| (&b.since, &b.digest).cmp(&(&a.since, &a.digest)));
    let of_one_name = versions.iter().all(|p| p.name == versions[0].name);
    let mark = |(place, policy): (usize, &&Policy)| {
        let marks = [
            (place == 0 && of_one_name).then_some("newest"),
            policy.active.then_some("active"),
            policy.shipped.then_some("shipped"),
        ];
        let marks: Vec<_> = marks.into_iter().flatten().collect();
        let marks = if marks.is_empty() { String::new() } else { format!(" ({})", marks.join(", ")) };
        label(policy) + &marks
    };
    versions.iter().enumerate().map(mark).collect::<Vec<_>>().join(", ")
}

/// What names a version on the command line and in a stack file.
pub(crate) fn label(policy: &Policy) -> String {
    format!("{}@{}", policy.name, short(&policy.digest))
}

/// The bytes of a file; `-` is standard input.
///
/// # Errors
/// If it cannot be read, or has more than `limit` bytes.
pub fn read_file(file: &Path, limit: u64) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let reading = || format!("cannot read {}", file.display());
    if file == Path::new("-") {
        std::io::stdin().take(limit + 1).read_to_end(&mut bytes).with_context(reading)?;
    } else {
        let opened = std::fs::File::open(file).with_context(reading)?;
        opened.take(limit + 1).read_to_end(&mut bytes).with_context(reading)?;
    }
    if u64::try_from(bytes.len())? > limit {
        bail!("{} is larger than the {limit} bytes that are taken", file.display());
    }
    Ok(bytes)
}

fn read_stack(file: &Path) -> anyhow::Result<Vec<NewStackEntry>> {
    let name = if file == Path::new("-") { "standard input".into() } else { file.display().to_string() };
    let text = read_file(file, STACK_BYTES_MAX).map_err(|error| {
        match file.exists() || name.contains(['/', '.']) {
            true => error,
            // The name of a policy, perhaps: the next thing that people try.
            false => error.context(format!(
                "a stack is activated from a file; one of this policy alone has the line `- policy: {name}`"
            )),
        }
    })?;
    stack_file::parse(&name, &text)
}

fn list(list: &PolicyList) -> String {
    let rows: Vec<_> = list
        .items
        .iter()
        .map(|p| {
            let origin = if p.shipped { "shipped" } else { "uploaded" };
            let active = if p.active { "yes" } else { "" };
            vec![
                p.name.clone(),
                p.version.clone(),
                short(&p.digest).into(),
                origin.into(),
                active.into(),
                p.since.clone(),
                p.by.clone().unwrap_or_default(),
                p.signed_by.clone().unwrap_or_default(),
                p.hooks.join(","),
                p.summary.clone(),
            ]
        })
        .collect();
    let head =
        ["NAME", "VERSION", "DIGEST", "ORIGIN", "ACTIVE", "SINCE", "BY", "SIGNED BY", "HOOKS", "SUMMARY"];
    table(&head, &rows)
}

fn show(detail: &PolicyDetail) -> String {
    let p = &detail.policy;
    facts(&[
        ("name", p.name.clone()),
        ("version", p.version.clone()),
        ("summary", p.summary.clone()),
        ("digest", p.digest.clone()),
        ("origin", if p.shipped { "shipped" } else { "uploaded" }.into()),
        ("active", if p.active { "yes" } else { "no" }.into()),
        ("hooks", p.hooks.join(" ")),
        ("bytes", p.bytes.to_string()),
        ("since", p.since.clone()),
        ("by", p.by.clone().unwrap_or_default()),
        ("why", p.why.clone().unwrap_or_default()),
        ("signed by", p.signed_by.clone().unwrap_or_default()),
    ]) + &parameters::shown(&detail.parameters_schema)
}

pub(crate) fn stack_table(stack: &Stack) -> String {
    let mut text = format!(
        "revision {}, from the {}",
        stack.revision,
        if stack.source == "api" { "API" } else { "file" }
    );
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
        text +=
            "the file's stack is set aside while this one is active; `berth policy reset` goes back to it\n";
    }
    if let Some(trouble) = &stack.file_stack.trouble {
        text += &format!("the file's stack cannot be used: {trouble}\n");
    }
    for warning in &stack.warnings {
        text += &format!("warning: {}\n", printable(warning));
    }
    text
}

/// How the calls of each policy went; nothing before the first call.
fn hooks_table(stack: &Stack) -> String {
    let mut rows = Vec::new();
    for (place, entry) in stack.entries.iter().enumerate() {
        for (hook, record) in entry.record.iter().flat_map(|record| &record.hooks) {
            let us = |us: u64| format!("{us} us");
            rows.push(vec![
                place.to_string(),
                entry.policy.clone(),
                hook.clone(),
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

pub(crate) fn short(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}
