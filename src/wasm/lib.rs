//! Policies as WebAssembly components. The only crate that uses wasmtime.
//!
//! - [`limits`]: all limits of policies
//! - `engine`: the wasmtime configuration; the clock of the wall-time limit
//! - `compile`, `compile_child`: compilation, in a limited process of its own; `compile_cache`: its results, kept for
//!   other commands of a user
//! - `artifacts`, `shipped`: the files of uploaded versions; the policies built into the daemon
//! - `module`, `call`, `fault`, `parameters`: an installed version, a call of it, and its faults
//! - `view`, `convert`, `bindings`: conversions between kernel types and WIT types; `recorded`: WIT types as JSON, for
//!   replays
//!
//! Absent on purpose: WASI, threads, state that outlives a call. A faulty policy costs at most its budget.

mod artifacts;
mod bindings;
mod call;
mod compile;
mod compile_cache;
mod compile_child;
mod convert;
mod engine;
mod fault;
mod guest;
pub mod limits;
mod module;
mod parameters;
mod recorded;
mod settings;
mod shipped;
mod view;

use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::sync::Arc;

pub use compile::CompileLimits;
pub use compile_child::compiler_process;
pub use settings::{Scratch, Settings, default_compiler};
pub use shipped::is_shipped_name;

use artifacts::{Artifacts, digest};
use bindings::berth::policy::types as wit;
use call::{CallResult, Runner};
use compile::{Compiled, Compiler, install_failed};
use compile_cache::CompileCache;
use compile_child::Reply;
use convert::WitQuestion;
use limits::MODULE_BYTES_MAX;
use module::{Installed, Module};
use recorded::Recorded;
use view::{Indices, ViewCache};

use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::ids::names::{Digest, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::{
    Call, CallOutput, Input, InstallError, PolicyFiles, PolicyRuntime, ReplayedCall,
};
use berth_kernel::policy::hooks::{Fault, FaultKind, Question};
use berth_kernel::policy::version::PolicyVersion;

/// Wall time of a call with a recorded question, milliseconds. Longer than that of a live call, since no pod
/// waits for it.
const REPLAY_WALL_MS_MAX: u64 = 2_000;

/// The policies of this node.
pub struct WasmPolicies {
    runner: Runner,
    compiler: Compiler,
    artifacts: Artifacts,
    views: ViewCache,
    installed: RwLock<BTreeMap<Digest, Arc<Installed>>>,
    /// Serializes writes of policy files.
    files: Mutex<()>,
}

impl WasmPolicies {
    /// Reserves the pool of call memories and starts the clock. Installs no policy.
    ///
    /// # Errors
    /// If the pool cannot be reserved or the state folder cannot be written; the message includes a fix.
    pub fn new(settings: Settings) -> Result<Self, InstallError> {
        let runner = Runner::new().map_err(|error| {
            let error = fault::error_chain(&error);
            install_failed(format!(
                "cannot reserve memory for policies: {error}; raise the limit on address space (ulimit -v)"
            ))
        })?;
        let compatibility = engine::compatibility(&runner.engine);
        let cache = settings.compile_cache.as_deref();
        let cache = cache.and_then(|folder| CompileCache::open(folder, &settings.compiler, &compatibility));
        let artifacts = Artifacts::open(&settings.state_dir, compatibility).map_err(|error| {
            let folder = settings.state_dir.display();
            install_failed(format!("cannot create the folder policies in {folder}: {error}"))
        })?;
        Ok(Self {
            runner,
            compiler: Compiler::new(settings.compiler.clone(), settings.compile.clone(), cache),
            views: ViewCache::new(settings),
            artifacts,
            installed: RwLock::default(),
            files: Mutex::default(),
        })
    }

    /// Changes what policies are shown of the configuration: how whole GPUs and MIG instances are offered without
    /// policies.
    pub fn set_offers(&self, resource: Resource, mig: MigStrategy) {
        self.views.set_offers(resource, mig);
    }

    /// Restores every shipped policy, for tests and benchmarks that call all of them.
    ///
    /// # Errors
    /// If one of them cannot be compiled.
    pub fn restore_shipped(&self, now: Now) -> Result<Vec<PolicyVersion>, InstallError> {
        self.shipped(now).iter().map(|version| self.load(version)).collect()
    }

    /// Deletes artifacts of versions that are not `known`, and files that were not written completely. Call it at
    /// start only: nothing else may write policy files meanwhile.
    pub fn tidy(&self, known: impl Fn(&Digest) -> bool) {
        self.artifacts.tidy(known);
    }

    fn installed(&self, digest: &Digest) -> Option<Arc<Installed>> {
        self.installed.read().get(digest).cloned()
    }

    /// An installed version whose component is intact. A missing or damaged one is replaced by an upload.
    fn installed_intact(&self, digest: &Digest) -> Option<Arc<Installed>> {
        self.installed(digest).filter(|_| self.read_all(digest).is_ok())
    }

    /// Adds a version; without `module` its first call loads the artifact.
    fn insert(&self, version: PolicyVersion, module: Option<Module>) -> PolicyVersion {
        let entry = Installed::new(version.clone());
        if let Some(module) = module {
            let _ = entry.module.set(module);
        }
        let mut installed = self.installed.write();
        installed.insert(version.digest.clone(), Arc::new(entry));
        version
    }

    /// Compiles and describes a module in this process, without limits and without writing files. For the fuzz
    /// target `upload` only. Returns the policy's name and its component.
    ///
    /// # Errors
    /// Those of [`PolicyFiles::install`].
    #[doc(hidden)]
    pub fn compile_and_describe(&self, module: &[u8]) -> Result<(String, Vec<u8>), InstallError> {
        // Covers the encoding of replies, too.
        let frame = compile_child::compile_or_refuse(module.to_vec()).encode();
        let malformed = || install_failed("the compiler's reply is malformed".to_owned());
        let compiled = Reply::decode(&frame).ok_or_else(malformed)?.into_compiled(module)?;
        let (description, _) = Module::load(&self.runner, &compiled.artifact)?.describe(&self.runner)?;
        Ok((description.name, compiled.component.into_owned()))
    }

    /// Loads and describes a compiled module, saves its files and adds its version.
    fn add(&self, compiled: &Compiled<'_>, now: Now, shipped: bool) -> Result<PolicyVersion, InstallError> {
        let module = Module::load(&self.runner, &compiled.artifact)?;
        let (description, hooks) = module.describe(&self.runner)?;
        let id = digest(&compiled.component);
        let existed = self.artifacts.has_component(&id);
        let saved = self.artifacts.save(&id, &compiled.component, &compiled.artifact);
        let module = match saved {
            Ok(()) => None,
            // A shipped policy can be compiled again from the embedded component.
            Err(error) if shipped => {
                tracing::warn!("cannot save the compiled policy {}: {error}", description.name);
                Some(module)
            }
            Err(error) => {
                // A component that existed before is the only copy of an earlier upload.
                if !existed {
                    self.artifacts.remove(&id);
                }
                return Err(install_failed(format!("cannot save the policy: {error}")));
            }
        };
        let version = PolicyVersion {
            name: description.name,
            version: description.version,
            summary: description.summary,
            hooks,
            parameters_schema: description.parameters_schema,
            digest: id,
            artifact: digest(&compiled.artifact),
            bytes: compiled.component.len() as u64,
            shipped,
            since_wall_ms: now.wall_ms,
            origin: berth_kernel::policy::version::Origin::default(),
        };
        Ok(self.insert(version, module))
    }

    /// Calls a version with a question in WIT types.
    fn ask(
        &self,
        installed: &Installed,
        context: &wit::Context,
        question: &WitQuestion,
        indices: &Indices,
        wall_ms: u64,
    ) -> CallOutput {
        let module = match installed.module(&self.artifacts, &self.runner) {
            Ok(module) => module,
            Err(fault) => return CallOutput::from(Err(fault)),
        };
        let CallResult { answer, cost, mut log_lines } =
            module.call(&self.runner, &installed.label, wall_ms, context, question);
        let answer = answer.map_err(|fault| parameters::locate(fault, &context.parameters));
        if answer.as_ref().is_err_and(|fault| fault.kind == FaultKind::Parameters) {
            // The fault has the same text with the parameter's path.
            log_lines.pop();
        }
        let answer = answer.and_then(|answer| convert::answer(indices, answer, question));
        CallOutput { answer, cost, log_lines }
    }
}

fn not_installed(digest: &Digest) -> Fault {
    fault::missing(format!("the version {} is not installed", digest.short()))
}

/// The result of reading a component; `None` is a missing or damaged file.
fn component_or_error(
    read: std::io::Result<Option<Vec<u8>>>,
    digest: &Digest,
) -> Result<Vec<u8>, InstallError> {
    let read = read.map_err(|error| install_failed(format!("cannot read the policy: {error}")))?;
    read.ok_or_else(|| InstallError::Lost { digest: digest.clone() })
}

impl PolicyFiles for WasmPolicies {
    fn install(&self, module: &[u8], now: Now) -> Result<PolicyVersion, InstallError> {
        if module.len() > MODULE_BYTES_MAX {
            return Err(InstallError::TooLarge { bytes: module.len(), limit: MODULE_BYTES_MAX });
        }
        let id = digest(module);
        if let Some(installed) = self.installed_intact(&id) {
            return Ok(installed.version.clone());
        }
        let shipped = shipped::component(&id).is_some();
        let compiled = self.compiler.compile(module)?;
        // Of two concurrent uploads of the same bytes the first saves them.
        let _guard = self.files.lock();
        // The component that was made from a core module has another digest than the module.
        if let Some(installed) = self.installed_intact(&digest(&compiled.component)) {
            return Ok(installed.version.clone());
        }
        self.add(&compiled, now, shipped)
    }

    fn shipped(&self, now: Now) -> Vec<PolicyVersion> {
        shipped::versions(now)
    }

    fn register(&self, version: &PolicyVersion) -> bool {
        if self.installed(&version.digest).is_none() {
            if shipped::component(&version.digest).is_none() && !self.artifacts.has_component(&version.digest)
            {
                return false;
            }
            self.insert(version.clone(), None);
        }
        true
    }

    fn read(&self, digest: &Digest, from: u64, bytes_max: usize) -> Result<Vec<u8>, InstallError> {
        if let Some(component) = shipped::component(digest) {
            let from = usize::try_from(from).unwrap_or(usize::MAX).min(component.len());
            return Ok(component[from..].iter().copied().take(bytes_max).collect());
        }
        component_or_error(self.artifacts.component_piece(digest, from, bytes_max), digest)
    }

    fn read_all(&self, digest: &Digest) -> Result<Vec<u8>, InstallError> {
        if let Some(component) = shipped::component(digest) {
            return Ok(component.to_vec());
        }
        component_or_error(self.artifacts.component(digest), digest)
    }

    fn remove(&self, digest: &Digest) {
        // Running calls keep their reference to the module.
        self.installed.write().remove(digest);
        self.artifacts.remove(digest);
    }
}

impl PolicyRuntime for WasmPolicies {
    fn load(&self, version: &PolicyVersion) -> Result<PolicyVersion, InstallError> {
        if let Some(installed) = self.installed(&version.digest)
            && installed.module(&self.artifacts, &self.runner).is_ok()
        {
            return Ok(installed.version.clone());
        }
        if let Some(artifact) = self.artifacts.artifact(&version.digest, &version.artifact) {
            let module = Module::load(&self.runner, &artifact)?;
            return Ok(self.insert(version.clone(), Some(module)));
        }
        let component = self.read_all(&version.digest)?;
        let compiled = self.compiler.compile(&component)?;
        let module = Module::load(&self.runner, &compiled.artifact)?;
        let guard = self.files.lock();
        let saved = self.artifacts.save(&version.digest, &component, &compiled.artifact);
        drop(guard);
        if let Err(error) = saved {
            // The policy is usable; it is compiled again at the next start.
            tracing::warn!("cannot save the compiled policy {}: {error}", version.label());
        }
        let artifact = digest(&compiled.artifact);
        let version = PolicyVersion { artifact, ..version.clone() };
        Ok(self.insert(version, Some(module)))
    }

    fn unload(&self, digest: &Digest) {
        // The disk is read and memory freed without the lock, which every call takes.
        let loaded = self.installed(digest).filter(|entry| entry.module.get().is_some());
        let Some(old) = loaded.filter(|_| self.artifacts.has_artifact(digest)) else { return };
        let mut installed = self.installed.write();
        if let Some(entry) = installed.get_mut(digest)
            && Arc::ptr_eq(entry, &old)
        {
            // Running calls keep their reference to the module.
            *entry = Arc::new(Installed::new(old.version.clone()));
        }
        drop(installed);
        drop(old);
    }

    fn call(&self, call: Call<'_>) -> CallOutput {
        let Some(installed) = self.installed(call.digest) else {
            return CallOutput::from(Err(not_installed(call.digest)));
        };
        self.views.with(call.node, call.now, call.parameters, |view| match view.question(call.question) {
            Ok(question) => self.ask(&installed, &view.context, &question, &view.indices, call.wall_ms_max),
            Err(fault) => CallOutput::from(Err(fault)),
        })
    }

    fn record_input(&self, node: &Arc<Ledger>, now: Now, question: Question<'_>) -> Result<Input, Fault> {
        self.views.with(node, now, "", |view| recorded::write(view, &view.question(question)?))
    }

    fn call_recorded(
        &self,
        digest: &Digest,
        parameters: &str,
        input: &Input,
    ) -> Result<ReplayedCall, String> {
        let recorded = Recorded::read(input, parameters)?;
        let question = recorded.kernel_question()?;
        let output = match self.installed(digest) {
            None => CallOutput::from(Err(not_installed(digest))),
            Some(installed) if !installed.version.hooks.contains(&question.hook()) => {
                CallOutput::from(Ok(None))
            }
            Some(installed) => {
                let Recorded { context, question, indices } = &recorded;
                self.ask(&installed, context, question, indices, REPLAY_WALL_MS_MAX)
            }
        };
        Ok(ReplayedCall { question, answer: output.answer, cost: output.cost })
    }
}
