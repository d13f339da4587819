//! Loads policies at the start: checks their signatures and makes them callable.

use super::Progress;
use anyhow::Context;
use berth_core::PolicyService;
use berth_core::policies::signatures;
use berth_kernel::names::Digest;
use berth_kernel::policy::PolicyVersion;
use berth_kernel::ports::InstallError;
use berth_kernel::trust::{Origin, TrustedKey, may_activate};
use std::sync::Arc;
use std::time::Duration;

/// Most attempts of a start to make a policy of the active stack callable.
const RESTORE_ATTEMPTS_MAX: u32 = 3;
/// Interval of these attempts.
const RESTORE_INTERVAL: Duration = Duration::from_secs(2);
/// Longest interval of attempts after the start. A policy that always fails after a minute of processor time then takes at
/// most a tenth of a processor.
const RETRY_INTERVAL_MAX: Duration = Duration::from_secs(600);

/// Registers the policies of this release and of the store, and makes those of the active stack callable. The others are
/// compiled when a request names them, since the kubelet waits for the start. Signatures are checked again, since the trusted
/// keys may have changed: a version without a trusted signature is kept, but not callable. Returns why the active stack is
/// not callable, if it is not.
///
/// # Errors
/// If the versions cannot be recorded.
pub(super) async fn load(
    policies: PolicyService,
    keys: Vec<TrustedKey>,
) -> anyhow::Result<Option<NotCallable>> {
    // The API already runs, and a version that it deletes meanwhile must not be recorded again.
    let held = policies.hold_files().await;
    let work = move || {
        let _held = held;
        load_all(&PolicyLoader { policies: &policies, keys: &keys, is_first_pass: true })
    };
    tokio::task::spawn_blocking(work).await.context("loading the policies")?
}

fn load_all(loader: &PolicyLoader<'_>) -> anyhow::Result<Option<NotCallable>> {
    let kernel = loader.policies.kernel();
    let shipped = loader.policies.files().shipped(kernel.now());
    let newest = kernel.snapshot();
    for version in &shipped {
        match newest.policies.get(&version.digest) {
            None => drop(kernel.record_policy(version.clone())?),
            // It was uploaded, or an earlier release without it recorded it.
            Some(known) if !known.shipped => {
                kernel.record_policy(PolicyVersion { shipped: true, ..PolicyVersion::clone(known) })?;
            }
            Some(_) => {}
        }
    }
    // Policies of other releases become like uploaded ones: a name selects the version of this release.
    let now_shipped = |digest: &Digest| shipped.iter().any(|v| v.digest == *digest);
    for old in newest.policies.values().filter(|k| k.shipped && !now_shipped(&k.digest)) {
        let origin = Origin { once_shipped: true, ..old.origin.clone() };
        kernel.record_policy(PolicyVersion { shipped: false, origin, ..PolicyVersion::clone(old) })?;
    }
    let snapshot = kernel.snapshot();
    loader.load(snapshot.policies.keys(), snapshot.stack.revision)
}

/// Why the active stack is not callable.
pub(super) struct NotCallable {
    /// The revision of that stack.
    revision: u64,
    reason: String,
    /// Whether the cause may be temporary.
    is_temporary: bool,
}

/// One pass over the policies of the store.
struct PolicyLoader<'l> {
    policies: &'l PolicyService,
    keys: &'l [TrustedKey],
    /// The first pass retries temporary failures and logs its findings.
    is_first_pass: bool,
}

impl PolicyLoader<'_> {
    /// Loads these versions, independently of each other.
    fn load<'d>(
        &self,
        digests: impl IntoIterator<Item = &'d Digest>,
        revision: u64,
    ) -> anyhow::Result<Option<NotCallable>> {
        let mut not_callable: Option<NotCallable> = None;
        for digest in digests {
            let node = self.policies.kernel().snapshot();
            let Some(version) = node.policies.get(digest) else { continue };
            let active = node.stack.entries.iter().any(|e| e.digest == *digest);
            match self.restore(version, active) {
                Restored::Known(known) => self.record(version, &known)?,
                Restored::NotCallable { reason, is_temporary } => {
                    not_callable = Some(match not_callable {
                        None => NotCallable { revision, reason, is_temporary },
                        // The last reason is kept. One temporary failure is enough for an early retry.
                        Some(before) => NotCallable {
                            reason,
                            is_temporary: is_temporary || before.is_temporary,
                            ..before
                        },
                    });
                }
                Restored::Gone => {
                    tracing::info!(
                        policy = version.label(),
                        "removed a policy of an earlier release that was never called"
                    );
                    self.policies.kernel().forget_policy(digest.clone())?;
                }
            }
        }
        Ok(not_callable)
    }

    /// Records the result of loading `old`. An upload may have changed its signature meanwhile.
    fn record(&self, old: &PolicyVersion, loaded: &PolicyVersion) -> anyhow::Result<()> {
        let node = self.policies.kernel().snapshot();
        let Some(newest) = node.policies.get(&old.digest) else { return Ok(()) };
        let mut origin = newest.origin.clone();
        if origin.signature == old.origin.signature {
            origin.signed_by.clone_from(&loaded.origin.signed_by);
        }
        let recorded =
            PolicyVersion { artifact: loaded.artifact.clone(), origin, ..PolicyVersion::clone(newest) };
        if recorded != **newest {
            self.policies.kernel().record_policy(recorded)?;
        }
        Ok(())
    }

    fn restore(&self, version: &PolicyVersion, active: bool) -> Restored {
        let mut attempts_left = if self.is_first_pass { RESTORE_ATTEMPTS_MAX - 1 } else { 0 };
        loop {
            let error = match self.try_restore(version, active) {
                Ok(restored) => return restored,
                Err(error) => error,
            };
            let is_temporary = matches!(error, InstallError::Busy | InstallError::Failed { .. });
            // Retried, since the node should not start without its stack because of a temporary failure.
            if active && is_temporary && attempts_left > 0 {
                attempts_left -= 1;
                std::thread::sleep(RESTORE_INTERVAL);
                continue;
            }
            if self.is_first_pass {
                tracing::error!(policy = version.label(), %error, "a policy of the store cannot be loaded");
            } else {
                tracing::debug!(policy = version.label(), %error, "the policy is still not callable");
            }
            // Registered, so that it can be made callable later.
            self.policies.files().register(version);
            if active {
                let reason = format!("policy {} cannot be made callable: {error}", version.label());
                return Restored::NotCallable { reason, is_temporary };
            }
            return Restored::Known(Box::new(version.clone()));
        }
    }

    fn try_restore(&self, version: &PolicyVersion, active: bool) -> Result<Restored, InstallError> {
        let version = self.with_signer(version)?;
        if !may_activate(&version, self.keys) {
            if self.is_first_pass {
                log_untrusted(&version, active);
            }
            return Ok(Restored::Known(Box::new(version)));
        }
        if !active && self.policies.files().register(&version) {
            return Ok(Restored::Known(Box::new(version)));
        }
        let is_lost =
            || matches!(self.policies.files().read_all(&version.digest), Err(InstallError::Lost { .. }));
        if !active && version.origin.once_shipped && is_lost() {
            return Ok(Restored::Gone);
        }
        Ok(Restored::Known(Box::new(self.policies.runtime().load(&version)?)))
    }

    /// The version with the name of the trusted key that signed it.
    ///
    /// # Errors
    /// If its module is missing or cannot be read.
    fn with_signer(&self, version: &PolicyVersion) -> Result<PolicyVersion, InstallError> {
        let signature = version.origin.signature.filter(|_| !self.keys.is_empty());
        let signed_by = match signature {
            None => None,
            Some(signature) => {
                let bytes = self.policies.files().read_all(&version.digest)?;
                signatures::signer(self.keys, &bytes, &signature).map(ToOwned::to_owned)
            }
        };
        Ok(PolicyVersion { origin: Origin { signed_by, ..version.origin.clone() }, ..version.clone() })
    }
}

fn log_untrusted(version: &PolicyVersion, active: bool) {
    let effect = if active { "; the active stack runs without it" } else { "" };
    tracing::error!(
        policy = version.label(),
        "a known policy is not called: no trusted key signed it{effect} (`berth policy push FILE --signature \
         FILE.sig` adds a signature)"
    );
}

/// The result of loading a version of the store.
enum Restored {
    /// The version is registered, and callable if it is active.
    Known(Box<PolicyVersion>),
    /// The version is active, but cannot be made callable.
    NotCallable { reason: String, is_temporary: bool },
    /// The version is of another release and was never compiled, so that its module was never stored.
    Gone,
}

/// Retries until the active stack is callable, first after `wait`. Ends when another stack is active, since activation made
/// that one callable.
pub(super) async fn retry_until_callable(
    policies: PolicyService,
    keys: Vec<TrustedKey>,
    progress: Arc<Progress>,
    cause: NotCallable,
    mut wait: Duration,
) {
    let NotCallable { revision, reason, .. } = cause;
    progress.set_uncallable(Some(reason));
    let mut snapshots = policies.kernel().watch();
    let keys: Arc<[TrustedKey]> = keys.into();
    loop {
        let another = snapshots.wait_for(|node| node.stack.revision != revision);
        if tokio::time::timeout(wait, another).await.is_ok() {
            tracing::info!("the stack whose policies could not be called is no longer active");
            break;
        }
        match retry(&policies, &keys, revision).await {
            Ok(None) => {
                tracing::info!("the policies of the active stack can be called again");
                break;
            }
            Ok(Some(NotCallable { reason, is_temporary, .. })) => {
                if !is_temporary {
                    wait = (wait * 2).min(RETRY_INTERVAL_MAX);
                }
                progress.set_uncallable(Some(reason));
            }
            Err(error) => {
                tracing::warn!("the state of the active stack's policies could not be recorded: {error:#}");
            }
        }
    }
    progress.set_uncallable(None);
}

async fn retry(
    policies: &PolicyService,
    keys: &Arc<[TrustedKey]>,
    revision: u64,
) -> anyhow::Result<Option<NotCallable>> {
    let held = policies.hold_files().await;
    let (policies, keys) = (policies.clone(), Arc::clone(keys));
    let work = move || {
        let _held = held;
        let node = policies.kernel().snapshot();
        let loader = PolicyLoader { policies: &policies, keys: &keys, is_first_pass: false };
        loader.load(node.stack.entries.iter().map(|entry| &entry.digest), revision)
    };
    tokio::task::spawn_blocking(work).await.context("loading the active stack's policies")?
}
