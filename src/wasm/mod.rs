//! Policies over wasmtime, the only room that names it.
//!
//! - [`limits`]: every limit that a policy meets
//! - `engine`, `ticker`: how code is compiled and run; the clock of the wall-time backstop
//! - `compile`, `compile_child`, `frame`, `memory`: compiling, in a limited process of its own
//! - `artifacts`, `shipped`: the files of uploaded versions, and what comes with the daemon
//! - `module`, `exports`, `call`, `guest`, `fault`: an installed version, one call of it, and what
//!   goes wrong
//! - `view`, `convert`, `bindings`: the kernel's words and those of the contract
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
pub mod limits;
mod memory;
mod module;
mod shipped;
mod ticker;
mod view;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

pub use call::Cost;
pub use compile::CompileLimits;
pub use compile_child::compiler_process;

use artifacts::{Artifacts, digest};
use call::Runner;
use compile::{Compiled, Compiler, trouble};
use limits::MODULE_BYTES_MAX;
use module::Module;
use view::View;

use crate::kernel::names::Digest;
use crate::kernel::policy::{Answer, Call, Fault, PolicyVersion};
use crate::kernel::time::Now;
use crate::ports::{InstallError, Policies};

/// What this room is told by the configuration.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where `policies/` lies.
    pub state_dir: PathBuf,
    /// The program that is started to compile; its `main` calls [`compiler_process`]. Usually this
    /// one.
    pub compiler: PathBuf,
    /// What one compilation may take.
    pub compile: CompileLimits,
    /// Memory that grants may take of a part, percent of what it has.
    pub memory_overcommit_percent: u32,
}

impl Settings {
    /// With this program as the compiler, and the limits of the product.
    #[must_use]
    pub fn new(state_dir: PathBuf) -> Self {
        Self {
            state_dir,
            compiler: PathBuf::from("/proc/self/exe"),
            compile: CompileLimits::default(),
            memory_overcommit_percent: 100,
        }
    }
}

/// The policies of this node.
pub struct WasmPolicies {
    runner: Runner,
    compiler: Compiler,
    artifacts: Artifacts,
    memory_overcommit_percent: u32,
    installed: RwLock<BTreeMap<Digest, Arc<Installed>>>,
}

struct Installed {
    version: PolicyVersion,
    label: String,
    module: Module,
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
            compiler: Compiler::new(settings.compiler, settings.compile),
            artifacts,
            memory_overcommit_percent: settings.memory_overcommit_percent,
            installed: RwLock::default(),
        })
    }

    /// As [`Policies::ask`], and what it cost.
    pub fn ask_at_cost(&self, call: Call<'_>) -> (Result<Option<Answer>, Fault>, Cost) {
        let Some(installed) = self.installed(call.digest) else {
            let words = format!("the version {} is not installed", call.digest.short());
            return (Err(fault::missing(words)), Cost::default());
        };
        let view = View::new(&call, self.memory_overcommit_percent);
        let question = match view.question(call.question) {
            Ok(question) => question,
            Err(fault) => return (Err(fault), Cost::default()),
        };
        let (told, cost) =
            installed.module.ask(&self.runner, &installed.label, call.wall_ms_max, |hooks, store| {
                question.put(hooks, store, &view.context)
            });
        (told.and_then(|told| view.answer(told, call.question)), cost)
    }

    fn installed(&self, digest: &Digest) -> Option<Arc<Installed>> {
        let installed = self.installed.read().unwrap_or_else(PoisonError::into_inner);
        installed.get(digest).map(Arc::clone)
    }

    /// Makes an artifact callable and remembers it under its version.
    fn enter(&self, version: PolicyVersion, module: Module) -> PolicyVersion {
        let mut installed = self.installed.write().unwrap_or_else(PoisonError::into_inner);
        let entry = Installed { label: version.label(), version: version.clone(), module };
        installed.insert(version.digest.clone(), Arc::new(entry));
        version
    }

    /// Everything after compiling: load, describe, keep, enter.
    fn admit(&self, compiled: &Compiled<'_>, now: Now, shipped: bool) -> Result<PolicyVersion, InstallError> {
        let module = Module::load(&self.runner, &compiled.artifact)?;
        let told = module.describe(&self.runner)?;
        let id = digest(&compiled.component);
        let kept = self.artifacts.keep(&id, &compiled.component, &compiled.artifact);
        match kept {
            Ok(()) => {}
            // It can be made again from what is embedded here.
            Err(error) if shipped => {
                tracing::warn!("cannot keep the compiled policy {}: {error}", told.name);
            }
            Err(error) => return Err(trouble(format!("cannot keep the policy: {error}"))),
        }
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
            origin: crate::kernel::trust::Origin::default(),
        };
        Ok(self.enter(version, module))
    }
}

impl Policies for WasmPolicies {
    fn install(&self, module: &[u8], now: Now) -> Result<PolicyVersion, InstallError> {
        if module.len() > MODULE_BYTES_MAX {
            return Err(InstallError::TooLarge { bytes: module.len(), limit: MODULE_BYTES_MAX });
        }
        let id = digest(module);
        if let Some(installed) = self.installed(&id) {
            return Ok(installed.version.clone());
        }
        let shipped = shipped::component(&id).is_some();
        let compiled = self.compiler.compile(module)?;
        // A core module has another digest than the component that it became.
        if let Some(installed) = self.installed(&digest(&compiled.component)) {
            return Ok(installed.version.clone());
        }
        self.admit(&compiled, now, shipped)
    }

    /// Call [`Policies::restore`] for the versions that the store knows first: what it makes
    /// callable is not compiled again here.
    fn install_shipped(&self, now: Now) -> Result<Vec<PolicyVersion>, InstallError> {
        let components = shipped::all().iter().map(|(_, component)| component);
        components.map(|component| self.install(component, now)).collect()
    }

    fn restore(&self, version: &PolicyVersion) -> Result<PolicyVersion, InstallError> {
        if let Some(installed) = self.installed(&version.digest) {
            return Ok(installed.version.clone());
        }
        if let Some(artifact) = self.artifacts.artifact(&version.digest, &version.artifact) {
            let module = Module::load(&self.runner, &artifact)?;
            return Ok(self.enter(version.clone(), module));
        }
        let component = self.module(&version.digest)?;
        let compiled = self.compiler.compile(&component)?;
        let module = Module::load(&self.runner, &compiled.artifact)?;
        let kept = self.artifacts.keep(&version.digest, &component, &compiled.artifact);
        if let Err(error) = kept {
            // It works; the next start compiles once more.
            tracing::warn!("cannot keep the compiled policy {}: {error}", version.label());
        }
        let artifact = digest(&compiled.artifact);
        let version = PolicyVersion { artifact, ..version.clone() };
        Ok(self.enter(version, module))
    }

    fn module(&self, digest: &Digest) -> Result<Vec<u8>, InstallError> {
        if let Some(component) = shipped::component(digest) {
            return Ok(component.to_vec());
        }
        self.artifacts.component(digest).ok_or_else(|| InstallError::Lost { digest: digest.clone() })
    }

    fn remove(&self, digest: &Digest) {
        // A call that runs keeps its own hold of the module.
        self.installed.write().unwrap_or_else(PoisonError::into_inner).remove(digest);
        self.artifacts.remove(digest);
    }

    fn ask(&self, call: Call<'_>) -> Result<Option<Answer>, Fault> {
        self.ask_at_cost(call).0
    }
}
