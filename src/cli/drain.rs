//! `berth gpu drain`: orders a drain, and watches it where asked to.

use super::args::{AtDeadline, DrainArgs};
use super::client::{Client, escaped};
use super::gpu::{drain, resolve};
use super::output::Out;
use crate::admin::dto;
use crate::admin::dto::{DrainOrder, Gpu};
use anyhow::{Context, bail};
use std::time::Duration;

/// How often a drain that is waited for is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

pub(super) fn run(args: &DrainArgs, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    let uuid = resolve(client, &args.gpu)?;
    let path = format!("/gpus/{}/drain", escaped(&uuid));
    if args.stop {
        let gpu: Gpu = client.delete(&path)?;
        return out.answer(&gpu, line);
    }
    let order = DrainOrder {
        reason: args.reason.clone(),
        deadline_seconds: args.deadline.map(seconds).transpose()?,
        at_deadline: match args.at_deadline {
            AtDeadline::Wait => dto::AtDeadline::Wait,
            AtDeadline::GiveUp => dto::AtDeadline::GiveUp,
        },
    };
    let mut gpu: Gpu = client.put(&path, &order, None)?;
    if args.wait {
        gpu = watch(client, gpu)?;
    }
    let state = gpu.summary.drain.state.clone();
    out.answer(&gpu, line)?;
    match state.as_str() {
        "draining" | "drained" => Ok(()),
        _ => bail!("the drain of {uuid} was called off, or given up at its deadline"),
    }
}

/// Says on standard error whenever something changes, until the GPU no longer drains.
fn watch(client: &Client, mut gpu: Gpu) -> anyhow::Result<Gpu> {
    let path = format!("/gpus/{}", escaped(&gpu.summary.uuid));
    let mut said = String::new();
    while gpu.summary.drain.state == "draining" {
        let now = line(&gpu);
        if now != said {
            eprint!("{now}");
            said = now;
        }
        std::thread::sleep(LOOK_EVERY);
        gpu = client.get(&path).context("the drain goes on, but cannot be watched any more")?;
    }
    Ok(gpu)
}

fn line(gpu: &Gpu) -> String {
    let mut text = format!("{} is {}", gpu.summary.uuid, drain(&gpu.summary.drain));
    if let Some(progress) = &gpu.summary.drain.progress {
        let many = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        text += &format!(": {} left", many(progress.allocations.len(), "allocation"));
        if let Some(processes) = progress.processes {
            text += &format!(", {}", many(processes as usize, "process").replace("processs", "processes"));
        }
        if let Some(deadline) = &progress.deadline {
            text += if progress.late { ", late since " } else { ", until " };
            text += deadline;
        }
    }
    text + "\n"
}

fn seconds(deadline: Duration) -> anyhow::Result<u32> {
    u32::try_from(deadline.as_secs())
        .ok()
        .filter(|s| *s > 0)
        .context("--deadline: at least a second, at most a week")
}
