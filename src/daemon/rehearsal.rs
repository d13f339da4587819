//! What `berth serve` would say of a configuration's GPUs and stack, without a node: the shipped
//! policies are asked as at a start, in a folder of their own that is gone afterwards.

use super::SystemClock;
use super::stack::{Unresolved, resolve_one};
use crate::admission::Trial;
use crate::config::{Config, GpuSource};
use crate::kernel::change::{Change, Entry};
use crate::kernel::command::NewStack;
use crate::kernel::gpu::Inventory;
use crate::kernel::ledger::Ledger;
use crate::kernel::look::look;
use crate::kernel::policy::{Fault, Hook};
use crate::kernel::stack::StackEntry;
use crate::ports::{Clock, Gpus, Policies};
use crate::sim::SimGpus;
use crate::wasm::{self, Scratch, WasmPolicies};
use anyhow::{Context, bail};
use std::path::Path;
use std::sync::Arc;

/// What stands in for the GPUs of a node that is elsewhere.
const SAMPLE: &str = "8xh100";

/// Whether the GPU source can ever work: a simulated profile that is not known never will, while a
/// library or a file may come yet.
///
/// # Errors
/// What is wrong with the profile.
pub fn check_source(source: &GpuSource) -> anyhow::Result<()> {
    match source {
        GpuSource::Sim(profile) if SimGpus::is_profile(profile) => {
            SimGpus::open(profile)?;
        }
        GpuSource::Sim(_) | GpuSource::Nvml { .. } => {}
    }
    Ok(())
}

/// Does with the stack what a start does. Answers, in sentences, what cannot be known here.
///
/// # Errors
/// What would keep the daemon from starting.
pub fn rehearse(config: &Config) -> anyhow::Result<Vec<String>> {
    check_source(&config.gpus)?;
    let mut notes = Vec::new();
    if config.stack.is_empty() {
        return Ok(notes);
    }
    let scratch = Scratch::new()
        .context("cannot make a folder to ask the stack's policies in (TMPDIR names another place)")?;
    let policies = WasmPolicies::new(wasm::Settings {
        memory_overcommit_percent: config.rules.overcommit_percent,
        ..wasm::Settings::new(scratch.path().to_owned())
    })?;
    let clock = SystemClock::default();
    let mut node = Ledger::default();
    apply(&mut node, policies.shipped(clock.now()).into_iter().map(Change::PolicyKept).collect(), &clock);
    let mut entries = Vec::new();
    for entry in &config.stack {
        match resolve_one(entry, &node) {
            Ok(resolved) => {
                if let Some(version) = node.policies.get(&resolved.digest) {
                    policies.restore(version)?;
                }
                entries.push(resolved);
            }
            Err(Unresolved::NotHere(why)) => {
                let uploads = Uploads::of(&config.state_dir, |digest| {
                    node.policies.keys().any(|d| d.as_str() == digest)
                });
                if matches!(uploads, Uploads::None) {
                    bail!("the stack cannot be used: {why}");
                }
                notes.push(format!(
                    "stack entry {}: not a shipped policy ({}), so it must have been uploaded to the node (`berth \
                     policy push`) before the daemon starts with this file",
                    entry.policy,
                    names(&node)
                ));
            }
            Err(Unresolved::Wrong(why)) => bail!("the stack cannot be used: {why}"),
        }
    }
    let ask = |node: &Ledger| ask(config, &policies, &entries, &Arc::new(node.clone()), &clock);
    // Parameters are read before a policy looks at any GPU.
    if let Some((policy, fault)) = ask(&node) {
        bail!("the stack cannot be used: policy {policy} fails: {fault}");
    }
    let (gpus, certain) = gpus(config, &mut notes)?;
    let changes = look(&node, &gpus, &config.rules, clock.now());
    apply(&mut node, changes, &clock);
    // One that offers nothing was asked about its parameters, whatever the GPUs.
    let offers = |label: &str| {
        let version = node.policies.values().find(|version| version.label() == label);
        version.is_some_and(|version| version.hooks.contains(&Hook::Offer))
    };
    match ask(&node) {
        Some((policy, fault)) if certain || !offers(&policy) => {
            bail!("the stack cannot be used: policy {policy} fails: {fault}")
        }
        Some((policy, fault)) => notes.push(format!(
            "on a node with {SAMPLE} GPUs this stack would fail: policy {policy} fails: {fault}"
        )),
        None => {}
    }
    Ok(notes)
}

/// The GPUs to ask about, and whether they are those that the daemon would have.
fn gpus(config: &Config, notes: &mut Vec<String>) -> anyhow::Result<(Inventory, bool)> {
    if let GpuSource::Sim(profile) = &config.gpus {
        match SimGpus::open(profile).and_then(|gpus| gpus.look()) {
            Ok(gpus) => return Ok((gpus, true)),
            Err(error) => notes.push(format!("{error}; the daemon would wait for it")),
        }
    }
    Ok((SimGpus::open(SAMPLE)?.look()?, false))
}

fn ask(
    config: &Config,
    policies: &dyn Policies,
    entries: &[StackEntry],
    node: &Arc<Ledger>,
    clock: &SystemClock,
) -> Option<(String, Fault)> {
    let entries = entries.to_vec();
    let stack = NewStack { from_api: false, by: "config".into(), why: String::new(), entries };
    let trial = Trial {
        stack: &stack,
        policies,
        node,
        now: clock.now(),
        baseline: &super::baseline(config),
        rules: &config.rules,
        leisure: 1,
    };
    trial.run().err()
}

fn apply(node: &mut Ledger, changes: Vec<Change>, clock: &SystemClock) {
    node.apply(&Entry { at: clock.now(), changes });
}

fn names(node: &Ledger) -> String {
    let mut names: Vec<_> = node.policies.values().map(|v| v.name.as_str()).collect();
    names.sort_unstable();
    names.join(", ")
}

/// What a state folder has of uploaded policies.
enum Uploads {
    /// The daemon has run with it and has none.
    None,
    /// Some; or there is no such folder here, or it cannot be looked into.
    Perhaps,
}

impl Uploads {
    fn of(state_dir: &Path, shipped: impl Fn(&str) -> bool) -> Self {
        let Ok(files) = std::fs::read_dir(state_dir.join("policies")) else {
            return Self::Perhaps;
        };
        let uploaded = files.flatten().any(|file| {
            let path = file.path();
            let component = path.extension().is_some_and(|e| e == "wasm");
            component && path.file_stem().and_then(|s| s.to_str()).is_some_and(|digest| !shipped(digest))
        });
        if uploaded { Self::Perhaps } else { Self::None }
    }
}
