//! What happens in the demo, step by step.

use crate::workload::{NAMESPACE, Workload};
use crate::{Node, table};
use anyhow::Context;
use berth_gpus::sim::Machine;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::{Instant, sleep};

const WHOLE: &str = "nvidia.com/gpu";
const SHARED: &str = "nvidia.com/gpu.shared";
/// Events of the busy cluster between two tables, where lines are printed.
const TABLE_EVERY: u64 = 60;
/// Shares of each GPU.
const SHARES: u64 = 4;
/// Pods of the busy cluster.
const PODS: usize = 8;
/// How long the kubelet or the ledger may take to show what was done, on a machine that is busy.
const SEEN_WITHIN: Duration = Duration::from_secs(60);

/// The waits that guard a real node are tens of seconds; a story needs them shorter.
pub(crate) const CONFIGURATION: &str = "
stack:
  - policy: exclusive
health: { pollSeconds: 1 }
rounds: { listEveryMs: 250, listEveryCordonedMs: 250, roundEveryMs: 1000 }
timing: { roundsApartMs: 300, kubeletSettleMs: 500, replySettleMs: 500, retireMs: 5000, namedMs: 1000 }
";

/// Runs the tour; then, unless `once`, keeps a simulated cluster busy until it is interrupted.
pub(crate) async fn tell(node: &Node, once: bool) -> anyhow::Result<Workload> {
    let mut work = Workload::default();
    whole_gpus(node, &mut work).await?;
    cordon(node, &mut work).await?;
    share(node, &mut work).await?;
    release(node, &mut work).await?;
    limit(node, &mut work).await?;
    if !once {
        keep_busy(node, &mut work).await?;
    }
    Ok(work)
}

async fn whole_gpus(node: &Node, work: &mut Workload) -> anyhow::Result<()> {
    node.screen.step("1. policy `exclusive`: eight whole GPUs");
    node.kubelet.wait_allocatable(WHOLE, 8, SEEN_WITHIN).await?;
    work.start(node, "train-a", WHOLE, 4).await;
    work.start(node, "train-b", WHOLE, 2).await;
    work.start_in_vain(node, "greedy", WHOLE, 3).await;
    holders_known(node, 2).await?;
    table::print(node, work).await
}

async fn cordon(node: &Node, work: &mut Workload) -> anyhow::Result<()> {
    let gpu = free_gpu(node).await?;
    let (index, gpu) = gpu;
    node.screen.step(&format!(
        "2. cordon GPU {index}, which is free: it is no longer allocatable, nothing else changes"
    ));
    node.api.cordon(&gpu, "fan replacement").await?;
    node.kubelet.wait_allocatable(WHOLE, 7, SEEN_WITHIN).await?;
    work.start(node, "infer-a", WHOLE, 1).await;
    work.start_in_vain(node, "infer-b", WHOLE, 1).await;
    table::print(node, work).await?;
    node.screen.say("  uncordon it");
    node.api.uncordon(&gpu).await?;
    node.kubelet.wait_allocatable(WHOLE, 8, SEEN_WITHIN).await?;
    Ok(())
}

async fn share(node: &Node, work: &mut Workload) -> anyhow::Result<()> {
    node.screen.step("3. swap the policy for `mixed`, four shares a GPU, with pods running");
    node.api.activate(json!([{ "policy": "mixed", "parameters": { "replicas": SHARES } }])).await?;
    // The GPU that is free can be had whole or in four shares.
    node.kubelet.wait_allocatable(SHARED, 4, SEEN_WITHIN).await?;
    for name in ["note-a", "note-b", "note-c", "note-d"] {
        work.start(node, name, SHARED, 1).await;
    }
    node.screen.say("  while a share is held the whole GPU is withdrawn");
    node.kubelet.wait_allocatable(WHOLE, 7, SEEN_WITHIN).await?;
    work.start_in_vain(node, "note-e", SHARED, 1).await;
    holders_known(node, 7).await?;
    table::print(node, work).await
}

async fn release(node: &Node, work: &mut Workload) -> anyhow::Result<()> {
    node.screen.step("4. pods finish: the kubelet shows it, and the next reconcile pass frees their devices");
    for name in ["note-a", "note-b", "note-c", "note-d", "train-a"] {
        work.finish(node, name);
    }
    node.kubelet.wait_allocatable(SHARED, 5 * 4, SEEN_WITHIN).await?;
    // The shares of the GPU that was shared count as allocatable whether they are held or not.
    holders_known(node, work.names().len()).await?;
    table::print(node, work).await
}

async fn limit(node: &Node, work: &mut Workload) -> anyhow::Result<()> {
    node.screen.step("5. add policy `quota`: namespace `batch` may hold two shares");
    let quota = json!({ "namespaces": [{ "namespace": "batch", "devices": 2 }] });
    let mixed = json!({ "policy": "mixed", "parameters": { "replicas": SHARES } });
    node.api.activate(json!([{ "policy": "quota", "parameters": quota }, mixed])).await?;
    work.namespace = "batch";
    let known = work.names().len();
    for (at, name) in ["crawl-a", "crawl-b"].into_iter().enumerate() {
        work.start(node, name, SHARED, 1).await;
        // A quota counts what has a holder.
        holders_known(node, known + at + 1).await?;
    }
    work.start_in_vain(node, "crawl-c", SHARED, 1).await;
    work.namespace = NAMESPACE;
    work.start(node, "note-f", SHARED, 1).await;
    holders_known(node, known + 3).await?;
    table::print(node, work).await
}

/// Starts and ends pods until the demo is interrupted.
async fn keep_busy(node: &Node, work: &mut Workload) -> anyhow::Result<()> {
    node.screen.step("6. pods come and go; Ctrl-C ends it");
    for turn in 0u64.. {
        let running = work.names();
        // Another stack may be activated meanwhile: pods request what is offered then.
        let is_free = |resource: &&str| {
            node.kubelet.allocatable(resource).unwrap_or(0) > node.kubelet.in_use(resource).len()
        };
        match [SHARED, WHOLE].iter().find(|resource| is_free(resource)) {
            Some(resource) if running.len() <= PODS => {
                work.start(node, &format!("web-{turn}"), resource, 1).await;
            }
            _ if !running.is_empty() => {
                let place = usize::try_from(turn)? % running.len();
                work.finish(node, &running[place]);
            }
            _ => node.screen.say(
                "  . no pod runs, and none can: `berth policy rollback` activates the previous stack again",
            ),
        }
        move_load(node, turn).await?;
        sleep(Duration::from_secs(1)).await;
        // As lines, a table at each event would bury the events.
        if node.screen.is_live() || turn.is_multiple_of(TABLE_EVERY) {
            table::print(node, work).await?;
        }
        if node.screen.is_live() {
            node.show_head();
        }
    }
    Ok(())
}

/// Sets the memory in use of each GPU, and the number of its processes: those of the pods on it. The memory goes up and
/// down, so that graphs have something to show.
async fn move_load(node: &Node, turn: u64) -> anyhow::Result<()> {
    let gpus = node.api.get("/gpus").await?;
    let held: Vec<String> =
        [SHARED, WHOLE].iter().flat_map(|resource| node.kubelet.in_use(resource)).collect();
    let change = |machine: &mut Machine| {
        for gpu in table::items(&gpus) {
            let (Some(uuid), Some(index), Some(memory)) =
                (gpu["uuid"].as_str(), gpu["index"].as_u64(), gpu["memoryMiB"].as_u64())
            else {
                continue;
            };
            let (Ok(index), prefix) = (u32::try_from(index), format!("{uuid}::")) else { continue };
            let (mut processes, mut most) = (0, 0);
            for id in &held {
                if id == uuid {
                    (processes, most) = (1, memory);
                } else if id.starts_with(&prefix) {
                    (processes, most) = (processes + 1, most + memory / SHARES);
                }
            }
            let state = machine.gpu(index);
            (state.processes, state.memory_used_mib) = (processes, most * wave(turn, index) / 100);
        }
    };
    node.gpus.change(change).map_err(anyhow::Error::msg)
}

/// Percent of the memory that is in use: from 30 up to 90 and down again, each GPU a little later than the one before.
fn wave(turn: u64, gpu: u32) -> u64 {
    let at = (turn * 2 + u64::from(gpu) * 15) % 120;
    30 + at.min(120 - at)
}

/// Index and UUID of a free GPU.
async fn free_gpu(node: &Node) -> anyhow::Result<(u64, String)> {
    let gpus = node.api.get("/gpus").await?;
    let free = table::items(&gpus)
        .find(|gpu| node.kubelet.in_use(WHOLE).iter().all(|id| gpu["uuid"] != id.as_str()));
    let free = free.context("no GPU is free")?;
    let named = free["index"].as_u64().zip(free["uuid"].as_str());
    named.map(|(index, uuid)| (index, uuid.to_owned())).context("a GPU without a name")
}

/// Waits until there are `count` live allocations, and each has a pod's name.
async fn holders_known(node: &Node, count: usize) -> anyhow::Result<()> {
    let deadline = Instant::now() + SEEN_WITHIN;
    loop {
        let allocations = node.api.get("/allocations").await?;
        let live = table::items(&allocations).count();
        let known = table::items(&allocations).filter(|a| a["holder"]["pod"] != Value::Null).count();
        if (live, known) == (count, count) {
            return Ok(());
        }
        anyhow::ensure!(
            Instant::now() < deadline,
            "{live} allocations are live and {known} of their holders known, instead of {count}"
        );
        sleep(Duration::from_millis(50)).await;
    }
}
