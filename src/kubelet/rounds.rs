//! Rounds: looks at the kubelet's two accounts of who holds what, handed to the middle.
//!
//! The order makes a round fresh: `List` first (the kubelet forgets the dead), then the resent list
//! (it writes down what is left), then the new file. A file of before the round shows too much.

use super::boards::Boards;
use super::checkpoint::{self, Checkpoint, CheckpointError};
use super::disputes::Disputes;
use super::folder::{FileId, Seen};
use super::pod_resources::PodResources;
use super::settings::Settings;
use berth_core::admission::KernelHandle;
use berth_core::keeper::{Applied, CommandError};
use berth_core::spans;
use berth_kernel::drain::Drain;
use berth_kernel::ledger::Ledger;
use berth_kernel::names::Resource;
use berth_kernel::reconcile::{KubeletAge, PodList, ReconcileView};
use berth_kernel::stuck::SourceError;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::Instrument;

/// A round that could not be taken to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RoundError {
    /// What was seen could not be handed over.
    #[error("the round's findings could not be applied")]
    Ask(#[source] CommandError),
}

/// Takes rounds, one at a time.
pub(super) struct Rounds {
    settings: Arc<Settings>,
    kernel: KernelHandle,
    boards: Arc<Boards>,
    seen: watch::Receiver<Seen>,
    pod_resources: PodResources,
    /// When this process began to look, milliseconds since 1970.
    began_wall_ms: u64,
    /// The newest kubelet.sock and when we noticed it, monotonic milliseconds.
    noticed: Mutex<Option<(FileId, u64)>>,
    /// When the last full round ended. Held while one runs.
    last: tokio::sync::Mutex<Option<Instant>>,
    /// Which kubelet sources could not be read last time.
    errors: Mutex<Errors>,
}

/// Why each kubelet source cannot be read, and since when.
#[derive(Debug, Default)]
struct Errors {
    list: Option<SourceError>,
    checkpoint: Option<SourceError>,
    /// The checkpoint can be read, and may be of long ago.
    stale: Option<Stale>,
}

/// Full rounds in a row in which the checkpoint was not written again. One alone may have come too early.
#[derive(Debug)]
struct Stale {
    rounds: u32,
    error: SourceError,
}

impl Errors {
    fn first(&self) -> Option<&SourceError> {
        let stale = self.stale.as_ref().filter(|stale| stale.rounds > 1).map(|stale| &stale.error);
        self.list.as_ref().or(self.checkpoint.as_ref()).or(stale)
    }
}

impl Rounds {
    pub(super) fn new(
        settings: Arc<Settings>,
        kernel: KernelHandle,
        boards: Arc<Boards>,
        seen: watch::Receiver<Seen>,
    ) -> Self {
        let socket = settings.pod_resources_socket();
        Self {
            pod_resources: PodResources::new(&socket, settings.waits.list_limit),
            began_wall_ms: kernel.now().wall_ms,
            settings,
            kernel,
            boards,
            seen,
            noticed: Mutex::default(),
            last: tokio::sync::Mutex::default(),
            errors: Mutex::default(),
        }
    }

    /// One full round.
    pub(super) async fn round(&self) -> Result<(), RoundError> {
        let mut last = self.last.lock().await;
        let began = Instant::now();
        let span = spans::reconcile_pass();
        let taken = self.take(&mut last).instrument(span.clone()).await;
        let outcome = match taken {
            Ok(true) => "applied",
            Ok(false) => "partial",
            Err(_) => "failed",
        };
        spans::ended(&span, outcome);
        self.kernel.counters().kubelet.count_pass(outcome, began.elapsed());
        taken.map(drop)
    }

    /// The same, while `last` is held. Answers whether both accounts could be seen.
    async fn take(&self, last: &mut Option<Instant>) -> Result<bool, RoundError> {
        let mut view = self.begin();
        let ours = self.ours();
        view.list = self.list(&ours).await;
        let before = checkpoint_now(&self.settings);
        let resent = self.boards.resend_one();
        if resent {
            // Not written in time means only that the view is not fresh.
            let _ = timeout(self.settings.rounds.checkpoint_wait, self.written_after(before)).await;
        }
        if let Some(read) = self.checkpoint(&ours).await {
            view.fresh = Some(read.file) != before;
            view.checkpoint = Some(read.entries);
            self.note_age(view.fresh, resent);
        }
        // Before its first grant a kubelet has no checkpoint.
        let nothing = view.checkpoint.is_none() && self.kernel.snapshot().live.is_empty();
        let whole = view.list.is_some() && (view.checkpoint.is_some() || nothing);
        let applied = self.observe(view).await;
        *last = Some(Instant::now());
        applied.map(|_| whole).map_err(RoundError::Ask)
    }

    /// Waits until the checkpoint is another file than `before`. The watcher wakes us, but the folder
    /// itself is asked: the watcher may only now be telling of a write before that.
    async fn written_after(&self, before: Option<FileId>) {
        let mut seen = self.seen.clone();
        seen.mark_unchanged();
        while checkpoint_now(&self.settings) == before {
            if seen.changed().await.is_err() {
                return;
            }
        }
    }

    /// A round before a refusal, bounded: the pod's admission waits for it.
    pub(super) async fn cure(&self) {
        match timeout(self.settings.waits.cure_limit, self.round()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(%error, "comparing allocations with the kubelet before a refusal failed");
            }
            Err(_) => tracing::warn!("comparing allocations with the kubelet before a refusal took too long"),
        }
    }

    /// What both sources show now, without making the kubelet write. Names holders early; ends
    /// nothing, as it is never fresh.
    ///
    /// `view` was begun before its `List` was fetched, or has none yet.
    async fn glance(&self, mut view: ReconcileView) -> Result<(), RoundError> {
        let ours = self.ours();
        if view.list.is_none() {
            view.list = self.list(&ours).await;
        }
        let read = self.checkpoint(&ours).await;
        view.checkpoint = read.map(|read| read.entries);
        let applied = self.observe(view).await;
        applied.map(drop).map_err(RoundError::Ask)
    }

    /// Takes over what pods hold already, before the first registration. The checkpoint was read
    /// by the caller, who decides what an unreadable one means.
    pub(super) async fn adopt(&self, found: Option<Checkpoint>) -> Result<(), RoundError> {
        let mut view = self.begin();
        let ours = self.ours();
        view.list = self.list(&ours).await;
        view.checkpoint = Some(found.map_or_else(Vec::new, |found| found.entries));
        view.adopt = true;
        let applied = self.observe(view).await;
        applied.map(drop).map_err(RoundError::Ask)
    }

    /// Polls `List`, reads new checkpoints, and takes rounds when they are due, for ever.
    pub(super) async fn keep(self: Arc<Self>) {
        let mut seen = self.seen.clone();
        let mut disputes = Disputes::default();
        let mut next_list = Instant::now();
        loop {
            tokio::select! {
                () = sleep_until(next_list) => {
                    next_list = Instant::now() + self.list_interval();
                    self.poll(&mut disputes).await;
                }
                changed = seen.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.age();
                    tokio::time::sleep(self.settings.waits.gather).await;
                    seen.borrow_and_update();
                    self.read_if_curious().await;
                }
            }
        }
    }

    async fn poll(&self, disputes: &mut Disputes) {
        let mut view = self.begin();
        view.list = self.list(&self.ours()).await;
        let ledger = self.kernel.snapshot();
        let every = self.settings.rounds.round_every;
        // Two rounds so far apart end an allocation.
        let apart = Duration::from_millis(self.kernel.rules().timing.rounds_apart_ms);
        disputes.look(&ledger, view.list.as_ref());
        let since = self.last.lock().await.map_or(Duration::MAX, |at| at.elapsed());
        let done = if since >= every || disputes.due(since, apart, every) {
            disputes.asked();
            self.round().await
        } else if view.list.is_some() && curious(&ledger) {
            self.glance(view).await
        } else {
            Ok(())
        };
        if let Err(error) = done {
            tracing::warn!(%error, "comparing allocations with the kubelet failed");
        }
    }

    async fn read_if_curious(&self) {
        if curious(&self.kernel.snapshot())
            && let Err(error) = self.glance(self.begin()).await
        {
            tracing::warn!(%error, "a new checkpoint could not be handed over");
        }
    }

    fn list_interval(&self) -> Duration {
        let rounds = &self.settings.rounds;
        let draining = self.kernel.snapshot().gpus.values().any(|gpu| gpu.drain != Drain::Active);
        match draining {
            true => rounds.list_every_cordoned,
            false => rounds.list_every,
        }
    }

    fn begin(&self) -> ReconcileView {
        ReconcileView {
            began_mono_ms: self.kernel.now().mono_ms,
            kubelet: self.age(),
            ..ReconcileView::default()
        }
    }

    /// How old the kubelet's socket is. One that is older than this process is of moment 0; any
    /// other counts from when we noticed it, which can only be later than it was made.
    fn age(&self) -> Option<KubeletAge> {
        let id = self.seen.borrow().kubelet.ok()?;
        let mut noticed = self.noticed.lock();
        let since = match *noticed {
            Some((known, since)) if known == id => since,
            None if id.created_wall_ms() < self.began_wall_ms => 0,
            _ => self.kernel.now().mono_ms,
        };
        *noticed = Some((id, since));
        Some(KubeletAge { created_wall_ms: id.created_wall_ms(), created_mono_ms: since })
    }

    /// The resources whose holders concern us: listed ones, and ones that live allocations name.
    pub(super) fn ours(&self) -> BTreeSet<Resource> {
        let ledger = self.kernel.snapshot();
        let mut ours = ledger.resources();
        ours.extend(ledger.live.values().map(|a| a.resource.clone()));
        ours
    }

    /// Hands a view in, with what keeps an account from being had.
    async fn observe(&self, mut view: ReconcileView) -> Result<Applied, CommandError> {
        view.source_error = self.errors().first().cloned();
        self.kernel.observe(view).await
    }

    async fn list(&self, ours: &BTreeSet<Resource>) -> Option<PodList> {
        let answer = self.pod_resources.list(ours).await;
        let mut errors = self.errors();
        match answer {
            Ok(list) => {
                if errors.list.take().is_some() {
                    tracing::info!("the kubelet's pod resources API answers again");
                }
                Some(list)
            }
            Err(error) => {
                self.note(&mut errors.list, chain(&error));
                None
            }
        }
    }

    async fn checkpoint(&self, ours: &BTreeSet<Resource>) -> Option<Checkpoint> {
        let folder = self.settings.device_plugins();
        let ours = ours.clone();
        // Up to 64 MiB from a disk: not on a thread that answers the kubelet.
        let read = move || checkpoint::read(&folder, Some(&ours));
        let answer = tokio::task::spawn_blocking(read).await.ok()?;
        let mut errors = self.errors();
        match answer {
            Ok(read) => {
                if errors.checkpoint.take().is_some() {
                    tracing::info!("the kubelet's checkpoint can be read again");
                }
                Some(read)
            }
            // Before its first grant a kubelet has none, and nothing is held that it could show.
            Err(CheckpointError::Missing { .. }) if self.kernel.snapshot().live.is_empty() => None,
            Err(error) => {
                errors.stale = None;
                self.note(&mut errors.checkpoint, chain(&error));
                None
            }
        }
    }

    /// Notes whether a full round saw the checkpoint written again, after a device list was resent for it or not.
    fn note_age(&self, fresh: bool, resent: bool) {
        let mut errors = self.errors();
        if fresh {
            errors.stale = None;
            return;
        }
        let reason = if resent {
            format!(
                "the kubelet did not write its checkpoint again within {} ms of a new device list, so it may be out of date",
                self.settings.rounds.checkpoint_wait.as_millis()
            )
        } else {
            "the kubelet watches no device list of berth's, so its checkpoint may be out of date".to_owned()
        };
        let (rounds, since) = errors
            .stale
            .as_ref()
            .map_or_else(|| (0, self.kernel.now()), |stale| (stale.rounds, stale.error.since));
        errors.stale = Some(Stale { rounds: rounds + 1, error: SourceError { reason, since } });
    }

    fn errors(&self) -> MutexGuard<'_, Errors> {
        self.errors.lock()
    }

    /// Stores an error with its start time; logs it when it differs from the last one.
    fn note(&self, last: &mut Option<SourceError>, reason: String) {
        let since = last.as_ref().map_or_else(|| self.kernel.now(), |last| last.since);
        if last.as_ref().is_none_or(|last| last.reason != reason) {
            tracing::warn!(
                error = reason,
                "the GPUs of finished pods stay allocated until this source can be read"
            );
        }
        *last = Some(SourceError { reason, since });
    }
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

fn checkpoint_now(settings: &Settings) -> Option<FileId> {
    let path = settings.device_plugins().join(checkpoint::CHECKPOINT_FILE);
    let metadata = std::fs::symlink_metadata(path).ok()?;
    Some(FileId::of(&metadata))
}

/// Whether the sources could tell the ledger something: somebody's name is missing, or an overlap
/// is open.
fn curious(ledger: &Ledger) -> bool {
    let mut live = ledger.live.values();
    live.any(|a| a.overlapped || a.holder.pod.is_none() || a.holder.pod_uid.is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::time::Now;

    #[test]
    fn a_checkpoint_that_came_late_once_is_no_error_and_one_that_stays_old_is() {
        let error = SourceError { reason: "old".into(), since: Now { wall_ms: 1, mono_ms: 1 } };
        let errors =
            |rounds| Errors { stale: Some(Stale { rounds, error: error.clone() }), ..Errors::default() };
        assert_eq!(errors(1).first(), None);
        assert_eq!(errors(2).first(), Some(&error));
    }
}
