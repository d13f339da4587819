//! Policies over wasmtime, the only room that names it.
//!
//! - [`limits`]: every limit that a policy meets
//! - `engine`, `ticker`: how code is compiled and run; the clock of the wall-time backstop
//! - `compile`, `compile_child`, `whole`, `frame`, `memory`: compiling, in a limited process of its own
//! - `artifacts`, `shipped`: the files of uploaded versions, and what comes with the daemon
//! - `installed`, `module`, `exports`, `call`, `guest`, `fault`, `parameters`: an installed version, one call
//!   of it, and what goes wrong
//! - `view`, `views`, `convert`, `bindings`: the kernel's words and those of the contract; `recorded`: the
//!   latter as JSON, to be asked again
//!
//! Absent on purpose: WASI, threads, anything that outlives a call. A policy that is wrong costs its
//! budget and nothing else.

mod artifacts;
mod bindings;
mod call;
mod compile;
mod compile_child;
mod convert;
mod engine;
mod exports;
mod fault;
mod frame;
mod guest;
mod installed;
pub mod limits;
mod memory;
mod module;
mod parameters;
mod recorded;
mod scratch;
mod settings;
mod shipped;
mod ticker;
mod view;
mod views;
mod whole;

use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::sync::Arc;

pub use compile::CompileLimits;
pub use compile_child::compiler_process;
pub use scratch::Scratch;
pub use settings::Settings;

use artifacts::{Artifacts, digest};
use call::{Called, Runner};
use compile::{Compiled, Compiler, trouble};
use frame::Reply;
use installed::Installed;
use limits::MODULE_BYTES_MAX;
use module::Module;
use recorded::Recorded;
use view::Rules;
use views::Views;

use berth_kernel::decision::Cost;
use berth_kernel::ledger::Ledger;
use berth_kernel::names::Digest;
use berth_kernel::policy::{Answer, Fault, FaultKind, PolicyVersion, Question};
use berth_kernel::policy_call::Call;
use berth_kernel::ports::{CallOutput, Input, InstallError, Policies, ReplayedCall};
use berth_kernel::time::Now;

/// Wall time of a call about the past, milliseconds: nobody waits for it but an operator.
const CALL_AGAIN_MS: u64 = 2_000;

/// The policies of this node.
pub struct WasmPolicies {
    runner: Runner,
    compiler: Compiler,
    artifacts: Artifacts,
    views: Views,
    installed: RwLock<BTreeMap<Digest, Arc<Installed>>>,
    /// Whoever has it writes files of policies.
    keeping: Mutex<()>,
}

impl WasmPolicies {
    /// Reserves the pool that calls run in and starts the clock. Nothing is installed yet.
    ///
    /// # Errors
    /// If the address space or the state folder does not allow it; says what to do.
    pub fn new(settings: Settings) -> Result<Self, InstallError> {
        let runner = Runner::new().map_err(|error| {
            let error = fault::words_of(&error);
            trouble(format!("no room to run policies: {error}; lift the limit of address space (ulimit -v)"))
        })?;
        let compatibility = engine::compatibility(&runner.engine);
        let artifacts = Artifacts::open(&settings.state_dir, compatibility).map_err(|error| {
            let folder = settings.state_dir.display();
            trouble(format!("cannot make the folder policies in {folder}: {error}"))
        })?;
        Ok(Self {
            runner,
            views: Views::new(Rules::of(&settings)),
            compiler: Compiler::new(settings.compiler, settings.compile),
            artifacts,
            installed: RwLock::default(),
            keeping: Mutex::default(),
        })
    }

    /// Makes every policy that came with the daemon callable: for whoever tries them all.
    ///
    /// # Errors
    /// If one of them cannot be compiled here.
    pub fn restore_shipped(&self, now: Now) -> Result<Vec<PolicyVersion>, InstallError> {
        self.shipped(now).iter().map(|version| self.restore(version)).collect()
    }

    /// Deletes the compiled forms that no version of these has, and what was not written to its end. For
    /// a start: nothing else may write policies meanwhile.
    pub fn tidy(&self, known: impl Fn(&Digest) -> bool) {
        self.artifacts.tidy(known);
    }

    fn installed(&self, digest: &Digest) -> Option<Arc<Installed>> {
        let installed = self.installed.read();
        installed.get(digest).map(Arc::clone)
    }

    /// The same, if its bytes are there and as they were: those that are damaged are brought anew.
    fn whole(&self, digest: &Digest) -> Option<Arc<Installed>> {
        self.installed(digest).filter(|_| self.module(digest).is_ok())
    }

    /// Remembers a version, with its code where that must not be read from its file again.
    fn enter(&self, version: PolicyVersion, module: Option<Module>) -> PolicyVersion {
        let entry = Installed::new(version.clone());
        if let Some(module) = module {
            let _ = entry.module.set(module);
        }
        let mut installed = self.installed.write();
        installed.insert(version.digest.clone(), Arc::new(entry));
        version
    }

    /// What an upload goes through but for the compiler's process of its own and the files: for the fuzz
    /// target `upload`, which looks for bytes that break any of it. Compiling has no limits here, so nothing
    /// of the daemon calls it. Answers the name and the component.
    ///
    /// # Errors
    /// As [`Policies::install`].
    #[doc(hidden)]
    pub fn rehearse(&self, module: &[u8]) -> Result<(String, Vec<u8>), InstallError> {
        // By way of the frame, as from the process.
        let frame = compile_child::compile_or_refuse(module.to_vec()).encode();
        match Reply::decode(&frame) {
            Some(Reply::Compiled { component, artifact }) => {
                let told = Module::load(&self.runner, &artifact)?.describe(&self.runner)?;
                Ok((told.name, component.unwrap_or_else(|| module.to_vec())))
            }
            Some(Reply::Refused(words)) => Err(module::not_a_policy(words)),
            Some(Reply::TooCostly(what)) => Err(InstallError::TooCostly { what }),
            None => Err(trouble("the compiler's answer cannot be read".to_owned())),
        }
    }

    /// Everything after compiling: load, describe, keep, enter.
    fn admit(&self, compiled: &Compiled<'_>, now: Now, shipped: bool) -> Result<PolicyVersion, InstallError> {
        let module = Module::load(&self.runner, &compiled.artifact)?;
        let told = module.describe(&self.runner)?;
        let id = digest(&compiled.component);
        let was_there = self.artifacts.has_component(&id);
        let kept = self.artifacts.keep(&id, &compiled.component, &compiled.artifact);
        let module = match kept {
            Ok(()) => None,
            // It can be made again from what is embedded here.
            Err(error) if shipped => {
                tracing::warn!("cannot keep the compiled policy {}: {error}", told.name);
                Some(module)
            }
            Err(error) => {
                // What lay there before is all that there is of an earlier upload.
                if !was_there {
                    self.artifacts.remove(&id);
                }
                return Err(trouble(format!("cannot keep the policy: {error}")));
            }
        };
        let version = PolicyVersion {
            name: told.name,
            version: told.version,
            summary: told.summary,
            hooks: told.hooks,
            parameters_schema: told.parameters_schema,
            digest: id,
            artifact: digest(&compiled.artifact),
            bytes: compiled.component.len() as u64,
            shipped,
            since_wall_ms: now.wall_ms,
            origin: berth_kernel::trust::Origin::default(),
        };
        Ok(self.enter(version, module))
    }
}

fn not_installed(digest: &Digest) -> Fault {
    fault::missing(format!("the version {} is not installed", digest.short()))
}

impl Policies for WasmPolicies {
    fn install(&self, module: &[u8], now: Now) -> Result<PolicyVersion, InstallError> {
        if module.len() > MODULE_BYTES_MAX {
            return Err(InstallError::TooLarge { bytes: module.len(), limit: MODULE_BYTES_MAX });
        }
        let id = digest(module);
        if let Some(installed) = self.whole(&id) {
            return Ok(installed.version.clone());
        }
        let shipped = shipped::component(&id).is_some();
        let compiled = self.compiler.compile(module)?;
        // Of two who bring the same bytes at once one keeps them.
        let _alone = self.keeping.lock();
        // A core module has another digest than the component that it became.
        if let Some(installed) = self.whole(&digest(&compiled.component)) {
            return Ok(installed.version.clone());
        }
        self.admit(&compiled, now, shipped)
    }

    fn shipped(&self, now: Now) -> Vec<PolicyVersion> {
        shipped::versions(now)
    }

    fn restore(&self, version: &PolicyVersion) -> Result<PolicyVersion, InstallError> {
        if let Some(installed) = self.installed(&version.digest)
            && installed.module(self).is_ok()
        {
            return Ok(installed.version.clone());
        }
        if let Some(artifact) = self.artifacts.artifact(&version.digest, &version.artifact) {
            let module = Module::load(&self.runner, &artifact)?;
            return Ok(self.enter(version.clone(), Some(module)));
        }
        let component = self.module(&version.digest)?;
        let compiled = self.compiler.compile(&component)?;
        let module = Module::load(&self.runner, &compiled.artifact)?;
        let alone = self.keeping.lock();
        let kept = self.artifacts.keep(&version.digest, &component, &compiled.artifact);
        drop(alone);
        if let Err(error) = kept {
            // It works; the next start compiles once more.
            tracing::warn!("cannot keep the compiled policy {}: {error}", version.label());
        }
        let artifact = digest(&compiled.artifact);
        let version = PolicyVersion { artifact, ..version.clone() };
        Ok(self.enter(version, Some(module)))
    }

    fn register(&self, version: &PolicyVersion) -> bool {
        if self.installed(&version.digest).is_none() {
            if shipped::component(&version.digest).is_none() && !self.artifacts.has_component(&version.digest)
            {
                return false;
            }
            self.enter(version.clone(), None);
        }
        true
    }

    fn module(&self, digest: &Digest) -> Result<Vec<u8>, InstallError> {
        if let Some(component) = shipped::component(digest) {
            return Ok(component.to_vec());
        }
        let read = self.artifacts.component(digest);
        let read = read.map_err(|error| trouble(format!("cannot read the policy: {error}")))?;
        read.ok_or_else(|| InstallError::Lost { digest: digest.clone() })
    }

    fn module_piece(&self, digest: &Digest, from: u64, bytes_max: usize) -> Result<Vec<u8>, InstallError> {
        if let Some(component) = shipped::component(digest) {
            let from = usize::try_from(from).unwrap_or(usize::MAX).min(component.len());
            return Ok(component[from..].iter().copied().take(bytes_max).collect());
        }
        let read = self.artifacts.component_piece(digest, from, bytes_max);
        let read = read.map_err(|error| trouble(format!("cannot read the policy: {error}")))?;
        read.ok_or_else(|| InstallError::Lost { digest: digest.clone() })
    }

    fn unload(&self, digest: &Digest) {
        // Without the lock, which every call takes, while the disk is asked and memory given back.
        let loaded = self.installed(digest).filter(|entry| entry.module.get().is_some());
        let Some(old) = loaded.filter(|_| self.artifacts.has_artifact(digest)) else { return };
        let mut installed = self.installed.write();
        if let Some(entry) = installed.get_mut(digest)
            && Arc::ptr_eq(entry, &old)
        {
            // A call that runs keeps its own hold of the module.
            *entry = Arc::new(Installed::new(old.version.clone()));
        }
        drop(installed);
        drop(old);
    }

    fn remove(&self, digest: &Digest) {
        // A call that runs keeps its own hold of the module.
        self.installed.write().remove(digest);
        self.artifacts.remove(digest);
    }

    fn call(&self, call: Call<'_>) -> Result<Option<Answer>, Fault> {
        self.call_with_cost(call).0
    }

    fn call_with_cost(&self, call: Call<'_>) -> (Result<Option<Answer>, Fault>, Cost) {
        let CallOutput { answer: told, cost, .. } = self.call_with_log(call);
        (told, cost)
    }

    fn call_with_log(&self, call: Call<'_>) -> CallOutput {
        let unasked = |fault| CallOutput { answer: Err(fault), cost: Cost::default(), log_lines: Vec::new() };
        let Some(installed) = self.installed(call.digest) else {
            return unasked(not_installed(call.digest));
        };
        self.views.with(call.node, call.now, call.parameters, |view| {
            let question = match view.question(call.question) {
                Ok(question) => question,
                Err(fault) => return unasked(fault),
            };
            let module = match installed.module(self) {
                Ok(module) => module,
                Err(fault) => return unasked(fault),
            };
            let Called { answer, cost, mut said } =
                module.ask(&self.runner, &installed.label, call.wall_ms_max, |hooks, store| {
                    question.put(hooks, store, &view.context)
                });
            let answer = answer.map_err(|fault| parameters::told(fault, call.parameters));
            if answer.as_ref().is_err_and(|fault| fault.kind == FaultKind::Parameters) {
                // The fault says it, and better.
                said.pop();
            }
            let told = answer.and_then(|told| convert::answer(view, told, &question));
            CallOutput { answer: told, cost, log_lines: said }
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
        let asked = recorded.asked()?;
        let Some(installed) = self.installed(digest) else {
            return Ok(ReplayedCall {
                question: asked,
                answer: Err(not_installed(digest)),
                cost: Cost::default(),
            });
        };
        if !installed.version.hooks.contains(&asked.hook()) {
            return Ok(ReplayedCall { question: asked, answer: Ok(None), cost: Cost::default() });
        }
        let module = match installed.module(self) {
            Ok(module) => module,
            Err(fault) => {
                return Ok(ReplayedCall { question: asked, answer: Err(fault), cost: Cost::default() });
            }
        };
        let Called { answer, cost, .. } =
            module.ask(&self.runner, &installed.label, CALL_AGAIN_MS, |hooks, store| {
                recorded.question.put(hooks, store, &recorded.context)
            });
        let answer = answer.map_err(|fault| parameters::told(fault, parameters));
        let told = answer.and_then(|told| convert::answer(&recorded, told, &recorded.question));
        Ok(ReplayedCall { question: asked, answer: told, cost })
    }
}
