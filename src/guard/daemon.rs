//! The daemon's side of the connection: it tells the keeper what the guard shows, and the guard whether pods are being
//! deleted.

use crate::link::{Link, is_of_trusted_user};
use crate::published::Published;
use berth_core::keeper::CommandError;
use berth_core::{GuardDriverState, GuardDriverUse, KernelHandle, next_beat};
use berth_kernel::evidence::limits::{LimitReading, LimitState, LimitSupport, MemoryLimit};
use berth_kernel::evidence::pods::{BypassKind, Pod, PodsView, Stage};
use berth_kernel::evidence::runtime::{self, BypassOutcome, RuntimeContainer, RuntimeView, Tie};
use berth_kernel::grants::bypass::BypassAction;
use berth_kernel::ids::names::{AllocationId, GpuId};
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::sharing::part_state::PartState;
use berth_proto::guard::{
    self, BypassRules, Container, ContainerBypass, Daemon, KnownPods, PartDeviceNode, PodDeletions, Status,
    Update,
};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// Interval of attempts to connect: a node may have no guard.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// The first attempt after a connection was lost that had lasted: a guard that restarts listens again at once.
const FIRST_RETRY: Duration = Duration::from_millis(200);
/// A connection that lasted this long had no problem of its own.
const LASTED: Duration = Duration::from_secs(10);
/// The longest wait for a guard that is asked once.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// The wait before a view is sent again to a keeper that was busy.
const BUSY_RETRY: Duration = Duration::from_millis(200);

/// The state of the guard, as the daemon knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuardStatus {
    /// Whether it is connected to the daemon and to the container runtime, and has shown all containers.
    pub is_connected: bool,
    /// Its version; empty before the first connection.
    pub version: String,
    /// The container runtime and its version, such as `containerd 2.2.9`; empty before the first connection.
    pub runtime: String,
    /// Why it is not connected.
    pub why: String,
}

/// Reads the status and the view of the guard at this socket.
///
/// # Errors
/// The text says what to do.
pub async fn query(socket: &Path) -> Result<(GuardStatus, RuntimeView), String> {
    let answer = async {
        let mut link = connect(socket).await?;
        link.receive::<Update>().await?.ok_or_else(|| io::Error::from(ErrorKind::UnexpectedEof))
    };
    let answer =
        timeout(ANSWER_MAX, answer).await.map_err(|_| io::Error::from(ErrorKind::TimedOut)).flatten();
    let update = answer.map_err(|error| not_connected(socket, &error))?;
    let mut shown = Published::default();
    shown.apply(update);
    Ok((status_of(&shown), view_of(&shown)))
}

/// Follows the guard at this socket, until the keeper ends. `has_pods_source`: whether a source that shows deletions is
/// configured, which may not have answered yet.
pub async fn follow(
    socket: PathBuf,
    kernel: KernelHandle,
    has_pods_source: bool,
    driver: GuardDriverUse,
    status: watch::Sender<GuardStatus>,
) {
    let mut shown = Published::default();
    loop {
        let began = Instant::now();
        let ended = match connect(&socket).await {
            Ok(link) => {
                let mut following = Following {
                    kernel: &kernel,
                    shown: &mut shown,
                    driver: &driver,
                    status: &status,
                    pending: None,
                };
                following.exchange(link, Deletions::new(has_pods_source)).await
            }
            Err(error) => Err(error),
        };
        let why = match ended {
            Ok(End::Keeper) => return,
            Ok(End::Guard) => {
                format!(
                    "the guard has closed its socket {}; the daemon connects again once the guard runs",
                    socket.display()
                )
            }
            Err(error) => not_connected(&socket, &error),
        };
        if lose(&kernel, &status, why).await.is_err() {
            return;
        }
        if began.elapsed() >= LASTED {
            sleep(FIRST_RETRY).await;
        } else {
            sleep_until(next_beat(RETRY_INTERVAL)).await;
        }
    }
}

/// Who ended a connection.
enum End {
    Guard,
    Keeper,
}

async fn connect(socket: &Path) -> io::Result<Link> {
    let socket = UnixStream::connect(socket).await?;
    // Another user's process could name any holder.
    if !is_of_trusted_user(&socket) {
        let text = "the process that listens there runs neither as root nor as the daemon's user";
        return Err(io::Error::new(ErrorKind::PermissionDenied, text));
    }
    Ok(Link::new(socket))
}

fn not_connected(socket: &Path, error: &io::Error) -> String {
    let path = socket.display();
    match error.kind() {
        ErrorKind::NotFound => {
            format!("{path} does not exist: run `berth guard` on this node, which creates it")
        }
        ErrorKind::ConnectionRefused => {
            format!(
                "no process listens on {path}: the guard was killed, or is just starting. Its log has the cause; start it \
                 again with `systemctl restart berth-guard`, or delete its pod"
            )
        }
        ErrorKind::PermissionDenied => {
            format!(
                "{path} cannot be used: {error}; run `berth guard` and `berth serve` as the same user, or as root"
            )
        }
        _ => format!("the connection to the guard at {path} failed: {error}"),
    }
}

/// A connection that is open.
struct Following<'a> {
    kernel: &'a KernelHandle,
    shown: &'a mut Published,
    driver: &'a GuardDriverUse,
    status: &'a watch::Sender<GuardStatus>,
    /// A view that the keeper has not taken, and when it is sent again.
    pending: Option<(RuntimeView, Instant)>,
}

impl Following<'_> {
    /// Passes on what the guard sends, and tells it of deletions, until one side ends.
    async fn exchange(&mut self, mut link: Link, mut deletions: Deletions) -> io::Result<End> {
        let (mut ledger, mut released) = (self.kernel.watch(), self.driver.watch_release());
        let mut sent = None;
        loop {
            let is_driver_released = *released.borrow_and_update();
            let (known, bypass) = {
                let ledger = ledger.borrow_and_update();
                (deletions.of(&ledger), bypass_rules(&ledger))
            };
            let message = Daemon {
                // Until the pods are known, the guard goes on with what it was sent before.
                bypass: known.map(|_| bypass),
                deletions: known.unwrap_or(PodDeletions::Some).into(),
                is_driver_released,
                are_deletions_unknown_yet: known.is_none(),
            };
            if sent.as_ref() != Some(&message) {
                link.send(&message).await?;
                sent = Some(message);
            }
            let retry_at = self.pending.as_ref().map(|(_, at)| *at);
            let retry = async {
                match retry_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                received = link.receive::<Update>() => {
                    let Some(update) = received? else { return Ok(End::Guard) };
                    self.shown.apply(update);
                    let from = &self.shown.status;
                    self.driver.set_state(GuardDriverState {
                        has_driver_open: from.has_driver_open,
                        carried_out: from.is_driver_released,
                    });
                    report(self.status, self.shown);
                    self.pending = Some((view_of(self.shown), Instant::now()));
                }
                () = retry => {
                    if self.send_pending().await.is_err() {
                        return Ok(End::Keeper);
                    }
                }
                changed = ledger.changed() => {
                    if changed.is_err() {
                        return Ok(End::Keeper);
                    }
                }
                _ = released.changed() => {}
            }
        }
    }

    /// Sends the view that the keeper has not taken yet. A full inbox or a slow disk is tried again.
    async fn send_pending(&mut self) -> Result<(), Stopping> {
        let Some((view, _)) = self.pending.take() else { return Ok(()) };
        match self.kernel.execute(Command::SeeContainers(view.clone())).await {
            Ok(_) => Ok(()),
            Err(CommandError::Stopping) => Err(Stopping),
            Err(error) => {
                tracing::debug!(%error, "what the container runtime shows could not be recorded");
                self.pending = Some((view, Instant::now() + BUSY_RETRY));
                Ok(())
            }
        }
    }
}

fn status_of(shown: &Published) -> GuardStatus {
    let from = &shown.status;
    GuardStatus {
        is_connected: from.is_connected,
        version: from.version.clone(),
        runtime: [from.runtime.as_str(), from.runtime_version.as_str()].join(" ").trim().to_owned(),
        why: from.why.clone(),
    }
}

fn report(status: &watch::Sender<GuardStatus>, shown: &Published) {
    let now = status_of(shown);
    let was_connected = status.borrow().is_connected;
    if now.is_connected && !was_connected {
        tracing::info!(
            runtime = now.runtime,
            guard = now.version,
            "the guard shows the containers of this node"
        );
    }
    status.send_if_modified(|known| {
        let is_new = *known != now;
        *known = now;
        is_new
    });
}

/// Records that the guard is away: what it has shown may have ended since.
async fn lose(
    kernel: &KernelHandle,
    status: &watch::Sender<GuardStatus>,
    why: String,
) -> Result<(), Stopping> {
    status.send_if_modified(|known| {
        let is_new = known.is_connected || known.why != why;
        known.is_connected = false;
        known.why.clone_from(&why);
        is_new
    });
    let mut is_logged = false;
    // No holder is new in it, so that it needs no disk.
    while let Some(view) = kernel.snapshot().runtime.as_ref().filter(|view| view.is_whole) {
        if !std::mem::replace(&mut is_logged, true) {
            tracing::warn!(
                "the guard is not connected: {why}. Until it is, holders of allocations and their ends come from the other \
                 sources alone, the kubelet and the API server"
            );
        }
        let away = RuntimeView { is_whole: false, ..RuntimeView::clone(view) };
        match kernel.execute(Command::SeeContainers(away)).await {
            Err(CommandError::Stopping) => return Err(Stopping),
            Err(_) => sleep(BUSY_RETRY).await,
            Ok(_) => {}
        }
    }
    Ok(())
}

/// The keeper ends.
struct Stopping;

/// The kernel's view of what the guard shows.
fn view_of(shown: &Published) -> RuntimeView {
    let mut view = RuntimeView {
        is_whole: shown.status.is_connected,
        guard_run: shown.status.run,
        pods: shown.pods.clone(),
        limit_support: limit_support(&shown.status),
        bypass_action: shown.status.bypass_action.map(|_| match shown.status.bypass_action() {
            guard::BypassAction::Report => BypassAction::Report,
            guard::BypassAction::Strip => BypassAction::Strip,
            guard::BypassAction::Deny => BypassAction::Deny,
        }),
        container_bypasses: shown.bypasses.iter().map(container_bypass).collect(),
        ..RuntimeView::default()
    };
    for container in shown.containers.values() {
        for tie in &container.ties {
            // The guard has parsed it before.
            let Ok(id) = AllocationId::parse(&tie.allocation) else { continue };
            let tie = if tie.is_annotation { Tie::Annotation } else { Tie::Environment };
            view.containers.entry(id).or_default().push(Arc::new(runtime_container(container, tie)));
        }
    }
    view
}

fn container_bypass(bypass: &ContainerBypass) -> Arc<runtime::ContainerBypass> {
    Arc::new(runtime::ContainerBypass {
        namespace: bypass.namespace.clone(),
        pod: bypass.pod.clone(),
        pod_uid: bypass.pod_uid.clone(),
        container: bypass.container.clone(),
        outcome: match bypass.outcome() {
            guard::BypassOutcome::Failed => BypassOutcome::Failed,
            guard::BypassOutcome::Stripped => BypassOutcome::Stripped,
            guard::BypassOutcome::Denied => BypassOutcome::Denied,
        },
        detail: bypass.details.join("; "),
        why: reason(&bypass.why),
        wall_ms: bypass.wall_ms,
        count: bypass.count,
    })
}

fn runtime_container(container: &Container, tie: Tie) -> RuntimeContainer {
    RuntimeContainer {
        id: container.id.clone(),
        namespace: container.namespace.clone(),
        pod: container.pod.clone(),
        pod_uid: container.pod_uid.clone(),
        name: container.name.clone(),
        tie,
        is_cgroup_known: container.is_cgroup_known,
        is_privileged: container.is_privileged,
        limits: container.limits.iter().filter_map(memory_limit).collect(),
    }
}

/// The limit; `None` if its GPU has a name that no GPU can have.
fn memory_limit(limit: &guard::MemoryLimit) -> Option<MemoryLimit> {
    // The kernel sets when it expires.
    let reading = |read: &guard::LimitReading| LimitReading {
        limit_mib: read.limit_mib,
        used_mib: read.used_mib,
        wall_ms: read.wall_ms,
        expires_mono_ms: 0,
        is_stale: false,
    };
    Some(MemoryLimit {
        gpu: GpuId::parse(&limit.gpu).ok()?,
        granted_mib: limit.granted_mib,
        state: match limit.state() {
            guard::LimitState::Pending => LimitState::Pending,
            guard::LimitState::Set => LimitState::Set,
            guard::LimitState::Late => LimitState::Late,
            guard::LimitState::Failed => LimitState::Failed,
        },
        times_changed: limit.times_changed,
        why: reason(&limit.why),
        reading: limit.reading.as_ref().map(reading),
    })
}

fn limit_support(status: &Status) -> LimitSupport {
    let of_gpu = |one: &guard::LimitSupport| Some((GpuId::parse(&one.gpu).ok()?, reason(&one.why)));
    LimitSupport {
        gpus: status.limit_support.iter().filter_map(of_gpu).collect(),
        why: reason(&status.limits_error),
        is_required: status.is_required,
        claim_grants: reason(&status.claim_grants),
    }
}

/// A text that is empty if there is nothing to say.
fn reason(text: &str) -> Option<Arc<str>> {
    (!text.is_empty()).then(|| text.into())
}

/// What the guard does about containers that can use GPUs that were not allocated to them. Without an action it needs
/// nothing else.
fn bypass_rules(ledger: &Ledger) -> BypassRules {
    let rules = &ledger.rules.bypass;
    if rules.action == BypassAction::Report {
        return BypassRules::default();
    }
    let named = |pod: &&Arc<Pod>| {
        let kind = pod.bypass.as_ref().map(|bypass| bypass.kind);
        matches!(kind, Some(BypassKind::NamesGpus | BypassKind::ImportsVariables))
    };
    let pods = || ledger.pods.iter().flat_map(|view| view.pods.values());
    let minor = |state: &Arc<PartState>| {
        Some(PartDeviceNode { part: state.part.id.to_string(), minor: state.part.minor? })
    };
    BypassRules {
        action: match rules.action {
            BypassAction::Report => guard::BypassAction::Report,
            BypassAction::Strip => guard::BypassAction::Strip,
            BypassAction::Deny => guard::BypassAction::Deny,
        }
        .into(),
        exempt_namespaces: rules.exempt_namespaces.iter().cloned().collect(),
        pods_setting_visible_devices: pods().filter(named).map(|pod| pod.uid.clone()).collect(),
        pods_with_claims: pods().filter(|pod| pod.has_claims).map(|pod| pod.uid.clone()).collect(),
        known_pods: ledger.pods.as_ref().map(|view| KnownPods { uids: view.pods.keys().cloned().collect() }),
        resources: ledger.resources().iter().map(ToString::to_string).collect(),
        parts: ledger.parts.values().filter_map(minor).collect(),
    }
}

/// Whether pods of this node are being deleted, by the ledger's view of pods.
struct Deletions {
    view: Option<Arc<PodsView>>,
    newest: Option<PodDeletions>,
}

impl Deletions {
    fn new(has_source: bool) -> Self {
        Self { view: None, newest: (!has_source).then_some(PodDeletions::Unknown) }
    }

    /// The answer for this snapshot; most snapshots have the view of the one before. `None` until a source that is
    /// configured has answered. While it is not connected, its last view counts: the kubelet, too, learns of deletions
    /// from the API server alone.
    fn of(&mut self, ledger: &Ledger) -> Option<PodDeletions> {
        if self.view.as_ref().map(Arc::as_ptr) != ledger.pods.as_ref().map(Arc::as_ptr) {
            self.view.clone_from(&ledger.pods);
            self.newest = match &self.view {
                Some(view) if view.current || self.newest.is_some() => Some(deletions(view)),
                _ => self.newest,
            };
        }
        self.newest
    }
}

fn deletions(view: &PodsView) -> PodDeletions {
    let mut pods = view.pods.values();
    match pods.any(|pod| pod.deletion_wall_ms.is_some() && pod.stage != Stage::Finished) {
        true => PodDeletions::Some,
        false => PodDeletions::None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::evidence::pods::{Pod, PodsSource};
    use berth_kernel::node::rules::Rules;

    /// A ledger with a view of one pod, which is being deleted since then.
    fn ledger(is_current: bool, deletion_wall_ms: Option<u64>, stage: Stage) -> Ledger {
        let pod = Pod {
            uid: "uid-1".into(),
            namespace: "team".into(),
            name: "p".into(),
            labels: Vec::new(),
            is_static: false,
            owner: None,
            stage,
            deletion_wall_ms,
            created_wall_ms: 0,
            containers: Vec::new(),
            bypass: None,
            has_claims: false,
            named_claims: Vec::new(),
        };
        let mut view = PodsView::empty(PodsSource::ApiServer);
        view.current = is_current;
        view.pods.insert(pod.uid.clone(), Arc::new(pod));
        Ledger { pods: Some(Arc::new(view)), ..Ledger::default() }
    }

    #[test]
    fn a_source_that_has_not_answered_yet_permits_no_registration() {
        let mut deletions = Deletions::new(true);
        assert_eq!(deletions.of(&Ledger::default()), None);
        assert_eq!(deletions.of(&ledger(false, None, Stage::Admitted)), None, "it is not connected yet");
        assert_eq!(deletions.of(&ledger(true, None, Stage::Admitted)), Some(PodDeletions::None));
        assert_eq!(Deletions::new(false).of(&Ledger::default()), Some(PodDeletions::Unknown));
    }

    #[test]
    fn the_guard_is_sent_which_pods_are_known_and_have_claims_if_it_stops_bypasses() {
        let mut known = ledger(true, None, Stage::Admitted);
        assert_eq!(bypass_rules(&known), BypassRules::default(), "it only reports");
        let bypass =
            berth_kernel::grants::bypass::BypassRules { action: BypassAction::Strip, ..Default::default() };
        known.rules = Arc::new(Rules { bypass, ..Rules::default() });
        let sent = bypass_rules(&known);
        assert_eq!(sent.known_pods, Some(KnownPods { uids: vec!["uid-1".into()] }));
        assert_eq!((sent.action(), sent.pods_with_claims.len()), (guard::BypassAction::Strip, 0));
        let without_source = Ledger { pods: None, ..known };
        assert_eq!(bypass_rules(&without_source).known_pods, None);
    }

    #[test]
    fn a_deletion_counts_until_the_pod_has_finished_also_while_the_source_is_away() {
        let mut deletions = Deletions::new(true);
        for (is_current, deleted, stage, expected) in [
            (true, Some(1), Stage::Admitted, PodDeletions::Some),
            (false, Some(1), Stage::Admitted, PodDeletions::Some),
            (true, Some(1), Stage::Finished, PodDeletions::None),
            (false, None, Stage::Admitted, PodDeletions::None),
        ] {
            let known = deletions.of(&ledger(is_current, deleted, stage));
            assert_eq!(known, Some(expected), "{is_current} {deleted:?} {stage:?}");
        }
    }
}
