//! Tests of policies without a daemon: whether a module is a valid policy and accepts its parameters, and whether it
//! does what a scenario file expects.
//!
//! - `author`, `policy_new`: the commands `berth policy check`, `test` and `new`
//! - `format`, `expect`: the format of a scenario file; expectations, and how results differ from them
//! - `node`, `pods`: a simulated node with the real keeper, a store in memory and a clock that steps advance
//! - `run`, `report`: running the steps, and the results
//!
//! The rules are the daemon's: the same kernel, stack evaluation, compiler and limits. There is no kubelet, no
//! reconcile pass and no thread; nothing happens between steps.

pub mod author;
mod expect;
mod format;
mod node;
pub mod pack;
mod pods;
pub mod policy_new;
mod report;
mod run;

pub use expect::Mismatch;
pub use format::FILE_BYTES_MAX;
pub use report::{FailedStep, ScenarioReport};

use berth_core::stack::{CALL_MS_MAX, CallRecorder};
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::ids::names::{DeviceId, RESOURCE_BYTES_MAX, Resource};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::{Call, Clock as _, InstallError, PolicyFiles as _, PolicyRuntime};
use berth_kernel::policy::hooks::{
    AdmitRequest, FaultKind, Hook, PARAMETERS_BYTES_MAX, PlaceRequest, Question, STACK_ENTRIES_MAX,
};
use berth_kernel::policy::stack::{OnFault, Permissions, StackEntry};
use berth_kernel::policy::version::PolicyVersion;
use berth_kernel::sharing::offer::SHARES_PER_PART_MAX;
use berth_wasm::{Scratch, Settings, WasmPolicies};
use format::{Entry, Group, Scenario};
use node::{BEGIN, Node};
use std::path::PathBuf;
use std::sync::Arc;

/// The name of the policy under test in a scenario's stack.
const THIS: &str = "this";
/// The model of the sample node's GPUs.
const SAMPLE_MODEL: &str = "h100";
/// The number of its GPUs: those of one board.
const SAMPLE_COUNT: u32 = 8;

/// Tests policies. They are compiled as in the daemon, in a temporary folder; what was compiled is
/// kept in the user's cache, so that `berth policy check` and then `berth policy test` compile a module once.
pub struct PolicyTester {
    policies: WasmPolicies,
    _state: Scratch,
}

impl PolicyTester {
    /// Uses this program as the compiler, whose `main` must call [`berth_wasm::compiler_process`].
    ///
    /// # Errors
    /// If the temporary folder cannot be created.
    pub fn new() -> Result<Self, InstallError> {
        Self::of(Settings { compile_cache: cache_folder(), ..Settings::new(PathBuf::new()) })
    }

    /// Uses another program as the compiler, and keeps nothing for other processes.
    ///
    /// # Errors
    /// As [`PolicyTester::new`].
    pub fn with_compiler(compiler: PathBuf) -> Result<Self, InstallError> {
        Self::of(Settings { compiler, ..Settings::new(PathBuf::new()) })
    }

    /// Replaces the state folder by a temporary one.
    fn of(settings: Settings) -> Result<Self, InstallError> {
        let state = Scratch::new().map_err(|error| InstallError::Failed {
            what: format!("cannot create a temporary folder: {error} (set TMPDIR to choose another parent)"),
        })?;
        let policies = WasmPolicies::new(Settings { state_dir: state.path().to_owned(), ..settings })?;
        Ok(Self { policies, _state: state })
    }

    /// Checks, compiles and describes a module as an upload does.
    ///
    /// # Errors
    /// The daemon's error for such an upload.
    pub fn install(&self, module: &[u8]) -> Result<PolicyVersion, InstallError> {
        self.policies.install(module, BEGIN)
    }

    /// The component of an installed policy.
    ///
    /// # Errors
    /// If its file is missing.
    pub fn component(&self, version: &PolicyVersion) -> Result<Vec<u8>, InstallError> {
        self.policies.read_all(&version.digest)
    }

    /// Returns a policy that is built into this program.
    ///
    /// # Errors
    /// If no policy has this name, or it cannot be compiled.
    pub fn shipped(&self, name: &str) -> Result<PolicyVersion, String> {
        let shipped = self.policies.shipped(BEGIN);
        let version = shipped.iter().find(|version| version.name == name).ok_or_else(|| {
            let names: Vec<&str> = shipped.iter().map(|version| version.name.as_str()).collect();
            format!("no policy {name:?} is shipped; the shipped ones are {}", names.join(", "))
        })?;
        self.policies.load(version).map_err(|error| error.to_string())
    }

    /// Whether a different policy of the same name is shipped, which the name without a digest selects.
    #[must_use]
    pub fn ships_another(&self, version: &PolicyVersion) -> bool {
        let shipped = self.policies.shipped(BEGIN);
        shipped.iter().any(|shipped| shipped.name == version.name)
            && shipped.iter().all(|shipped| shipped.digest != version.digest)
    }

    /// Checks that a policy accepts these parameters, by one call of each hook on a sample node.
    ///
    /// # Errors
    /// The hook that failed, with its fault.
    pub fn check_parameters(&self, version: &PolicyVersion, parameters: &str) -> Result<(), String> {
        check_parameters_size(parameters)?;
        let called = call_all_hooks(&CallRecorder::new(&self.policies), version, parameters);
        called.map_err(|(_, error)| error)
    }

    /// Whether a policy refuses to work without parameters, as one with required ones does.
    #[must_use]
    pub fn needs_parameters(&self, version: &PolicyVersion) -> bool {
        let called = call_all_hooks(&CallRecorder::new(&self.policies), version, "{}");
        matches!(called, Err((Some(FaultKind::Parameters), _)))
    }

    /// Checks that a policy can be used on a sample node: a stack of it alone is activated there, and one device of
    /// each resource that it offers is placed and admitted. It may offer any resource and set any variable; the
    /// operator of a node decides which.
    ///
    /// # Errors
    /// The rule that an answer breaks, or the call that failed.
    pub fn check_activation(&self, version: &PolicyVersion, parameters: &str) -> Result<(), String> {
        let any = || vec!["*".to_owned()];
        let entry = StackEntry {
            name: version.name.clone(),
            digest: version.digest.clone(),
            parameters: parameters.to_owned(),
            permissions: Permissions { resources: any(), environment: any(), ..Permissions::default() },
            on_fault: OnFault::default(),
        };
        let group = Group { model: SAMPLE_MODEL.into(), count: SAMPLE_COUNT, mig: Vec::new() };
        let policies = CallRecorder::new(&self.policies);
        let mut node = Node::new(&[group], std::slice::from_ref(version), &policies)?;
        let mut faults = node.activate(vec![entry])?;
        if faults.is_empty() {
            faults = run::one_of_each(&mut node)?;
        }
        if faults.is_empty() { Ok(()) } else { Err(faults.join("; ")) }
    }

    /// Runs a scenario file's text against a policy.
    #[must_use]
    pub fn run(&self, version: &PolicyVersion, name: &str, text: &str) -> ScenarioReport {
        let scenario = match Scenario::parse(text) {
            Ok(scenario) => scenario,
            Err(error) => return ScenarioReport::with_error(name, "", error),
        };
        match self.run_parsed(version, &scenario) {
            Ok(failures) => ScenarioReport {
                name: name.into(),
                about: scenario.about,
                passed: failures.is_empty(),
                failures,
                trouble: None,
            },
            Err(error) => ScenarioReport::with_error(name, &scenario.about, error),
        }
    }

    fn run_parsed(&self, version: &PolicyVersion, scenario: &Scenario) -> Result<Vec<FailedStep>, String> {
        let mut versions = vec![version.clone()];
        let entries = match &scenario.stack {
            None => vec![StackEntry {
                name: version.name.clone(),
                digest: version.digest.clone(),
                parameters: "{}".into(),
                permissions: Permissions::default(),
                on_fault: OnFault::default(),
            }],
            Some(stack) => self.resolve_stack(stack, version, &mut versions)?,
        };
        let policies = CallRecorder::new(&self.policies);
        let mut node = Node::new(&scenario.node, &versions, &policies)?;
        let faults = node.activate(entries)?;
        run::run(scenario, &mut node, &faults)
    }

    fn resolve_stack(
        &self,
        stack: &[Entry],
        this: &PolicyVersion,
        versions: &mut Vec<PolicyVersion>,
    ) -> Result<Vec<StackEntry>, String> {
        if stack.len() > STACK_ENTRIES_MAX {
            return Err(format!("stack: {} entries; at most {STACK_ENTRIES_MAX} are allowed", stack.len()));
        }
        let mut entries = Vec::new();
        for entry in stack {
            let version = if entry.policy == THIS { this.clone() } else { self.shipped(&entry.policy)? };
            let parameters = serde_json::Value::Object(entry.parameters.clone()).to_string();
            let with_entry = |error: String| format!("stack entry {}: {error}", entry.policy);
            check_parameters_size(&parameters).map_err(with_entry)?;
            entries.push(StackEntry {
                name: version.name.clone(),
                digest: version.digest.clone(),
                parameters,
                permissions: permissions(entry.permissions.clone()).map_err(with_entry)?,
                on_fault: entry.on_fault.into(),
            });
            if !versions.iter().any(|known| known.digest == version.digest) {
                versions.push(version);
            }
        }
        if !entries.iter().any(|entry| entry.digest == this.digest) {
            return Err("stack: add an entry with `policy: this`, the policy under test".into());
        }
        Ok(entries)
    }
}

/// Where compiled modules are kept between commands: `berth/compiled` in the user's cache, as the XDG Base Directory
/// Specification names it. `None` for a user without a home.
fn cache_folder() -> Option<PathBuf> {
    let folder = |name| std::env::var_os(name).map(PathBuf::from).filter(|folder| folder.is_absolute());
    let cache = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?;
    Some(cache.join("berth/compiled"))
}

fn check_parameters_size(parameters: &str) -> Result<(), String> {
    if parameters.len() > PARAMETERS_BYTES_MAX {
        return Err(format!("parameters: {} bytes; at most {PARAMETERS_BYTES_MAX}", parameters.len()));
    }
    Ok(())
}

/// The permissions of an entry.
fn permissions(entry: berth_api::Permissions) -> Result<Permissions, String> {
    let share_max = entry.share_max;
    if !(1..=SHARES_PER_PART_MAX).contains(&share_max) {
        return Err(format!("permissions.shareMax: 1 to {SHARES_PER_PART_MAX}, not {share_max}"));
    }
    let mut resources = entry.resources.iter();
    if let Some(long) = resources.find(|name| name.is_empty() || name.len() > RESOURCE_BYTES_MAX) {
        return Err(format!("permissions.resources: {long:?} is not a resource name"));
    }
    Ok(entry.into())
}

/// Calls every hook of a policy once, on a sample node, to check its parameters.
///
/// # Errors
/// The hook that failed, with its fault and the kind of that; without a kind if the node cannot be simulated.
fn call_all_hooks(
    policies: &CallRecorder<'_>,
    version: &PolicyVersion,
    parameters: &str,
) -> Result<(), (Option<FaultKind>, String)> {
    let group = Group { model: SAMPLE_MODEL.into(), count: SAMPLE_COUNT, mig: Vec::new() };
    let failed = |error: String| (None, error);
    let mut node = Node::new(&[group], std::slice::from_ref(version), policies).map_err(failed)?;
    // The baseline's offers provide devices to place and admit.
    node.settle().map_err(failed)?;
    let full = node.snapshot();
    // Policies read parameters before any GPU, so invalid ones fail on a node without GPUs, too.
    let empty = Arc::new(Ledger { policies: full.policies.clone(), ..Ledger::default() });
    let resource = Resource::parse("nvidia.com/gpu").map_err(|error| failed(error.to_string()))?;
    let available: Vec<DeviceId> = node.free(&resource);
    let devices = available.iter().take(1).cloned().collect();
    let reading = Reading {
        part: node.gpu(0).map_err(failed)?.as_part().clone(),
        source: "xid".into(),
        code: 79,
        detail: "fell off the bus".into(),
    };
    let place = PlaceRequest { resource: resource.clone(), available, required: Vec::new(), size: 1 };
    let admit = AdmitRequest { resource, devices, claim: None };
    for hook in &version.hooks {
        let question = match hook {
            Hook::Describe => continue,
            Hook::Offer => Question::Offer,
            Hook::Place => Question::Place(&place),
            Hook::Admit => Question::Admit(&admit),
            Hook::Triage => Question::Triage(&reading),
        };
        let nodes: &[&Arc<Ledger>] = if *hook == Hook::Offer { &[&empty, &full] } else { &[&full] };
        for snapshot in nodes {
            let call = Call {
                digest: &version.digest,
                parameters,
                node: snapshot,
                now: node.clock.now(),
                question,
                wall_ms_max: CALL_MS_MAX,
            };
            let gpus = if snapshot.parts.is_empty() { 0 } else { SAMPLE_COUNT };
            policies.call(call).answer.map_err(|fault| {
                let error = match fault.kind {
                    // Independent of hook and node.
                    FaultKind::Parameters => fault.to_string(),
                    _ => format!("`{hook}`, called on a node with {gpus} GPUs: {fault}"),
                };
                (Some(fault.kind), error)
            })?;
        }
    }
    Ok(())
}
