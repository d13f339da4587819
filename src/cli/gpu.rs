//! `berth gpu`.

use crate::client::{Client, escaped, query};
use crate::drain::DrainArgs;
use crate::output::{Out, facts, or_dash, table};
use crate::process;
use anyhow::bail;
use berth_api::{
    Cordon, Device, Drain, Gpu, GpuList, GpuSummary, Health, HealthState, HealthTurn, Link, Mark,
    MarkHealthy, MarkKind, Part, ResourceUse,
};
use clap::Subcommand;

/// `berth gpu`.
#[derive(Subcommand, Debug)]
pub enum GpuCommand {
    /// List the GPUs
    List,
    /// One GPU with its devices and the pods that hold them
    Show {
        /// UUID, the beginning of it, or index
        gpu: String,
    },
    /// Grant nothing new on a GPU; running pods keep it
    Cordon {
        /// UUID, the beginning of it, or index
        gpu: String,
        /// The reason; recorded with the change
        #[arg(long, default_value = "", value_name = "TEXT")]
        reason: String,
    },
    /// Drain a GPU: cordon it and wait until its pods have ended
    #[command(after_help = "\
Without --evict no pod is evicted: end the pods yourself (`kubectl delete pod`), or wait until they end.
With --evict they are evicted through the API server, as `kubectl drain` does: disruption budgets are
respected, and static pods stay. A GPU is drained once it has no allocation left and, where
processes are visible, none was seen on it for ten seconds. `berth gpu uncordon` ends a drain at any point.

Examples:
  berth gpu drain 0 --reason 'fan replacement' --wait
  berth gpu drain 0 --evict --deadline 10m --wait
  berth gpu drain 0 --evict --deadline 10m --at-deadline delete --wait
  berth gpu drain 0 --deadline 10m --at-deadline give-up --wait
  berth gpu drain 0 --stop")]
    Drain(DrainArgs),
    /// Mark an unhealthy GPU as healthy, until the next error
    MarkHealthy {
        /// UUID, the beginning of it, or index
        gpu: String,
        /// The reason; recorded with the change
        #[arg(long, default_value = "", value_name = "TEXT")]
        reason: String,
    },
    /// Allow new grants on a GPU again
    #[command(after_help = "\
A GPU is out of use while any owner's cordon or drain is left on it. This command removes your own; the
others are shown with their owners.")]
    Uncordon {
        /// UUID, the beginning of it, or index
        gpu: String,
        /// Remove the mark of this owner, or of `all`, instead of your own
        #[arg(long, value_name = "OWNER")]
        owner: Option<String>,
    },
    /// Remove a vanished GPU from the list, if no allocation uses it
    Forget {
        /// UUID, or the beginning of it
        gpu: String,
    },
}

pub(crate) fn run(command: &GpuCommand, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    match command {
        GpuCommand::List => {
            let wide = out.wide();
            out.answer(&client.get::<GpuList>("/gpus")?, |gpus| list(gpus, wide))
        }
        GpuCommand::Show { gpu } => {
            let uuid = resolve(client, gpu)?;
            let processes = process::on(client, &uuid)?;
            let gpu = client.get::<Gpu>(&format!("/gpus/{}", escaped(&uuid)))?;
            out.answer(&gpu, |gpu| show(gpu) + &process::below_gpu(&processes))
        }
        GpuCommand::Cordon { gpu, reason } => {
            let path = format!("/gpus/{}/cordon", escaped(&resolve(client, gpu)?));
            let gpu: Gpu = client.put(&path, &Cordon { reason: reason.clone() }, None)?;
            out.answer(&gpu, |gpu| {
                let held: u32 = gpu.summary.resources.iter().map(|r| r.held).sum();
                format!("{} is {}; devices still held: {held}\n", gpu.summary.uuid, drain(&gpu.summary.drain))
            })
        }
        GpuCommand::Uncordon { gpu, owner } => {
            let query = query(&[("owner", owner.as_deref())]);
            let path = format!("/gpus/{}/cordon{query}", escaped(&resolve(client, gpu)?));
            let gpu: Gpu = client.delete(&path, None)?;
            out.answer(&gpu, |gpu| {
                let mut text = format!("{} is {}\n", gpu.summary.uuid, drain(&gpu.summary.drain));
                for Mark { owner, since, .. } in &gpu.summary.drain.marks {
                    let quoted = owner.replace('\'', r"'\''");
                    text += &format!(
                        "  a mark of {owner} is left, since {since}; `berth gpu uncordon {} --owner '{quoted}'` removes it\n",
                        gpu.summary.uuid
                    );
                }
                text
            })
        }
        GpuCommand::Drain(args) => super::drain::run(args, client, out),
        GpuCommand::MarkHealthy { gpu, reason } => {
            let path = format!("/gpus/{}/health", escaped(&resolve(client, gpu)?));
            let word = MarkHealthy { state: HealthState::Healthy, reason: reason.clone() };
            let gpu: Gpu = client.put(&path, &word, None)?;
            out.answer(&gpu, |gpu| format!("{} is {}\n", gpu.summary.uuid, health(&gpu.summary.health)))
        }
        GpuCommand::Forget { gpu } => {
            let uuid = resolve(client, gpu)?;
            client.remove(&format!("/gpus/{}", escaped(&uuid)))?;
            out.done(&format!("{uuid} is forgotten"))
        }
    }
}

/// The UUID of the GPU that is named by a UUID, the beginning of one, or an index.
pub(crate) fn resolve(client: &Client, given: &str) -> anyhow::Result<String> {
    let GpuList { items } = client.get("/gpus")?;
    let index: Option<u32> = given.parse().ok();
    let meant = |g: &&GpuSummary| g.uuid == given || Some(g.index) == index;
    // A vanished GPU keeps its index until it is forgotten; the present one with that index is meant.
    let exact = items.iter().filter(meant).max_by_key(|g| g.present);
    let beginning: Vec<_> = items.iter().filter(|g| !given.is_empty() && g.uuid.starts_with(given)).collect();
    match (exact, beginning.as_slice()) {
        (Some(gpu), _) => Ok(gpu.uuid.clone()),
        (None, [gpu]) => Ok(gpu.uuid.clone()),
        (None, []) => bail!("this node has no GPU {given:?}; `berth gpu list` shows its GPUs"),
        (None, several) => {
            bail!("{given:?} is the beginning of the UUIDs of {} GPUs: give more characters", several.len())
        }
    }
}

fn list(list: &GpuList, wide: bool) -> String {
    if list.items.is_empty() {
        return "no GPUs; `berth node check` shows the cause\n".into();
    }
    let row = |g: &GpuSummary| {
        let known = |mib: Option<u64>| mib.map_or_else(|| "?".into(), |m| m.to_string());
        vec![
            g.index.to_string(),
            g.uuid.clone(),
            g.model.clone(),
            format!("{}/{}", known(g.memory_used_mib), known(g.memory_mib)),
            health(&g.health),
            drain(&g.drain),
            uses(&g.resources),
            or_dash(g.processes),
            g.bypasses.to_string(),
            g.health.since.clone(),
            or_dash(g.drain.since.as_ref()),
        ]
    };
    let mut head = vec!["INDEX", "UUID", "MODEL", "MEMORY MIB", "HEALTH", "DRAIN", "HELD/FREE"];
    if wide {
        head.extend(["PROCESSES", "BYPASSES", "HEALTH SINCE", "DRAIN SINCE"]);
    }
    table(&head, list.items.iter().map(row))
}

fn show(gpu: &Gpu) -> String {
    let summary = &gpu.summary;
    let mut text = facts(&[
        ("uuid", summary.uuid.clone()),
        ("index", summary.index.to_string()),
        ("model", summary.model.clone()),
        ("health", format!("{} since {}", health(&summary.health), summary.health.since)),
        ("drain", drain(&summary.drain)),
        (
            "memory MiB",
            format!("{} used of {}", or_dash(summary.memory_used_mib), or_dash(summary.memory_mib)),
        ),
        ("processes", or_dash(summary.processes)),
        ("bypasses", bypasses(summary.bypasses)),
        ("PCI bus", gpu.pci_bus.clone()),
        ("NUMA node", or_dash(gpu.numa_node)),
        ("MIG", if gpu.mig_enabled { "enabled".into() } else { String::new() }),
    ]);
    if !summary.health.history.is_empty() {
        let turn = |t: &HealthTurn| vec![t.since.clone(), t.state.to_string(), or_dash(t.reason.as_ref())];
        text += "\n";
        text += &table(&["WAS SINCE", "HEALTH", "REASON"], summary.health.history.iter().map(turn));
    }
    if summary.drain.marks.len() > 1 {
        text += "\n";
        text += &marks(&summary.drain.marks);
    }
    for part in &gpu.parts {
        text += &part_table(part);
    }
    if !gpu.links.is_empty() {
        let row = |l: &Link| vec![l.gpu.clone(), l.path.to_string(), l.nvlinks.to_string()];
        text += "\n";
        text += &table(&["TO GPU", "PATH", "NVLINKS"], gpu.links.iter().map(row));
    }
    text
}

fn marks(marks: &[Mark]) -> String {
    let row = |mark: &Mark| {
        let kind = match (&mark.kind, mark.expired) {
            (MarkKind::Cordon, true) => "cordon, drain given up".into(),
            (MarkKind::Cordon | MarkKind::Drain | MarkKind::Other(_), _) => mark.kind.to_string(),
        };
        vec![mark.owner.clone(), kind, mark.since.clone(), or_dash(mark.why.as_ref())]
    };
    table(&["OWNER", "MARK", "SINCE", "REASON"], marks.iter().map(row))
}

fn bypasses(count: u32) -> String {
    match count {
        0 => String::new(),
        1 => "1 process without an allocation".into(),
        several => format!("{several} processes without an allocation"),
    }
}

fn part_table(part: &Part) -> String {
    let kind = part.mig.as_ref().map_or_else(|| "whole GPU".into(), |m| format!("MIG {}", m.profile));
    let by = part.offered_by.as_deref().unwrap_or("no policy");
    let head = ["DEVICE", "RESOURCE", "STATE", "TAKES", "ALLOCATIONS"];
    format!("\n{} ({kind}), offered by {by}\n", part.uuid)
        + &table(&head, part.devices.iter().map(device_row))
}

fn device_row(device: &Device) -> Vec<String> {
    let takes = match device.consumes {
        c if c.whole => "whole".into(),
        c if c.memory_mib == 0 && c.compute_percent == 0 => "-".into(),
        c => format!("{} MiB, {} %", c.memory_mib, c.compute_percent),
    };
    let state = device.state.to_string();
    vec![device.id.clone(), device.resource.clone(), state, takes, device.allocations.join(" ")]
}

fn health(health: &Health) -> String {
    match &health.reason {
        Some(reason) => format!("{} ({reason})", health.state),
        None => health.state.to_string(),
    }
}

pub(crate) fn drain(drain: &Drain) -> String {
    match (&drain.by, &drain.why) {
        (Some(by), Some(why)) => format!("{} by {by} ({why})", drain.state),
        (Some(by), None) => format!("{} by {by}", drain.state),
        _ => drain.state.to_string(),
    }
}

fn uses(resources: &[ResourceUse]) -> String {
    // A resource whose devices are all withdrawn is not shown.
    let shown = resources.iter().filter(|r| r.held + r.free > 0);
    let words: Vec<_> = shown.map(|r| format!("{} {}/{}", r.resource, r.held, r.free)).collect();
    if words.is_empty() { "-".into() } else { words.join(", ") }
}

/// The indices of a node's GPUs by UUID, for texts of the API that name GPUs by UUID.
pub(crate) struct Names(Vec<(String, u32)>);

impl Names {
    /// Requests the list. Without an answer, texts stay as they are.
    pub(crate) fn of(client: &Client) -> Self {
        let gpus = client.get::<GpuList>("/gpus").map(|list| list.items).unwrap_or_default();
        Self(gpus.into_iter().filter(|gpu| gpu.present).map(|gpu| (gpu.uuid, gpu.index)).collect())
    }

    /// The text with `GPU 3 (GPU-71d5...)` for a UUID, and `GPU 3 share 1 (GPU-71d5...::1)` for a device.
    pub(crate) fn with_indices(&self, text: &str) -> String {
        let mut result = String::with_capacity(text.len());
        let mut rest = text;
        // A UUID inside a longer word is left alone.
        let in_word = |c: char| c.is_ascii_alphanumeric() || c == '-';
        while !rest.is_empty() {
            // A UUID in JSON, after a quote, is left alone.
            let free = !result.ends_with(in_word) && !result.ends_with('"');
            let here = |(uuid, _): &&(String, u32)| {
                rest.strip_prefix(uuid.as_str()).is_some_and(|behind| !behind.starts_with(in_word))
            };
            if let Some((uuid, index)) = self.0.iter().filter(|_| free).find(here) {
                let behind = &rest[uuid.len()..];
                let share = behind
                    .strip_prefix("::")
                    .map(|n| &n[..n.find(|c: char| !c.is_ascii_digit()).unwrap_or(n.len())]);
                match share.filter(|share| !share.is_empty()) {
                    Some(share) => {
                        result += &format!("GPU {index} share {share} ({uuid}::{share})");
                        rest = &behind[2 + share.len()..];
                    }
                    None => {
                        result += &format!("GPU {index} ({uuid})");
                        rest = behind;
                    }
                }
                continue;
            }
            let Some(next) = rest.chars().next() else { break };
            result.push(next);
            rest = &rest[next.len_utf8()..];
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_comes_with_its_index_and_longer_words_stay() {
        let names = Names(vec![("GPU-1".into(), 1), ("GPU-10".into(), 7)]);
        for (text, expected) in [
            ("chooses GPU-1 instead of GPU-10", "chooses GPU 1 (GPU-1) instead of GPU 7 (GPU-10)"),
            ("GPU-10::3, GPU-1::12.", "GPU 7 share 3 (GPU-10::3), GPU 1 share 12 (GPU-1::12)."),
            ("GPU-1 x2; GPU-1::", "GPU 1 (GPU-1) x2; GPU 1 (GPU-1)::"),
            ("{\"part\":\"GPU-1\"}", "{\"part\":\"GPU-1\"}"),
            ("MIG-GPU-1 GPU-100 GPU-1-a \u{e9}", "MIG-GPU-1 GPU-100 GPU-1-a \u{e9}"),
        ] {
            assert_eq!(names.with_indices(text), expected);
        }
        assert_eq!(Names(Vec::new()).with_indices("GPU-1"), "GPU-1");
    }
}
