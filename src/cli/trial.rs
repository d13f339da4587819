//! `berth policy try`.

use crate::arguments::{CandidateArgs, read_parameters};
use crate::client::Client;
use crate::complete;
use crate::names::runs;
use crate::output::Column::{Name, Whole};
use crate::output::{Out, facts, fitted, table};
use crate::usage::BadUsage;
use anyhow::{anyhow, bail};
use berth_api::{
    NewTrial, OfferLine, OnFault, Outcome, Permissions, Trial, TrialCall, TrialOffer, TrialOutcome,
    TrialRequest, TrialResource,
};
use berth_kernel::ids::names::Resource;
use clap::Args;
use clap_complete::engine::ArgValueCandidates;

/// `berth policy try`.
#[derive(Args, Clone, Debug)]
pub struct TryArgs {
    /// The policy.
    #[command(flatten)]
    pub candidate: CandidateArgs,
    /// The request of a container, such as nvidia.com/gpu=2
    #[arg(long, value_name = "RESOURCE=COUNT")]
    pub request: Option<String>,
    /// The namespace of the container's pod, as policies see it
    #[arg(long, requires = "request", add = ArgValueCandidates::new(complete::namespaces))]
    pub namespace: Option<String>,
    /// The name of the container's pod
    #[arg(long, requires = "request")]
    pub pod: Option<String>,
    /// A label of the container's pod; may be given several times
    #[arg(long = "label", requires = "request", value_name = "KEY=VALUE", value_parser = label)]
    pub labels: Vec<(String, String)>,
    /// Leave out the other policies of the active stack
    #[arg(long)]
    pub alone: bool,
    /// Permissions as in a stack, instead of the default: {"resources": ["nvidia.com/gpu", "example.com/*"]}
    #[arg(long, value_name = "JSON|@FILE")]
    pub permissions: Option<String>,
    /// What happens if the policy fails: `skip` or `deny`
    #[arg(long, value_parser = ["skip", "deny"])]
    pub on_fault: Option<String>,
}

/// Runs the command.
pub(crate) fn run(args: &TryArgs, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    let candidate = args.candidate.candidate(client)?;
    let permissions = match &args.permissions {
        Some(given) => {
            let json = read_parameters("--permissions", given)?;
            let taken: Result<Permissions, _> = serde_json::from_str(&json);
            Some(taken.map_err(|error| -> anyhow::Error {
                let message = format!("--permissions: {error}");
                // Bad content of a file is not bad usage.
                if given.starts_with('@') { anyhow!(message) } else { BadUsage(message).into() }
            })?)
        }
        None => None,
    };
    let trial = NewTrial {
        policy: candidate.policy,
        entries: None,
        digest: candidate.digest,
        parameters: candidate.parameters,
        permissions,
        on_fault: args.on_fault.as_deref().map(|effect| match effect {
            "deny" => OnFault::Deny,
            _ => OnFault::Skip,
        }),
        alone: args.alone,
        request: args.request.as_deref().map(|text| request(text, args)).transpose()?,
    };
    let trial = client.post::<Trial>("/trials", &trial, None)?;
    let wide = out.wide();
    out.answer(&trial, |trial| shown(trial, wide))?;
    if trial.refused.is_some() {
        bail!("this stack would not be activated");
    }
    match &trial.request {
        Some(request) if request.outcome != Outcome::Granted => {
            bail!("the request would be {}", request.outcome)
        }
        _ => Ok(()),
    }
}

fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write a label as KEY=VALUE, such as tier=gold")?;
    Ok((key.to_owned(), value.to_owned()))
}

fn request(text: &str, args: &TryArgs) -> anyhow::Result<TrialRequest> {
    let (resource, count) = text.split_once('=').unwrap_or((text, "1"));
    let wrong =
        |why: &str| BadUsage(format!("--request {text:?} is not a request such as nvidia.com/gpu=2: {why}"));
    Resource::parse(resource).map_err(|error| wrong(&error.to_string()))?;
    let count =
        count.parse().ok().filter(|count| *count > 0).ok_or_else(|| wrong("the count must be 1 or more"))?;
    let (namespace, pod) = (args.namespace.clone(), args.pod.clone());
    let labels = args.labels.iter().cloned().collect();
    Ok(TrialRequest { resource: resource.to_owned(), count, namespace, pod, labels })
}

fn shown(trial: &Trial, wide: bool) -> String {
    let beside = match &trial.instead_of {
        Some(old) => format!("in place of {old}"),
        None if trial.stack.len() > 1 => "called before the active stack".into(),
        None => "by itself".into(),
    };
    let mut text = facts(&[
        ("policy", format!("{}, {beside}", trial.policy)),
        ("stack", trial.stack.join(" ")),
        (
            "activation",
            trial
                .refused
                .clone()
                .map_or("would be accepted".into(), |why| format!("would be refused: {why}")),
        ),
    ]);
    if trial.refused.is_some() {
        text += "the present state of the node:\n";
    }
    text += "\n";
    text += &offers(&trial.offers, &trial.resources, wide);
    if let Some(request) = &trial.request {
        text += "\n";
        text += &outcome(request);
        text += &unknown(request, trial);
        text += &wait(request, trial);
    }
    text += "\nasked\n";
    for call in &trial.calls {
        text += &lines(call);
    }
    for warning in &trial.warnings {
        text += &format!("warning: {warning}\n");
    }
    text + "nothing was changed\n"
}

/// The devices that parts would be offered as, beside those of now, and the devices of each resource.
pub(crate) fn offers(offers: &[TrialOffer], resources: &[TrialResource], wide: bool) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    for offer in offers {
        for [resource, offered, now] in lines_of(offer) {
            let row = vec![offer.name.clone(), resource, offered, now, offer.by.clone(), offer.part.clone()];
            // Most nodes have GPUs that are all alike.
            match rows.iter_mut().find(|other| !wide && other[1..5] == row[1..5]) {
                Some(other) => other[0] = format!("{}, {}", other[0], row[0]),
                None => rows.push(row),
            }
        }
    }
    for row in &mut rows {
        row[0] = in_runs(&row[0]);
    }
    let head = [("PART", Name), ("RESOURCE", Name), ("OFFERED", Whole), ("NOW", Whole), ("BY", Name)];
    let mut text = match wide {
        true => table(&["PART", "RESOURCE", "OFFERED", "NOW", "BY", "UUID"], rows),
        false => fitted(&head, rows),
    };
    let rows = resources.iter().map(|resource| {
        let pair = |free: usize, devices: usize| format!("{free} of {devices}");
        vec![
            resource.resource.clone(),
            pair(resource.free, resource.devices),
            pair(resource.free_now, resource.devices_now),
        ]
    });
    text += "\n";
    text + &fitted(&[("RESOURCE", Name), ("FREE", Whole), ("FREE NOW", Whole)], rows)
}

/// Each resource that a part would be or is offered as, with both numbers of its devices.
fn lines_of(offer: &TrialOffer) -> Vec<[String; 3]> {
    let mut names: Vec<&String> =
        offer.offered.iter().chain(&offer.offered_now).map(|line| &line.resource).collect();
    names.sort_unstable();
    names.dedup();
    let count = |lines: &[OfferLine], name: &String| {
        lines.iter().filter(|line| line.resource == *name).map(|line| line.count).sum::<u32>().to_string()
    };
    match names.as_slice() {
        [] => vec![["-".into(), "0".into(), "0".into()]],
        names => names
            .iter()
            .map(|name| [(*name).clone(), count(&offer.offered, name), count(&offer.offered_now, name)])
            .collect(),
    }
}

/// The names of several GPUs as `GPU 0-3,7`; other names as they are.
fn in_runs(names: &str) -> String {
    let indices: Option<Vec<u32>> = names
        .split(", ")
        .map(|name| name.strip_prefix("GPU ").and_then(|index| index.parse().ok()))
        .collect();
    indices.map_or_else(|| names.to_owned(), |indices| format!("GPU {}", runs(indices).join(",")))
}

fn outcome(request: &TrialOutcome) -> String {
    let because = |reason: &str| if reason.is_empty() { String::new() } else { format!(": {reason}") };
    let placed = request.placed_by.as_deref().map_or(String::new(), |by| {
        format!("{}, by {by}{}", request.names.join(", "), because(&request.placed_because))
    });
    let by = if request.by.is_empty() { String::new() } else { format!(" by {}", request.by.join(" ")) };
    let environment = request.environment.iter().map(|(key, value)| format!("{key}={value}"));
    let mut limits: Vec<_> = request.memory_limit_mib.map(|mib| format!("{mib} MiB")).into_iter().collect();
    limits.extend(request.compute_limit_percent.map(|percent| format!("{percent} % of compute")));
    facts(&[
        ("request", format!("{} x {}", request.count, request.resource)),
        ("candidates", request.candidates.join(" ")),
        ("would be placed", placed),
        ("would be", format!("{}{by}{}", request.outcome, because(&request.reason))),
        ("limits", limits.join(", ")),
        ("environment", environment.collect::<Vec<_>>().join(" ")),
    ])
}

/// The hint for a resource that is not offered: which ones are.
fn unknown(request: &TrialOutcome, trial: &Trial) -> String {
    let mut offered = trial.resources.iter().filter(|r| r.devices > 0).map(|r| r.resource.as_str());
    if offered.clone().any(|name| name == request.resource) {
        return String::new();
    }
    let names: Vec<_> = offered.by_ref().collect();
    let names = if names.is_empty() { "none".into() } else { names.join(", ") };
    format!("no {} would be offered; offered resources: {names}\n", request.resource)
}

/// The typical time until devices are free, if too few of an offered resource are.
fn wait(request: &TrialOutcome, trial: &Trial) -> String {
    let too_few = |r: &&TrialResource| {
        r.resource == request.resource && r.devices >= request.count && r.free < request.count
    };
    match trial.resources.iter().find(too_few) {
        Some(resource) => format!(
            "{} of {} devices are free; those of a pod that has ended are free typically 10 to 50 s after its end\n",
            resource.free, resource.devices
        ),
        None => String::new(),
    }
}

fn lines(call: &TrialCall) -> String {
    let took =
        if call.call.microseconds == 0 { String::new() } else { format!(" ({} us)", call.call.microseconds) };
    let mut text = format!("  {} {}: {}{took}\n", call.call.policy, call.hook, call.message);
    for line in &call.log {
        text += &format!("    log: {line}\n");
    }
    text
}
