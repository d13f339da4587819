//! Checks a configuration's GPUs and stack as a start would, without a node: opens the GPUs and calls the shipped policies,
//! compiled in a temporary folder.

use super::stack::{Unresolved, check_trusted, resolve, resolve_entry};
use super::{SystemClock, open_gpus, setup};
use crate::config::{BadSetting, Config, Findings, GpuSource, SkippedChecks};
use anyhow::Context;
use berth_core::stack::{DryRun, TIME_FACTOR};
use berth_gpus::sim::SimGpus;
use berth_http::check_files;
use berth_kernel::change::{Change, Entry};
use berth_kernel::command::NewStack;
use berth_kernel::gpu::Inventory;
use berth_kernel::ledger::Ledger;
use berth_kernel::policy::{Fault, FaultKind, Hook};
use berth_kernel::ports::{Clock, Gpus, PolicyFiles as _, PolicyRuntime};
use berth_kernel::scan::look;
use berth_kernel::stack::StackEntry;
use berth_kernel::time::Now;
use berth_wasm::{self, Scratch, WasmPolicies};
use std::path::Path;
use std::sync::Arc;

/// The simulated GPUs in place of those of another node.
const SAMPLE: &str = "8xh100";

/// Checks that the GPU source can ever work. An unknown simulated profile cannot, while a missing library or file may still
/// appear.
///
/// # Errors
/// If the profile is unknown.
pub fn check_source(source: &GpuSource) -> anyhow::Result<()> {
    match source {
        GpuSource::Sim(profile) if SimGpus::is_profile(profile) => {
            SimGpus::open(profile)?;
        }
        GpuSource::Sim(_) | GpuSource::Nvml { .. } => {}
    }
    Ok(())
}

/// Opens the GPUs and tests the stack as a start does. Returns all errors with which the daemon would not start or would
/// offer no GPUs.
///
/// # Errors
/// If policies cannot be run on this machine.
pub fn dry_run(config: &Config, skipped: SkippedChecks) -> anyhow::Result<Findings> {
    let mut findings = Findings::default();
    let (inventory, is_real) = inventory(config, skipped, &mut findings)?;
    if config.stack.is_empty() {
        return Ok(findings);
    }
    let scratch = Scratch::new().context(
        "cannot create a temporary folder for the stack's policies (set TMPDIR to choose another parent)",
    )?;
    let policies = WasmPolicies::new(setup::policies(config, scratch.path().to_owned()))?;
    let clock = SystemClock::default();
    let mut node = Ledger::default();
    apply(&mut node, policies.shipped(clock.now()).into_iter().map(Change::PolicyStored).collect(), &clock);
    let mut entries = entries(config, skipped, &node, &mut findings);
    for (_, entry) in &entries {
        if let Some(version) = node.policies.get(&entry.digest) {
            policies.load(version)?;
        }
    }
    // Policies read parameters before any GPU, so these faults occur on every node.
    let (mut failures, _) = run_dry_runs(config, &policies, &mut entries, &Arc::new(node.clone()), &clock);
    failures.iter_mut().for_each(|failure| failure.is_certain = true);
    let changes = look(&node, &inventory, &config.rules, clock.now());
    apply(&mut node, changes, &clock);
    let (more, warnings) = run_dry_runs(config, &policies, &mut entries, &Arc::new(node.clone()), &clock);
    failures.extend(more);
    if is_real {
        findings.notes.extend(warnings);
    }
    for PolicyFailure { at, policy, fault, is_certain } in failures {
        let what = format!("policy {policy} fails: {fault}");
        // A fault of a policy without `offer`, or an invalid answer, does not depend on the GPUs.
        let version = node.policies.values().find(|version| version.label() == policy);
        let offers = version.is_some_and(|version| version.hooks.contains(&Hook::Offer));
        if is_certain || is_real || !offers || fault.kind == FaultKind::Answer {
            let key = if fault.kind == FaultKind::Parameters { ".parameters" } else { "" };
            findings.errors.push(BadSetting::new(format!("stack[{at}]{key}"), what));
        } else {
            findings.notes.push(format!("on a node with {SAMPLE} GPUs this stack would fail: {what}"));
        }
    }
    Ok(findings)
}

/// The stack that a start with this configuration would activate on the node. Checks the GPU source and the files first, as a
/// start does.
///
/// # Errors
/// If the start would fail.
pub(super) fn start_stack(config: &Config, node: &Ledger) -> anyhow::Result<Vec<StackEntry>> {
    check_source(&config.gpus)?;
    if let Some((key, error)) = check_files(&config.token_file, &config.admin).into_iter().next() {
        return Err(anyhow::Error::new(error).context(key));
    }
    // A start then only shows an error of the file's stack.
    if node.stack.from_api {
        return Ok(Vec::new());
    }
    let entries = resolve(config, node).map_err(anyhow::Error::msg)?;
    check_trusted(entries, node, &config.rules.trusted_keys).map_err(anyhow::Error::msg)
}

/// Tests a stack on the node's current state, as a start does.
///
/// # Errors
/// If it cannot be activated, even if the failure may be temporary.
pub(super) fn test_stack(
    config: &Config,
    entries: Vec<StackEntry>,
    node: &Arc<Ledger>,
    now: Now,
    policies: berth_wasm::Settings,
) -> anyhow::Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    // A separate runtime, since that of the daemon has the settings of the current configuration.
    let policies = WasmPolicies::new(policies)?;
    for entry in &entries {
        if let Some(version) = node.policies.get(&entry.digest) {
            policies.load(version).with_context(|| format!("policy {}", version.label()))?;
        }
    }
    let stack = NewStack { from_api: false, by: "config".into(), why: String::new(), entries };
    let baseline = &super::baseline(config);
    let (rules, policies, time_factor) = (&config.rules, &policies, TIME_FACTOR);
    let dry_run = DryRun { stack: &stack, policies, node, now, baseline, rules, time_factor };
    dry_run.run().map(drop).map_err(|(policy, fault)| {
        let at = stack.entries.iter().position(|entry| entry.label() == policy).unwrap_or_default();
        let key = if fault.kind == FaultKind::Parameters { ".parameters" } else { "" };
        let what = format!("policy {policy} fails on this node: {fault}");
        anyhow::Error::msg(config.locate(BadSetting::new(format!("stack[{at}]{key}"), what)).to_string())
    })
}

/// The inventory for the test, and whether it is the one that the daemon would have.
fn inventory(
    config: &Config,
    skipped: SkippedChecks,
    findings: &mut Findings,
) -> anyhow::Result<(Inventory, bool)> {
    let sample = || anyhow::Ok((SimGpus::open(SAMPLE)?.scan()?, false));
    // A profile does not depend on the machine.
    let is_profile = matches!(&config.gpus, GpuSource::Sim(profile) if SimGpus::is_profile(profile));
    if skipped.gpus && !is_profile {
        findings.notes.push("the GPUs were not read".into());
        return sample();
    }
    match open_gpus(config.gpus.clone()).and_then(|gpus| gpus.scan()) {
        Ok(gpus) if gpus.parts.is_empty() => {
            let what = "there is no GPU (on a machine without GPUs, use --without-gpus)";
            findings.errors.push(BadSetting::new("gpus", what));
            sample()
        }
        Ok(gpus) => Ok((gpus, true)),
        Err(error) => {
            let what = format!("{error} (on a machine without GPUs, use --without-gpus)");
            findings.errors.push(BadSetting::new("gpus", what));
            sample()
        }
    }
}

/// The entries whose policies this node has, with their indices in the file.
fn entries(
    config: &Config,
    skipped: SkippedChecks,
    node: &Ledger,
    findings: &mut Findings,
) -> Vec<(usize, StackEntry)> {
    let mut entries = Vec::new();
    for (at, entry) in config.stack.iter().enumerate() {
        let key = if entry.digest.is_some() { "digest" } else { "policy" };
        match resolve_entry(entry, node) {
            Ok(resolved) => entries.push((at, resolved)),
            Err(Unresolved::UnknownVersion(reason))
                if skipped.files || has_uploads(&config.state_dir, node) =>
            {
                findings.notes.push(format!(
                    "{reason}; the daemon starts with this file after the policy is uploaded to its node (`berth policy push`)"
                ));
            }
            Err(Unresolved::UnknownVersion(reason)) => {
                let what =
                    format!("{reason} (if the policy was uploaded to another node, use --without-files)");
                findings.errors.push(BadSetting::new(format!("stack[{at}].{key}"), what));
            }
            Err(Unresolved::Invalid(reason)) => {
                findings.errors.push(BadSetting::new(format!("stack[{at}].{key}"), reason));
            }
        }
    }
    let untrusted =
        |entry: &StackEntry| check_trusted(vec![entry.clone()], node, &config.rules.trusted_keys).err();
    for (at, entry) in &entries {
        findings
            .errors
            .extend(untrusted(entry).map(|reason| BadSetting::new(format!("stack[{at}].policy"), reason)));
    }
    entries
}

/// A policy that fails.
struct PolicyFailure {
    /// The index of its entry in the file.
    at: usize,
    policy: String,
    fault: Fault,
    /// Whether it fails on every node.
    is_certain: bool,
}

/// Tests the stack repeatedly, each time without the entry that failed, until no entry fails. Returns the failures and the
/// warnings of the others, and removes failed entries from `entries`.
fn run_dry_runs(
    config: &Config,
    policies: &dyn PolicyRuntime,
    entries: &mut Vec<(usize, StackEntry)>,
    node: &Arc<Ledger>,
    clock: &SystemClock,
) -> (Vec<PolicyFailure>, Vec<String>) {
    let (mut failures, mut warnings) = (Vec::new(), Vec::new());
    while !entries.is_empty() {
        let stack = NewStack {
            from_api: false,
            by: "config".into(),
            why: String::new(),
            entries: entries.iter().map(|(_, entry)| entry.clone()).collect(),
        };
        let dry_run = DryRun {
            stack: &stack,
            policies,
            node,
            now: clock.now(),
            baseline: &super::baseline(config),
            rules: &config.rules,
            time_factor: 1,
        };
        let (policy, fault) = match dry_run.run() {
            Err(fault) => fault,
            Ok(offers) => {
                warnings = offers.notes.reasons();
                break;
            }
        };
        let Some(index) = entries.iter().position(|(_, entry)| entry.label() == policy) else { break };
        let (at, _) = entries.remove(index);
        failures.push(PolicyFailure { at, policy, fault, is_certain: false });
    }
    (failures, warnings)
}

fn apply(node: &mut Ledger, changes: Vec<Change>, clock: &SystemClock) {
    node.apply(&Entry { at: clock.now(), changes });
}

/// Whether the state folder has uploaded policies. Their names are only in the store, which the daemon locks.
fn has_uploads(state_dir: &Path, node: &Ledger) -> bool {
    let Ok(files) = std::fs::read_dir(state_dir.join("policies")) else { return false };
    let is_shipped = |digest: &str| node.policies.keys().any(|d| d.as_str() == digest);
    files.flatten().any(|file| {
        let path = file.path();
        let is_component = path.extension().is_some_and(|e| e == "wasm");
        is_component && path.file_stem().and_then(|s| s.to_str()).is_some_and(|digest| !is_shipped(digest))
    })
}
