//! Converts the entries of a request into entries of the kernel: names become versions, and all limits are checked
//! before any policy is called.

use berth_api::{Kind, NewStackEntry, Operation, Permissions};
use berth_core::policies::resolve_version;
use berth_http::{Failure, excerpt};
use berth_kernel::ids::names::RESOURCE_BYTES_MAX;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::hooks::{ENVIRONMENT_KEY_BYTES_MAX, PARAMETERS_BYTES_MAX, STACK_ENTRIES_MAX};
use berth_kernel::policy::stack::StackEntry;
use berth_kernel::sharing::offer::SHARES_PER_PART_MAX;
use serde_json::{Map, Value};

/// Most patterns in one list of permissions: an entry is one record of at most 16 KiB, of which parameters may take 6
/// KiB twice.
pub(crate) const PATTERNS_MAX: usize = 16;
/// Most bytes of all patterns of an entry, for the same reason.
pub(crate) const PATTERNS_BYTES_MAX: usize = 3 * 1024;

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
            check_permissions(&entry.permissions).map_err(bad)?;
            Ok(StackEntry {
                name: version.name.clone(),
                digest: version.digest.clone(),
                parameters: parameters_text(entry.parameters).map_err(bad)?,
                permissions: entry.permissions.into(),
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

pub(crate) fn check_permissions(permissions: &Permissions) -> Result<(), String> {
    if !(1..=SHARES_PER_PART_MAX).contains(&permissions.share_max) {
        return Err(format!(
            "permissions.shareMax: 1 to {SHARES_PER_PART_MAX}, not {}",
            permissions.share_max
        ));
    }
    for (list, name, longest) in [
        (&permissions.resources, "resources", RESOURCE_BYTES_MAX),
        (&permissions.environment, "environment", ENVIRONMENT_KEY_BYTES_MAX),
    ] {
        if list.len() > PATTERNS_MAX {
            return Err(format!("permissions.{name}: at most {PATTERNS_MAX} patterns"));
        }
        let pattern_fits = |p: &String| {
            let text = p.strip_suffix('*').unwrap_or(p);
            !p.is_empty()
                && text.len() <= longest
                && !text.contains('*')
                && text.bytes().all(|b| b.is_ascii_graphic())
        };
        if let Some(bad) = list.iter().find(|p| !pattern_fits(p)) {
            let shown = excerpt(bad);
            return Err(format!(
                "permissions.{name}: {shown:?} is not a name, exact or ending in `*`, of at most {longest} bytes"
            ));
        }
    }
    let lists = permissions.resources.iter().chain(&permissions.environment);
    let bytes: usize = lists.map(String::len).sum();
    if bytes > PATTERNS_BYTES_MAX {
        return Err(format!("permissions: {bytes} bytes of patterns; at most {PATTERNS_BYTES_MAX}"));
    }
    Ok(())
}
