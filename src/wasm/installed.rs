//! A version that the node knows, with its code once somebody asked for it.

use std::sync::OnceLock;

use super::module::Module;
use super::{WasmPolicies, fault};
use berth_kernel::policy::{Fault, PolicyVersion};

/// A known version.
pub(super) struct Installed {
    pub(super) version: PolicyVersion,
    pub(super) label: String,
    /// Empty until somebody asks: a version that no stack names costs its files and a few texts.
    pub(super) module: OnceLock<Module>,
}

impl Installed {
    pub(super) fn new(version: PolicyVersion) -> Self {
        Self { label: version.label(), version, module: OnceLock::new() }
    }

    /// Its code, read and made callable by the first who asks.
    pub(super) fn module(&self, policies: &WasmPolicies) -> Result<&Module, Fault> {
        if let Some(module) = self.module.get() {
            return Ok(module);
        }
        // Whoever is about to ask has it restored first, which makes it anew; not so in midcall.
        let gone =
            || fault::missing(format!("the compiled form of {} is gone: activate it again", self.label));
        let artifact = policies.artifacts.artifact(&self.version.digest, &self.version.artifact);
        let module = Module::load(&policies.runner, &artifact.ok_or_else(gone)?);
        let module = module.map_err(|error| fault::missing(error.to_string()))?;
        // Of two who come at once one's is kept.
        Ok(self.module.get_or_init(|| module))
    }
}
