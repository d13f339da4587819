//! The policies that are there when the daemon starts: checked, and made callable.

use super::Progress;
use anyhow::Context;
use berth_core::admission::Door;
use berth_core::trust;
use berth_kernel::names::Digest;
use berth_kernel::policy::PolicyVersion;
use berth_kernel::ports::{InstallError, Policies};
use berth_kernel::trust::{Origin, TrustedKey};
use berth_kernel::trust_check::may_activate;
use std::sync::Arc;
use std::time::Duration;

/// A start tries so often to make a policy of the active stack callable, so long apart.
const RESTORE_TRIES: u32 = 3;
const RESTORE_AGAIN: Duration = Duration::from_secs(2);
/// A node that had to start without goes on trying, at least so often: one that fails for good, after a
/// minute of processor time, takes at most a tenth of a processor then.
const STACK_AGAIN_MAX: Duration = Duration::from_secs(600);

/// Registers the policies of this release and those of the store, and makes those of the active stack callable. The others
/// are compiled when a request names them: nothing else is compiled while the kubelet waits. Signatures are checked again,
/// since the trusted keys may have changed: a version that no trusted key signed is kept, but not callable. Returns why the
/// active stack is not callable, if it is not.
///
/// # Errors
/// If the versions cannot be recorded.
pub(super) async fn load(
    door: Door,
    policies: Arc<dyn Policies>,
    keys: Vec<TrustedKey>,
) -> anyhow::Result<Option<NotNow>> {
    // The API answers already: a version that it deletes meanwhile would be recorded again here.
    let held = door.hold_files().await;
    let work = move || {
        let _held = held;
        load_all(&Look { door: &door, policies: &*policies, keys: &keys, first: true })
    };
    tokio::task::spawn_blocking(work).await.context("loading the policies")?
}

fn load_all(look: &Look<'_>) -> anyhow::Result<Option<NotNow>> {
    let door = look.door;
    let shipped = look.policies.shipped(door.now());
    let newest = door.snapshot();
    for version in &shipped {
        match newest.policies.get(&version.digest) {
            None => drop(door.keep(version.clone())?),
            // It was recorded by a release without it, or was uploaded before.
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
    look.at(known.policies.keys(), known.stack.revision)
}

/// Why the active stack is not callable.
pub(super) struct NotNow {
    /// The revision of the stack that this is about.
    revision: u64,
    why: String,
    /// Whether it may go by itself soon.
    passing: bool,
}

/// One pass over the policies of the store.
struct Look<'l> {
    door: &'l Door,
    policies: &'l dyn Policies,
    keys: &'l [TrustedKey],
    /// Whether it is the first pass, which tries several times and logs what it finds.
    first: bool,
}

impl Look<'_> {
    /// Each by itself: one that is lost for good keeps no other out.
    fn at<'d>(
        &self,
        digests: impl IntoIterator<Item = &'d Digest>,
        revision: u64,
    ) -> anyhow::Result<Option<NotNow>> {
        let mut found: Option<NotNow> = None;
        for digest in digests {
            let node = self.door.snapshot();
            let Some(version) = node.policies.get(digest) else { continue };
            let active = node.stack.entries.iter().any(|e| e.digest == *digest);
            match self.restored(version, active) {
                Found::Known(known) => self.record(version, &known)?,
                Found::NotNow { why, passing } => {
                    found = Some(match found {
                        None => NotNow { revision, why, passing },
                        // The last of them: whatever may still pass is worth another try soon.
                        Some(before) => NotNow { why, passing: passing || before.passing, ..before },
                    });
                }
                Found::Gone => {
                    tracing::info!(
                        policy = version.label(),
                        "an earlier release had this policy, and it was never asked"
                    );
                    self.door.forget_policy(digest.clone())?;
                }
            }
        }
        Ok(found)
    }

    /// What was found out of a version that was `was`: an upload may have brought another signature since.
    fn record(&self, was: &PolicyVersion, known: &PolicyVersion) -> anyhow::Result<()> {
        let node = self.door.snapshot();
        let Some(newest) = node.policies.get(&was.digest) else { return Ok(()) };
        let mut origin = newest.origin.clone();
        if origin.signature == was.origin.signature {
            origin.signed_by.clone_from(&known.origin.signed_by);
        }
        let recorded =
            PolicyVersion { artifact: known.artifact.clone(), origin, ..PolicyVersion::clone(newest) };
        if recorded != **newest {
            self.door.keep(recorded)?;
        }
        Ok(())
    }

    fn restored(&self, version: &PolicyVersion, active: bool) -> Found {
        let mut tries_left = if self.first { RESTORE_TRIES - 1 } else { 0 };
        loop {
            let error = match self.once(version, active) {
                Ok(found) => return found,
                Err(error) => error,
            };
            let passing = matches!(error, InstallError::Busy | InstallError::Trouble { .. });
            // The machine may be out of something for a moment, and the node must not start without it.
            if active && passing && tries_left > 0 {
                tries_left -= 1;
                std::thread::sleep(RESTORE_AGAIN);
                continue;
            }
            if self.first {
                tracing::error!(policy = version.label(), %error, "a policy of the store cannot be loaded");
            } else {
                tracing::debug!(policy = version.label(), %error, "it still cannot be called");
            }
            // So that it can be made callable later.
            self.policies.know(version);
            if active {
                let why = format!("policy {} cannot be made callable here: {error}", version.label());
                return Found::NotNow { why, passing };
            }
            return Found::Known(Box::new(version.clone()));
        }
    }

    fn once(&self, version: &PolicyVersion, active: bool) -> Result<Found, InstallError> {
        let version = self.signed(version)?;
        if !may_activate(&version, self.keys) {
            if self.first {
                untrusted(&version, active);
            }
            return Ok(Found::Known(Box::new(version)));
        }
        if !active && self.policies.know(&version) {
            return Ok(Found::Known(Box::new(version)));
        }
        let lost = || matches!(self.policies.module(&version.digest), Err(InstallError::Lost { .. }));
        if !active && version.origin.once_shipped && lost() {
            return Ok(Found::Gone);
        }
        Ok(Found::Known(Box::new(self.policies.restore(&version)?)))
    }

    /// The version with the key that signed it, as the keys are now.
    ///
    /// # Errors
    /// If its bytes cannot be read or are gone.
    fn signed(&self, version: &PolicyVersion) -> Result<PolicyVersion, InstallError> {
        let made = version.origin.signature.filter(|_| !self.keys.is_empty());
        let signed_by = match made {
            None => None,
            Some(signature) => {
                let bytes = self.policies.module(&version.digest)?;
                trust::signer(self.keys, &bytes, &signature).map(ToOwned::to_owned)
            }
        };
        Ok(PolicyVersion { origin: Origin { signed_by, ..version.origin.clone() }, ..version.clone() })
    }
}

fn untrusted(version: &PolicyVersion, active: bool) {
    let then = if active { "; the active stack has it, and goes on without it" } else { "" };
    tracing::error!(
        policy = version.label(),
        "a known policy is not called: no trusted key signed it{then} (`berth policy push FILE --signature \
         FILE.sig` brings a signature)"
    );
}

/// What becomes of a version that the store knows.
enum Found {
    /// The version as it is: known, and callable where it is active.
    Known(Box<PolicyVersion>),
    /// It is active, and this machine cannot make it callable now.
    NotNow { why: String, passing: bool },
    /// It came with another release and was never compiled, so its bytes were never kept.
    Gone,
}

/// Tries until the active stack is callable, for a start that went on without; first after `wait`. Ends
/// when another one is active: that was made callable before.
pub(super) async fn go_on_trying(
    door: Door,
    policies: Arc<dyn Policies>,
    keys: Vec<TrustedKey>,
    progress: Arc<Progress>,
    not_now: NotNow,
    mut wait: Duration,
) {
    let NotNow { revision, why, .. } = not_now;
    progress.uncallable(Some(why));
    let mut snapshots = door.watch();
    let keys: Arc<[TrustedKey]> = keys.into();
    loop {
        let another = snapshots.wait_for(|node| node.stack.revision != revision);
        if tokio::time::timeout(wait, another).await.is_ok() {
            tracing::info!("the stack whose policies could not be called is no longer active");
            break;
        }
        match once_more(&door, &policies, &keys, revision).await {
            Ok(None) => {
                tracing::info!("the policies of the active stack can be called again");
                break;
            }
            Ok(Some(NotNow { why, passing, .. })) => {
                if !passing {
                    wait = (wait * 2).min(STACK_AGAIN_MAX);
                }
                progress.uncallable(Some(why));
            }
            Err(error) => {
                tracing::warn!("what came of the active stack's policies is not on the record: {error:#}");
            }
        }
    }
    progress.uncallable(None);
}

async fn once_more(
    door: &Door,
    policies: &Arc<dyn Policies>,
    keys: &Arc<[TrustedKey]>,
    revision: u64,
) -> anyhow::Result<Option<NotNow>> {
    let held = door.hold_files().await;
    let (door, policies, keys) = (door.clone(), Arc::clone(policies), Arc::clone(keys));
    let work = move || {
        let _held = held;
        let node = door.snapshot();
        let look = Look { door: &door, policies: &*policies, keys: &keys, first: false };
        look.at(node.stack.entries.iter().map(|entry| &entry.digest), revision)
    };
    tokio::task::spawn_blocking(work).await.context("looking after the active stack's policies")?
}
