//! Checks a configuration's GPUs and stack as a start would, without a node: opens the GPUs and calls the shipped
//! policies, compiled in a temporary folder.

use anyhow::Context;
use berth_config::{BadSetting, Config, new_stack};
use berth_core::SystemClock;
use berth_core::policies::ResolveError;
use berth_core::stack::{DryRun, TIME_FACTOR};
use berth_files::yaml::Problems;
use berth_gpus::sim::SimGpus;
use berth_http::check_files;
use berth_kernel::hardware::gpu::Inventory;
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::Command;
use berth_kernel::node::decide::decide;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::{Clock, Gpus as _, PolicyFiles as _, PolicyRuntime};
use berth_kernel::policy::hooks::{Fault, FaultKind, Hook};
use berth_kernel::policy::stack::StackEntry;
use berth_kernel::policy::version_records::check_trust;
use berth_wasm::{self, Scratch, WasmPolicies};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The simulated GPUs in place of those of another node.
const SAMPLE: &str = "8xh100";

/// Parts of a configuration check that are skipped, since this machine is not the node.
#[derive(Clone, Copy, Debug, Default)]
pub struct SkippedChecks {
    /// Token and TLS files, and uploaded policies.
    pub files: bool,
    /// The GPUs.
    pub gpus: bool,
}

/// The result of a configuration check.
#[derive(Clone, Debug, Default)]
pub struct Findings {
    /// Errors with which the daemon does not start or offers no GPUs.
    pub errors: Vec<BadSetting>,
    /// Facts that only a check on the node can verify, as sentences.
    pub notes: Vec<String>,
}

/// The settings of the policy runtime, with the policies of this state folder.
#[must_use]
pub fn policy_settings(config: &Config, folder: PathBuf) -> berth_wasm::Settings {
    berth_wasm::Settings {
        resource: config.offers.resource.clone(),
        mig: config.offers.mig_strategy,
        ..berth_wasm::Settings::new(folder)
    }
}

/// Opens the GPUs and tests the stack as a start does. Returns all errors with which the daemon would not start or
/// would offer no GPUs.
///
/// # Errors
/// If policies cannot be run on this machine.
pub fn dry_run(config: &Config, skipped: SkippedChecks) -> anyhow::Result<Findings> {
    let mut findings = Findings::default();
    let (inventory, is_real) = inventory(config, skipped, &mut findings)?;
    if config.offers.stack.is_empty() {
        return Ok(findings);
    }
    let scratch = Scratch::new().context(
        "cannot create a temporary folder for the stack's policies (set TMPDIR to choose another parent)",
    )?;
    let policies = WasmPolicies::new(policy_settings(config, scratch.path().to_owned()))?;
    let clock = SystemClock::default();
    let mut node = Ledger::default().with_rules(&Arc::new(config.rules.clone()));
    submit(&mut node, &Command::RecordShipped(policies.shipped(clock.now())), &clock);
    let mut entries = entries(config, skipped, &node, &mut findings);
    for (_, entry) in &entries {
        if let Some(version) = node.policies.get(&entry.digest) {
            policies.load(version)?;
        }
    }
    // First without GPUs: policies read parameters before any GPU, so these faults occur on every node.
    for is_certain in [true, false] {
        if !is_certain {
            submit(&mut node, &Command::RecordScan(inventory.clone()), &clock);
        }
        let (failures, warnings) =
            run_trials(config, &policies, &mut entries, &Arc::new(node.clone()), clock.now(), 1);
        if is_real && !is_certain {
            findings.notes.extend(warnings);
        }
        for (at, policy, fault) in failures {
            let what = format!("policy {policy} fails: {fault}");
            // A fault of a policy without `offer`, or an invalid answer, does not depend on the GPUs.
            let version = node.policies.values().find(|version| version.label() == policy);
            let offers = version.is_some_and(|version| version.hooks.contains(&Hook::Offer));
            if is_certain || is_real || !offers || fault.kind == FaultKind::Answer {
                findings.errors.push(bad_entry(at, &fault, what));
            } else {
                findings.notes.push(format!("on a node with {SAMPLE} GPUs this stack would fail: {what}"));
            }
        }
    }
    Ok(findings)
}

/// The stack that a start with this configuration would activate on the node. Checks the GPU source and the files
/// first, as a start does.
///
/// # Errors
/// If the start would fail.
pub fn start_stack(config: &Config, node: &Ledger) -> anyhow::Result<Vec<StackEntry>> {
    config.gpus.source.check()?;
    if let Some((key, error)) = check_files(&config.admin.token_file, &config.admin.access).into_iter().next()
    {
        return Err(anyhow::Error::new(error).context(key));
    }
    // A start then only shows an error of the file's stack.
    if !node.stack.is_of_file() {
        return Ok(Vec::new());
    }
    config.resolve_stack(node).map_err(anyhow::Error::new)
}

/// Tests a stack, of which all entries are in the file, on the node's current state, as a start does. Returns the
/// failures of all its policies, even those that may be temporary.
///
/// # Errors
/// If the policies cannot be called.
pub fn test_stack(
    config: &Config,
    entries: Vec<StackEntry>,
    node: &Arc<Ledger>,
    now: Now,
    policies: berth_wasm::Settings,
) -> anyhow::Result<Problems> {
    if entries.is_empty() {
        return Ok(Problems::default());
    }
    // A separate runtime, since that of the daemon has the settings of the current configuration.
    let policies = WasmPolicies::new(policies)?;
    for entry in &entries {
        if let Some(version) = node.policies.get(&entry.digest) {
            policies.load(version).with_context(|| format!("policy {}", version.label()))?;
        }
    }
    let mut entries = entries.into_iter().enumerate().collect();
    let node = Arc::new(node.with_rules(&Arc::new(config.rules.clone())));
    let (failures, _) = run_trials(config, &policies, &mut entries, &node, now, TIME_FACTOR);
    let problems = failures.into_iter().map(|(at, policy, fault)| {
        let what = format!("policy {policy} fails on this node: {fault}");
        config.locate(bad_entry(at, &fault, what))
    });
    Ok(problems.collect())
}

/// The error of the stack entry whose policy has this fault.
fn bad_entry(at: usize, fault: &Fault, what: String) -> BadSetting {
    let key = if fault.kind == FaultKind::Parameters { ".parameters" } else { "" };
    BadSetting::new(format!("stack[{at}]{key}"), what)
}

/// The inventory for the test, and whether it is the one that the daemon would have.
fn inventory(
    config: &Config,
    skipped: SkippedChecks,
    findings: &mut Findings,
) -> anyhow::Result<(Inventory, bool)> {
    let sample = || anyhow::Ok((SimGpus::open(SAMPLE)?.scan()?, false));
    if skipped.gpus && config.gpus.source.profile().is_none() {
        findings.notes.push("the GPUs were not read".into());
        return sample();
    }
    let error = match config.gpus.source.open().and_then(|gpus| gpus.scan()) {
        Ok(gpus) if gpus.parts.is_empty() => "there is no GPU".to_owned(),
        Ok(mut gpus) => {
            let unused = gpus.exclude(&config.gpus.excluded);
            findings
                .notes
                .extend(unused.iter().map(|one| format!("gpus.exclude: no GPU of this node is {one}")));
            return Ok((gpus, true));
        }
        Err(error) => error.to_string(),
    };
    let what = format!("{error} (on a machine without GPUs, use --without-gpus)");
    findings.errors.push(BadSetting::new("gpus", what));
    sample()
}

/// The entries whose policies this node has, with their indices in the file.
fn entries(
    config: &Config,
    skipped: SkippedChecks,
    node: &Ledger,
    findings: &mut Findings,
) -> Vec<(usize, StackEntry)> {
    let mut entries = Vec::new();
    for (at, entry) in config.offers.stack.iter().enumerate() {
        let reason = match entry.resolve(node) {
            Ok(resolved) => {
                entries.push((at, resolved));
                continue;
            }
            Err(ResolveError::Missing(reason))
                if skipped.files || has_uploads(&config.node.state_dir, node) =>
            {
                findings.notes.push(format!(
                    "{reason}; the daemon starts with this file after the policy is uploaded to its node (`berth policy push`)"
                ));
                continue;
            }
            Err(ResolveError::Missing(reason)) => {
                format!("{reason} (if the policy was uploaded to another node, use --without-files)")
            }
            Err(ResolveError::Invalid(reason)) => reason,
        };
        let key = if entry.digest.is_some() { "digest" } else { "policy" };
        findings.errors.push(BadSetting::new(format!("stack[{at}].{key}"), reason));
    }
    for (at, entry) in &entries {
        if let Err(reason) = check_trust(node, std::slice::from_ref(entry), &config.rules.trusted_keys) {
            findings.errors.push(BadSetting::new(format!("stack[{at}].policy"), reason.to_string()));
        }
    }
    entries
}

/// Tests the stack repeatedly, each time without the entry that failed, until no entry fails. Returns the failures
/// (index of the entry in the file, policy, fault) and the warnings of the others, and removes failed entries from
/// `entries`.
fn run_trials(
    config: &Config,
    policies: &dyn PolicyRuntime,
    entries: &mut Vec<(usize, StackEntry)>,
    node: &Arc<Ledger>,
    now: Now,
    time_factor: u32,
) -> (Vec<(usize, String, Fault)>, Vec<String>) {
    let (mut failures, mut warnings) = (Vec::new(), Vec::new());
    while !entries.is_empty() {
        let stack = new_stack(entries.iter().map(|(_, entry)| entry.clone()).collect());
        let dry_run =
            DryRun { stack: &stack, policies, node, now, baseline: &config.baseline(), time_factor };
        let (policy, fault) = match dry_run.run() {
            Err(fault) => fault,
            Ok(offers) => {
                warnings = offers.notes.reasons();
                break;
            }
        };
        let Some(index) = entries.iter().position(|(_, entry)| entry.label() == policy) else { break };
        let (at, _) = entries.remove(index);
        failures.push((at, policy, fault));
    }
    (failures, warnings)
}

/// Decides a command, and applies its changes.
fn submit(node: &mut Ledger, command: &Command, clock: &SystemClock) {
    node.apply(&decide(node, command, clock.now()).entry);
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
