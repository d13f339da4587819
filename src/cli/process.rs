//! `berth process`: the processes on the GPUs, and their allocations.

use crate::age::age;
use crate::client::{Client, escaped};
use crate::complete;
use crate::named_gpu::resolve;
use crate::names::GpuIndices;
use crate::output::Column::{self, Lines, Name, Whole};
use crate::output::{Out, fitted, joined, or_dash, table};
use berth_api::{
    Bypass, BypassList, ContainerBypass, GpuList, Process, ProcessList, ProcessPod, ProcessSight,
    ReachingPod, Right, SightState,
};
use clap::Subcommand;
use clap_complete::engine::ArgValueCandidates;

/// `berth process`.
#[derive(Subcommand, Debug)]
pub enum ProcessCommand {
    /// The processes on the GPUs: their pods, memory and allocations
    List {
        /// On this GPU only: index, UUID, or the beginning of it
        #[arg(long, add = ArgValueCandidates::new(complete::gpus))]
        gpu: Option<String>,
    },
    /// Processes that use a GPU without an allocation, and why they can
    Bypass,
}

pub(crate) fn run(command: &ProcessCommand, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    match command {
        ProcessCommand::List { gpu } => {
            let wide = out.wide();
            let found = all(client, gpu.as_deref())?;
            let empty_text = found.items.is_empty().then(|| empty_text("No processes found", &found.sight));
            out.list(&found, empty_text, |found| list(found, &GpuIndices::fetch(client), wide))
        }
        ProcessCommand::Bypass => {
            let wide = out.wide();
            let found = client.get::<BypassList>("/bypass")?;
            let has_pods = found.pods.iter().flatten().next().is_some();
            let is_empty = found.items.is_empty() && !has_pods && found.containers.is_empty();
            let empty_text = is_empty
                .then(|| empty_text("No processes found that use a GPU without an allocation", &found.sight));
            out.list(&found, empty_text, |found| bypass(found, &GpuIndices::fetch(client), wide))
        }
    }
}

/// The processes on one GPU, by UUID.
pub(crate) fn on(client: &Client, uuid: &str) -> anyhow::Result<ProcessList> {
    client.get(&format!("/gpus/{}/processes", escaped(uuid)))
}

fn all(client: &Client, gpu: Option<&str>) -> anyhow::Result<ProcessList> {
    if let Some(gpu) = gpu {
        return on(client, &resolve(client, gpu)?);
    }
    let GpuList { items, .. } = client.get("/gpus")?;
    let mut found: Option<ProcessList> = None;
    for gpu in items {
        let more = on(client, &gpu.uuid)?;
        match &mut found {
            Some(found) => found.items.extend(more.items),
            None => found = Some(more),
        }
    }
    Ok(found.unwrap_or_else(|| ProcessList {
        sight: ProcessSight {
            state: SightState::Unsupported,
            why: Some("this node has no GPU".into()),
            fix: None,
        },
        items: Vec::new(),
    }))
}

/// The text of an empty list, with the processes that cannot be seen.
fn empty_text(text: &str, sight: &ProcessSight) -> String {
    match limits_of(sight) {
        limits if limits.is_empty() => text.into(),
        limits => format!("{text}; {}", limits.trim_end()),
    }
}

fn list(list: &ProcessList, indices: &GpuIndices, wide: bool) -> String {
    let on = |p: &Process| if wide { p.part.clone() } else { indices.index_or_uuid(&p.gpu) };
    let rows = list.items.iter().map(|p| [vec![on(p)], row(p, wide)].concat());
    let shown = match wide {
        true => table(&[&["ON"][..], &HEAD_WIDE].concat(), rows),
        false => fitted(&[&[("GPU", Whole)][..], &HEAD].concat(), rows),
    };
    shown + &limits_of(&list.sight)
}

const HEAD: [(&str, Column); 5] =
    [("PID", Whole), ("NAME", Name), ("MEM MIB", Whole), ("POD/CONTAINER", Name), ("RIGHT", Whole)];
const HEAD_WIDE: [&str; 7] = ["PID", "NAME", "MEM MIB", "POD/CONTAINER", "RIGHT", "USES", "ALLOCATION"];

/// The table below a GPU; empty if there is no process.
pub(crate) fn below_gpu(list: &ProcessList, wide: bool) -> String {
    let rows = || list.items.iter().map(|process| row(process, wide));
    match (list.items.is_empty(), &list.sight.state) {
        (true, SightState::Visible | SightState::Unsupported) => String::new(),
        (true, SightState::PidsHidden | SightState::Other(_)) => format!("\n{}", limits_of(&list.sight)),
        (false, _) if wide => format!("\n{}{}", table(&HEAD_WIDE, rows()), limits_of(&list.sight)),
        (false, _) => format!("\n{}{}", fitted(&HEAD, rows()), limits_of(&list.sight)),
    }
}

fn row(process: &Process, wide: bool) -> Vec<String> {
    let mut row = vec![
        process.pid.to_string(),
        or_dash(process.name.as_ref()),
        or_dash(process.memory_mib),
        pod(process.pod.as_ref()),
    ];
    match &process.reason {
        Some(reason) if wide && !matches!(process.right, Right::Allocation | Right::Ignored) => {
            row.push(format!("{} ({reason})", word(&process.right)));
        }
        _ => row.push(word(&process.right).into()),
    }
    if wide {
        row.extend([joined(&process.uses, "+"), process.allocations.join(" ")]);
    }
    row
}

fn word(right: &Right) -> &str {
    match right {
        Right::Allocation => "allocation",
        Right::Shared => "shared",
        Right::Unclear => "unclear",
        Right::Ignored => "ignored",
        Right::Settling => "not yet known",
        Right::Bypass => "BYPASS",
        Right::Other(word) => word,
    }
}

fn bypass(list: &BypassList, indices: &GpuIndices, wide: bool) -> String {
    let row = |b: &Bypass| {
        let mut row = vec![
            if wide { b.part.clone() } else { indices.index_or_uuid(&b.part) },
            b.pid.to_string(),
            or_dash(b.name.as_ref()),
            or_dash(b.memory_mib),
            pod(b.pod.as_ref()),
            if wide { b.since.clone() } else { age(&b.since) },
        ];
        if wide {
            row.push(b.detail.clone());
        }
        row
    };
    let rows = list.items.iter().map(row);
    let mut text = match list.items.is_empty() {
        true => "no visible process uses a GPU without an allocation\n".to_owned(),
        false if wide => table(&["ON", "PID", "NAME", "MEM MIB", "POD/CONTAINER", "SINCE", "WHY"], rows),
        false => {
            // The reason is a sentence, which no column has room for.
            let why = |b: &Bypass| format!("process {}: {}\n", b.pid, b.detail);
            let whys: String = list.items.iter().map(why).collect();
            let head = [
                ("GPU", Whole),
                ("PID", Whole),
                ("NAME", Name),
                ("MEM MIB", Whole),
                ("POD/CONTAINER", Name),
                ("AGE", Whole),
            ];
            fitted(&head, rows) + &whys
        }
    };
    if list.total > list.items.len() {
        text += &format!("... and {} more\n", list.total - list.items.len());
    }
    let may = |p: &ReachingPod| vec![format!("{}/{}", p.namespace, p.name), p.detail.clone()];
    let rows: Vec<_> = list.pods.iter().flatten().map(may).collect();
    if !rows.is_empty() {
        text += &format!("\n{}", fitted(&[("MAY REACH GPUS", Name), ("WHY", Lines)], rows));
    }
    let row = |bypass: &ContainerBypass| {
        let why = bypass.why.as_ref().map_or_else(String::new, |why| format!(" ({why})"));
        vec![
            format!("{}/{}/{}", bypass.namespace, bypass.pod, bypass.container),
            bypass.outcome.as_str().to_owned(),
            bypass.count.to_string(),
            if wide { bypass.at.clone() } else { age(&bypass.at) },
            format!("{}{why}", bypass.detail),
        ]
    };
    let rows: Vec<_> = list.containers.iter().map(row).collect();
    if !rows.is_empty() {
        let head =
            [("CONTAINER", Name), ("OUTCOME", Whole), ("COUNT", Whole), ("LAST SEEN", Whole), ("WHY", Lines)];
        text += &format!("\n{}", fitted(&head, rows));
    }
    text + &limits_of(&list.sight)
}

fn pod(pod: Option<&ProcessPod>) -> String {
    let Some(pod) = pod else { return "-".into() };
    let name = match (&pod.namespace, &pod.name) {
        (Some(namespace), Some(name)) => format!("{namespace}/{name}"),
        _ => pod.uid.clone(),
    };
    format!("{name}/{}", pod.container.as_deref().unwrap_or("?"))
}

/// Which processes cannot be seen, and what to do about it.
fn limits_of(sight: &ProcessSight) -> String {
    let why = sight.why.as_deref().unwrap_or_default();
    match (&sight.state, &sight.fix) {
        (SightState::Visible, _) => String::new(),
        (SightState::PidsHidden, Some(fix)) => format!("not all processes are visible: {why}; fix: {fix}\n"),
        (SightState::PidsHidden, None) => format!("not all processes are visible: {why}\n"),
        (SightState::Unsupported | SightState::Other(_), _) => format!("processes are not visible: {why}\n"),
    }
}
