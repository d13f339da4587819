//! Making policies callable before they are asked, and letting go of code that nothing needs.
//!
//! Reading and compiling happen here, in a thread that may wait, so that the policy thread never does
//! either for a stack that is about to be asked.

use super::Door;
use super::recorder::aside;
use crate::spans;
use berth_kernel::command::Command;
use berth_kernel::names::Digest;
use berth_kernel::ports::InstallError;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::OwnedRwLockReadGuard;

/// Longest wait for others who prepare: as long as a large policy takes to compile.
const TURN_MAX: Duration = Duration::from_secs(20);
/// All policies of a stack together; a compilation that began may still take its own 90 s.
const PREPARE_MAX: Duration = Duration::from_secs(60);

/// A policy that cannot be made callable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("policy {policy} cannot be made callable here: {error}")]
pub struct Unprepared {
    /// Its label.
    pub policy: String,
    /// Why.
    pub error: InstallError,
}

impl Unprepared {
    /// Whether it may be another time: the machine is busy, or out of something.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        matches!(self.error, InstallError::Busy | InstallError::Trouble { .. })
    }
}

/// As long as this is held, no version's files are deleted, and no code is let go of.
pub struct Prepared {
    _files: OwnedRwLockReadGuard<()>,
}

impl Door {
    /// Makes policies callable. One caller at a time, so that none is compiled twice.
    ///
    /// # Errors
    /// The first that cannot be.
    pub async fn prepare(&self, digests: impl IntoIterator<Item = &Digest>) -> Result<Prepared, Unprepared> {
        let failed = |policy: &str, error| Unprepared { policy: policy.to_owned(), error };
        let digests: Vec<&Digest> = digests.into_iter().collect();
        let label = |digest: &&Digest| self.snapshot().policies.get(*digest).map(|v| v.label());
        let first = digests.first().and_then(label).unwrap_or_default();
        let turn = tokio::time::timeout(TURN_MAX, Arc::clone(&self.preparing).lock_owned()).await;
        let turn = turn.map_err(|_| failed(&first, InstallError::Busy))?;
        let files = self.hold_files().await;
        // Only now: what was known before may be deleted.
        let ledger = self.snapshot();
        let known = |digest: &Digest| {
            let lost = || failed(digest.short(), InstallError::Lost { digest: digest.clone() });
            ledger.policies.get(digest).map(Arc::clone).ok_or_else(lost)
        };
        let versions = digests.into_iter().map(known).collect::<Result<Vec<_>, _>>()?;
        let (policies, door) = (Arc::clone(&self.policies), self.clone());
        // Turn and files go with the work, which goes on when whoever asked has gone.
        let work = move || {
            let _turn = turn;
            let end = Instant::now() + PREPARE_MAX;
            for version in versions {
                let label = version.label();
                if Instant::now() > end {
                    let what = format!(
                        "compiling the policies before it took over {} s; what is compiled stays so, so try again",
                        PREPARE_MAX.as_secs()
                    );
                    return Err(failed(&label, InstallError::TooCostly { what }));
                }
                let restored = policies.restore(&version).map_err(|error| failed(&label, error))?;
                if restored.artifact != version.artifact {
                    let (digest, artifact) = (restored.digest, restored.artifact);
                    if let Err(error) = door.keeper.ask(Command::Compiled { digest, artifact }) {
                        // It is callable; the next start compiles once more.
                        tracing::warn!(policy = label, %error, "the compiled form is not on the record");
                    }
                }
            }
            Ok(files)
        };
        // It ends early only with the daemon.
        tokio::task::spawn_blocking(spans::carried(aside(work)))
            .await
            .unwrap_or_else(|_| Err(failed(&first, InstallError::Stopping)))
    }

    /// Keeps every version's files where they are until it is dropped.
    pub async fn hold_files(&self) -> Prepared {
        Prepared { _files: Arc::clone(&self.files).read_owned().await }
    }

    /// Lets go of the code that neither the stack nor a shadow needs. While somebody else has prepared
    /// what he is about to ask, nothing: he does it at his own end.
    pub fn rest(&self) {
        let Ok(alone) = Arc::clone(&self.files).try_write_owned() else { return };
        let door = self.clone();
        tokio::task::spawn_blocking(move || {
            let _alone = alone;
            let ledger = door.snapshot();
            let shadows = door.past.shadows();
            let active = ledger.stack.entries.iter().map(|entry| &entry.digest);
            let needed: BTreeSet<&Digest> =
                active.chain(shadows.iter().map(|shadow| &shadow.candidate.digest)).collect();
            let idle = ledger.policies.keys().filter(|digest| !needed.contains(digest));
            idle.for_each(|digest| door.policies.rest(digest));
        });
    }
}
