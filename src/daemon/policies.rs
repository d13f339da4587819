//! The policies that are there when the daemon starts: checked, and made callable.

use crate::admission::Door;
use crate::kernel::names::Digest;
use crate::kernel::policy::PolicyVersion;
use crate::kernel::trust::{Origin, TrustedKey, may_activate};
use crate::ports::Policies;
use crate::trust;

/// Has the node know the policies that came with this release and those of the store, and makes
/// those of the active stack callable. The others are made so when somebody names them: nothing else
/// is compiled while the kubelet waits. Signatures are checked anew, since the keys may be others:
/// what no trusted key signed is kept, but not callable.
///
/// # Errors
/// If what was found out cannot be recorded.
pub(super) fn load(door: &Door, policies: &dyn Policies, keys: &[TrustedKey]) -> anyhow::Result<()> {
    let shipped = policies.shipped(door.now());
    let newest = door.snapshot();
    for version in &shipped {
        match newest.policies.get(&version.digest) {
            None => drop(door.keep(version.clone())?),
            // Another release that did not have it said so, or it was uploaded before.
            Some(known) if !known.shipped => {
                door.keep(PolicyVersion { shipped: true, ..PolicyVersion::clone(known) })?;
            }
            Some(_) => {}
        }
    }
    // What another release shipped is a version like an uploaded one now: a name means this release's.
    let now_shipped = |digest: &Digest| shipped.iter().any(|v| v.digest == *digest);
    for old in newest.policies.values().filter(|k| k.shipped && !now_shipped(&k.digest)) {
        let origin = Origin { once_shipped: true, ..old.origin.clone() };
        door.keep(PolicyVersion { shipped: false, origin, ..PolicyVersion::clone(old) })?;
    }
    let known = door.snapshot();
    for version in known.policies.values() {
        let active = known.stack.entries.iter().any(|e| e.digest == version.digest);
        let checked = signed(policies, version, keys);
        let checked = restored(policies, checked, active, keys);
        if checked != **version {
            door.keep(checked)?;
        }
    }
    Ok(())
}

/// The version as it is once it is known, and callable if it is active.
fn restored(
    policies: &dyn Policies,
    version: PolicyVersion,
    active: bool,
    keys: &[TrustedKey],
) -> PolicyVersion {
    if !may_activate(&version, keys) {
        let then = if active { "; the active stack has it, and goes on without it" } else { "" };
        tracing::error!(
            policy = version.label(),
            "a known policy is not called: no trusted key signed it{then} (`berth policy push FILE --signature \
             FILE.sig` brings a signature)"
        );
        return version;
    }
    if !active && policies.know(&version) {
        return version;
    }
    policies.restore(&version).unwrap_or_else(|error| {
        tracing::error!(policy = version.label(), %error, "a known policy cannot be called");
        version
    })
}

/// The version with the key that signed it, as the keys are now.
fn signed(policies: &dyn Policies, version: &PolicyVersion, keys: &[TrustedKey]) -> PolicyVersion {
    let made = version.origin.signature.filter(|_| !keys.is_empty());
    let signed_by = made.and_then(|signature| {
        let bytes = policies.module(&version.digest).ok()?;
        trust::signer(keys, &bytes, &signature).map(ToOwned::to_owned)
    });
    PolicyVersion { origin: Origin { signed_by, ..version.origin.clone() }, ..version.clone() }
}
