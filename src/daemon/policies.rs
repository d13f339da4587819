//! The policies that are there when the daemon starts: checked, and made callable.

use crate::admission::Door;
use crate::kernel::names::Digest;
use crate::kernel::policy::PolicyVersion;
use crate::kernel::trust::{Origin, TrustedKey, may_activate};
use crate::ports::Policies;
use crate::trust;

/// Makes the policies that the store knows and those that came with the daemon callable. Signatures
/// are checked anew, since the keys may be others: what no trusted key signed is kept, but not
/// callable.
///
/// # Errors
/// If what was found out cannot be recorded, or a shipped policy does not compile here.
pub(super) fn load(door: &Door, policies: &dyn Policies, keys: &[TrustedKey]) -> anyhow::Result<()> {
    let known = door.snapshot();
    for version in known.policies.values() {
        let checked = signed(policies, version, keys);
        let active = known.stack.entries.iter().any(|e| e.digest == version.digest);
        let may = may_activate(&checked, keys);
        // What no stack names is made callable when somebody asks it.
        let restored = if may && !active && policies.know(&checked) {
            checked
        } else if may {
            policies.restore(&checked).unwrap_or_else(|error| {
                tracing::error!(policy = version.label(), %error, "a known policy cannot be called");
                checked
            })
        } else {
            let then = if active { "; the active stack has it, and goes on without it" } else { "" };
            tracing::error!(
                policy = version.label(),
                "a known policy is not called: no trusted key signed it{then} (`berth policy push FILE --signature \
                 FILE.sig` brings a signature)"
            );
            checked
        };
        if restored != **version {
            door.keep(restored)?;
        }
    }
    let shipped = policies.install_shipped(door.now())?;
    // What another release shipped is a version like an uploaded one now: a name means this release's.
    let now_shipped = |digest: &Digest| shipped.iter().any(|v| v.digest == *digest);
    let newest = door.snapshot();
    for old in newest.policies.values().filter(|k| k.shipped && !now_shipped(&k.digest)) {
        let origin = Origin { once_shipped: true, ..old.origin.clone() };
        door.keep(PolicyVersion { shipped: false, origin, ..PolicyVersion::clone(old) })?;
    }
    for version in shipped {
        let known = newest.policies.get(&version.digest);
        if known.is_none_or(|k| k.artifact != version.artifact || !k.shipped) {
            door.keep(version)?;
        }
    }
    Ok(())
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
