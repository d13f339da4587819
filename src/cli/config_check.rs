//! `berth config check`: reads a file as the daemon would, and starts nothing.

use super::output::{Out, facts};
use crate::config::{Config, GpuSource, ServeArgs, read_file};
use anyhow::Context;
use std::path::Path;

pub(super) fn run(
    file: &Path,
    rehearse: fn(&Config) -> anyhow::Result<Vec<String>>,
    out: &mut Out,
) -> anyhow::Result<()> {
    // Without flags and environment: the file alone is checked.
    let config = Config::merge(&ServeArgs::default(), read_file(file)?)?;
    let notes =
        rehearse(&config).with_context(|| format!("the configuration {} is wrong", file.display()))?;
    let stack: Vec<_> = config.stack.iter().map(|e| e.policy.as_str()).collect();
    let stack =
        if stack.is_empty() { "none: the baseline offers whole GPUs".into() } else { stack.join(", ") };
    let gpus = match &config.gpus {
        GpuSource::Nvml { library: None, .. } => "nvml".into(),
        GpuSource::Nvml { library: Some(path), .. } => format!("nvml by {}", path.display()),
        GpuSource::Sim(profile) => format!("simulated: {profile}"),
    };
    out.text(&format!("ok: {}\n", file.display()))?;
    out.text(&facts(&[
        ("  node", config.node_name.clone()),
        ("  GPUs", gpus),
        ("  kubelet folder", config.kubelet_dir.display().to_string()),
        ("  state folder", config.state_dir.display().to_string()),
        ("  admin API", config.admin_listen.to_string()),
        ("  health", config.health_listen.map_or_else(String::new, |h| h.to_string())),
        ("  resource", config.resource.to_string()),
        ("  stack", stack),
    ]))?;
    notes.iter().try_for_each(|note| out.text(&format!("note: {note}\n")))
}
