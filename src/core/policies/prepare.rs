//! Makes policies callable before they are called, and unloads compiled code that is not needed.
//!
//! Reading and compiling happen here, on a blocking thread, so that the policy thread does neither for a new
//! stack.

use super::PolicyService;
use crate::jobs::Unprepared;
use crate::priority::at_low_priority;
use berth_kernel::ids::names::Digest;
use berth_kernel::node::command::Command;
use berth_kernel::node::ports::InstallError;
use berth_observe::spans;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::OwnedRwLockReadGuard;

/// Longest wait for another preparation: as long as a large policy takes to compile.
const TURN_MAX: Duration = Duration::from_secs(20);
/// Time limit of preparing all policies of a stack; a compilation that is running then may still take its own 300 s.
const PREPARE_MAX: Duration = Duration::from_secs(60);

/// Guard against the deletion of policies' files and the unloading of their code.
pub struct Prepared {
    _files: OwnedRwLockReadGuard<()>,
}

impl PolicyService {
    /// Makes policies callable. One caller at a time, so that none is compiled twice.
    ///
    /// # Errors
    /// The first policy that cannot be made callable.
    pub async fn prepare(&self, digests: impl IntoIterator<Item = &Digest>) -> Result<Prepared, Unprepared> {
        let failed = |policy: &str, error| Unprepared { policy: policy.to_owned(), error };
        let digests: Vec<&Digest> = digests.into_iter().collect();
        let label = |digest: &&Digest| self.kernel.snapshot().policies.get(*digest).map(|v| v.label());
        let first = digests.first().and_then(label).unwrap_or_default();
        let turn = tokio::time::timeout(TURN_MAX, Arc::clone(&self.preparing).lock_owned()).await;
        let turn = turn.map_err(|_| failed(&first, InstallError::Busy))?;
        let files = self.hold_files().await;
        // Read under the guard: versions of an older snapshot may have been deleted.
        let ledger = self.kernel.snapshot();
        let version = |digest: &Digest| {
            let lost = || failed(digest.short(), InstallError::Lost { digest: digest.clone() });
            ledger.policies.get(digest).map(Arc::clone).ok_or_else(lost)
        };
        let versions = digests.into_iter().map(version).collect::<Result<Vec<_>, _>>()?;
        let (runtime, kernel) = (Arc::clone(&self.runtime), self.kernel.clone());
        // The task holds both guards, since it continues if the caller is dropped.
        let work = move || {
            let _turn = turn;
            let end = Instant::now() + PREPARE_MAX;
            for version in versions {
                let label = version.label();
                if Instant::now() > end {
                    let what = format!(
                        "compiling the policies before this one took over {} s; they stay compiled: try again",
                        PREPARE_MAX.as_secs()
                    );
                    return Err(failed(&label, InstallError::TooCostly { what }));
                }
                let restored = runtime.load(&version).map_err(|error| failed(&label, error))?;
                if restored.artifact != version.artifact {
                    let (digest, artifact) = (restored.digest, restored.artifact);
                    if let Err(error) = kernel.execute_blocking(Command::RecordArtifact { digest, artifact })
                    {
                        tracing::warn!(
                            policy = label,
                            %error,
                            "a policy's compiled artifact could not be recorded; the next start compiles it again"
                        );
                    }
                }
            }
            Ok(files)
        };
        // The task fails only when the daemon stops.
        tokio::task::spawn_blocking(spans::in_current_span(at_low_priority(work)))
            .await
            .unwrap_or_else(|_| Err(failed(&first, InstallError::Stopping)))
    }

    /// Prevents the deletion of policies' files until the guard is dropped.
    pub async fn hold_files(&self) -> Prepared {
        Prepared { _files: Arc::clone(&self.files_lock).read_owned().await }
    }

    /// Unloads the code that neither the stack nor a shadow needs. Does nothing while another caller holds a
    /// guard: that caller unloads when it has finished.
    pub fn unload_unused(&self) {
        let Ok(files) = Arc::clone(&self.files_lock).try_write_owned() else { return };
        let service = self.clone();
        tokio::task::spawn_blocking(move || {
            let _files = files;
            let ledger = service.kernel.snapshot();
            let shadows = service.shadows.all();
            let active = ledger.stack.entries.iter().map(|entry| &entry.digest);
            let needed: BTreeSet<&Digest> =
                active.chain(shadows.iter().map(|shadow| &shadow.candidate.digest)).collect();
            let idle = ledger.policies.keys().filter(|digest| !needed.contains(digest));
            idle.for_each(|digest| service.runtime.unload(digest));
        });
    }
}
