//! Loads policies at the start: checks their signatures, and makes them callable.

use super::{PolicyService, signatures};
use crate::keeper::CommandError;
use berth_kernel::ids::names::Digest;
use berth_kernel::node::command::Command;
use berth_kernel::node::ports::InstallError;
use berth_kernel::policy::version::{Origin, PolicyVersion, TrustedKey};
use berth_kernel::policy::version_records::may_activate;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinError;

/// Most attempts of a start to make a policy of the active stack callable.
const RESTORE_ATTEMPTS_MAX: u32 = 3;
/// Interval of these attempts.
const RESTORE_INTERVAL: Duration = Duration::from_secs(2);
/// Longest interval of attempts after the start. A policy that always fails after a minute of processor time then takes
/// at most a tenth of a processor.
const RETRY_INTERVAL_MAX: Duration = Duration::from_secs(600);

/// Makes the policies of this release and of the store known and callable.
#[derive(Clone)]
pub struct PolicyLoader {
    policies: PolicyService,
    keys: Arc<[TrustedKey]>,
    /// The first pass retries temporary failures and logs its findings.
    is_first_pass: bool,
}

/// Error of loading the policies.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The versions cannot be recorded.
    #[error(transparent)]
    NotRecorded(#[from] CommandError),
    /// The thread that loads them failed.
    #[error("the thread that loads the policies panicked")]
    Thread(#[from] JoinError),
}

/// Why the active stack is not callable.
pub struct NotCallable {
    /// The revision of that stack.
    revision: u64,
    reason: String,
    /// Whether the cause may be temporary.
    is_temporary: bool,
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

impl PolicyLoader {
    /// A loader; `keys` are the keys whose signatures are trusted.
    #[must_use]
    pub fn new(policies: PolicyService, keys: Vec<TrustedKey>) -> Self {
        Self { policies, keys: keys.into(), is_first_pass: true }
    }

    /// Registers the policies of this release and of the store, and makes those of the active stack callable. The
    /// others are compiled when a request names them, since the kubelet waits for the start. Signatures are checked
    /// again, since the trusted keys may have changed: a version without a trusted signature is kept, but not callable.
    /// Returns why the active stack is not callable, if it is not.
    ///
    /// # Errors
    /// If the versions cannot be recorded.
    pub async fn load_all(&self) -> Result<Option<NotCallable>, LoadError> {
        let pass = |loader: &Self| {
            loader.record_shipped()?;
            let node = loader.policies.kernel().snapshot();
            loader.load(node.policies.keys(), node.stack.revision)
        };
        self.run(pass).await?
    }

    /// Reports at once why the active stack is not callable. The future retries until it is callable, first after
    /// `wait`, and after each upload, which may bring lost files back. It ends when another stack is active, since
    /// activation made that one callable. `report` gets each reason, and `None` at the end.
    pub fn retry_until_callable(
        self,
        report: impl Fn(Option<String>) + Send + 'static,
        cause: NotCallable,
        wait: Duration,
    ) -> impl Future<Output = ()> {
        let NotCallable { revision, reason, .. } = cause;
        // The cause is reported before the daemon is up, so that readiness never hides that policies are not callable.
        report(Some(reason));
        self.retry(report, revision, wait)
    }

    async fn retry(mut self, report: impl Fn(Option<String>), revision: u64, mut wait: Duration) {
        self.is_first_pass = false;
        let mut snapshots = self.policies.kernel().watch();
        let mut uploads = self.policies.watch_uploads();
        loop {
            tokio::select! {
                _ = snapshots.wait_for(|node| node.stack.revision != revision) => {
                    tracing::info!("the stack whose policies could not be called is no longer active");
                    break;
                }
                _ = uploads.changed() => {}
                () = tokio::time::sleep(wait) => {}
            }
            let pass = move |loader: &Self| {
                let node = loader.policies.kernel().snapshot();
                loader.load(node.stack.entries.iter().map(|entry| &entry.digest), revision)
            };
            match self.run(pass).await.map_err(LoadError::from).flatten() {
                Ok(None) => {
                    tracing::info!("all policies of the active stack can be called now");
                    break;
                }
                Ok(Some(NotCallable { reason, is_temporary, .. })) => {
                    if !is_temporary {
                        wait = (wait * 2).min(RETRY_INTERVAL_MAX);
                    }
                    report(Some(reason));
                }
                Err(error) => {
                    tracing::warn!("cannot record which policies of the active stack can be called: {error}");
                }
            }
        }
        report(None);
    }

    /// Runs a pass on a thread that may block. The API already runs, and a version that it deletes meanwhile must not
    /// be recorded again.
    async fn run<T: Send + 'static>(
        &self,
        pass: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> Result<T, JoinError> {
        let held = self.policies.hold_files().await;
        let loader = self.clone();
        let work = move || {
            let _held = held;
            pass(&loader)
        };
        tokio::task::spawn_blocking(work).await
    }

    /// Records which versions this release ships.
    fn record_shipped(&self) -> Result<(), LoadError> {
        let kernel = self.policies.kernel();
        let shipped = self.policies.files().shipped(kernel.now());
        kernel.execute_blocking(Command::RecordShipped(shipped))?;
        Ok(())
    }

    /// Loads these versions, independently of each other.
    fn load<'d>(
        &self,
        digests: impl IntoIterator<Item = &'d Digest>,
        revision: u64,
    ) -> Result<Option<NotCallable>, LoadError> {
        let mut not_callable: Option<NotCallable> = None;
        for digest in digests {
            let node = self.policies.kernel().snapshot();
            let Some(version) = node.policies.get(digest) else { continue };
            let active = node.stack.has(digest);
            match self.restore(version, active) {
                Restored::Known(known) if *known == **version => {}
                Restored::Known(known) => {
                    self.policies.kernel().execute_blocking(Command::RecordLoaded(*known))?;
                }
                Restored::NotCallable { reason, is_temporary } => {
                    // The last reason is kept. One temporary failure is enough for an early retry.
                    let is_temporary = is_temporary || not_callable.is_some_and(|before| before.is_temporary);
                    not_callable = Some(NotCallable { revision, reason, is_temporary });
                }
                Restored::Gone => {
                    tracing::info!(
                        policy = version.label(),
                        "removed a policy of an earlier release that was never called"
                    );
                    let digest = digest.clone();
                    self.policies.kernel().execute_blocking(Command::DeletePolicy { digest })?;
                }
            }
        }
        Ok(not_callable)
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
        if !may_activate(&version, &self.keys) {
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
        let mut signed_by = None;
        if let Some(signature) = version.origin.signature.filter(|_| !self.keys.is_empty()) {
            let bytes = self.policies.files().read_all(&version.digest)?;
            signed_by = signatures::signer(&self.keys, &bytes, &signature).map(ToOwned::to_owned);
        }
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
