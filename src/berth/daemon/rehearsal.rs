//! What a start would say of a configuration's GPUs and stack, without a node: the GPUs are opened, and the shipped
//! policies are asked about them as at a start, in a folder of their own that is removed afterwards.

use super::stack::{Unresolved, resolve, resolve_one, trusted};
use super::{SystemClock, open_gpus, setup};
use crate::config::{BadSetting, Config, Findings, GpuSource, Without};
use anyhow::Context;
use berth_core::admission::{LEISURE, Trial};
use berth_gpus::sim::SimGpus;
use berth_http::check_files;
use berth_kernel::change::{Change, Entry};
use berth_kernel::command::NewStack;
use berth_kernel::gpu::Inventory;
use berth_kernel::ledger::Ledger;
use berth_kernel::look::look;
use berth_kernel::policy::{Fault, FaultKind, Hook};
use berth_kernel::ports::{Clock, Gpus, Policies};
use berth_kernel::stack::StackEntry;
use berth_kernel::time::Now;
use berth_wasm::{self, Scratch, WasmPolicies};
use std::path::Path;
use std::sync::Arc;

/// The backend in place of the GPUs of another node.
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

/// Does with the GPUs and the stack what a start does, and finds all that would keep the daemon from starting or
/// from offering them.
///
/// # Errors
/// If the policies cannot be asked on this machine.
pub fn rehearse(config: &Config, without: Without) -> anyhow::Result<Findings> {
    let mut found = Findings::default();
    let (gpus, certain) = gpus(config, without, &mut found)?;
    if config.stack.is_empty() {
        return Ok(found);
    }
    let scratch = Scratch::new()
        .context("cannot make a folder to ask the stack's policies in (TMPDIR names another place)")?;
    let policies = WasmPolicies::new(setup::policies(config, scratch.path().to_owned()))?;
    let clock = SystemClock::default();
    let mut node = Ledger::default();
    apply(&mut node, policies.shipped(clock.now()).into_iter().map(Change::PolicyKept).collect(), &clock);
    let mut entries = entries(config, without, &node, &mut found);
    for (_, entry) in &entries {
        if let Some(version) = node.policies.get(&entry.digest) {
            policies.restore(version)?;
        }
    }
    // Parameters are read before a policy gets any GPU.
    let (mut faults, _) = ask(config, &policies, &mut entries, &Arc::new(node.clone()), &clock);
    faults.iter_mut().for_each(|fault| fault.certain = true);
    let changes = look(&node, &gpus, &config.rules, clock.now());
    apply(&mut node, changes, &clock);
    let (more, warnings) = ask(config, &policies, &mut entries, &Arc::new(node.clone()), &clock);
    faults.extend(more);
    if certain {
        found.notes.extend(warnings);
    }
    for Failed { at, policy, fault, certain: known } in faults {
        let what = format!("policy {policy} fails: {fault}");
        // What is not permitted or not well formed is so on all GPUs, and one that offers nothing never sees any.
        let version = node.policies.values().find(|version| version.label() == policy);
        let offers = version.is_some_and(|version| version.hooks.contains(&Hook::Offer));
        if known || certain || !offers || fault.kind == FaultKind::Answer {
            let key = if fault.kind == FaultKind::Parameters { ".parameters" } else { "" };
            found.errors.push(BadSetting::new(format!("stack[{at}]{key}"), what));
        } else {
            found.notes.push(format!("on a node with {SAMPLE} GPUs this stack would fail: {what}"));
        }
    }
    Ok(found)
}

/// The stack that a start with this configuration would activate on the node, for a daemon that would end itself for
/// it. The GPU source and the files are checked before, as by a start.
///
/// # Errors
/// If the start would fail.
pub(super) fn stack_of_start(config: &Config, node: &Ledger) -> anyhow::Result<Vec<StackEntry>> {
    check_source(&config.gpus)?;
    if let Some((key, error)) = check_files(&config.token_file, &config.admin).into_iter().next() {
        return Err(anyhow::Error::new(error).context(key));
    }
    // A start then shows what is wrong with the stack of its file, and goes on.
    if node.stack.from_api {
        return Ok(Vec::new());
    }
    let entries = resolve(config, node).map_err(anyhow::Error::msg)?;
    trusted(entries, node, &config.rules.trusted_keys).map_err(anyhow::Error::msg)
}

/// Tests that stack on the present state of the node, as the start would.
///
/// # Errors
/// If it could not be activated, also if the failure may be temporary.
pub(super) fn try_stack(
    config: &Config,
    entries: Vec<StackEntry>,
    node: &Arc<Ledger>,
    now: Now,
    policies: berth_wasm::Settings,
) -> anyhow::Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    // Others than those that run: what these are shown follows from the configuration that is in force.
    let policies = WasmPolicies::new(policies)?;
    for entry in &entries {
        if let Some(version) = node.policies.get(&entry.digest) {
            policies.restore(version).with_context(|| format!("policy {}", version.label()))?;
        }
    }
    let stack = NewStack { from_api: false, by: "config".into(), why: String::new(), entries };
    let baseline = &super::baseline(config);
    let (rules, policies, leisure) = (&config.rules, &policies, LEISURE);
    let trial = Trial { stack: &stack, policies, node, now, baseline, rules, leisure };
    trial.run().map(drop).map_err(|(policy, fault)| {
        let at = stack.entries.iter().position(|entry| entry.label() == policy).unwrap_or_default();
        let key = if fault.kind == FaultKind::Parameters { ".parameters" } else { "" };
        let what = format!("policy {policy} fails on this node: {fault}");
        anyhow::Error::msg(config.locate(BadSetting::new(format!("stack[{at}]{key}"), what)).to_string())
    })
}

/// The GPUs to ask about, and whether they are those that the daemon would have.
fn gpus(config: &Config, without: Without, found: &mut Findings) -> anyhow::Result<(Inventory, bool)> {
    let sample = || anyhow::Ok((SimGpus::open(SAMPLE)?.look()?, false));
    // A profile is known everywhere.
    let profile = matches!(&config.gpus, GpuSource::Sim(profile) if SimGpus::is_profile(profile));
    if without.gpus && !profile {
        found.notes.push("the GPUs were not read".into());
        return sample();
    }
    match open_gpus(config.gpus.clone()).and_then(|gpus| gpus.look()) {
        Ok(gpus) if gpus.parts.is_empty() => {
            let what = "there is no GPU (on a machine without GPUs, use --without-gpus)";
            found.errors.push(BadSetting::new("gpus", what));
            sample()
        }
        Ok(gpus) => Ok((gpus, true)),
        Err(error) => {
            let what = format!("{error} (on a machine without GPUs, use --without-gpus)");
            found.errors.push(BadSetting::new("gpus", what));
            sample()
        }
    }
}

/// The entries whose policies this node has, with their indices in the file.
fn entries(
    config: &Config,
    without: Without,
    node: &Ledger,
    found: &mut Findings,
) -> Vec<(usize, StackEntry)> {
    let mut entries = Vec::new();
    for (at, entry) in config.stack.iter().enumerate() {
        let key = if entry.digest.is_some() { "digest" } else { "policy" };
        match resolve_one(entry, node) {
            Ok(resolved) => entries.push((at, resolved)),
            Err(Unresolved::NotHere(why)) if without.files || has_uploads(&config.state_dir, node) => {
                found.notes.push(format!(
                    "{why}; the daemon starts with this file once it is uploaded to its node (`berth policy push`)"
                ));
            }
            Err(Unresolved::NotHere(why)) => {
                let what = format!("{why} (if the policy was uploaded to another node, use --without-files)");
                found.errors.push(BadSetting::new(format!("stack[{at}].{key}"), what));
            }
            Err(Unresolved::Wrong(why)) => {
                found.errors.push(BadSetting::new(format!("stack[{at}].{key}"), why));
            }
        }
    }
    let untrusted = |entry: &StackEntry| trusted(vec![entry.clone()], node, &config.rules.trusted_keys).err();
    for (at, entry) in &entries {
        found.errors.extend(untrusted(entry).map(|why| BadSetting::new(format!("stack[{at}].policy"), why)));
    }
    entries
}

/// A policy that fails.
struct Failed {
    /// Which entry of the file.
    at: usize,
    policy: String,
    fault: Fault,
    /// Whether it fails on every node.
    certain: bool,
}

/// Asks the stack, without each entry that fails, until none does; answers these, and what the others warn of.
/// What fails is taken out of `entries`.
fn ask(
    config: &Config,
    policies: &dyn Policies,
    entries: &mut Vec<(usize, StackEntry)>,
    node: &Arc<Ledger>,
    clock: &SystemClock,
) -> (Vec<Failed>, Vec<String>) {
    let (mut failed, mut warnings) = (Vec::new(), Vec::new());
    while !entries.is_empty() {
        let stack = NewStack {
            from_api: false,
            by: "config".into(),
            why: String::new(),
            entries: entries.iter().map(|(_, entry)| entry.clone()).collect(),
        };
        let trial = Trial {
            stack: &stack,
            policies,
            node,
            now: clock.now(),
            baseline: &super::baseline(config),
            rules: &config.rules,
            leisure: 1,
        };
        let (policy, fault) = match trial.run() {
            Err(fault) => fault,
            Ok(offers) => {
                warnings = offers.notes.of_activation();
                break;
            }
        };
        let Some(place) = entries.iter().position(|(_, entry)| entry.label() == policy) else { break };
        let (at, _) = entries.remove(place);
        failed.push(Failed { at, policy, fault, certain: false });
    }
    (failed, warnings)
}

fn apply(node: &mut Ledger, changes: Vec<Change>, clock: &SystemClock) {
    node.apply(&Entry { at: clock.now(), changes });
}

/// Whether the state folder has policies that were uploaded. Their names are in the store, which belongs to the
/// daemon.
fn has_uploads(state_dir: &Path, node: &Ledger) -> bool {
    let Ok(files) = std::fs::read_dir(state_dir.join("policies")) else { return false };
    let shipped = |digest: &str| node.policies.keys().any(|d| d.as_str() == digest);
    files.flatten().any(|file| {
        let path = file.path();
        let component = path.extension().is_some_and(|e| e == "wasm");
        component && path.file_stem().and_then(|s| s.to_str()).is_some_and(|digest| !shipped(digest))
    })
}
