//! `berth process`: the processes on the GPUs, and their allocations.

use crate::client::{Client, escaped};
use crate::gpu;
use crate::output::{Out, joined, or_dash, table};
use berth_api::{
    Bypass, BypassList, GpuList, Process, ProcessList, ProcessPod, ProcessSight, ReachingPod, Right,
    SightState,
};
use clap::Subcommand;

/// `berth process`.
#[derive(Subcommand, Debug)]
pub enum ProcessCommand {
    /// The processes on the GPUs: their pods, memory and allocations
    List {
        /// On this GPU only: UUID, the beginning of it, or index
        #[arg(long)]
        gpu: Option<String>,
    },
    /// Processes that use a GPU without an allocation, and why they can
    Bypass,
}

pub(crate) fn run(command: &ProcessCommand, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    match command {
        ProcessCommand::List { gpu } => out.answer(&all(client, gpu.as_deref())?, list),
        ProcessCommand::Bypass => out.answer(&client.get::<BypassList>("/bypass")?, bypass),
    }
}

/// The processes on one GPU, by UUID.
pub(crate) fn on(client: &Client, uuid: &str) -> anyhow::Result<ProcessList> {
    client.get(&format!("/gpus/{}/processes", escaped(uuid)))
}

fn all(client: &Client, gpu: Option<&str>) -> anyhow::Result<ProcessList> {
    if let Some(gpu) = gpu {
        return on(client, &gpu::resolve(client, gpu)?);
    }
    let GpuList { items } = client.get("/gpus")?;
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

fn list(list: &ProcessList) -> String {
    let rows = list.items.iter().map(|p| [vec![p.part.clone()], row(p)].concat());
    let shown = match list.items.is_empty() {
        true => "no processes on the GPUs\n".to_owned(),
        false => table(&[&["ON"][..], &HEAD].concat(), rows),
    };
    shown + &limits_of(&list.sight)
}

const HEAD: [&str; 7] = ["PID", "NAME", "USES", "MEMORY MIB", "POD/CONTAINER", "RIGHT", "ALLOCATION"];

/// The table below a GPU; empty if there is no process.
pub(crate) fn below_gpu(list: &ProcessList) -> String {
    match (list.items.is_empty(), &list.sight.state) {
        (true, SightState::Visible | SightState::Unsupported) => String::new(),
        (true, SightState::PidsHidden | SightState::Other(_)) => format!("\n{}", limits_of(&list.sight)),
        (false, _) => format!("\n{}{}", table(&HEAD, list.items.iter().map(row)), limits_of(&list.sight)),
    }
}

fn row(process: &Process) -> Vec<String> {
    let right = match (&process.right, &process.reason) {
        (Right::Allocation, _) => "allocation".into(),
        (Right::Ignored, _) => "ignored".into(),
        (right, Some(reason)) => format!("{} ({reason})", word(right)),
        (right, None) => word(right).into(),
    };
    vec![
        process.pid.to_string(),
        or_dash(process.name.as_ref()),
        joined(&process.uses, "+"),
        or_dash(process.memory_mib),
        pod(process.pod.as_ref()),
        right,
        process.allocations.join(" "),
    ]
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

fn bypass(list: &BypassList) -> String {
    let row = |b: &Bypass| {
        vec![
            b.part.clone(),
            b.pid.to_string(),
            or_dash(b.name.as_ref()),
            or_dash(b.memory_mib),
            pod(b.pod.as_ref()),
            b.since.clone(),
            b.detail.clone(),
        ]
    };
    let head = ["ON", "PID", "NAME", "MEMORY MIB", "POD/CONTAINER", "SINCE", "WHY"];
    let mut text = match list.items.is_empty() {
        true => "no visible process uses a GPU without an allocation\n".to_owned(),
        false => table(&head, list.items.iter().map(row)),
    };
    if list.total > list.items.len() {
        text += &format!("... and {} more\n", list.total - list.items.len());
    }
    let may = |p: &ReachingPod| vec![format!("{}/{}", p.namespace, p.name), p.detail.clone()];
    let rows: Vec<_> = list.pods.iter().flatten().map(may).collect();
    if !rows.is_empty() {
        text += &format!("\n{}", table(&["MAY REACH GPUS", "WHY"], rows));
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
