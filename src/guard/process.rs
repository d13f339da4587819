//! The process `berth guard`: a plugin of the container runtime that shows the daemon which containers run, limits their GPU
//! memory, and restricts bypasses.

use crate::bypass::BypassGuard;
use crate::cgroup::ContainerCgroup;
use crate::limiter::Limiter;
use crate::link::{self, DaemonMessages};
use crate::plugin::{ContainerEvent, Plugin, Refusal, RuntimeInfo};
use crate::session;
use crate::settings::Settings;
use crate::state::GuardState;
use berth_proto::guard::PodDeletions;
use berth_proto::nri::{Container, ContainerAdjustment, Event, PodSandbox};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// Interval at which the lock of the socket is tried while another guard has it.
const LOCK_RETRY: Duration = Duration::from_secs(1);
/// Interval of the checks whether a container that the runtime has stopped still has processes in its cgroup.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// The waits between registrations; the last one repeats. A registration blocks all calls of the runtime for a moment.
const RETRIES: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(5), Duration::from_secs(30), Duration::from_secs(60)];
/// A session that lasted this long had no problem with the guard: the waits begin with the first one again.
const LASTED: Duration = Duration::from_secs(60);

/// Why the guard cannot run.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// Its socket cannot be created.
    #[error(
        "the guard cannot listen on {}; run it as root, or set `guard.socket` for daemon and guard to a path in a folder that \
         the guard may write",
        path.display()
    )]
    Socket {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Runs the guard until the future is dropped.
///
/// # Errors
/// If its socket cannot be created. A runtime that does not answer is no error: the guard tries again.
pub async fn run(settings: Settings) -> Result<(), GuardError> {
    if !rustix::process::geteuid().is_root() {
        tracing::warn!(
            "the guard does not run as root, and needs root for the container runtime's socket, for cgroups and for NVML: run \
             it as root"
        );
    }
    let failed = |source| GuardError::Socket { path: settings.socket.clone(), source };
    let _lock = lock(&settings.socket).await.map_err(failed)?;
    let listener = bind(&settings.socket).map_err(failed)?;
    // Removed before the lock is released, so that it is not the next guard's.
    let _socket = SocketFile(settings.socket.clone());
    let guard = Arc::new(GuardState::new(settings.claim_grants.clone()));
    let limiter = Arc::new(Limiter::new(&settings, Arc::clone(&guard)));
    limiter.resume_left();
    let messages = DaemonMessages::default();
    let (deletions, released) = (messages.deletions.subscribe(), messages.is_driver_released.subscribe());
    let rules = messages.bypass.subscribe();
    let bypass = Arc::new(BypassGuard::new(&settings, Arc::clone(&guard), rules));
    let plugin = Registered {
        settings: settings.clone(),
        guard: Arc::clone(&guard),
        limiter: Arc::clone(&limiter),
        bypass: Arc::clone(&bypass),
    };
    tracing::info!(socket = %settings.socket.display(), "the guard listens for the daemon");
    tokio::join!(
        link::serve(listener, Arc::clone(&guard), messages),
        keep_session(plugin, deletions),
        limiter.run(released),
        bypass.run(),
        sweep(&guard),
    );
    Ok(())
}

/// Locks the socket for this process; waits while another guard has the lock, as during an upgrade.
async fn lock(socket: &Path) -> io::Result<File> {
    if let Some(folder) = socket.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
    }
    let file = File::create(PathBuf::from(format!("{}.lock", socket.display())))?;
    let mut is_logged = false;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) if is_logged => {}
            Err(Errno::WOULDBLOCK) => {
                tracing::info!("another guard runs on this node; this one waits until it ends");
                is_logged = true;
            }
            Err(error) => return Err(error.into()),
        }
        sleep(LOCK_RETRY).await;
    }
}

/// The guard's socket; removed when dropped, so that a node whose guard was stopped has none.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            tracing::warn!("the guard cannot remove its socket {}: {error}", self.0.display());
        }
    }
}

/// Listens; the socket of a guard that was killed is replaced, which the lock makes safe.
fn bind(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Registers with the runtime, again after each end of a session.
async fn keep_session(mut plugin: Registered, mut deletions: watch::Receiver<Option<PodDeletions>>) {
    let (guard, nri_socket) = (Arc::clone(&plugin.guard), plugin.settings.nri_socket.clone());
    let mut retries = RETRIES.iter();
    loop {
        plugin.limiter.wait_until_none_is_suspended().await;
        wait_for_safe_registration(&guard, &mut deletions).await;
        guard.set_status(|status| {
            status.why = format!(
                "the guard is registering at {}, and the container runtime has not answered yet",
                nri_socket.display()
            );
        });
        let began = Instant::now();
        let why = match UnixStream::connect(&nri_socket).await {
            Ok(socket) => match session::run(socket, &mut plugin).await {
                Ok(()) => "the container runtime closed the connection; the guard connects again within 60 s"
                    .to_owned(),
                Err(error) => error.to_string(),
            },
            Err(error) => no_socket(&nri_socket, &error),
        };
        guard.set_unconnected(why);
        if began.elapsed() >= LASTED {
            retries = RETRIES.iter();
        }
        sleep(*retries.next().unwrap_or(&RETRIES[RETRIES.len() - 1])).await;
    }
}

fn no_socket(path: &Path, error: &io::Error) -> String {
    let path = path.display();
    match error.kind() {
        ErrorKind::NotFound => format!(
            "{path} does not exist: the container runtime offers no NRI there. Enable NRI in its configuration (docs/guard.md, \
             \"Run it\") and restart the runtime; if it offers NRI at another socket, set `guard.nriSocket` and restart the \
             guard"
        ),
        _ => format!(
            "the guard cannot connect to {path}: {error}; run it as root, and check that the container runtime runs"
        ),
    }
}

/// A registration takes the lock of the runtime's plugins, which the stop of a container holds for its whole grace period;
/// until then no other call of the runtime goes on (containerd#14083). So it is not tried while a pod of this node is
/// being deleted, nor while the daemon is not connected, which alone knows.
async fn wait_for_safe_registration(
    guard: &GuardState,
    deletions: &mut watch::Receiver<Option<PodDeletions>>,
) {
    loop {
        let why = match *deletions.borrow_and_update() {
            // No source shows deletions, so that a guard that waited for one would never register.
            Some(PodDeletions::None | PodDeletions::Unknown) => return,
            Some(PodDeletions::Some) => {
                "a pod of this node is being deleted; the guard registers after that, since a registration now would block \
                 the container runtime until the pod's containers have ended"
            }
            None => {
                "the guard waits for `berth serve` to say whether a pod of this node is being deleted, since a registration \
                 during a deletion blocks the container runtime. If this lasts, check with `berth node show` that `berth \
                 serve` runs with the same `guard.socket` and reaches the API server"
            }
        };
        guard.set_unconnected(why.into());
        if deletions.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

/// Checks the cgroups that outlived their container until they have no processes.
async fn sweep(guard: &GuardState) {
    loop {
        guard.left.notified().await;
        loop {
            let mut has_left = false;
            guard.update(|known| {
                has_left = known.sweep();
                true
            });
            if !has_left {
                break;
            }
            sleep(SWEEP_INTERVAL).await;
        }
    }
}

/// The plugin of the runtime.
struct Registered {
    settings: Settings,
    guard: Arc<GuardState>,
    limiter: Arc<Limiter>,
    bypass: Arc<BypassGuard>,
}

impl Registered {
    fn cgroup_of(&self, container: &Container) -> Option<ContainerCgroup> {
        ContainerCgroup::of_container(container, &self.settings.cgroup_root)
    }

    /// Judges the containers that the runtime shows, after the answer to it, which has to come within two seconds.
    fn judge_running(&self, pods: &[PodSandbox], containers: &[Container]) {
        let pods: BTreeMap<&String, &PodSandbox> = pods.iter().map(|pod| (&pod.id, pod)).collect();
        let with_pod = |container: &Container| {
            let pod = *pods.get(&container.pod_sandbox_id)?;
            Some((pod.clone(), container.clone()))
        };
        let all: Vec<_> = containers.iter().filter_map(with_pod).collect();
        let bypass = Arc::clone(&self.bypass);
        tokio::spawn(async move { bypass.judge_all_running(all).await });
    }
}

impl Plugin for Registered {
    fn configure(&mut self, runtime: RuntimeInfo) {
        tracing::info!(
            runtime = runtime.name,
            version = runtime.version,
            request_timeout_ms = runtime.request_timeout.map(|max| max.as_millis()),
            "the guard is registered with the container runtime"
        );
        self.guard.set_status(|status| {
            (status.runtime, status.runtime_version) = (runtime.name, runtime.version);
            status.why = "the container runtime has not sent its containers yet".into();
        });
    }

    async fn synchronize(&mut self, pods: Vec<PodSandbox>, containers: Vec<Container>) {
        self.guard.update(|known| {
            let cgroup_of = |one: &Container| Some(self.cgroup_of(one)?.at_start(&one.id));
            known.synchronize(&pods, &containers, cgroup_of);
            true
        });
        self.guard.set_status(|status| (status.is_connected, status.why) = (true, String::new()));
        // Those that were started while no guard was connected have no limits yet.
        self.limiter.wake();
        self.judge_running(&pods, &containers);
        tracing::info!(
            pods = pods.len(),
            containers = containers.len(),
            "the guard has received all containers of this node"
        );
    }

    async fn create_container(
        &mut self,
        pod: PodSandbox,
        container: Container,
    ) -> Result<ContainerAdjustment, Refusal> {
        self.guard.update(|known| known.create(&pod, &container));
        let adjusted = self.bypass.create(&pod, &container).await;
        if adjusted.is_err() {
            // The runtime sends no end of a container that it has not created.
            self.guard.update(|known| known.end(&container.id));
        }
        adjusted
    }

    async fn start_container(&mut self, pod: PodSandbox, container: Container) -> Result<(), Refusal> {
        let is_known = self.guard.containers.lock().is_known(&container.id);
        self.bypass.start(&pod, &container).await;
        if !is_known {
            return Ok(());
        }
        let starting = self.limiter.mark_starting(&container.id);
        let cgroup = self.cgroup_of(&container);
        self.guard.update(|known| {
            known.start(&container.id, cgroup.clone());
            true
        });
        let (limits, doubtful_key) = {
            let known = self.guard.containers.lock();
            (known.limits_of(&container.id), known.doubtful_key_of(&container.id))
        };
        if let Some(key) = doubtful_key {
            self.limiter.refuse_doubtful(&container.id, container.pid, &key)?;
        }
        if limits.is_empty() {
            return Ok(());
        }
        self.limiter.start(starting, container.pid, cgroup, limits).await
    }

    async fn observe(&mut self, event: ContainerEvent) {
        let ContainerEvent { event, pod, container } = event;
        if let (Event::StopContainer | Event::RemoveContainer, Some(container)) = (event, &container) {
            self.bypass.end(&container.id);
        }
        self.guard.update(|known| match event {
            Event::StopPodSandbox | Event::RemovePodSandbox => known.end_sandbox(&pod.id),
            Event::StopContainer | Event::RemoveContainer => {
                container.is_some_and(|container| known.end(&container.id))
            }
            _ => false,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::Link;
    use crate::published::Published;
    use crate::session::tests::Runtime;
    use crate::settings::LimitSettings;
    use berth_proto::guard::Daemon;
    use berth_proto::nri::{
        CreateContainerRequest, StartContainerRequest, StopContainerRequest, StopPodSandboxRequest,
        SynchronizeRequest,
    };
    use futures_util::FutureExt as _;

    #[tokio::test]
    async fn a_registration_waits_for_the_daemon_and_for_the_end_of_deletions() {
        let guard = GuardState::new(Settings::default().claim_grants);
        let sender = watch::Sender::new(None);
        let why = || guard.status().why;
        let mut receiver = sender.subscribe();
        let mut waiting = std::pin::pin!(wait_for_safe_registration(&guard, &mut receiver));
        assert_eq!(waiting.as_mut().now_or_never(), None);
        assert!(why().contains("waits for `berth serve` to say"), "{}", why());
        sender.send_replace(Some(PodDeletions::Some));
        assert_eq!(waiting.as_mut().now_or_never(), None);
        assert!(why().contains("being deleted"), "{}", why());
        sender.send_replace(Some(PodDeletions::None));
        waiting.await;
        sender.send_replace(Some(PodDeletions::Unknown));
        wait_for_safe_registration(&guard, &mut sender.subscribe()).await;
    }

    fn pod() -> PodSandbox {
        let (id, name, uid) = ("s".into(), "p".into(), "uid-1".into());
        PodSandbox { id, name, uid, namespace: "team".into(), ..PodSandbox::default() }
    }

    fn container(allocation: &str) -> Container {
        let key = "berth.dev/grant.nvidia.com_gpu".to_owned();
        Container {
            id: "c".into(),
            pod_sandbox_id: "s".into(),
            name: "main".into(),
            annotations: [(key, format!("{allocation} GPU-1=4096"))].into(),
            ..Container::default()
        }
    }

    /// A daemon that follows the guard, by what it has received.
    struct Follower {
        link: Link,
        shown: Published,
    }

    impl Follower {
        async fn new(socket: &Path) -> Self {
            let socket = loop {
                match UnixStream::connect(socket).await {
                    Ok(socket) => break socket,
                    Err(_) => sleep(Duration::from_millis(5)).await,
                }
            };
            let mut link = Link::new(socket);
            link.send(&Daemon { deletions: PodDeletions::None.into(), ..Daemon::default() }).await.unwrap();
            Self { link, shown: Published::default() }
        }

        async fn wait_for(&mut self, holds: impl Fn(&Published) -> bool) {
            while !holds(&self.shown) {
                self.shown.apply(self.link.receive().await.unwrap().expect("the guard runs"));
            }
        }
    }

    #[tokio::test]
    async fn a_daemon_sees_a_container_from_its_creation_to_its_end_also_over_its_own_restart() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let settings = Settings {
            socket: path("guard.sock"),
            nri_socket: path("nri.sock"),
            cgroup_root: path("cgroup"),
            device_plugins: path("device-plugins"),
            claim_grants: path("grants"),
            own_namespace: None,
            limits: LimitSettings::Off,
        };
        let nri = UnixListener::bind(&settings.nri_socket).unwrap();
        let guard = tokio::spawn(run(settings.clone()));
        let mut daemon = Follower::new(&settings.socket).await;
        let mut runtime = Runtime::new(nri.accept().await.unwrap().0);
        runtime.configure().await;
        let ours = (Some(pod()), Some(container("0000002a-7")));
        runtime.call("Synchronize", &SynchronizeRequest::default()).await.unwrap();
        daemon.wait_for(|shown| shown.status.is_connected && shown.containers.is_empty()).await;
        let create = CreateContainerRequest { pod: ours.0.clone(), container: ours.1.clone() };
        runtime.call("CreateContainer", &create).await.unwrap();
        daemon.wait_for(|shown| shown.containers.contains_key("c")).await;
        drop(daemon);
        let mut daemon = Follower::new(&settings.socket).await;
        daemon.wait_for(|shown| shown.status.is_connected).await;
        let shown = &daemon.shown.containers["c"];
        assert_eq!((shown.pod_uid.as_str(), shown.ties[0].allocation.as_str()), ("uid-1", "0000002a-7"));
        // Without a process it has no cgroup.
        let start = StartContainerRequest { pod: ours.0.clone(), container: ours.1.clone() };
        runtime.call("StartContainer", &start).await.unwrap();
        let stop = StopContainerRequest { pod: ours.0.clone(), container: ours.1 };
        runtime.call("StopContainer", &stop).await.unwrap();
        daemon.wait_for(|shown| shown.containers.is_empty() && !shown.pods.is_empty()).await;
        runtime.call("StopPodSandbox", &StopPodSandboxRequest { pod: ours.0 }).await.unwrap();
        daemon.wait_for(|shown| shown.pods.is_empty()).await;
        drop(runtime);
        daemon.wait_for(|shown| !shown.status.is_connected && shown.status.why.contains("closed")).await;
        guard.abort();
    }

    #[tokio::test]
    async fn a_second_guard_waits_for_the_lock_of_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("run/guard.sock");
        let first = lock(&socket).await.unwrap();
        let mut second = std::pin::pin!(lock(&socket));
        assert!(second.as_mut().now_or_never().is_none());
        drop(first);
        second.await.unwrap();
        let listener = bind(&socket).unwrap();
        drop(listener);
        bind(&socket).unwrap();
        assert_eq!(fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn a_guard_that_is_stopped_leaves_no_socket() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("guard.sock");
        let settings = Settings { socket: socket.clone(), limits: LimitSettings::Off, ..Settings::default() };
        let mut guard = Box::pin(run(settings));
        assert!(guard.as_mut().now_or_never().is_none());
        assert!(socket.exists());
        drop(guard);
        assert!(!socket.exists());
    }
}
