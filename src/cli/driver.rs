//! `berth nvml`: releasing the GPUs' driver, and using it again.

use crate::client::Client;
use crate::confirm::warn_and_ask;
use crate::output::Out;
use berth_api::{DriverRelease, Node, ReleaseOrder};
use clap::Subcommand;
use std::time::Duration;

/// `berth nvml`.
#[derive(Subcommand, Debug)]
pub enum DriverCommand {
    /// Close NVML, so that the driver can be unloaded, a GPU reset, or its MIG mode changed
    #[command(after_help = "\
While it is released no GPU is scanned, and nothing is granted. Allocations stay. It \
is refused while a GPU is held: drain the GPUs first. The daemon uses the driver again \
after `berth nvml resume`, when the time is over, once another driver is loaded, or \
when it is started again.

Examples:
  berth nvml release --for 1h --reason 'driver upgrade'
  nvidia-smi --gpu-reset -i 0
  berth nvml resume")]
    Release {
        /// Use the driver again after this time: `30m`, `2h`; at most a day
        #[arg(long = "for", value_name = "TIME", value_parser = duration, default_value = "30m")]
        time: Duration,
        /// The reason; recorded with the change
        #[arg(long, default_value = "", hide_default_value = true, value_name = "TEXT")]
        reason: String,
        /// Release it even if pods hold GPUs: their containers are not stopped, and while one uses its GPU, the driver
        /// cannot be unloaded
        #[arg(long)]
        force: bool,
        /// Skip the confirmation
        #[arg(short, long)]
        yes: bool,
    },
    /// Use the driver again at once
    Resume,
}

pub(crate) fn run(command: &DriverCommand, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    match command {
        DriverCommand::Release { time, reason, force, yes } => {
            let node: Node = client.get("/node")?;
            let free: u32 = node.resources.iter().map(|resource| resource.free).sum();
            if free > 0 {
                let time = humantime::format_duration(*time);
                let effect = format!(
                    "this withdraws all {free} free devices of the node, for {time} or until `berth nvml resume`"
                );
                warn_and_ask(&effect, "Release the driver?", *yes)?;
            }
            let for_seconds = u32::try_from(time.as_secs()).unwrap_or(ReleaseOrder::SECONDS_MAX);
            let order = ReleaseOrder { reason: reason.clone(), for_seconds, force: *force };
            let release: DriverRelease = client.post("/node/nvml/release", &order, None)?;
            out.answer(&release, |release| {
                format!("NVML is closed until {}; `berth nvml resume` opens it again\n", release.until)
            })
        }
        DriverCommand::Resume => {
            client.call("/node/nvml/resume")?;
            out.done("NVML is in use")
        }
    }
}

/// A time of whole seconds, up to a day.
fn duration(text: &str) -> Result<Duration, String> {
    let time = crate::usage::time(text)?;
    let max = Duration::from_secs(ReleaseOrder::SECONDS_MAX.into());
    if time < Duration::from_secs(1) || time > max {
        return Err("give a time from 1s to 24h".into());
    }
    Ok(time)
}
