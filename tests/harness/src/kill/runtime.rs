//! The container runtime's side of NRI: it shows a guard the containers of the node's pods, as containerd does.
//!
//! Sources: containerd/nri 0.12 `pkg/adaptation/plugin.go` (the order of the calls), `pkg/net/multiplex/mux.go` and
//! containerd/ttrpc `channel.go` (frames). Containers are created and removed, and never started, since a cgroup of their
//! own needs root.

use anyhow::{Context, bail, ensure};
use berth_proto::nri::{
    ConfigureRequest, Container, ContainerState, CreateContainerRequest, PodSandbox, RemoveContainerRequest,
    RemovePodSandboxRequest, StopContainerRequest, StopPodSandboxRequest, SynchronizeRequest,
};
use berth_proto::ttrpc::{Request, Response};
use kubelet_standin::{Kubelet, PodSpec};
use prost::Message;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// The connection on which the runtime calls the plugin.
const TO_PLUGIN: u32 = 1;
/// The connection on which the plugin calls the runtime.
const TO_RUNTIME: u32 = 2;
/// Types of messages.
const REQUEST: u8 = 1;
/// See [`REQUEST`].
const RESPONSE: u8 = 2;
/// Bytes before a message of ttrpc: length, stream, type, flags.
const MESSAGE_HEADER_BYTES: usize = 10;
/// The longest message, bytes.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Far above the two seconds that containerd waits: this machine may be busy.
const CALL_MAX: Duration = Duration::from_secs(300);
/// How many changes can wait for the task. When there are so many, the load waits.
const WAITING_MAX: usize = 64;

/// What happens to a pod.
enum Change {
    Starts { pod: Box<PodSandbox>, init: Vec<Container>, main: Vec<Container> },
    Ends { uid: String },
}

/// What the guards have done.
#[derive(Debug, Default)]
pub(crate) struct Guards {
    /// How many have registered and were shown all containers.
    pub(crate) registered: u64,
    /// How many calls they have answered.
    pub(crate) answered: u64,
    /// How many connections they have closed.
    pub(crate) closed: u64,
    /// What they have done wrong.
    pub(crate) wrong: Vec<String>,
}

/// The runtime of a node.
#[derive(Debug)]
pub(crate) struct Runtime {
    changes: mpsc::Sender<Change>,
    guards: Arc<Mutex<Guards>>,
}

impl Runtime {
    /// Listens at this socket.
    pub(crate) fn start(socket: &Path) -> anyhow::Result<Self> {
        let listener = UnixListener::bind(socket).with_context(|| format!("{}", socket.display()))?;
        let (changes, received) = mpsc::channel(WAITING_MAX);
        let guards = Arc::<Mutex<Guards>>::default();
        let task = RuntimeTask { pods: BTreeMap::new(), plugin: None, guards: Arc::clone(&guards) };
        tokio::spawn(task.run(listener, received));
        Ok(Self { changes, guards })
    }

    /// Shows the guard that the containers of a pod are created, with the annotations of their grants.
    pub(crate) async fn run(&self, kubelet: &Kubelet, pod: &PodSpec) {
        let sandbox = PodSandbox {
            id: format!("sandbox-{}", pod.uid),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            namespace: pod.namespace.clone(),
            ..PodSandbox::default()
        };
        let container = |name: &String| Container {
            id: format!("{name}-{}", pod.uid),
            pod_sandbox_id: sandbox.id.clone(),
            name: name.clone(),
            state: ContainerState::ContainerCreated.into(),
            annotations: kubelet.view(&pod.uid, name).unwrap_or_default().annotations.into_iter().collect(),
            ..Container::default()
        };
        let init = pod.init_containers.iter().map(|spec| container(&spec.name)).collect();
        let main = pod.containers.iter().map(|spec| container(&spec.name)).collect();
        self.change(Change::Starts { pod: Box::new(sandbox.clone()), init, main }).await;
    }

    /// Shows the guard that the containers of a pod are stopped and removed.
    pub(crate) async fn end(&self, uid: &str) {
        self.change(Change::Ends { uid: uid.to_owned() }).await;
    }

    async fn change(&self, change: Change) {
        // The task receives until this sender is dropped.
        let _ = self.changes.send(change).await;
    }

    /// How many guards have registered, and how many calls they have answered.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let guards = self.guards.lock().unwrap_or_else(PoisonError::into_inner);
        (guards.registered, guards.answered)
    }

    /// Takes what guards have done wrong since the last call; `kills`: how many of them were killed.
    pub(crate) fn take_wrong(&self, kills: u64) -> Vec<String> {
        let mut guards = self.guards.lock().unwrap_or_else(PoisonError::into_inner);
        if guards.closed > kills {
            let closed = std::mem::replace(&mut guards.closed, kills);
            guards.wrong.push(format!("guards closed {closed} connections, and {kills} guards were killed"));
        }
        std::mem::take(&mut guards.wrong)
    }
}

/// The running pods, and the guard to which they are shown.
struct RuntimeTask {
    pods: BTreeMap<String, (PodSandbox, Vec<Container>)>,
    plugin: Option<Plugin>,
    guards: Arc<Mutex<Guards>>,
}

impl RuntimeTask {
    async fn run(mut self, listener: UnixListener, mut changes: mpsc::Receiver<Change>) {
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    if let Ok((socket, _)) = accepted {
                        self.register(socket).await;
                    }
                }
                change = changes.recv() => match change {
                    Some(change) => self.carry_out(change).await,
                    None => return,
                },
            }
        }
    }

    fn note(&self, note: impl FnOnce(&mut Guards)) {
        note(&mut self.guards.lock().unwrap_or_else(PoisonError::into_inner));
    }

    async fn register(&mut self, socket: UnixStream) {
        let mut plugin = Plugin { socket, calls: 0 };
        match plugin.register(&self.pods).await {
            Ok(()) => {
                self.plugin = Some(plugin);
                self.note(|guards| guards.registered += 1);
            }
            Err(error) => self.lose(&error),
        }
    }

    async fn carry_out(&mut self, change: Change) {
        match change {
            Change::Starts { pod, init, main } => {
                self.pods.insert(pod.uid.clone(), (PodSandbox::clone(&pod), Vec::new()));
                for container in init {
                    self.create(&pod, &container).await;
                    self.remove(&pod, container).await;
                }
                for container in main {
                    self.create(&pod, &container).await;
                    if let Some((_, containers)) = self.pods.get_mut(&pod.uid) {
                        containers.push(container);
                    }
                }
            }
            Change::Ends { uid } => {
                let Some((pod, containers)) = self.pods.remove(&uid) else { return };
                for container in containers {
                    self.remove(&pod, container).await;
                }
                let pod = Some(pod);
                self.call("StopPodSandbox", &StopPodSandboxRequest { pod: pod.clone() }).await;
                self.call("RemovePodSandbox", &RemovePodSandboxRequest { pod }).await;
            }
        }
    }

    async fn create(&mut self, pod: &PodSandbox, container: &Container) {
        let (pod, container) = (Some(pod.clone()), Some(container.clone()));
        self.call("CreateContainer", &CreateContainerRequest { pod, container }).await;
    }

    async fn remove(&mut self, pod: &PodSandbox, container: Container) {
        let (pod, container) = (Some(pod.clone()), Some(container));
        let stop = StopContainerRequest { pod: pod.clone(), container: container.clone() };
        self.call("StopContainer", &stop).await;
        self.call("RemoveContainer", &RemoveContainerRequest { pod, container }).await;
    }

    /// Calls the guard, if there is one.
    async fn call(&mut self, method: &str, request: &impl Message) {
        let Some(plugin) = &mut self.plugin else { return };
        match plugin.call(method, request).await {
            Ok(()) => self.note(|guards| guards.answered += 1),
            Err(error) => self.lose(&error),
        }
    }

    /// Forgets the guard whose connection has failed. Its process may have been killed, which closes the connection; any
    /// other failure is an error of the guard.
    fn lose(&mut self, error: &anyhow::Error) {
        self.plugin = None;
        let is_closed = error.downcast_ref::<io::Error>().is_some_and(|error| {
            let kind = error.kind();
            matches!(kind, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::UnexpectedEof)
        });
        self.note(|guards| {
            if is_closed {
                guards.closed += 1;
            } else {
                guards.wrong.push(format!("{error:#}"));
            }
        });
    }
}

/// A connection that a guard has made.
struct Plugin {
    socket: UnixStream,
    calls: u32,
}

impl Plugin {
    /// Takes it through its registration, and shows it what runs.
    async fn register(
        &mut self,
        pods: &BTreeMap<String, (PodSandbox, Vec<Container>)>,
    ) -> anyhow::Result<()> {
        let (connection, stream, kind, _) = self.receive().await?;
        ensure!((connection, kind) == (TO_RUNTIME, REQUEST), "the guard's first message is not a request");
        self.send(TO_RUNTIME, stream, RESPONSE, &Response::default().encode_to_vec()).await?;
        let configure = ConfigureRequest { runtime_name: "harness".into(), ..ConfigureRequest::default() };
        self.call("Configure", &configure).await?;
        let containers = pods.values().flat_map(|(_, containers)| containers).cloned().collect();
        let pods = pods.values().map(|(pod, _)| pod.clone()).collect();
        self.call("Synchronize", &SynchronizeRequest { pods, containers, more: false }).await
    }

    /// Makes a call.
    async fn call(&mut self, method: &str, request: &impl Message) -> anyhow::Result<()> {
        let stream = 2 * self.calls + 1;
        self.calls += 1;
        let (service, payload) = ("nri.pkg.api.v1alpha1.Plugin".into(), request.encode_to_vec());
        let request = Request { service, method: method.into(), payload, timeout_nano: 0 };
        self.send(TO_PLUGIN, stream, REQUEST, &request.encode_to_vec()).await?;
        let answer = timeout(CALL_MAX, self.receive()).await;
        let (connection, answered, kind, payload) =
            answer.with_context(|| format!("the guard did not answer {method}"))??;
        ensure!(
            (connection, answered, kind) == (TO_PLUGIN, stream, RESPONSE),
            "the guard's answer to {method} is of connection {connection}, stream {answered}, type {kind}"
        );
        match Response::decode(payload.as_slice())?.status.filter(|status| status.code != 0) {
            Some(status) => bail!("the guard refused {method}: {} (code {})", status.message, status.code),
            None => Ok(()),
        }
    }

    async fn send(&mut self, connection: u32, stream: u32, kind: u8, payload: &[u8]) -> anyhow::Result<()> {
        let mut message = u32::try_from(payload.len())?.to_be_bytes().to_vec();
        message.extend(stream.to_be_bytes());
        message.extend([kind, 0]);
        message.extend(payload);
        let mut frame = connection.to_be_bytes().to_vec();
        frame.extend(u32::try_from(message.len())?.to_be_bytes());
        frame.extend(message);
        Ok(self.socket.write_all(&frame).await?)
    }

    /// The next message: connection, stream, type, payload. There is one at a time, perhaps in several frames.
    async fn receive(&mut self) -> anyhow::Result<(u32, u32, u8, Vec<u8>)> {
        let mut message = Vec::new();
        loop {
            let connection = self.socket.read_u32().await?;
            let length = usize::try_from(self.socket.read_u32().await?)?;
            ensure!(length <= MESSAGE_BYTES_MAX, "a frame of {length} bytes");
            let begin = message.len();
            message.resize(begin + length, 0);
            self.socket.read_exact(&mut message[begin..]).await?;
            let Some((header, payload)) = message.split_first_chunk::<MESSAGE_HEADER_BYTES>() else {
                continue;
            };
            let number =
                |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
            let length = usize::try_from(number(0))?;
            ensure!(length <= MESSAGE_BYTES_MAX && payload.len() <= length, "a message of {length} bytes");
            if payload.len() == length {
                return Ok((connection, number(4), header[8], payload.to_vec()));
            }
        }
    }
}
