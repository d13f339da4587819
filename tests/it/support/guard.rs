//! A stand-in for `berth guard`: it listens on the socket to which the daemon connects, and sends what a test says.

use crate::support::wait::SOON;
use actix_web::web::Bytes;
use berth_core::{GuardDriverUse, KernelHandle};
use berth_guard::{GuardStatus, follow};
use berth_proto::guard::{Container, Daemon, PodDeletions, Status, Tie, Update};
use futures_util::{SinkExt, StreamExt};
use kubelet_standin::ContainerView;
use prost::Message;
use tempfile::TempDir;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::codec::{Framed, LengthDelimitedCodec};

/// The guard's socket, and the daemon that follows it.
pub(crate) struct StandInGuard {
    listener: UnixListener,
    pub(crate) status: watch::Receiver<GuardStatus>,
    /// What the daemon orders of the guard's use of the driver.
    pub(crate) driver: GuardDriverUse,
    _following: JoinSet<()>,
    _folder: TempDir,
}

/// The daemon's connection.
pub(crate) struct Connection(Framed<UnixStream, LengthDelimitedCodec>);

impl StandInGuard {
    /// Listens, and has the daemon of this kernel connect.
    pub(crate) fn followed_by(kernel: &KernelHandle) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("guard.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let (sender, status) = watch::channel(GuardStatus::default());
        let mut following = JoinSet::new();
        let driver = GuardDriverUse::default();
        following.spawn(follow(socket, kernel.clone(), false, driver.clone(), sender));
        Self { listener, status, driver, _following: following, _folder: folder }
    }

    /// The daemon's next connection.
    pub(crate) async fn accept(&self) -> Connection {
        let (socket, _) = timeout(SOON, self.listener.accept()).await.expect("the daemon connects").unwrap();
        Connection(Framed::new(socket, LengthDelimitedCodec::new()))
    }
}

impl Connection {
    pub(crate) async fn send(&mut self, update: Update) {
        self.0.send(Bytes::from(update.encode_to_vec())).await.unwrap();
    }

    /// Waits until the daemon says this of deletions.
    pub(crate) async fn wait_for(&mut self, expected: PodDeletions) {
        while self.message().await.deletions() != expected {}
    }

    /// What the daemon says next.
    pub(crate) async fn message(&mut self) -> Daemon {
        let received = timeout(SOON, self.0.next()).await.expect("the daemon says something");
        Daemon::decode(received.expect("it is connected").unwrap()).unwrap()
    }
}

/// Everything that a guard shows that runs for the first time: these containers, in running sandboxes.
pub(crate) fn whole(containers: Vec<Container>) -> Update {
    let status = Status {
        version: "0.1.0".into(),
        run: 1,
        runtime: "containerd".into(),
        runtime_version: "2.2.9".into(),
        is_connected: true,
        ..Status::default()
    };
    let pods = containers.iter().map(|container| container.pod_uid.clone()).collect();
    Update { is_whole: true, status: Some(status), containers, pods, ..Update::default() }
}

/// A container of a pod in namespace `default` with the annotations that it was given.
pub(crate) fn container(uid: &str, pod: &str, name: &str, view: &ContainerView) -> Container {
    let grants = view.annotations.iter().filter(|(key, _)| key.starts_with("berth.dev/grant."));
    let ties = grants.map(|(_, value)| Tie {
        allocation: value.split(' ').next().unwrap().to_owned(),
        is_annotation: true,
    });
    Container {
        id: format!("{name}-of-{uid}"),
        namespace: "default".into(),
        pod: pod.into(),
        pod_uid: uid.into(),
        name: name.into(),
        ties: ties.collect(),
        is_cgroup_known: true,
        ..Container::default()
    }
}
