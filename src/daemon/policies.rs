//! The policies that are there when the daemon starts: checked, and made callable.

use super::Progress;
use crate::admission::Door;
use crate::kernel::names::Digest;
use crate::kernel::policy::PolicyVersion;
use crate::kernel::trust::{Origin, TrustedKey, may_activate};
use crate::ports::{InstallError, Policies};
use crate::trust;
use anyhow::Context;
use std::sync::Arc;
use std::time::Duration;

/// A start tries so often to make a policy of the active stack callable, so long apart.
const RESTORE_TRIES: u32 = 3;
const RESTORE_AGAIN: Duration = Duration::from_secs(2);
/// A node that had to start without goes on trying, at least so often: one that fails for good, after a
/// minute of processor time, takes at most a tenth of a processor then.
const STACK_AGAIN_MAX: Duration = Duration::from_secs(600);

/// Has the node know the policies that came with this release and those of the store, and makes
/// those of the active stack callable. The others are made so when somebody names them: nothing else
/// is compiled while the kubelet waits. Signatures are checked anew, since the keys may be others:
/// what no trusted key signed is kept, but not callable. Answers why the active stack is not callable, if
/// so.
///
/// # Errors
/// If what was found out cannot be recorded.
pub(super) async fn load(
    door: Door,
    policies: Arc<dyn Policies>,
    keys: Vec<TrustedKey>,
) -> anyhow::Result<Option<String>> {
    // The API answers already: what it deletes meanwhile would be written anew here.
    let held = door.hold_files().await;
    let work = move || {
        let _held = held;
        load_all(&door, &*policies, &keys)
    };
    tokio::task::spawn_blocking(work).await.context("loading the policies")?
}

fn load_all(door: &Door, policies: &dyn Policies, keys: &[TrustedKey]) -> anyhow::Result<Option<String>> {
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
    let mut trouble = None;
    for version in known.policies.values() {
        let active = known.stack.entries.iter().any(|e| e.digest == version.digest);
        let checked = signed(policies, version, keys);
        match restored(policies, checked, active, keys) {
            Found::Known(found) if *found != **version => drop(door.keep(*found)?),
            Found::Known(_) => {}
            Found::NotNow(why) => trouble = Some(why),
            Found::Gone => {
                tracing::info!(
                    policy = version.label(),
                    "an earlier release had this policy, and it was never asked"
                );
                door.forget_policy(version.digest.clone())?;
            }
        }
    }
    Ok(trouble)
}

/// What becomes of a version that the store knows.
enum Found {
    /// The version as it is: known, and callable where it is active.
    Known(Box<PolicyVersion>),
    /// It is active, and this machine cannot make it callable now; why.
    NotNow(String),
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
    let lost = || matches!(policies.module(&version.digest), Err(InstallError::Lost { .. }));
    if !active && version.origin.once_shipped && lost() {
        return Found::Gone;
    }
    let mut why = String::new();
    for tries_left in (0..RESTORE_TRIES).rev() {
        match policies.restore(&version) {
            Ok(restored) => return Found::Known(Box::new(restored)),
            // The machine may be out of something for a moment, and the node must not start without it.
            Err(InstallError::Busy | InstallError::Trouble { .. }) if active && tries_left > 0 => {
                std::thread::sleep(RESTORE_AGAIN);
            }
            Err(error) => {
                tracing::error!(policy = version.label(), %error, "a known policy cannot be called");
                why = format!("policy {} cannot be made callable here: {error}", version.label());
                break;
            }
        }
    }
    // So that it can be made callable later.
    policies.know(&version);
    if active { Found::NotNow(why) } else { Found::Known(Box::new(version)) }
}

/// Tries until the active stack is callable, for a start that went on without; first after `wait`. Ends
/// when another one is active: that was made callable before.
pub(super) async fn go_on_trying(door: Door, progress: Arc<Progress>, why: String, mut wait: Duration) {
    progress.uncallable(Some(why));
    let mut snapshots = door.watch();
    let revision = snapshots.borrow_and_update().stack.revision;
    loop {
        let another = snapshots.wait_for(|node| node.stack.revision != revision);
        if tokio::time::timeout(wait, another).await.is_ok() {
            tracing::info!("the stack whose policies could not be called is no longer active");
            break;
        }
        match door.prepare_stack().await {
            Ok(()) => {
                tracing::info!("the policies of the active stack can be called again");
                break;
            }
            Err(error) => {
                tracing::debug!(%error, "the active stack cannot be called yet");
                if !error.is_passing() {
                    wait = (wait * 2).min(STACK_AGAIN_MAX);
                }
                progress.uncallable(Some(error.to_string()));
            }
        }
    }
    progress.uncallable(None);
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
