//! Whether policies may be activated: only signed ones, where keys are configured.

use super::ledger::Ledger;
use super::policy::PolicyVersion;
use super::refusal::Refusal;
use super::stack::StackEntry;
use super::trust::TrustedKey;

/// Whether this version may be activated with these keys. Without keys any may; versions that are or were
/// built into the daemon need no signature.
#[must_use]
pub fn may_activate(version: &PolicyVersion, keys: &[TrustedKey]) -> bool {
    let signed = || version.origin.signed_by.as_ref().is_some_and(|by| keys.iter().any(|k| k.name == *by));
    keys.is_empty() || version.shipped || version.origin.once_shipped || signed()
}

/// Checks that all entries of a stack may be activated with these keys. Unknown versions are not checked
/// here.
///
/// # Errors
/// [`Refusal::Untrusted`] with the labels of those that may not.
pub fn check_trust(ledger: &Ledger, entries: &[StackEntry], keys: &[TrustedKey]) -> Result<(), Refusal> {
    let untrusted = |e: &&StackEntry| ledger.policies.get(&e.digest).is_some_and(|v| !may_activate(v, keys));
    let policies: Vec<String> = entries.iter().filter(untrusted).map(StackEntry::label).collect();
    if policies.is_empty() { Ok(()) } else { Err(Refusal::Untrusted { policies }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::test_version;
    use crate::trust::{Origin, Signature};

    fn version(shipped: bool, origin: Origin) -> PolicyVersion {
        PolicyVersion { shipped, origin, ..test_version('a') }
    }

    #[test]
    fn with_keys_only_signed_or_built_in_versions_may_be_activated() {
        let keys = [TrustedKey { name: "release".into(), key: [1; 32] }];
        let signed = |by: &str| Origin { signed_by: Some(by.into()), ..Origin::default() };
        let unsigned = version(false, Origin::default());
        assert!(may_activate(&unsigned, &[]) && !may_activate(&unsigned, &keys));
        assert!(may_activate(&version(false, signed("release")), &keys));
        assert!(!may_activate(&version(false, signed("gone")), &keys), "the key is no longer configured");
        assert!(may_activate(&version(true, Origin::default()), &keys));
        let older = Origin { once_shipped: true, ..Origin::default() };
        assert!(may_activate(&version(false, older), &keys));
        // A signature that is not verified does not count.
        let unchecked = Origin { signature: Some(Signature([0; 64])), ..Origin::default() };
        assert!(!may_activate(&version(false, unchecked), &keys));
    }
}
