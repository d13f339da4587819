//! The stack of the file as the node has it: names become versions.

use super::{BadSetting, Config, StackEntryConfig};
use berth_core::policies::{ResolveError, resolve_version};
use berth_files::yaml::Problems;
use berth_kernel::node::command::NewStack;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::stack::{StackEntry, StackOrigin};
use berth_kernel::policy::version_records::check_trust;

/// Most characters of a policy's name that an error shows.
const NAME_CHARACTERS_MAX: usize = 80;

impl Config {
    /// Resolves the stack to versions that the node has and that may be activated.
    ///
    /// # Errors
    /// All invalid entries with their lines: an unknown policy, a digest of another policy, or a version that no
    /// trusted key signed.
    pub fn resolve_stack(&self, ledger: &Ledger) -> Result<Vec<StackEntry>, Problems> {
        let mut problems = Problems::default();
        let mut resolved = Vec::with_capacity(self.offers.stack.len());
        for (at, entry) in self.offers.stack.iter().enumerate() {
            let entry = entry.resolve(ledger).map_err(|error| error.to_string()).and_then(|entry| {
                let trusted = check_trust(ledger, std::slice::from_ref(&entry), &self.rules.trusted_keys);
                trusted.map_err(|refusal| refusal.to_string()).map(|()| entry)
            });
            match entry {
                Ok(entry) => resolved.push(entry),
                Err(error) => {
                    problems.push(self.locate(BadSetting::new(format!("stack[{at}].policy"), error)));
                }
            }
        }
        if problems.is_empty() { Ok(resolved) } else { Err(problems) }
    }
}

impl StackEntryConfig {
    /// As [`Config::resolve_stack`], for one entry.
    ///
    /// # Errors
    /// As [`resolve_version`]; the text names the entry.
    pub fn resolve(&self, ledger: &Ledger) -> Result<StackEntry, ResolveError> {
        let name = &self.policy;
        let with_entry = |error: String| {
            let name: String = name.chars().take(NAME_CHARACTERS_MAX).collect();
            format!("stack entry {name}: {error}")
        };
        let version = resolve_version(ledger, name, self.digest.as_deref()).map_err(|error| match error {
            ResolveError::Missing(error) => ResolveError::Missing(with_entry(error)),
            ResolveError::Invalid(error) => ResolveError::Invalid(with_entry(error)),
        })?;
        let parameters = serde_json::Value::Object(self.parameters.clone()).to_string();
        Ok(StackEntry {
            name: version.name.clone(),
            digest: version.digest.clone(),
            parameters,
            permissions: self.permissions.resolve(),
            on_fault: self.on_fault.into(),
        })
    }
}

/// The command that activates these entries as the stack of the configuration.
#[must_use]
pub fn new_stack(entries: Vec<StackEntry>) -> NewStack {
    NewStack { origin: StackOrigin::File, failed: None, by: "config".into(), why: String::new(), entries }
}
