//! From the file's stack to one that can be activated: names become versions.

use crate::admin::resolve_version;
use crate::config::StackEntryConfig;
use crate::kernel::ledger::Ledger;
use crate::kernel::stack::StackEntry;

/// Resolves the stack of a file against the versions that the node knows.
///
/// # Errors
/// In words that name the entry: an unknown policy, or a digest that is another policy's.
pub(super) fn resolve(entries: &[StackEntryConfig], ledger: &Ledger) -> Result<Vec<StackEntry>, String> {
    entries.iter().map(|entry| resolve_one(entry, ledger)).collect()
}

fn resolve_one(entry: &StackEntryConfig, ledger: &Ledger) -> Result<StackEntry, String> {
    let name = &entry.policy;
    let digest = resolve_version(ledger, name, entry.digest.as_deref())
        .map_err(|why| format!("stack entry {name}: {why}"))?;
    let parameters = serde_json::Value::Object(entry.parameters.clone()).to_string();
    Ok(StackEntry {
        name: name.clone(),
        digest,
        parameters,
        permissions: entry.permissions.resolve(),
        on_fault: entry.on_fault.into(),
    })
}
