//! `berth top`: GPUs and pods with their present use, redrawn on a terminal until `q`.

use crate::client::{Client, Temporary, query};
use crate::named_gpu::{gib, with_unit};
use crate::names::{GpuIndices, pod_name, scheduling_of};
use crate::output::Column::{Name, Whole};
use crate::output::{COLUMNS, Out, fitted_to, or_dash};
use crate::terminal::Terminal;
use berth_api::{Allocation, AllocationList, GpuList, GpuSummary, HealthState, Node, rfc3339};
use clap::Args;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::{Duration, SystemTime};

/// Interval of the screens, unless `--watch` sets it.
const EVERY: Duration = Duration::from_secs(2);
/// Most allocations in one answer.
const PAGE: &str = "1000";
/// Upper left corner (ECMA-48: CUP), the rest of a line (EL), the rest of the screen (ED).
const HOME: &str = "\u{1b}[H";
const REST_OF_LINE: &str = "\u{1b}[K";
const REST_OF_SCREEN: &str = "\u{1b}[J";

/// `berth top`.
#[derive(Args, Clone, Debug, Default)]
pub struct TopArgs {
    /// Print one screen and exit, as where standard output is no terminal
    #[arg(long)]
    pub once: bool,
}

/// The use of the node at one time.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Top {
    node: String,
    at: String,
    gpus: Vec<GpuSummary>,
    /// GPUs without a known UUID.
    #[serde(skip_serializing_if = "is_zero")]
    unidentified: usize,
    pods: Vec<PodUse>,
    /// Live allocations beyond those that were fetched.
    #[serde(skip_serializing_if = "is_zero")]
    more_allocations: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// The devices of one resource that a pod holds on one GPU, and their use.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodUse {
    gpu: String,
    pod: String,
    resource: String,
    /// The number of devices that it holds.
    devices: usize,
    /// The number of devices of the resource on the GPU; absent if the GPU is not offered as this resource any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    of: Option<u32>,
    #[serde(rename = "memoryUsedMiB", skip_serializing_if = "Option::is_none")]
    memory_used_mib: Option<u64>,
    #[serde(rename = "memoryLimitMiB", skip_serializing_if = "Option::is_none")]
    memory_limit_mib: Option<u64>,
}

/// Runs the command: one screen after another until `q` or Ctrl-C, and then the terminal is as it was before.
pub(crate) fn run(
    args: &TopArgs,
    every: Option<Duration>,
    client: &Client,
    out: &mut Out,
) -> anyhow::Result<()> {
    let is_live = !args.once && out.is_table() && std::io::stdout().is_terminal();
    if !is_live {
        let wide = if out.wide() { usize::MAX } else { COLUMNS };
        return out.answer(&fetch(client)?, |top| screen(top, wide));
    }
    let mut last = String::new();
    // Fetched before the screen is switched: an error of the first request is printed as by any other command.
    let mut next = match fetch(client) {
        Ok(top) => Some(top),
        // As a restart causes it.
        Err(error) if error.is::<Temporary>() => None,
        Err(error) => return Err(error),
    };
    let _terminal = Terminal::open()?;
    while !out.is_closed() {
        let (columns, rows) = size();
        let status = match next.take().map_or_else(|| fetch(client), Ok) {
            Ok(top) => {
                last = screen(&top, if out.wide() { usize::MAX } else { columns });
                String::new()
            }
            // As a restart causes it: the last screen stays, with the cause below.
            Err(error) if error.is::<Temporary>() => format!("{error:#}; trying again\n"),
            Err(error) => return Err(error),
        };
        out.text(&in_place(&(last.clone() + &status), columns, rows))?;
        std::thread::sleep(every.unwrap_or(EVERY));
    }
    Ok(())
}

/// The size of the terminal in columns and rows.
fn size() -> (usize, usize) {
    let size = terminal_size::terminal_size();
    size.map_or((COLUMNS, 24), |(width, height)| (usize::from(width.0), usize::from(height.0)))
}

/// Moves the cursor to the top and writes as much of the text as fits over the previous one: lines of at most
/// `columns`, and at most `rows`, of which the last stays empty for the cursor.
fn in_place(text: &str, columns: usize, rows: usize) -> String {
    let most = rows.saturating_sub(1).max(1);
    let lines: Vec<String> = text.lines().map(|line| cut(line, columns)).collect();
    let mut shown = HOME.to_owned();
    let fits = lines.len() <= most;
    let count = if fits { lines.len() } else { most - 1 };
    for line in &lines[..count] {
        shown += &format!("{line}{REST_OF_LINE}\n");
    }
    if !fits {
        let left = lines.len() - count;
        let rest = cut(&format!("... {left} more lines; `berth top --once` prints all"), columns);
        shown += &format!("{rest}{REST_OF_LINE}\n");
    }
    shown + REST_OF_SCREEN
}

/// The line without what goes beyond the last column: the terminal would continue it in the next row. Colours (ECMA-48:
/// SGR) take no column.
fn cut(line: &str, columns: usize) -> String {
    let (mut cut, mut used, mut in_colour) = (String::with_capacity(line.len()), 0, false);
    for c in line.chars() {
        let starts = c == '\u{1b}';
        if !starts && !in_colour {
            used += 1;
        }
        if starts || in_colour || used <= columns {
            cut.push(c);
        }
        in_colour = starts || (in_colour && c != 'm');
    }
    cut
}

fn fetch(client: &Client) -> anyhow::Result<Top> {
    let node: Node = client.get("/node")?;
    let GpuList { items: gpus, unidentified } = client.get("/gpus")?;
    let allocations: AllocationList =
        client.get(&format!("/allocations{}", query(&[("limit", Some(PAGE))])))?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let pods = pods(&gpus, &allocations.items);
    let more_allocations = allocations.total.saturating_sub(allocations.items.len());
    Ok(Top {
        node: node.name,
        at: rfc3339(u64::try_from(now.as_millis()).unwrap_or_default()),
        gpus,
        unidentified: unidentified.len(),
        pods,
        more_allocations,
    })
}

/// The use of each pod, by GPU and resource, in the order of the GPUs.
fn pods(gpus: &[GpuSummary], allocations: &[Allocation]) -> Vec<PodUse> {
    let mut all = BTreeMap::<(u32, String, String), PodUse>::new();
    for allocation in allocations {
        for uuid in &allocation.gpus {
            let gpu = gpus.iter().find(|gpu| gpu.uuid == *uuid);
            let pod = pod_name(allocation.holder.as_ref());
            let key = (gpu.map_or(u32::MAX, |gpu| gpu.index), pod.clone(), allocation.resource.clone());
            // Ids of MIG devices do not name the GPU, so an allocation of one GPU has all of its devices there.
            let is_only = allocation.gpus.len() == 1;
            let here = |id: &str| {
                is_only
                    || id
                        .strip_prefix(uuid.as_str())
                        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
            };
            let devices = allocation.devices.iter().filter(|id| here(id)).count();
            let uses = allocation.uses.iter().filter(|used| here(&used.part));
            let resources = gpu.into_iter().flat_map(|gpu| &gpu.resources);
            let of = resources.filter(|r| r.resource == allocation.resource).map(|r| r.devices).next();
            let entry = all.entry(key).or_insert_with(|| PodUse {
                gpu: uuid.clone(),
                pod,
                resource: allocation.resource.clone(),
                devices: 0,
                of,
                memory_used_mib: None,
                memory_limit_mib: None,
            });
            entry.devices += devices;
            for used in uses {
                let add = |sum: &mut Option<u64>, more: Option<u64>| {
                    if let Some(more) = more {
                        *sum = Some(sum.unwrap_or_default() + more);
                    }
                };
                add(&mut entry.memory_used_mib, used.memory_used_mib);
                add(&mut entry.memory_limit_mib, used.memory_limit_mib);
            }
        }
    }
    all.into_values().collect()
}

/// The whole screen, in lines of at most `width` columns.
fn screen(top: &Top, width: usize) -> String {
    let bad =
        top.gpus.iter().filter(|gpu| gpu.health.state != HealthState::Healthy).count() + top.unidentified;
    let time = top.at.split_once('T').map_or("", |(_, time)| time.get(..8).unwrap_or_default());
    let bad = if bad > 0 { format!(", {bad} not healthy") } else { String::new() };
    let count = match top.gpus.len() + top.unidentified {
        1 => "1 GPU".to_owned(),
        count => format!("{count} GPUs"),
    };
    let mut text = format!("{}  {time} UTC  {count}{bad}\n\n", top.node);
    if top.gpus.is_empty() {
        return text + "No GPUs found; `berth node check` shows the cause\n";
    }
    let heads =
        ["GPU", "UTIL", "USED", "GRANTED", "TOTAL GIB", "TEMP", "POWER", "HEALTH", "SCHEDULING", "PODS"];
    let indices = GpuIndices::from_gpus(&top.gpus);
    let rows = top.gpus.iter().map(|gpu| gpu_row(gpu, &indices));
    text += &fitted_to(width, &heads.map(|head| (head, Whole)), rows);
    text += "\n";
    if top.pods.is_empty() {
        return text + "No pods hold GPUs\n";
    }
    let row = |pod: &PodUse| {
        vec![
            indices.index_or_uuid(&pod.gpu),
            pod.pod.clone(),
            format!("{}/{}", pod.devices, or_dash(pod.of)),
            pod.resource.clone(),
            or_dash(pod.memory_used_mib),
            or_dash(pod.memory_limit_mib),
        ]
    };
    let head = [
        ("GPU", Whole),
        ("POD", Name),
        ("DEVICES", Whole),
        ("RESOURCE", Name),
        ("MEM MIB", Whole),
        ("LIMIT MIB", Whole),
    ];
    text += &fitted_to(width, &head, top.pods.iter().map(row));
    if top.more_allocations > 0 {
        text += &format!("... and {} older allocations\n", top.more_allocations);
    }
    text
}

fn gpu_row(gpu: &GpuSummary, indices: &GpuIndices) -> Vec<String> {
    vec![
        indices.index_or_uuid(&gpu.uuid),
        with_unit(gpu.utilization_percent, "%"),
        gib(gpu.memory_used_mib),
        gib(gpu.memory_granted_mib),
        gib(gpu.memory_mib),
        with_unit(gpu.temperature_celsius, "C"),
        with_unit(gpu.power_watts, "W"),
        gpu.health.state.to_string(),
        scheduling_of(gpu).into(),
        gpu.pod_count.to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn gpu(index: u32, more: &Value) -> GpuSummary {
        let mut gpu = json!({
            "uuid": format!("GPU-{index}"), "index": index, "model": "H100", "memoryMiB": 81559, "bypasses": 0, "present": true,
            "health": {"state": "healthy", "since": "2026-02-03T04:05:06.000Z", "heals": true, "history": []},
            "drain": {"state": "active", "marks": []},
            "resources": [{"resource": "nvidia.com/gpu.shared", "devices": 10, "held": 3, "free": 7}],
        });
        gpu.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        serde_json::from_value(gpu).unwrap()
    }

    fn allocation(id: u32, pod: &str, devices: &[&str], gpus: &[&str], used: u64) -> Allocation {
        serde_json::from_value(json!({
            "id": format!("a-{id}"), "state": "live", "resource": "nvidia.com/gpu.shared", "devices": devices, "gpus": gpus,
            "grantedAt": "2026-02-03T04:05:06.000Z", "overlapped": false, "decision": {"by": []},
            "holder": {"namespace": "team", "pod": pod, "container": "main"},
            "uses": [{"part": gpus[0], "memoryUsedMiB": used, "pids": []}],
        }))
        .unwrap()
    }

    fn top() -> Top {
        let load = json!({
            "utilizationPercent": 87, "temperatureCelsius": 56, "powerWatts": 412, "memoryUsedMiB": 71_680,
            "memoryGrantedMiB": 65_536, "podCount": 2, "drain": {"state": "draining", "marks": []},
        });
        let gpus = vec![gpu(0, &json!({})), gpu(1, &load)];
        let long = "a-deployment-with-a-long-name-7d9c8b6f5-x2x4q";
        let allocations = [
            allocation(1, long, &["GPU-1::0", "GPU-1::1"], &["GPU-1"], 1024),
            allocation(2, long, &["GPU-1::2"], &["GPU-1"], 512),
            allocation(3, "web-0", &["GPU-0::0", "GPU-1::3"], &["GPU-0", "GPU-1"], 7),
        ];
        let pods = pods(&gpus, &allocations);
        Top {
            node: "gpu-1".into(),
            at: "2026-02-03T04:05:06.000Z".into(),
            gpus,
            unidentified: 0,
            pods,
            more_allocations: 0,
        }
    }

    #[test]
    fn unknown_values_are_dashes_and_lines_fit_80_columns() {
        let text = screen(&top(), 80);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["gpu-1", "04:05:06", "UTC", "2", "GPUs"], "{text}");
        assert_eq!(lines[3], ["0", "-", "-", "-", "80", "-", "-", "healthy", "open", "0"], "{text}");
        assert_eq!(
            lines[4],
            ["1", "87%", "70", "64", "80", "56C", "412W", "healthy", "draining", "2"],
            "{text}"
        );
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(screen(&top(), usize::MAX).contains("a-long-name-7d9c8b6f5-x2x4q"), "no width cuts nothing");
        let mut one = top();
        one.gpus.truncate(1);
        assert!(screen(&one, 80).starts_with("gpu-1  04:05:06 UTC  1 GPU\n"));
    }

    #[test]
    fn a_pod_is_one_row_on_each_gpu_with_the_sum_of_its_containers() {
        let rows: Vec<_> =
            top().pods.into_iter().map(|p| (p.gpu, p.devices, p.of, p.memory_used_mib)).collect();
        let (zero, one) = ("GPU-0".to_owned(), "GPU-1".to_owned());
        // The use of the second allocation's other GPU is not known.
        let expected =
            [(zero, 1, Some(10), Some(7)), (one.clone(), 3, Some(10), Some(1536)), (one, 1, Some(10), None)];
        assert_eq!(rows, expected);
    }

    #[test]
    fn a_screen_is_drawn_over_the_last_one_and_cut_at_the_bottom() {
        assert_eq!(in_place("a\nb\n", 80, 24), "\u{1b}[Ha\u{1b}[K\nb\u{1b}[K\n\u{1b}[J");
        let shown = in_place("1\n2\n3\n4\n5\n", 80, 4);
        assert_eq!(shown.lines().count(), 4, "{shown:?}");
        assert!(shown.contains("2\u{1b}[K\n... 3 more lines; `berth top --once`"), "{shown:?}");
        assert_eq!(cut("\u{1b}[32mhealthy\u{1b}[0m and more", 4), "\u{1b}[32mheal\u{1b}[0m");
    }
}
