//! Whose policies this node takes: keys that are trusted, and how a version came here.
//!
//! Checking a signature needs arithmetic that is not the kernel's; what it found is in
//! [`Origin::signed_by`], and is found anew at every start.

use super::ledger::Ledger;
use super::policy::PolicyVersion;
use super::refusal::Refusal;
use super::stack::StackEntry;

/// A public key that uploads must be signed with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustedKey {
    /// What the configuration calls it.
    pub name: String,
    /// Ed25519, as RFC 8032 encodes it.
    pub key: [u8; 32],
}

/// An Ed25519 signature over a component's bytes, as RFC 8032 encodes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature(pub [u8; 64]);

/// How a version of a policy came to this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// Who uploaded it, by their own word; empty where nobody did, or nobody said.
    pub by: String,
    /// Why, in their words; may be empty.
    pub why: String,
    /// What came with it, whether or not a key is trusted that made it.
    pub signature: Option<Signature>,
    /// The trusted key that made the signature; `None` where no such key is known.
    pub signed_by: Option<String>,
    /// Whether it came with an earlier release of the daemon.
    pub once_shipped: bool,
}

/// Whether these keys let this version be activated. Without keys everything may be; what comes or
/// came with the daemon needs no signature.
#[must_use]
pub fn may_activate(version: &PolicyVersion, keys: &[TrustedKey]) -> bool {
    let signed = || version.origin.signed_by.as_ref().is_some_and(|by| keys.iter().any(|k| k.name == *by));
    keys.is_empty() || version.shipped || version.origin.once_shipped || signed()
}

/// Whether these keys let all entries of a stack be activated. Versions that are not known are nobody's
/// concern here.
///
/// # Errors
/// [`Refusal::Untrusted`], naming those that may not.
pub fn check_trust(ledger: &Ledger, entries: &[StackEntry], keys: &[TrustedKey]) -> Result<(), Refusal> {
    let untrusted = |e: &&StackEntry| ledger.policies.get(&e.digest).is_some_and(|v| !may_activate(v, keys));
    let policies: Vec<String> = entries.iter().filter(untrusted).map(StackEntry::label).collect();
    if policies.is_empty() { Ok(()) } else { Err(Refusal::Untrusted { policies }) }
}

#[cfg(test)]
mod tests {
    use super::super::names::Digest;
    use super::*;

    fn version(shipped: bool, origin: Origin) -> PolicyVersion {
        let digest = Digest::parse(&"a".repeat(64)).unwrap();
        PolicyVersion {
            name: "own".into(),
            version: "1.0.0".into(),
            summary: String::new(),
            hooks: Vec::new(),
            parameters_schema: "{}".into(),
            artifact: digest.clone(),
            digest,
            bytes: 1,
            shipped,
            since_wall_ms: 0,
            origin,
        }
    }

    #[test]
    fn with_keys_only_what_they_signed_or_what_came_with_the_daemon_is_activated() {
        let keys = [TrustedKey { name: "release".into(), key: [1; 32] }];
        let signed = |by: &str| Origin { signed_by: Some(by.into()), ..Origin::default() };
        let unsigned = version(false, Origin::default());
        assert!(may_activate(&unsigned, &[]) && !may_activate(&unsigned, &keys));
        assert!(may_activate(&version(false, signed("release")), &keys));
        assert!(!may_activate(&version(false, signed("gone")), &keys), "a key that is no longer there");
        assert!(may_activate(&version(true, Origin::default()), &keys));
        let older = Origin { once_shipped: true, ..Origin::default() };
        assert!(may_activate(&version(false, older), &keys));
        // A signature alone proves nothing.
        let unchecked = Origin { signature: Some(Signature([0; 64])), ..Origin::default() };
        assert!(!may_activate(&version(false, unchecked), &keys));
    }
}
