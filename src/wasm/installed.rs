//! An installed version. Its code is loaded at the first call.

use std::sync::OnceLock;

use super::module::Module;
use super::{WasmPolicies, fault};
use berth_kernel::policy::{Fault, PolicyVersion};

/// An installed version.
pub(super) struct Installed {
    pub(super) version: PolicyVersion,
    pub(super) label: String,
    /// Empty until the first call, so that an unused version takes little memory.
    pub(super) module: OnceLock<Module>,
}

impl Installed {
    pub(super) fn new(version: PolicyVersion) -> Self {
        Self { label: version.label(), version, module: OnceLock::new() }
    }

    /// The version's code, loaded by the first call.
    pub(super) fn module(&self, policies: &WasmPolicies) -> Result<&Module, Fault> {
        if let Some(module) = self.module.get() {
            return Ok(module);
        }
        // Callers restore the version first, which compiles it if necessary. A call itself does not compile.
        let missing =
            || fault::missing(format!("the compiled form of {} is missing: activate it again", self.label));
        let artifact = policies.artifacts.artifact(&self.version.digest, &self.version.artifact);
        let module = Module::load(&policies.runner, &artifact.ok_or_else(missing)?);
        let module = module.map_err(|error| fault::missing(error.to_string()))?;
        // Concurrent first calls may each load the module; the first one is used.
        Ok(self.module.get_or_init(|| module))
    }
}
