//! Reconcile passes: read the kubelet's two records of device holders and send them to the core.
//!
//! The order makes a pass fresh: `List` first (it makes the kubelet forget ended pods), then a resent
//! device list (it makes the kubelet write its checkpoint), then the new checkpoint. A checkpoint from
//! before the pass may still contain ended pods.

use super::checkpoint::{self, Checkpoint, CheckpointError};
use super::container_ends::ContainerEnds;
use super::device_list::DeviceLists;
use super::disputes::Disputes;
use super::folder::{FileId, FolderState, checkpoint_id, kubelet_id};
use super::pod_resources::PodResources;
use super::settings::{ReconcileTiming, Settings};
use berth_core::keeper::CommandError;
use berth_core::{KernelHandle, Shared, next_beat};
use berth_kernel::evidence::kubelet_view::{KubeletAge, PodList, ReconcileView, SourceError};
use berth_kernel::ids::names::Resource;
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_observe::spans;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::Instrument;

/// After a quick pass the next one waits so many times as long as it took, so that a node where a thousand pods come
/// and go spends a twentieth of one processor on them. `List` and checkpoint grow with the pods, and each grant is a
/// new checkpoint.
const QUICK_PASS_SHARE: u32 = 20;

/// Why a reconcile pass failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReconcileError {
    /// The core did not apply the view.
    #[error("the kubelet's records could not be applied")]
    Apply(#[source] CommandError),
}

/// Runs reconcile passes, one after another.
pub(super) struct Reconciler {
    settings: Arc<Settings>,
    timing: Shared<ReconcileTiming>,
    kernel: KernelHandle,
    device_lists: Arc<DeviceLists>,
    folder_state: watch::Receiver<FolderState>,
    pod_resources: PodResources,
    /// When this process started to watch the kubelet, milliseconds since 1970.
    started_wall_ms: u64,
    /// The newest kubelet.sock and when it was first seen, monotonic milliseconds.
    kubelet_first_seen: Mutex<Option<(FileId, u64)>>,
    /// When the last full pass ended. Locked while one runs.
    last_pass: tokio::sync::Mutex<Option<Instant>>,
    /// Why the kubelet's sources could not be read last time.
    errors: Mutex<SourceErrors>,
}

/// Why each of the kubelet's sources cannot be read, and since when.
#[derive(Debug, Default)]
struct SourceErrors {
    list: Option<SourceError>,
    checkpoint: Option<SourceError>,
    /// The checkpoint can be read but may be out of date.
    stale: Option<Stale>,
}

/// A checkpoint that was not written again. After a single pass it may only be late.
#[derive(Debug)]
struct Stale {
    /// Consecutive full passes without a new checkpoint.
    passes: u32,
    error: SourceError,
}

impl SourceErrors {
    fn first(&self) -> Option<&SourceError> {
        let stale = self.stale.as_ref().filter(|stale| stale.passes > 1).map(|stale| &stale.error);
        self.list.as_ref().or(self.checkpoint.as_ref()).or(stale)
    }
}

impl Reconciler {
    pub(super) fn new(
        settings: Arc<Settings>,
        timing: Shared<ReconcileTiming>,
        kernel: KernelHandle,
        device_lists: Arc<DeviceLists>,
        folder_state: watch::Receiver<FolderState>,
    ) -> Self {
        let list_limit = settings.timeouts.reconcile.list_limit;
        Self {
            pod_resources: PodResources::new(settings.pod_resources_socket(), list_limit),
            started_wall_ms: kernel.now().wall_ms,
            settings,
            timing,
            kernel,
            device_lists,
            folder_state,
            kubelet_first_seen: Mutex::default(),
            last_pass: tokio::sync::Mutex::default(),
            errors: Mutex::default(),
        }
    }

    /// Runs one full pass.
    pub(super) async fn run_pass(&self) -> Result<(), ReconcileError> {
        let mut last_pass = self.last_pass.lock().await;
        let began = Instant::now();
        let span = spans::reconcile_pass();
        let result = self.run_pass_locked(&mut last_pass).instrument(span.clone()).await;
        let outcome = match result {
            Ok(true) => "applied",
            Ok(false) => "partial",
            Err(_) => "failed",
        };
        spans::ended(&span, outcome);
        self.kernel.counters().kubelet.count_pass(outcome, began.elapsed());
        result.map(drop)
    }

    /// Runs one full pass while `last_pass` is locked. True if both sources could be read.
    async fn run_pass_locked(&self, last_pass: &mut Option<Instant>) -> Result<bool, ReconcileError> {
        let mut view = self.new_view();
        let resources = self.resources();
        view.list = self.list_pods(&resources).await;
        let before = checkpoint_id(&self.settings.device_plugins);
        let resent = self.device_lists.resend_one();
        if resent {
            // After a timeout the view is only not fresh.
            let _ = timeout(self.timing.get().checkpoint_wait, self.wait_for_checkpoint_write(before)).await;
        }
        if let Some(read) = self.read_checkpoint(&resources).await {
            view.fresh = Some(read.file) != before;
            view.checkpoint = Some(read.entries);
            self.record_staleness(view.fresh, resent);
        }
        // Before its first grant a kubelet has no checkpoint.
        let is_empty_node = view.checkpoint.is_none() && self.kernel.snapshot().live.is_empty();
        let is_complete = view.list.is_some() && (view.checkpoint.is_some() || is_empty_node);
        let applied = self.observe(view).await;
        *last_pass = Some(Instant::now());
        applied.map(|()| is_complete)
    }

    /// Waits until the checkpoint is another file than `before`. Checks the file itself, since an event
    /// of the watcher may belong to an earlier write.
    async fn wait_for_checkpoint_write(&self, before: Option<FileId>) {
        let mut folder_state = self.folder_state.clone();
        folder_state.mark_unchanged();
        while checkpoint_id(&self.settings.device_plugins) == before {
            if folder_state.changed().await.is_err() {
                return;
            }
        }
    }

    /// Runs a pass before an Allocate call is refused, with a time limit: the pod's admission waits for it.
    pub(super) async fn run_pass_before_refusal(&self) {
        match timeout(self.settings.timeouts.reconcile.refusal_pass_limit, self.run_pass()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(%error, "reconciling allocations with the kubelet before a refusal failed");
            }
            Err(_) => {
                tracing::warn!("reconciling allocations with the kubelet before a refusal took too long");
            }
        }
    }

    /// Applies what both sources contain now, without making the kubelet write its checkpoint. Its view
    /// is never fresh, so it identifies holders but ends no allocation.
    ///
    /// `view` was created before its `List` was fetched, or has none yet.
    async fn quick_pass(&self, mut view: ReconcileView) -> Result<(), ReconcileError> {
        let resources = self.resources();
        if view.list.is_none() {
            view.list = self.list_pods(&resources).await;
        }
        let read = self.read_checkpoint(&resources).await;
        view.checkpoint = read.map(|read| read.entries);
        self.observe(view).await
    }

    /// Adopts the devices that pods hold already, before the first registration. The caller has read the
    /// checkpoint, and decides whether to go on without one.
    pub(super) async fn adopt(&self, checkpoint: Option<Checkpoint>) -> Result<(), ReconcileError> {
        let mut view = self.new_view();
        let resources = self.resources();
        view.list = self.list_pods(&resources).await;
        view.checkpoint = Some(checkpoint.map_or_else(Vec::new, |checkpoint| checkpoint.entries));
        view.adopt = true;
        self.observe(view).await
    }

    /// Polls `List`, reads new checkpoints and runs the passes that are due, until the folder's watcher or the keeper
    /// ends.
    pub(super) async fn run(self: Arc<Self>) {
        let mut folder_state = self.folder_state.clone();
        let mut disputes = Disputes::default();
        let mut ledger = self.kernel.watch();
        let mut container_ends = ContainerEnds::default();
        let mut next_list = Instant::now();
        let mut next_quick = Instant::now();
        let mut is_idle = false;
        loop {
            tokio::select! {
                () = sleep_until(next_list) => {
                    self.poll(&mut disputes).await;
                    is_idle = self.is_idle(&disputes);
                    next_list = self.next_list(is_idle);
                }
                changed = ledger.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    container_ends.update(&ledger.borrow_and_update(), Instant::now());
                    if is_idle {
                        is_idle = self.is_idle(&disputes);
                        if !is_idle {
                            next_list = self.next_list(is_idle);
                        }
                    }
                }
                () = container_ends.due() => {
                    container_ends.count_pass(&self.kernel.snapshot());
                    if let Err(error) = self.run_pass().await {
                        tracing::warn!(%error, "reconciling allocations with the kubelet failed");
                    }
                }
                changed = folder_state.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    self.kubelet_age();
                    let gathered = Instant::now() + self.settings.timeouts.reconcile.gather;
                    sleep_until(next_quick.max(gathered)).await;
                    folder_state.borrow_and_update();
                    let began = Instant::now();
                    self.quick_pass_if_unresolved().await;
                    let pause = (began.elapsed() * QUICK_PASS_SHARE).min(self.list_interval());
                    next_quick = Instant::now() + pause;
                    // Another plugin may have granted devices.
                    next_list = next_list.min(next_beat(self.list_interval()));
                }
            }
        }
    }

    /// Whether `List` can wait for the next full pass: no allocation is live, no GPU is marked, no dispute is open, and
    /// the last `List` did not fail. A grant by Berth changes the ledger, one by another plugin the checkpoint, and
    /// each of these changes leads to a `List`.
    fn is_idle(&self, disputes: &Disputes) -> bool {
        let ledger = self.kernel.snapshot();
        let is_quiet = ledger.live.is_empty() && !has_marked_gpu(&ledger);
        is_quiet && disputes.is_empty() && self.errors.lock().list.is_none()
    }

    fn next_list(&self, is_idle: bool) -> Instant {
        let interval = self.list_interval();
        let full_pass_interval = self.timing.get().full_pass_interval;
        next_beat(if is_idle { full_pass_interval.max(interval) } else { interval })
    }

    async fn poll(&self, disputes: &mut Disputes) {
        let mut view = self.new_view();
        view.list = self.list_pods(&self.resources()).await;
        let ledger = self.kernel.snapshot();
        let interval = self.timing.get().full_pass_interval;
        // Two passes at least this far apart end an allocation.
        let min_gap = Duration::from_millis(ledger.rules.timing.passes_apart_ms);
        disputes.update(&ledger, view.list.as_ref());
        let since = self.last_pass.lock().await.map_or(Duration::MAX, |at| at.elapsed());
        // A full pass at the next `List` would come later than the interval allows.
        let next_list = self.next_list(self.is_idle(disputes)).saturating_duration_since(Instant::now());
        let is_full_pass_due = since.saturating_add(next_list) > interval;
        let result = if is_full_pass_due || disputes.is_pass_due(since, min_gap, interval) {
            disputes.count_pass();
            self.run_pass().await
        } else if view.list.is_some() && has_unresolved_holder(&ledger) {
            self.quick_pass(view).await
        } else {
            Ok(())
        };
        if let Err(error) = result {
            tracing::warn!(%error, "reconciling allocations with the kubelet failed");
        }
    }

    async fn quick_pass_if_unresolved(&self) {
        if has_unresolved_holder(&self.kernel.snapshot())
            && let Err(error) = self.quick_pass(self.new_view()).await
        {
            tracing::warn!(%error, "a new checkpoint could not be applied");
        }
    }

    fn list_interval(&self) -> Duration {
        let rounds = self.timing.get();
        match has_marked_gpu(&self.kernel.snapshot()) {
            true => rounds.list_interval_cordoned,
            false => rounds.list_interval,
        }
    }

    fn new_view(&self) -> ReconcileView {
        ReconcileView {
            began_mono_ms: self.kernel.now().mono_ms,
            kubelet: self.kubelet_age(),
            ..ReconcileView::default()
        }
    }

    /// The age of the kubelet's socket. One older than this process counts from moment 0, any other
    /// from when it was first seen, which cannot be before its creation. The file is read here, since the folder's watcher
    /// may be late: what a new kubelet does not show would count as gone from the old one.
    fn kubelet_age(&self) -> Option<KubeletAge> {
        let id = kubelet_id(&self.settings).ok()?;
        let mut first_seen = self.kubelet_first_seen.lock();
        let since = match *first_seen {
            Some((known, since)) if known == id => since,
            None if id.created_wall_ms() < self.started_wall_ms => 0,
            _ => self.kernel.now().mono_ms,
        };
        *first_seen = Some((id, since));
        Some(KubeletAge { created_wall_ms: id.created_wall_ms(), created_mono_ms: since })
    }

    /// The resources whose holders are reconciled: the listed ones and those of live allocations.
    fn resources(&self) -> BTreeSet<Resource> {
        let ledger = self.kernel.snapshot();
        let mut resources = ledger.resources();
        resources.extend(ledger.live.values().map(|allocation| allocation.resource.clone()));
        resources
    }

    /// Sends a view to the core, with the error of a source that cannot be read.
    async fn observe(&self, mut view: ReconcileView) -> Result<(), ReconcileError> {
        view.source_error = self.errors.lock().first().cloned();
        self.kernel.execute(Command::Reconcile(view)).await.map(drop).map_err(ReconcileError::Apply)
    }

    async fn list_pods(&self, resources: &BTreeSet<Resource>) -> Option<PodList> {
        let result = self.pod_resources.list(resources).await;
        let mut errors = self.errors.lock();
        let counters = &self.kernel.counters().kubelet;
        match result {
            Ok(list) => {
                counters.pod_list_answered();
                if errors.list.take().is_some() {
                    tracing::info!("the kubelet's pod resources API answers again");
                }
                Some(list)
            }
            Err(error) => {
                counters.pod_list_failed(with_causes(&error));
                self.record_error(&mut errors.list, with_causes(&error));
                None
            }
        }
    }

    async fn read_checkpoint(&self, resources: &BTreeSet<Resource>) -> Option<Checkpoint> {
        let folder = self.settings.device_plugins.clone();
        let resources = resources.clone();
        // Reads up to 64 MiB from a disk, so not on a thread that answers the kubelet.
        let read = move || checkpoint::read(&folder, Some(&resources));
        let result = tokio::task::spawn_blocking(read).await.ok()?;
        let mut errors = self.errors.lock();
        match result {
            Ok(checkpoint) => {
                if errors.checkpoint.take().is_some() {
                    tracing::info!("the kubelet's checkpoint can be read again");
                }
                Some(checkpoint)
            }
            // Before its first grant a kubelet has no checkpoint.
            Err(CheckpointError::Missing { .. }) if self.kernel.snapshot().live.is_empty() => None,
            Err(error) => {
                errors.stale = None;
                self.record_error(&mut errors.checkpoint, with_causes(&error));
                None
            }
        }
    }

    /// Records whether a full pass saw a new checkpoint; `resent`: whether a device list was resent for it.
    fn record_staleness(&self, fresh: bool, resent: bool) {
        let mut errors = self.errors.lock();
        if fresh {
            errors.stale = None;
            return;
        }
        let reason = if resent {
            format!(
                "the kubelet did not write its checkpoint again within {} ms of a new device list, so it may be out of date",
                self.timing.get().checkpoint_wait.as_millis()
            )
        } else {
            "the kubelet has no open ListAndWatch stream to berth, so its checkpoint may be out of date"
                .to_owned()
        };
        let (passes, since) = errors
            .stale
            .as_ref()
            .map_or_else(|| (0, self.kernel.now()), |stale| (stale.passes, stale.error.since));
        errors.stale = Some(Stale { passes: passes + 1, error: SourceError { reason, since } });
    }

    /// Stores an error with its start time; logs it when it differs from the last one.
    fn record_error(&self, last: &mut Option<SourceError>, reason: String) {
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
pub(super) fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Whether a GPU is cordoned or drained.
fn has_marked_gpu(ledger: &Ledger) -> bool {
    ledger.gpus.values().any(|gpu| !gpu.marks.is_empty())
}

/// Whether the kubelet's sources may complete the ledger: a live allocation lacks its pod's name or UID,
/// or overlaps another.
fn has_unresolved_holder(ledger: &Ledger) -> bool {
    let mut live = ledger.live.values();
    live.any(|allocation| {
        allocation.overlapped || allocation.holder.pod.is_none() || allocation.holder.pod_uid.is_none()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::ids::time::Now;

    #[test]
    fn a_checkpoint_is_an_error_after_two_passes_without_a_write() {
        let error = SourceError { reason: "old".into(), since: Now { wall_ms: 1, mono_ms: 1 } };
        let errors = |passes| SourceErrors {
            stale: Some(Stale { passes, error: error.clone() }),
            ..SourceErrors::default()
        };
        assert_eq!(errors(1).first(), None);
        assert_eq!(errors(2).first(), Some(&error));
    }
}
