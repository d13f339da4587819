//! Policies on trial, without a daemon: whether a file is a policy and takes its parameters, and
//! whether it does in a story what its author expects.
//!
//! - `format`, `expect`: the form of a scenario file; what is expected, and how that differs
//! - `node`, `pods`, `clock`: a simulated node: the real keeper, a store in memory, time on demand
//! - `run`, `report`: the story, and what came of it
//! - `told`: what policies were asked and said, in lines
//! - `sample`: asking a policy every question that it answers, once
//!
//! The rules are the daemon's own: the same kernel, the same walk over the stack, the same compiler
//! and the same limits. Absent: the kubelet, rounds, and threads; nothing happens between steps.

mod clock;
mod expect;
mod format;
mod node;
mod pods;
mod report;
mod run;
mod sample;
mod told;

pub use expect::Difference;
pub use format::FILE_BYTES_MAX;
pub use report::{Failure, Report};

use berth_core::admission::Ear;
use berth_kernel::names::RESOURCE_BYTES_MAX;
use berth_kernel::offer::SHARES_PER_PART_MAX;
use berth_kernel::policy::{PARAMETERS_BYTES_MAX, PolicyVersion, STACK_ENTRIES_MAX};
use berth_kernel::ports::{InstallError, Policies};
use berth_kernel::stack::{OnFault, Permissions, StackEntry};
use berth_wasm::limits::MODULE_BYTES_MAX;
use berth_wasm::{Scratch, Settings, WasmPolicies};
use clock::BEGIN;
use format::{Entry, Scenario};
use node::Node;
use std::path::PathBuf;

/// Largest module that is taken, bytes.
pub const POLICY_BYTES_MAX: usize = MODULE_BYTES_MAX;

/// What the policy under test is called in a scenario's stack.
const THIS: &str = "this";

/// A place to try policies in. They are compiled as the daemon does, in a folder that is gone
/// afterwards.
pub struct Bench {
    policies: WasmPolicies,
    _state: Scratch,
}

impl Bench {
    /// With this program as the compiler: its `main` calls [`berth_wasm::compiler_process`].
    ///
    /// # Errors
    /// If this machine has no room for it.
    pub fn new() -> Result<Self, InstallError> {
        Self::compiled_by(None)
    }

    /// With another program as the compiler.
    ///
    /// # Errors
    /// As [`Bench::new`].
    pub fn compiled_by(compiler: Option<PathBuf>) -> Result<Self, InstallError> {
        let state = Scratch::new().map_err(|error| InstallError::Trouble {
            what: format!("no folder to work in: {error} (TMPDIR names another place)"),
        })?;
        let settings = Settings::new(state.path().to_owned());
        let compiler = compiler.unwrap_or_else(|| settings.compiler.clone());
        let policies = WasmPolicies::new(Settings { compiler, ..settings })?;
        Ok(Self { policies, _state: state })
    }

    /// Takes a module as an upload would: checked, compiled, described.
    ///
    /// # Errors
    /// What the daemon would say.
    pub fn install(&self, module: &[u8]) -> Result<PolicyVersion, InstallError> {
        self.policies.install(module, BEGIN)
    }

    /// A policy that came with this program.
    ///
    /// # Errors
    /// In words: there is none of this name, or it cannot be compiled here.
    pub fn shipped(&self, name: &str) -> Result<PolicyVersion, String> {
        let all = self.policies.shipped(BEGIN);
        let version = all.iter().find(|version| version.name == name).ok_or_else(|| {
            let names: Vec<&str> = all.iter().map(|version| version.name.as_str()).collect();
            format!("no policy {name:?} is shipped; shipped are {}", names.join(", "))
        })?;
        self.policies.restore(version).map_err(|error| error.to_string())
    }

    /// Whether another policy of its name is shipped, which the name alone means.
    #[must_use]
    pub fn ships_another(&self, version: &PolicyVersion) -> bool {
        let all = self.policies.shipped(BEGIN);
        all.iter().any(|shipped| shipped.name == version.name)
            && all.iter().all(|shipped| shipped.digest != version.digest)
    }

    /// Whether a policy takes these parameters: each of its hooks is asked once, on a sample node.
    ///
    /// # Errors
    /// In words, which hook failed and how.
    pub fn takes(&self, version: &PolicyVersion, parameters: &str) -> Result<(), String> {
        check_parameters(parameters)?;
        sample::ask_all(&Ear::new(&self.policies), version, parameters)
    }

    /// Runs the text of a scenario file against a policy.
    #[must_use]
    pub fn run(&self, version: &PolicyVersion, name: &str, text: &str) -> Report {
        let scenario = match Scenario::parse(text) {
            Ok(scenario) => scenario,
            Err(trouble) => return Report::trouble(name, "", trouble),
        };
        match self.run_parsed(version, &scenario) {
            Ok(failures) => Report {
                name: name.into(),
                about: scenario.about,
                passed: failures.is_empty(),
                failures,
                trouble: None,
            },
            Err(trouble) => Report::trouble(name, &scenario.about, trouble),
        }
    }

    fn run_parsed(&self, version: &PolicyVersion, scenario: &Scenario) -> Result<Vec<Failure>, String> {
        let mut versions = vec![version.clone()];
        let entries = match &scenario.stack {
            None => vec![StackEntry {
                name: version.name.clone(),
                digest: version.digest.clone(),
                parameters: "{}".into(),
                permissions: Permissions::default(),
                on_fault: OnFault::default(),
            }],
            Some(stack) => self.resolve(stack, version, &mut versions)?,
        };
        let policies = Ear::new(&self.policies);
        let mut node = Node::new(&scenario.node, &versions, &policies)?;
        let faults = node.activate(entries)?;
        run::run(scenario, &mut node, &faults)
    }

    fn resolve(
        &self,
        stack: &[Entry],
        this: &PolicyVersion,
        versions: &mut Vec<PolicyVersion>,
    ) -> Result<Vec<StackEntry>, String> {
        if stack.len() > STACK_ENTRIES_MAX {
            return Err(format!("stack: {} entries; at most {STACK_ENTRIES_MAX} are taken", stack.len()));
        }
        let mut entries = Vec::new();
        for entry in stack {
            let version = if entry.policy == THIS { this.clone() } else { self.shipped(&entry.policy)? };
            let parameters = serde_json::Value::Object(entry.parameters.clone()).to_string();
            let wrong = |why: String| format!("stack entry {}: {why}", entry.policy);
            check_parameters(&parameters).map_err(wrong)?;
            entries.push(StackEntry {
                name: version.name.clone(),
                digest: version.digest.clone(),
                parameters,
                permissions: permissions(&entry.permissions).map_err(wrong)?,
                on_fault: match entry.on_fault {
                    format::OnFault::Skip => OnFault::Skip,
                    format::OnFault::Deny => OnFault::Deny,
                },
            });
            if !versions.iter().any(|known| known.digest == version.digest) {
                versions.push(version);
            }
        }
        if !entries.iter().any(|entry| entry.digest == this.digest) {
            return Err("stack: the policy under test is not in it; name it `policy: this`".into());
        }
        Ok(entries)
    }
}

fn check_parameters(parameters: &str) -> Result<(), String> {
    if parameters.len() > PARAMETERS_BYTES_MAX {
        return Err(format!("parameters: {} bytes; at most {PARAMETERS_BYTES_MAX}", parameters.len()));
    }
    Ok(())
}

/// With the daemon's defaults filled in.
fn permissions(given: &format::Permissions) -> Result<Permissions, String> {
    let defaults = Permissions::default();
    let share_max = given.share_max.unwrap_or(defaults.share_max);
    if !(1..=SHARES_PER_PART_MAX).contains(&share_max) {
        return Err(format!("permissions.shareMax: 1 to {SHARES_PER_PART_MAX}, not {share_max}"));
    }
    let resources = given.resources.clone().unwrap_or(defaults.resources);
    if let Some(long) = resources.iter().find(|name| name.is_empty() || name.len() > RESOURCE_BYTES_MAX) {
        return Err(format!("permissions.resources: {long:?} is no name of a resource"));
    }
    let environment = given.environment.clone().unwrap_or(defaults.environment);
    Ok(Permissions { deny: given.deny.unwrap_or(defaults.deny), share_max, resources, environment })
}
