//! `berth config check`: reads a file as the daemon would, and starts nothing.

mod door;

use super::output::{Out, facts};
use crate::admin::check_files;
use crate::config::{Config, GpuSource, ServeArgs, read_file};
use anyhow::Context;
use door::Door;
use serde::Serialize;
use std::path::Path;

/// Does with a configuration's GPUs and stack what a start does.
type Rehearse = fn(&Config) -> anyhow::Result<Vec<String>>;

/// What `berth config check` answers.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Checked {
    ok: bool,
    file: String,
    /// Why a daemon would refuse it.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    settings: Option<Settings>,
    /// What cannot be known without the node.
    notes: Vec<String>,
}

/// What the file comes to, defaults filled in.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Settings {
    node: String,
    gpus: String,
    kubelet_dir: String,
    state_dir: String,
    admin_listen: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    health_listen: Option<String>,
    admin: Door,
    resource: String,
    /// Where traces go, and what is spoken there.
    #[serde(skip_serializing_if = "Option::is_none")]
    tracing: Option<String>,
    /// The policies of its stack, in order.
    stack: Vec<String>,
}

pub(super) fn run(file: &Path, without_files: bool, rehearse: Rehearse, out: &mut Out) -> anyhow::Result<()> {
    let (ok, name) = (true, file.display().to_string());
    match check(file, without_files, rehearse) {
        Ok((settings, notes)) => {
            let settings = Some(settings);
            out.answer(&Checked { ok, file: name, problem: None, settings, notes }, shown)
        }
        Err(error) => {
            // People read the error itself.
            if !out.for_people() {
                let problem = Some(format!("{error:#}"));
                let refused = Checked { ok: !ok, file: name, problem, settings: None, notes: Vec::new() };
                out.answer(&refused, |_| String::new())?;
            }
            Err(error)
        }
    }
}

fn check(file: &Path, without_files: bool, rehearse: Rehearse) -> anyhow::Result<(Settings, Vec<String>)> {
    // Without flags and environment: the file alone is checked.
    let config = Config::merge(&ServeArgs::default(), read_file(file)?)?;
    let mut notes =
        rehearse(&config).with_context(|| format!("the configuration {} is wrong", file.display()))?;
    notes.extend(files(&config, without_files)?);
    let gpus = match &config.gpus {
        GpuSource::Nvml { library: None, .. } => "nvml".into(),
        GpuSource::Nvml { library: Some(path), .. } => format!("nvml by {}", path.display()),
        GpuSource::Sim(profile) => format!("simulated: {profile}"),
    };
    let settings = Settings {
        node: config.node_name.clone(),
        gpus,
        kubelet_dir: config.kubelet_dir.display().to_string(),
        state_dir: config.state_dir.display().to_string(),
        admin_listen: config.admin_listen.to_string(),
        health_listen: config.health_listen.map(|listen| listen.to_string()),
        admin: Door::of(&config),
        resource: config.resource.to_string(),
        tracing: config.tracing.as_ref().map(|t| format!("{} ({})", t.endpoint.url, t.endpoint.protocol)),
        stack: config.stack.iter().map(|entry| entry.policy.clone()).collect(),
    };
    Ok((settings, notes))
}

/// Reads the files of tokens and of TLS. Answers what a start would make of those that may be missing.
fn files(config: &Config, without_files: bool) -> anyhow::Result<Option<String>> {
    if without_files {
        return Ok(Some("the token and TLS files that it names were not read".into()));
    }
    check_files(&config.token_file, &config.admin).context(
        "the daemon would not start with the files that the configuration names (where they cannot be on this \
         machine, --without-files leaves them out)",
    )?;
    let made = !config.token_file.exists();
    Ok(made.then(|| format!("the daemon makes {} when it first starts", config.token_file.display())))
}

fn shown(checked: &Checked) -> String {
    let mut text = format!("ok: {}\n", checked.file);
    if let Some(settings) = &checked.settings {
        let stack = match settings.stack.as_slice() {
            [] => "none: the baseline offers whole GPUs".into(),
            policies => policies.join(", "),
        };
        let door = &settings.admin;
        text += &facts(&[
            ("  node", settings.node.clone()),
            ("  GPUs", settings.gpus.clone()),
            ("  kubelet folder", settings.kubelet_dir.clone()),
            ("  state folder", settings.state_dir.clone()),
            ("  admin API", door.address(&settings.admin_listen)),
            ("  lets in", door.lets_in()),
            ("  at most", door.limits()),
            ("  health", settings.health_listen.clone().unwrap_or_default()),
            ("  resource", settings.resource.clone()),
            ("  traces", settings.tracing.clone().unwrap_or_default()),
            ("  stack", stack),
        ]);
    }
    let notes: String = checked.notes.iter().map(|note| format!("note: {note}\n")).collect();
    text + &notes
}
