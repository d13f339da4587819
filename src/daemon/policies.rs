//! The policies that are there when the daemon starts: checked, and made callable.

use crate::admission::Door;
use crate::kernel::names::Digest;
use crate::kernel::policy::PolicyVersion;
use crate::kernel::trust::{Origin, TrustedKey, may_activate};
use crate::ports::{InstallError, Policies};
use crate::trust;
use std::time::Duration;

/// A start tries so often to make a policy of the active stack callable, so long apart.
const RESTORE_TRIES: u32 = 3;
const RESTORE_AGAIN: Duration = Duration::from_secs(2);
/// A node that had to start without goes on trying, so long apart.
const STACK_AGAIN: Duration = Duration::from_secs(30);

/// Has the node know the policies that came with this release and those of the store, and makes
/// those of the active stack callable. The others are made so when somebody names them: nothing else
/// is compiled while the kubelet waits. Signatures are checked anew, since the keys may be others:
/// what no trusted key signed is kept, but not callable. Answers whether the active stack is callable.
///
/// # Errors
/// If what was found out cannot be recorded.
pub(super) fn load(door: &Door, policies: &dyn Policies, keys: &[TrustedKey]) -> anyhow::Result<bool> {
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
    let mut callable = true;
    for version in known.policies.values() {
        let active = known.stack.entries.iter().any(|e| e.digest == version.digest);
        let checked = signed(policies, version, keys);
        match restored(policies, checked, active, keys) {
            Found::Known(found) if *found != **version => drop(door.keep(*found)?),
            Found::Known(_) => {}
            Found::NotNow => callable = false,
            Found::Gone => {
                tracing::info!(
                    policy = version.label(),
                    "an earlier release had this policy, and it was never asked"
                );
                door.forget_policy(version.digest.clone())?;
            }
        }
    }
    Ok(callable)
}

/// What becomes of a version that the store knows.
enum Found {
    /// The version as it is: known, and callable where it is active.
    Known(Box<PolicyVersion>),
    /// It is active, and this machine cannot make it callable now.
    NotNow,
    /// It came with another release and nobody ever had it compiled, so its bytes went with that.
    Gone,
}

fn restored(policies: &dyn Policies, version: PolicyVersion, active: bool, keys: &[TrustedKey]) -> Found {
    if !may_activate(&version, keys) {
        let then = if active { "; the active stack has it, and goes on without it" } else { "" };
        tracing::error!(
            policy = version.label(),
            "a known policy is not called: no trusted key signed it{then} (`berth policy push FILE --signature \
             FILE.sig` brings a signature)"
        );
        return Found::Known(Box::new(version));
    }
    if !active && policies.know(&version) {
        return Found::Known(Box::new(version));
    }
    if !active && version.origin.once_shipped && policies.module(&version.digest).is_err() {
        return Found::Gone;
    }
    for tries_left in (0..RESTORE_TRIES).rev() {
        match policies.restore(&version) {
            Ok(restored) => return Found::Known(Box::new(restored)),
            // The machine may be out of something for a moment, and the node must not start without it.
            Err(InstallError::Busy | InstallError::Trouble { .. }) if active && tries_left > 0 => {
                std::thread::sleep(RESTORE_AGAIN);
            }
            Err(error) => {
                tracing::error!(policy = version.label(), %error, "a known policy cannot be called");
                break;
            }
        }
    }
    // So that it can be made callable later.
    policies.know(&version);
    if active { Found::NotNow } else { Found::Known(Box::new(version)) }
}

/// Tries until the active stack is callable, for a start that went on without.
pub(super) async fn go_on_trying(door: Door) {
    loop {
        tokio::time::sleep(STACK_AGAIN).await;
        match door.prepare_stack().await {
            Ok(()) => return tracing::info!("the policies of the active stack can be called again"),
            Err(error) => tracing::debug!(%error, "the active stack cannot be called yet"),
        }
    }
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
