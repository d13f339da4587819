//! From the file's stack to one that can be activated: names become versions.

use crate::config::StackEntryConfig;
use crate::kernel::ledger::Ledger;
use crate::kernel::names::Digest;
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
    let digest = match &entry.digest {
        Some(text) => Digest::parse(text).map_err(|e| format!("stack entry {name}: {e}"))?,
        None => ledger
            .policies
            .values()
            .find(|v| v.shipped && v.name == *name)
            .map(|v| v.digest.clone())
            .ok_or_else(|| {
                let mut shipped: Vec<&str> = ledger
                    .policies
                    .values()
                    .filter(|v| v.shipped)
                    .map(|v| v.name.as_str())
                    .collect();
                shipped.sort_unstable();
                let shipped = shipped.join(", ");
                format!("stack entry {name}: no such shipped policy (there are {shipped}); an uploaded one needs its digest")
            })?,
    };
    let version = ledger.policies.get(&digest).ok_or_else(|| {
        format!("stack entry {name}: no policy with digest {digest} on this node; upload it with `berth policy push`")
    })?;
    if version.name != *name {
        return Err(format!("stack entry {name}: digest {} is policy {}", digest.short(), version.name));
    }
    let parameters = serde_json::Value::Object(entry.parameters.clone()).to_string();
    Ok(StackEntry {
        name: name.clone(),
        digest,
        parameters,
        permissions: entry.permissions.resolve(),
        on_fault: entry.on_fault.into(),
    })
}
