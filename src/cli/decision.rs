//! `berth decision`, and `berth allocation explain`.

use crate::age::{age, parse_time_or_duration};
use crate::client::{Client, escaped, query};
use crate::complete;
use crate::named_gpu;
use crate::names::GpuIndices;
use crate::output::Column::{Lines, Name, Text, Whole};
use crate::output::{Out, facts, fitted, joined, table};
use berth_api::{DecisionCall, DecisionRecord, DecisionRecordList, Explanation};
use clap::{Args, Subcommand};
use clap_complete::engine::ArgValueCandidates;

/// Most decisions in one answer.
const PAGE: usize = 500;
/// Empty pages in a row before the search ends: as many as the largest journal has.
const EMPTY_PAGES: usize = 256;

/// `berth decision`.
#[derive(Clone, Debug, Subcommand)]
pub enum DecisionCommand {
    /// The decisions of the stack and their results, newest first
    List(Box<DecisionFilter>),
    /// One decision with the answer of each policy
    Show {
        /// The number of the decision
        seq: u64,
        /// Show the input of the policies, too (JSON)
        #[arg(long)]
        input: bool,
    },
}

/// Selects decisions.
#[derive(Args, Clone, Debug, Default)]
pub struct DecisionFilter {
    /// Only decisions about this GPU: index, UUID, or the beginning of it
    #[arg(long, add = ArgValueCandidates::new(complete::gpus))]
    pub gpu: Option<String>,
    /// Only decisions for pods of this namespace
    #[arg(short, long, add = ArgValueCandidates::new(complete::namespaces))]
    pub namespace: Option<String>,
    /// Only decisions for pods of this name
    #[arg(long)]
    pub pod: Option<String>,
    /// Only the admission of this allocation; `berth allocation explain` has its placement, too
    #[arg(long, add = ArgValueCandidates::new(complete::allocations))]
    pub allocation: Option<String>,
    /// Only decisions with an answer of a policy whose name@digest begins with this text
    #[arg(long, add = ArgValueCandidates::new(complete::policies))]
    pub policy: Option<String>,
    /// Only decisions with this result; `fault`: a policy failed
    #[arg(long, value_parser = ["offered", "placed", "granted", "denied", "refused", "triaged", "fault"])]
    pub outcome: Option<String>,
    /// Only decisions of this hook
    #[arg(long, value_parser = ["offer", "place", "admit", "triage"])]
    pub hook: Option<String>,
    /// Only decisions since a time, such as 2026-02-03T04:05:06Z or today, or of the last 10m
    #[arg(long, value_name = "TIME", value_parser = parse_time_or_duration)]
    pub since: Option<String>,
    /// Only decisions before a time, or older than 10m
    #[arg(long, value_name = "TIME", value_parser = parse_time_or_duration)]
    pub until: Option<String>,
    /// Only decisions with a smaller number
    #[arg(long)]
    pub before: Option<u64>,
    /// The maximum number of decisions
    #[arg(long, default_value_t = 50)]
    pub limit: usize,
}

pub(crate) fn run(command: &DecisionCommand, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    match command {
        DecisionCommand::List(filter) => {
            let wide = out.wide();
            let found = fetch(filter, client)?;
            let empty_text = found.items.is_empty().then(|| empty_text(filter, &found));
            out.list(&found, empty_text, |found| list(found, wide))
        }
        DecisionCommand::Show { seq, input: false } => {
            let decision: DecisionRecord = client.get(&format!("/decisions/{seq}"))?;
            out.answer(&decision, |decision| show(decision, &GpuIndices::fetch(client)))
        }
        DecisionCommand::Show { seq, input: true } => {
            let shown: serde_json::Value = client.get(&format!("/decisions/{seq}/input"))?;
            out.answer(&shown, |shown| format!("{shown:#}\n"))
        }
    }
}

/// `berth allocation explain`.
pub(crate) fn explain(id: &str, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    let explained: Explanation = client.get(&format!("/allocations/{}/explanation", escaped(id)))?;
    out.answer(&explained, |explained| {
        let mut text = explained.sentences.join("\n") + "\n";
        for decision in &explained.decisions {
            text += &format!("(decision {}: `berth decision show {}`)\n", decision.seq, decision.seq);
        }
        text
    })
}

/// Fetches pages until there are as many decisions as the filter allows, or no more.
fn fetch(filter: &DecisionFilter, client: &Client) -> anyhow::Result<DecisionRecordList> {
    let gpu = filter.gpu.as_deref().map(|g| named_gpu::resolve(client, g)).transpose()?;
    let page = |left: usize, cursor: Option<&str>| {
        let query = query(&[
            ("limit", Some(&left.clamp(1, PAGE).to_string())),
            ("gpu", gpu.as_deref()),
            ("namespace", filter.namespace.as_deref()),
            ("pod", filter.pod.as_deref()),
            ("allocation", filter.allocation.as_deref()),
            ("policy", filter.policy.as_deref()),
            ("outcome", filter.outcome.as_deref()),
            ("hook", filter.hook.as_deref()),
            ("since", filter.since.as_deref()),
            ("until", filter.until.as_deref()),
            ("cursor", cursor),
        ]);
        client.get::<DecisionRecordList>(&format!("/decisions{query}"))
    };
    let mut all = page(filter.limit, filter.before.map(|seq| seq.to_string()).as_deref())?;
    for _ in 0..EMPTY_PAGES {
        let (left, Some(next)) = (filter.limit.saturating_sub(all.items.len()), all.next.as_deref()) else {
            break;
        };
        if left == 0 {
            break;
        }
        let more = page(left, Some(next))?;
        all.items.extend(more.items);
        (all.next, all.journal) = (more.next, more.journal);
    }
    Ok(all)
}

/// The text of an empty list. A filter with a typo leads to one, too, so it shows whether there are any decisions.
fn empty_text(filter: &DecisionFilter, found: &DecisionRecordList) -> String {
    let given = [
        &filter.gpu,
        &filter.namespace,
        &filter.pod,
        &filter.allocation,
        &filter.policy,
        &filter.outcome,
        &filter.hook,
        &filter.since,
        &filter.until,
    ];
    let is_filtered = filter.before.is_some() || given.iter().any(|value| value.is_some());
    match found.journal.kept {
        0 => "No decisions found; decisions for which no policy is called are not recorded".into(),
        kept if is_filtered => format!("No decisions found among the {kept} recorded ones"),
        _ => "No decisions found".into(),
    }
}

fn list(list: &DecisionRecordList, wide: bool) -> String {
    let row = |d: &DecisionRecord| {
        let what = match (&d.request, &d.reading) {
            (Some(request), _) => format!("{} x {}", request.count, request.resource),
            (None, Some(reading)) => format!("{} {}", reading.source, reading.code),
            (None, None) => format!("{} GPUs", d.gpus.len()),
        };
        let microseconds: u64 = d.calls.iter().map(|call| call.microseconds).sum();
        let mut row = vec![
            d.seq.to_string(),
            if wide { d.at.clone() } else { age(&d.at) },
            d.hook.to_string(),
            what,
            d.outcome.to_string(),
        ];
        if wide {
            row.extend([joined(&d.candidates, " "), d.by.join(" "), microseconds.to_string()]);
        }
        row.push(d.reason.clone());
        row
    };
    let rows = list.items.iter().map(row);
    let mut text = if wide {
        table(&["SEQ", "AT", "HOOK", "REQUEST", "OUTCOME", "PODS", "BY", "US", "REASON"], rows)
    } else {
        let head = [
            ("SEQ", Whole),
            ("AGE", Whole),
            ("HOOK", Whole),
            ("REQUEST", Name),
            ("OUTCOME", Whole),
            ("REASON", Text),
        ];
        fitted(&head, rows)
    };
    if let Some(next) = &list.next {
        text += &format!("--before {next} shows earlier ones\n");
    }
    if list.journal.lost > 0 {
        text += &format!(
            "{} decisions were not recorded: too many at once, or the disk failed\n",
            list.journal.lost
        );
    }
    text
}

fn show(decision: &DecisionRecord, indices: &GpuIndices) -> String {
    let request = decision.request.as_ref();
    let requested = request.map_or_else(String::new, |r| format!("{} x {}", r.count, r.resource));
    let reading = decision.reading.as_ref();
    let reported =
        reading.map_or_else(String::new, |r| format!("{} {} on {}: {}", r.source, r.code, r.part, r.detail));
    let pairs = [
        ("decision", decision.seq.to_string()),
        ("at", decision.at.clone()),
        ("hook", decision.hook.to_string()),
        ("request", requested),
        ("devices", request.map_or_else(String::new, |r| r.devices.join(" "))),
        ("reported", reported),
        ("GPUs", decision.gpus.join(" ")),
        ("candidates", decision.candidates.join(" ")),
        ("outcome", decision.outcome.to_string()),
        ("by", decision.by.join(" ")),
        ("reason", decision.reason.clone()),
        ("allocation", decision.allocation.clone().unwrap_or_default()),
        ("answer", decision.answer.to_string()),
        ("input", decision.input.clone().unwrap_or_else(|| "not recorded".into())),
    ];
    let mut text = facts(&pairs.map(|(name, value)| (name, indices.with_indices(&value))));
    if !decision.calls.is_empty() {
        let head = [
            ("POLICY", Name),
            ("RESULT", Whole),
            ("US", Whole),
            ("FUEL", Whole),
            ("PARAMETERS AND ANSWER", Lines),
        ];
        text += "\n";
        text += &fitted(&head, decision.calls.iter().flat_map(call));
    }
    text
}

/// Two rows: both of them have JSON, which can be long.
fn call(call: &DecisionCall) -> [Vec<String>; 2] {
    let answer = call.answer.as_ref().map(ToString::to_string).or_else(|| call.fault.clone());
    let first = vec![
        call.policy.clone(),
        call.said.to_string(),
        call.microseconds.to_string(),
        call.fuel.to_string(),
        call.parameters.to_string(),
    ];
    let empty = || vec![String::new(); first.len() - 1];
    let second = [empty(), vec![answer.unwrap_or_else(|| "-".into())]].concat();
    [first, second]
}
