//! Resolves the stack of the configuration file: names become versions.

use crate::config::{BadSetting, Config, StackEntryConfig};
use berth_admin::{NoVersion, resolve_version};
use berth_files::yaml::Problems;
use berth_kernel::ledger::Ledger;
use berth_kernel::stack::StackEntry;
use berth_kernel::trust::{TrustedKey, check_trust};

/// Why an entry of the file cannot be used. The text names the entry.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unresolved {
    /// The node does not have the version; another node may.
    #[error("{0}")]
    UnknownVersion(String),
    /// The entry is invalid on every node.
    #[error("{0}")]
    Invalid(String),
}

/// Resolves the stack of a configuration to versions that the node has.
///
/// # Errors
/// All invalid entries with their lines: an unknown policy, or a digest of another policy.
pub(super) fn resolve(config: &Config, ledger: &Ledger) -> Result<Vec<StackEntry>, String> {
    let mut problems = Problems::default();
    let mut resolved = Vec::with_capacity(config.stack.len());
    for (at, entry) in config.stack.iter().enumerate() {
        match resolve_entry(entry, ledger) {
            Ok(entry) => resolved.push(entry),
            Err(error) => {
                problems
                    .push(config.locate(BadSetting::new(format!("stack[{at}].policy"), error.to_string())));
            }
        }
    }
    if problems.is_empty() { Ok(resolved) } else { Err(problems.to_string()) }
}

/// Returns the entries if all of their versions may be activated with these keys.
///
/// # Errors
/// The versions that may not.
pub(super) fn check_trusted(
    entries: Vec<StackEntry>,
    ledger: &Ledger,
    keys: &[TrustedKey],
) -> Result<Vec<StackEntry>, String> {
    check_trust(ledger, &entries, keys).map_err(|refusal| refusal.to_string())?;
    Ok(entries)
}

/// As [`resolve`], for one entry.
///
/// # Errors
/// See [`Unresolved`].
pub(super) fn resolve_entry(entry: &StackEntryConfig, ledger: &Ledger) -> Result<StackEntry, Unresolved> {
    let name = &entry.policy;
    let version = resolve_version(ledger, name, entry.digest.as_deref()).map_err(|error| {
        let text = format!("stack entry {}: {error}", name.chars().take(80).collect::<String>());
        match error {
            NoVersion::NotHere(_) => Unresolved::UnknownVersion(text),
            NoVersion::Wrong(_) => Unresolved::Invalid(text),
        }
    })?;
    let parameters = serde_json::Value::Object(entry.parameters.clone()).to_string();
    Ok(StackEntry {
        name: version.name.clone(),
        digest: version.digest.clone(),
        parameters,
        permissions: entry.permissions.resolve(),
        on_fault: entry.on_fault.into(),
    })
}
