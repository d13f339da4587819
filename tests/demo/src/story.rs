//! What happens in the demo, step by step.

use crate::workload::Workload;
use crate::{Node, table};
use anyhow::Context;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::{Instant, sleep};

const WHOLE: &str = "nvidia.com/gpu";
const SHARED: &str = "nvidia.com/gpu.shared";
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
    if !once {
        keep_busy(node, &mut work).await?;
    }
    Ok(work)
}

async fn whole_gpus(node: &Node, work: &mut Workload) -> anyhow::Result<()> {
    println!("1. policy `exclusive`: eight whole GPUs");
    node.kubelet.wait_allocatable(WHOLE, 8, SEEN_WITHIN).await?;
    work.start(node, "train-a", WHOLE, 4).await;
    work.start(node, "train-b", WHOLE, 2).await;
    work.start_in_vain(node, "greedy", WHOLE, 3).await;
    holders_known(node, 2).await?;
    table::print(node, work, false).await
}

async fn cordon(node: &Node, work: &mut Workload) -> anyhow::Result<()> {
    let gpu = free_gpu(node).await?;
    println!("2. cordon {gpu}, which is free: it leaves allocatable, nothing else changes");
    node.api.cordon(&gpu, "fan replacement").await?;
    node.kubelet.wait_allocatable(WHOLE, 7, SEEN_WITHIN).await?;
    work.start(node, "infer-a", WHOLE, 1).await;
    work.start_in_vain(node, "infer-b", WHOLE, 1).await;
    table::print(node, work, false).await?;
    println!("   uncordon it");
    node.api.uncordon(&gpu).await?;
    node.kubelet.wait_allocatable(WHOLE, 8, SEEN_WITHIN).await?;
    Ok(())
}

async fn share(node: &Node, work: &mut Workload) -> anyhow::Result<()> {
    println!("3. swap the policy for `mixed`, four shares a GPU, with pods running");
    node.api.activate(json!([{ "policy": "mixed", "parameters": { "replicas": 4 } }])).await?;
    // The GPU that is free can be had whole or in four shares.
    node.kubelet.wait_allocatable(SHARED, 4, SEEN_WITHIN).await?;
    for name in ["note-a", "note-b", "note-c", "note-d"] {
        work.start(node, name, SHARED, 1).await;
    }
    println!("   while a share is held the whole GPU is withdrawn");
    node.kubelet.wait_allocatable(WHOLE, 7, SEEN_WITHIN).await?;
    work.start_in_vain(node, "note-e", SHARED, 1).await;
    holders_known(node, 7).await?;
    table::print(node, work, false).await
}

async fn release(node: &Node, work: &mut Workload) -> anyhow::Result<()> {
    println!("4. pods finish: no event reports it, two reconcile passes find it");
    for name in ["note-a", "note-b", "note-c", "note-d", "train-a"] {
        work.finish(node, name);
    }
    node.kubelet.wait_allocatable(SHARED, 5 * 4, SEEN_WITHIN).await?;
    // The shares of the GPU that was shared count as allocatable whether they are held or not.
    holders_known(node, work.names().len()).await?;
    table::print(node, work, false).await
}

/// Starts and ends pods until the demo is interrupted.
async fn keep_busy(node: &Node, work: &mut Workload) -> anyhow::Result<()> {
    println!("5. pods come and go; Ctrl-C ends it");
    node.print_way_in();
    for turn in 0usize.. {
        let running = work.names();
        // Another stack may be activated meanwhile: pods request what is offered then.
        let is_free = |resource: &&str| {
            node.kubelet.allocatable(resource).unwrap_or(0) > node.kubelet.in_use(resource).len()
        };
        match [SHARED, WHOLE].iter().find(|resource| is_free(resource)) {
            Some(resource) if running.len() <= PODS => {
                work.start(node, &format!("web-{turn}"), resource, 1).await;
            }
            _ if !running.is_empty() => work.finish(node, &running[turn % running.len()]),
            _ => println!(
                "  . no pod runs, and none can: `berth policy rollback` brings the stack before back"
            ),
        }
        sleep(Duration::from_secs(1)).await;
        table::print(node, work, true).await?;
    }
    Ok(())
}

async fn free_gpu(node: &Node) -> anyhow::Result<String> {
    let gpus = node.api.get("/gpus").await?;
    let free = table::items(&gpus)
        .find(|gpu| node.kubelet.in_use(WHOLE).iter().all(|id| gpu["uuid"] != id.as_str()));
    Ok(free.and_then(|gpu| gpu["uuid"].as_str()).context("no GPU is free")?.to_owned())
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
