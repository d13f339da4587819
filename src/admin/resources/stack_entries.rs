//! Converts the entries of a request into entries of the kernel: names become versions, and all limits are checked
//! before any policy is called.

use berth_api::{Kind, NewStackEntry, Operation};
use berth_core::policies::resolve_version;
use berth_http::Failure;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::hooks::{PARAMETERS_BYTES_MAX, STACK_ENTRIES_MAX};
use berth_kernel::policy::stack::{self as kernel, StackEntry};
use serde_json::{Map, Value};

/// The entries with their versions.
///
/// # Errors
/// [`Kind::Invalid`] with the entry and the rule.
pub(crate) fn resolve(ledger: &Ledger, entries: Vec<NewStackEntry>) -> Result<Vec<StackEntry>, Failure> {
    if entries.len() > STACK_ENTRIES_MAX {
        let rule = format!("entries: {}; at most {STACK_ENTRIES_MAX} are allowed", entries.len());
        return Err(Failure::new(Kind::Invalid, rule));
    }
    let numbered = entries.into_iter().enumerate();
    numbered
        .map(|(place, entry)| {
            let bad = |rule: String| Failure::new(Kind::Invalid, format!("entries[{place}]: {rule}"));
            let version =
                resolve_version(ledger, &entry.policy, entry.digest.as_deref()).map_err(|rule| {
                    bad(rule.to_string()).hint("list the policies").action(Operation::ListPolicies)
                })?;
            let permissions = kernel::Permissions::from(entry.permissions);
            permissions.check().map_err(bad)?;
            Ok(StackEntry {
                name: version.name.clone(),
                digest: version.digest.clone(),
                parameters: parameters_text(entry.parameters).map_err(bad)?,
                permissions,
                on_fault: entry.on_fault.into(),
            })
        })
        .collect()
}

/// The parameters as policies get them.
pub(crate) fn parameters_text(parameters: Map<String, Value>) -> Result<String, String> {
    let text = Value::Object(parameters).to_string();
    if text.len() > PARAMETERS_BYTES_MAX {
        return Err(format!("parameters: {} bytes; at most {PARAMETERS_BYTES_MAX}", text.len()));
    }
    Ok(text)
}
