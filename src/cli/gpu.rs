//! `berth gpu`.

use crate::age::age;
use crate::client::{Client, escaped, query};
use crate::complete;
use crate::drain::DrainArgs;
use crate::history::HistoryArgs;
use crate::named_gpu::{ChangedGpus, drain, gib, resolve, resolve_all, title};
use crate::names::{GpuIndices, pod_name, scheduling_of, unidentified};
use crate::output::Column::{Lines, Name, Whole};
use crate::output::{Out, facts, fitted, joined, or_dash, table};
use crate::process;
use crate::via::{ViaArgs, via_text};
use berth_api::{
    AllocationList, Cordon, Device, DeviceState, DrainState, Gpu, GpuList, GpuSummary, Health, HealthState,
    HealthTurn, Link, Mark, MarkHealthy, MarkKind, Part, ResourceUse, deletion_command,
};
use clap::Subcommand;
use clap_complete::engine::ArgValueCandidates;

/// `berth gpu`.
#[derive(Subcommand, Debug)]
pub enum GpuCommand {
    /// List the GPUs
    List,
    /// One GPU with its devices and the pods that hold them
    Show {
        /// Index, UUID, or the beginning of it
        #[arg(add = ArgValueCandidates::new(complete::gpus))]
        gpu: String,
    },
    /// The load of a GPU over the last hours, and that of the pods on it
    History(HistoryArgs),
    /// Grant nothing new on GPUs; running pods keep them
    Cordon {
        /// Index, UUID, or the beginning of it; several are cordoned in turn
        #[arg(required = true, value_name = "GPU", add = ArgValueCandidates::new(complete::gpus))]
        gpus: Vec<String>,
        /// The reason; recorded with the change
        #[arg(long, default_value = "", hide_default_value = true, value_name = "TEXT")]
        reason: String,
    },
    /// Drain GPUs: cordon them and wait until their pods have ended
    #[command(after_help = "\
Without --evict no pod is evicted: end them yourself, or wait until they end. With \
--evict they are evicted as by `kubectl drain`; static pods stay. A GPU is drained \
when no allocation is left and, where processes are visible, none was seen for 10 s: \
typically 10 to 60 s after its last pod ended. `berth gpu uncordon` ends a drain.
  berth gpu drain 0 --reason 'fan replacement' --wait
  berth gpu drain 0 --evict --deadline 10m --at-deadline delete --wait
  berth gpu drain 0 --stop")]
    Drain(DrainArgs),
    /// Show or change through which API of the kubelet a GPU is granted
    #[command(after_help = "\
Pods keep what they hold. The GPU is moved when nothing holds it through the former API, \
at least 30 s after the order; until then an order for the former API cancels the move. \
The DRA driver must be enabled (`dra.enabled: true`).
  berth gpu via 3
  berth gpu via 3 dra --wait
  berth gpu via 3 device-plugin")]
    Via(ViaArgs),
    /// Mark unhealthy GPUs as healthy, until the next error
    MarkHealthy {
        /// Index, UUID, or the beginning of it; several are marked in turn
        #[arg(required = true, value_name = "GPU", add = ArgValueCandidates::new(complete::gpus))]
        gpus: Vec<String>,
        /// The reason; recorded with the change
        #[arg(long, default_value = "", hide_default_value = true, value_name = "TEXT")]
        reason: String,
    },
    /// Allow new grants on GPUs again
    #[command(after_help = "\
A GPU is out of use while any owner's cordon or drain is left on it. This command \
removes your own; the others are shown with their owners.")]
    Uncordon {
        /// Index, UUID, or the beginning of it; several are uncordoned in turn
        #[arg(required = true, value_name = "GPU", add = ArgValueCandidates::new(complete::gpus))]
        gpus: Vec<String>,
        /// Remove the mark of this owner instead of your own, or of `all` owners except GPUMaintenances and DeviceTaintRules
        #[arg(long, value_name = "OWNER")]
        owner: Option<String>,
    },
    /// Remove vanished GPUs from the list, if no allocation uses them
    Forget {
        /// UUID, or the beginning of it; several are removed in turn
        #[arg(required = true, value_name = "GPU", add = ArgValueCandidates::new(complete::gpus))]
        gpus: Vec<String>,
    },
}

pub(crate) fn run(command: &GpuCommand, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    match command {
        GpuCommand::List => {
            let wide = out.wide();
            let gpus = client.get::<GpuList>("/gpus")?;
            let is_empty = gpus.items.is_empty() && gpus.unidentified.is_empty();
            let empty_text = is_empty.then(|| "No GPUs found; `berth node check` shows the cause".into());
            out.list(&gpus, empty_text, |gpus| if wide { list_wide(gpus) } else { list(gpus) })
        }
        GpuCommand::Show { gpu } => {
            let uuid = resolve(client, gpu)?;
            let processes = process::on(client, &uuid)?;
            let gpu = client.get::<Gpu>(&format!("/gpus/{}", escaped(&uuid)))?;
            // Names of the pods; the API names only allocations. Without an answer they are left out.
            let query = query(&[("gpu", Some(&uuid)), ("limit", Some("1000"))]);
            let pods = || client.get::<AllocationList>(&format!("/allocations{query}")).ok();
            let wide = out.wide();
            out.answer(&gpu, |gpu| {
                let indices = GpuIndices::fetch(client);
                show(gpu, pods().as_ref(), &indices, wide) + &process::below_gpu(&processes, wide)
            })
        }
        GpuCommand::History(args) => super::history::run(args, client, out),
        GpuCommand::Cordon { gpus, reason } => {
            let cordon = Cordon { reason: reason.clone() };
            let change = |uuid: &str| client.put(&format!("/gpus/{}/cordon", escaped(uuid)), &cordon, None);
            change_each(gpus, client, out, change, |gpu| {
                let held: u32 = gpu.summary.resources.iter().map(|r| r.held).sum();
                format!("{} is {}; devices still held: {held}\n", title(gpu), drain(&gpu.summary.drain))
            })
        }
        GpuCommand::Uncordon { gpus, owner } => {
            let query = query(&[("owner", owner.as_deref())]);
            let change = |uuid: &str| client.delete(&format!("/gpus/{}/cordon{query}", escaped(uuid)), None);
            change_each(gpus, client, out, change, |gpu| {
                let mut text = format!("{} is {}\n", title(gpu), drain(&gpu.summary.drain));
                for mark in &gpu.summary.drain.marks {
                    text += &remaining_mark(mark, gpu.summary.index);
                }
                text
            })
        }
        GpuCommand::Drain(args) => super::drain::run(args, client, out),
        GpuCommand::Via(args) => super::via::run(args, client, out),
        GpuCommand::MarkHealthy { gpus, reason } => {
            let mark = MarkHealthy { state: HealthState::Healthy, reason: reason.clone() };
            let change = |uuid: &str| client.put(&format!("/gpus/{}/health", escaped(uuid)), &mark, None);
            change_each(gpus, client, out, change, |gpu| {
                format!("{} is {}\n", title(gpu), health(&gpu.summary.health))
            })
        }
        GpuCommand::Forget { gpus } => {
            for uuid in resolve_all(client, gpus)? {
                client.remove(&format!("/gpus/{}", escaped(&uuid)))?;
                out.done(&format!("{uuid} is forgotten"))?;
            }
            Ok(())
        }
    }
}

/// Changes GPUs in turn, up to the first error, and prints each when it was changed. JSON and YAML are one document:
/// the GPU if one was named, and otherwise a list.
fn change_each(
    given: &[String],
    client: &Client,
    out: &mut Out,
    change: impl Fn(&str) -> anyhow::Result<Gpu>,
    text: impl Fn(&Gpu) -> String,
) -> anyhow::Result<()> {
    let uuids = resolve_all(client, given)?;
    if let [uuid] = uuids.as_slice() {
        return out.answer(&change(uuid)?, text);
    }
    let mut items = Vec::new();
    for uuid in &uuids {
        match change(uuid) {
            Ok(gpu) if out.is_table() => out.answer(&gpu, &text)?,
            Ok(gpu) => items.push(gpu),
            Err(error) => {
                if !out.is_table() && !items.is_empty() {
                    out.answer(&ChangedGpus { items }, |_| String::new())?;
                }
                return Err(error);
            }
        }
    }
    if out.is_table() { Ok(()) } else { out.answer(&ChangedGpus { items }, |_| String::new()) }
}

fn list(list: &GpuList) -> String {
    let indices = GpuIndices::from_gpus(&list.items);
    let row = |g: &GpuSummary| {
        let sum = |of: fn(&ResourceUse) -> u32| g.resources.iter().map(of).sum::<u32>().to_string();
        vec![
            indices.index_or_uuid(&g.uuid),
            g.health.state.to_string(),
            scheduling_of(g).into(),
            age(changed(g)),
            sum(|r| r.held),
            free(&g.resources),
            memory_gib(g),
            top_pod(g),
        ]
    };
    let head = [
        ("GPU", Whole),
        ("HEALTH", Whole),
        ("SCHEDULING", Whole),
        ("AGE", Whole),
        ("HELD", Whole),
        ("FREE", Whole),
        ("MEM GIB", Whole),
        ("TOP POD", Name),
    ];
    let mut text = fitted(&head, list.items.iter().map(row));
    let reason = |g: &GpuSummary| {
        let former =
            if indices.lost_index(&g.uuid) { format!(" (GPU {} before)", g.index) } else { String::new() };
        Some(format!("GPU {}{former}: {}\n", indices.index_or_uuid(&g.uuid), not_normal(g)?))
    };
    let reasons: String = list.items.iter().filter_map(reason).chain(unidentified_lines(list)).collect();
    if !reasons.is_empty() {
        text += &format!("\n{reasons}");
    }
    text
}

/// One line for each GPU without a known UUID.
fn unidentified_lines(list: &GpuList) -> impl Iterator<Item = String> {
    list.unidentified.iter().map(|gpu| format!("{} is not identified: {}\n", unidentified(gpu), gpu.reason))
}

fn list_wide(list: &GpuList) -> String {
    let indices = GpuIndices::from_gpus(&list.items);
    let row = |g: &GpuSummary| {
        let known = |mib: Option<u64>| mib.map_or_else(|| "?".into(), |m| m.to_string());
        vec![
            if indices.lost_index(&g.uuid) { "-".into() } else { g.index.to_string() },
            g.uuid.clone(),
            g.model.clone(),
            format!("{}/{}", known(g.memory_used_mib), known(g.memory_mib)),
            health(&g.health),
            if g.excluded { EXCLUDED.into() } else { drain(&g.drain) },
            uses(&g.resources),
            top_pod(g),
            or_dash(g.processes),
            g.bypasses.to_string(),
            g.health.since.clone(),
            or_dash(g.drain.since.as_ref()),
        ]
    };
    let head = [
        "GPU",
        "UUID",
        "MODEL",
        "MEMORY MIB",
        "HEALTH",
        "SCHEDULING",
        "HELD/FREE",
        "TOP POD",
        "PROCESSES",
        "BYPASSES",
        "HEALTH SINCE",
        "SCHEDULING SINCE",
    ];
    let mut text = table(&head, list.items.iter().map(row));
    for line in unidentified_lines(list) {
        text += &line;
    }
    text
}

/// The free devices. A GPU that is offered as several resources has either those of one or those of another, as
/// `1 or 4`; its MIG instances are free beside each other.
fn free(resources: &[ResourceUse]) -> String {
    let is_mig = |r: &&ResourceUse| r.resource.contains("/mig-");
    let instances: u32 = resources.iter().filter(is_mig).map(|r| r.free).sum();
    let others = resources.iter().filter(|r| !is_mig(r)).map(|r| r.free);
    let free: Vec<_> = [instances].into_iter().chain(others).filter(|free| *free > 0).collect();
    if free.is_empty() { "0".into() } else { joined(&free, " or ") }
}

/// Memory in use of all memory in GiB, with a decimal below ten: `0.9/80`.
fn memory_gib(gpu: &GpuSummary) -> String {
    format!("{}/{}", gib(gpu.memory_used_mib), gib(gpu.memory_mib))
}

/// The pod with the most of the GPU, and how many others there are; `-` without one, and from an older daemon.
fn top_pod(gpu: &GpuSummary) -> String {
    let Some(top) = &gpu.top_holder else { return "-".into() };
    let others = gpu.pod_count.saturating_sub(1);
    let more = if others > 0 { format!(" +{others}") } else { String::new() };
    format!("{}/{}{more}", top.namespace, top.pod)
}

/// How a GPU that is not offered by the configuration's order is shown.
const EXCLUDED: &str = "excluded by the configuration (gpus.exclude)";

/// The newer one of the last changes of its health and of its scheduling.
fn changed(gpu: &GpuSummary) -> &str {
    // All times are UTC and of one length, so their texts are in order.
    let scheduling = gpu.drain.since.as_deref().unwrap_or_default();
    gpu.health.since.as_str().max(scheduling)
}

/// Why a GPU is not in normal use.
fn not_normal(gpu: &GpuSummary) -> Option<String> {
    let bad = (gpu.health.state != HealthState::Healthy).then(|| health(&gpu.health));
    let closed = (gpu.drain.state != DrainState::Active).then(|| drain(&gpu.drain));
    let bypass = (gpu.bypasses > 0).then(|| bypasses(gpu.bypasses));
    let excluded = gpu.excluded.then(|| EXCLUDED.to_owned());
    let via =
        gpu.via.as_ref().filter(|via| !via.is_device_plugin()).map(|via| format!("via {}", via_text(via)));
    let all: Vec<_> = [bad, excluded, closed, via, bypass].into_iter().flatten().collect();
    (!all.is_empty()).then(|| all.join("; "))
}

fn show(gpu: &Gpu, pods: Option<&AllocationList>, indices: &GpuIndices, wide: bool) -> String {
    let summary = &gpu.summary;
    let percent = |value: Option<u32>| value.map_or_else(String::new, |v| format!("{v} %"));
    let mut text = facts(&[
        (
            "gpu",
            match indices.lost_index(&summary.uuid) {
                true => format!("none; {} before it vanished, which is another GPU now", summary.index),
                false => summary.index.to_string(),
            },
        ),
        ("uuid", summary.uuid.clone()),
        ("model", summary.model.clone()),
        (
            "health",
            format!(
                "{} since {} ({})",
                health(&summary.health),
                summary.health.since,
                age(&summary.health.since)
            ),
        ),
        ("healthy again", heals(summary)),
        ("scheduling", if summary.excluded { EXCLUDED.into() } else { drain(&summary.drain) }),
        ("via", summary.via.as_ref().map(via_text).unwrap_or_default()),
        (
            "memory MiB",
            format!(
                "{} used, {} granted, {} in total",
                or_dash(summary.memory_used_mib),
                or_dash(summary.memory_granted_mib),
                or_dash(summary.memory_mib)
            ),
        ),
        ("utilization", percent(summary.utilization_percent)),
        ("temperature", summary.temperature_celsius.map_or_else(String::new, |v| format!("{v} C"))),
        ("power", summary.power_watts.map_or_else(String::new, |v| format!("{v} W"))),
        ("processes", or_dash(summary.processes)),
        ("bypasses", bypasses(summary.bypasses)),
        ("PCI bus", gpu.pci_bus.clone()),
        ("NUMA node", or_dash(gpu.numa_node)),
        ("MIG", if gpu.mig_enabled { "enabled".into() } else { String::new() }),
    ]);
    if !summary.health.history.is_empty() {
        let turn = |t: &HealthTurn| vec![age(&t.since), t.state.to_string(), or_dash(t.reason.as_ref())];
        text += "\n";
        let head = [("AGE", Whole), ("HEALTH", Whole), ("REASON", Lines)];
        text += &fitted(&head, summary.health.history.iter().map(turn));
    }
    if summary.drain.marks.len() > 1 {
        text += "\n";
        text += &marks(&summary.drain.marks);
    }
    for part in &gpu.parts {
        text += &part_table(part, summary, pods, wide);
    }
    if !gpu.links.is_empty() {
        let other = |l: &Link| if wide { l.gpu.clone() } else { indices.index_or_uuid(&l.gpu) };
        let row = |l: &Link| vec![other(l), l.path.to_string(), l.nvlinks.to_string()];
        let mut rows: Vec<_> = gpu.links.iter().map(row).collect();
        rows.sort_by_key(|row| row[0].parse::<u32>().unwrap_or(u32::MAX));
        text += "\n";
        text += &fitted(&[("TO GPU", Name), ("PATH", Whole), ("NVLINKS", Whole)], rows);
    }
    text
}

/// When and how a GPU that is not healthy becomes healthy again.
fn heals(gpu: &GpuSummary) -> String {
    let health = &gpu.health;
    match (&health.state, &health.heals_at) {
        (HealthState::Healthy, _) => String::new(),
        _ if !health.heals => {
            format!("only by an operator, after the repair: `berth gpu mark-healthy {}`", gpu.index)
        }
        (_, Some(at)) => format!("at {at}, if no error comes until then"),
        // The time without errors that it needs may be over by then.
        (_, None) => "once a scan finds it working, or some minutes later".into(),
    }
}

/// A mark that an uncordon has not removed, and the command that removes it.
fn remaining_mark(mark: &Mark, index: u32) -> String {
    let quoted = mark.owner.replace('\'', r"'\''");
    let uncordon = format!("berth gpu uncordon {index} --owner '{quoted}'");
    let since = &mark.since;
    match &mark.object {
        None => format!("  a mark of {} is left, since {since}; `{uncordon}` removes it\n", mark.owner),
        Some(object) => format!(
            "  a mark of {object} is left, since {since}; `{}` removes it. If the object is already deleted, or the daemon was \
             configured to ignore such objects, `{uncordon}` removes it\n",
            deletion_command(object)
        ),
    }
}

fn marks(marks: &[Mark]) -> String {
    let row = |mark: &Mark| {
        let kind = match (&mark.kind, mark.expired) {
            (MarkKind::Cordon, true) => "cordon, drain given up".into(),
            (MarkKind::Cordon | MarkKind::Drain | MarkKind::Other(_), _) => mark.kind.to_string(),
        };
        let owner = mark.object.as_ref().unwrap_or(&mark.owner);
        vec![owner.clone(), kind, mark.since.clone(), or_dash(mark.why.as_ref())]
    };
    fitted(&[("OWNER", Name), ("MARK", Whole), ("SINCE", Whole), ("REASON", Lines)], marks.iter().map(row))
}

fn bypasses(count: u32) -> String {
    match count {
        0 => String::new(),
        1 => "1 process without an allocation".into(),
        several => format!("{several} processes without an allocation"),
    }
}

fn part_table(part: &Part, gpu: &GpuSummary, pods: Option<&AllocationList>, wide: bool) -> String {
    let kind = part.mig.as_ref().map_or_else(|| "whole GPU".into(), |m| format!("MIG {}", m.profile));
    let by = part.offered_by.as_deref().unwrap_or("no policy");
    let rows = part.devices.iter().map(|device| device_row(device, part, gpu, pods, wide));
    let devices = match wide {
        true => table(&["DEVICE", "RESOURCE", "STATE", "ALLOCATION", "POD", "TAKES"], rows),
        false => {
            let head = [
                ("DEVICE", Whole),
                ("RESOURCE", Name),
                ("STATE", Whole),
                ("ALLOCATION", Name),
                ("POD", Name),
            ];
            fitted(&head, rows)
        }
    };
    // The UUID of a whole GPU is above.
    let uuid = if wide || part.mig.is_some() { format!(" {}", part.uuid) } else { String::new() };
    format!("\n{kind}{uuid}, offered by {by}\n{devices}")
}

fn device_row(
    device: &Device,
    part: &Part,
    gpu: &GpuSummary,
    pods: Option<&AllocationList>,
    wide: bool,
) -> Vec<String> {
    let takes = match device.consumes {
        c if c.whole => "whole".into(),
        c if c.memory_mib == 0 && c.compute_percent == 0 => "-".into(),
        c => format!("{} MiB, {} %", c.memory_mib, c.compute_percent),
    };
    let id = match device.id.strip_prefix(part.uuid.as_str()) {
        _ if wide => device.id.clone(),
        Some("") => "all of it".into(),
        Some(share) => share.trim_start_matches(':').to_owned(),
        None => device.id.clone(),
    };
    let holders = pods.into_iter().flat_map(|list| &list.items);
    let holders = holders.filter(|allocation| device.allocations.contains(&allocation.id));
    let holders: Vec<_> = holders.map(|allocation| pod_name(allocation.holder.as_ref())).collect();
    let mut row = vec![
        id,
        device.resource.clone(),
        device_state(device, gpu),
        device.allocations.join(" "),
        holders.join(" "),
    ];
    if wide {
        row.push(takes);
    }
    row
}

/// The state of a device, as `berth node show` counts it: one that is withdrawn because of its GPU has the state of
/// that.
fn device_state(device: &Device, gpu: &GpuSummary) -> String {
    match (&device.state, &gpu.health.state, &gpu.drain.state) {
        (DeviceState::Withdrawn, HealthState::Unhealthy | HealthState::Vanished, _) => {
            HealthState::Unhealthy.to_string()
        }
        (DeviceState::Withdrawn, _, DrainState::Cordoned | DrainState::Draining | DrainState::Drained) => {
            DrainState::Cordoned.to_string()
        }
        (state, ..) => state.to_string(),
    }
}

fn health(health: &Health) -> String {
    match &health.reason {
        Some(reason) => format!("{} ({reason})", health.state),
        None => health.state.to_string(),
    }
}

fn uses(resources: &[ResourceUse]) -> String {
    // A resource whose devices are all withdrawn is not shown.
    let shown = resources.iter().filter(|r| r.held + r.free > 0);
    let words: Vec<_> = shown.map(|r| format!("{} {}/{}", r.resource, r.held, r.free)).collect();
    if words.is_empty() { "-".into() } else { words.join(", ") }
}
