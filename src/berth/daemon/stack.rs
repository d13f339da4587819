//! From the file's stack to one that can be activated: names become versions.

use crate::config::{BadSetting, Config, StackEntryConfig};
use berth_admin::{NoVersion, resolve_version};
use berth_files::yaml::Problems;
use berth_kernel::ledger::Ledger;
use berth_kernel::stack::StackEntry;
use berth_kernel::trust::TrustedKey;
use berth_kernel::trust_check::check_trust;

/// Why an entry of the file cannot be used; names the entry.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unresolved {
    /// The node knows no such version; another node may.
    #[error("{0}")]
    NotHere(String),
    /// No node would take it.
    #[error("{0}")]
    Wrong(String),
}

/// Resolves the stack of a configuration against the versions that the node knows.
///
/// # Errors
/// All entries that cannot be used, with their lines: an unknown policy, or a digest that is another policy's.
pub(super) fn resolve(config: &Config, ledger: &Ledger) -> Result<Vec<StackEntry>, String> {
    let mut problems = Problems::default();
    let mut resolved = Vec::with_capacity(config.stack.len());
    for (at, entry) in config.stack.iter().enumerate() {
        match resolve_one(entry, ledger) {
            Ok(entry) => resolved.push(entry),
            Err(why) => {
                problems.push(config.locate(BadSetting::new(format!("stack[{at}].policy"), why.to_string())));
            }
        }
    }
    if problems.is_empty() { Ok(resolved) } else { Err(problems.to_string()) }
}

/// The entries, if every version of them may be activated with these keys.
///
/// # Errors
/// Names those that may not.
pub(super) fn trusted(
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
pub(super) fn resolve_one(entry: &StackEntryConfig, ledger: &Ledger) -> Result<StackEntry, Unresolved> {
    let name = &entry.policy;
    let version = resolve_version(ledger, name, entry.digest.as_deref()).map_err(|why| {
        let words = format!("stack entry {}: {why}", name.chars().take(80).collect::<String>());
        match why {
            NoVersion::NotHere(_) => Unresolved::NotHere(words),
            NoVersion::Wrong(_) => Unresolved::Wrong(words),
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
