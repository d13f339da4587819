//! A session with the container runtime: registration, and answers to its calls until it closes the socket.
//!
//! Sources: containerd/nri 0.12 `pkg/api/api.proto`, `pkg/stub/stub.go`, `pkg/adaptation/plugin.go`. The runtime makes
//! one call at a time, so a session answers in the order of the calls.

use crate::frame::{Channel, Decoder, FrameError, Kind, Message};
use crate::plugin::{ContainerEvent, Plugin, Refusal, RuntimeInfo};
use berth_proto::nri::{
    ConfigureRequest, ConfigureResponse, Container, CreateContainerRequest, CreateContainerResponse, Event,
    PodSandbox, RegisterPluginRequest, RemoveContainerRequest, RemovePodSandboxRequest,
    StartContainerRequest, StateChangeEvent, StopContainerRequest, StopPodSandboxRequest, SynchronizeRequest,
    SynchronizeResponse,
};
use berth_proto::ttrpc::{Request, Response, Status};
use bytes::Bytes;
use prost::Message as _;
use std::io;
use std::mem::take;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::time::{Instant, timeout, timeout_at};

/// The plugin's name in the runtime's log and in `required-plugins.noderesource.dev`.
const NAME: &str = "berth";
/// Plugins are called in ascending order, so Berth sees what others have adjusted.
const INDEX: &str = "90";
/// The number of the registration's call, the only one that Berth makes.
const REGISTRATION: u32 = 1;
/// How long a registration may take: twice upstream's default `registration_timeout` and some.
const REGISTRATION_MAX: Duration = Duration::from_secs(15);
/// How long the runtime may take to read an answer. It reads all the time.
const WRITE_MAX: Duration = Duration::from_secs(2);
/// Bytes of one read.
const READ_BYTES: usize = 64 << 10;
/// The most pods and containers that are synchronized: ten times the pods that a kubelet runs by default, with ten
/// containers each.
const SYNCHRONIZED_MAX: usize = 11_000;

/// The events that are subscribed to; event e is bit e-1. Zero would subscribe to all.
const EVENTS: i32 = bit(Event::StopPodSandbox)
    | bit(Event::RemovePodSandbox)
    | bit(Event::CreateContainer)
    | bit(Event::StartContainer)
    | bit(Event::StopContainer)
    | bit(Event::RemoveContainer);

const fn bit(event: Event) -> i32 {
    1 << (event as i32 - 1)
}

/// Codes of gRPC that ttrpc uses, too.
mod code {
    pub(super) const OK: i32 = 0;
    pub(super) const UNKNOWN: i32 = 2;
    pub(super) const INVALID_ARGUMENT: i32 = 3;
    pub(super) const RESOURCE_EXHAUSTED: i32 = 8;
    pub(super) const UNIMPLEMENTED: i32 = 12;
}

/// Why a session ended, unless the runtime closed it in order.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The socket failed.
    #[error("the NRI socket of the container runtime failed: {0}")]
    Socket(#[from] io::Error),
    /// What came is not NRI's protocol, or an answer is too long for it.
    #[error("the container runtime and Berth do not understand each other: {0}")]
    Frame(#[from] FrameError),
    /// The runtime refused the registration.
    #[error("the container runtime refused the plugin `{NAME}`: {message} (code {code})")]
    Refused {
        /// A code of gRPC.
        code: i32,
        /// The runtime's words.
        message: String,
    },
    /// The runtime did not answer the registration.
    #[error("the container runtime did not configure the plugin `{NAME}` within {max:?}")]
    NotConfigured {
        /// How long was waited.
        max: Duration,
    },
    /// The runtime closed the connection before it had configured the plugin.
    #[error(
        "the container runtime closed the connection before it configured the plugin `{NAME}`; its log says why"
    )]
    ClosedEarly,
    /// The runtime reads no answers.
    #[error("the container runtime did not read an answer within {} s", WRITE_MAX.as_secs())]
    Unread,
}

/// Registers on this connection to `nri.sock`, and has the plugin answer the runtime's calls until the runtime closes the
/// connection.
///
/// # Errors
/// If the registration is refused or not answered, or the connection fails.
pub async fn run<S, P>(socket: S, plugin: &mut P) -> Result<(), SessionError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
    P: Plugin,
{
    run_registering(socket, plugin, REGISTRATION_MAX).await
}

async fn run_registering<S, P>(socket: S, plugin: &mut P, max: Duration) -> Result<(), SessionError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
    P: Plugin,
{
    let mut session = Session::new(socket);
    session.register().await?;
    let deadline = Instant::now() + max;
    loop {
        let received = if session.is_configured {
            session.receive().await?
        } else {
            timeout_at(deadline, session.receive())
                .await
                .map_err(|_| SessionError::NotConfigured { max })??
        };
        match received {
            Some(message) => session.answer(message, plugin).await?,
            None if session.is_configured => return Ok(()),
            None => return Err(SessionError::ClosedEarly),
        }
    }
}

struct Session<S> {
    socket: S,
    decoder: Decoder,
    is_configured: bool,
    /// What a synchronization of several calls has brought so far.
    pods: Vec<PodSandbox>,
    containers: Vec<Container>,
}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Session<S> {
    fn new(socket: S) -> Self {
        let (pods, containers) = (Vec::new(), Vec::new());
        Self { socket, decoder: Decoder::default(), is_configured: false, pods, containers }
    }

    /// Sends the registration; its answer comes among the runtime's calls.
    async fn register(&mut self) -> Result<(), SessionError> {
        let plugin = RegisterPluginRequest { plugin_name: NAME.into(), plugin_idx: INDEX.into() };
        let request = Request {
            service: "nri.pkg.api.v1alpha1.Runtime".into(),
            method: "RegisterPlugin".into(),
            payload: plugin.encode_to_vec(),
            timeout_nano: i64::try_from(REGISTRATION_MAX.as_nanos()).unwrap_or(i64::MAX),
        };
        let (channel, kind) = (Channel::Runtime, Kind::Request);
        self.send(Message { channel, stream: REGISTRATION, kind, payload: request.encode_to_vec().into() })
            .await
    }

    /// The next message, or `None` once the runtime has closed the connection.
    async fn receive(&mut self) -> Result<Option<Message>, SessionError> {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            if let Some(message) = self.decoder.next()? {
                return Ok(Some(message));
            }
            match self.socket.read(&mut buffer).await? {
                0 => return Ok(None),
                read => self.decoder.push(&buffer[..read]),
            }
        }
    }

    async fn send(&mut self, message: Message) -> Result<(), SessionError> {
        let bytes = message.encode()?;
        timeout(WRITE_MAX, self.socket.write_all(&bytes)).await.map_err(|_| SessionError::Unread)??;
        Ok(())
    }

    async fn answer<P: Plugin>(&mut self, message: Message, plugin: &mut P) -> Result<(), SessionError> {
        let Message { channel, stream, kind, payload } = message;
        match (channel, kind) {
            (Channel::Plugin, Kind::Request) => {
                let response = match self.call(payload, plugin).await {
                    Ok(payload) => Response { status: None, payload },
                    Err(status) => Response { status: Some(status), payload: Vec::new() },
                };
                let payload = response.encode_to_vec().into();
                self.send(Message { channel, stream, kind: Kind::Response, payload }).await
            }
            (Channel::Runtime, Kind::Response) if stream == REGISTRATION => registered(&payload),
            // Berth makes no other call and serves no other connection.
            (Channel::Plugin, Kind::Response) | (Channel::Runtime, _) => Ok(()),
        }
    }

    fn configure<P: Plugin>(&mut self, request: ConfigureRequest, plugin: &mut P) -> Vec<u8> {
        let request_timeout = u64::try_from(request.request_timeout).ok().filter(|ms| *ms > 0);
        plugin.configure(RuntimeInfo {
            name: request.runtime_name,
            version: request.runtime_version,
            request_timeout: request_timeout.map(Duration::from_millis),
        });
        self.is_configured = true;
        ConfigureResponse { events: EVENTS }.encode_to_vec()
    }

    async fn synchronize<P: Plugin>(
        &mut self,
        request: SynchronizeRequest,
        plugin: &mut P,
    ) -> Result<Vec<u8>, Status> {
        let SynchronizeRequest { pods, containers, more } = request;
        self.pods.extend(pods);
        self.containers.extend(containers);
        if self.pods.len() + self.containers.len() > SYNCHRONIZED_MAX {
            let message = format!("more than {SYNCHRONIZED_MAX} pods and containers");
            return Err(Status { code: code::RESOURCE_EXHAUSTED, message });
        }
        if !more {
            plugin.synchronize(take(&mut self.pods), take(&mut self.containers)).await;
        }
        Ok(SynchronizeResponse { more }.encode_to_vec())
    }

    /// Makes the call of a request, and returns the encoded response.
    async fn call<P: Plugin>(&mut self, request: Bytes, plugin: &mut P) -> Result<Vec<u8>, Status> {
        let Request { method, payload, .. } = decode(&request)?;
        let payload = payload.as_slice();
        match method.as_str() {
            "Configure" => return Ok(self.configure(decode(payload)?, plugin)),
            "Synchronize" => return self.synchronize(decode(payload)?, plugin).await,
            "CreateContainer" => {
                let CreateContainerRequest { pod, container } = decode(payload)?;
                let adjust =
                    plugin.create_container(given(pod)?, given(container)?).await.map_err(refused)?;
                return Ok(CreateContainerResponse { adjust: Some(adjust) }.encode_to_vec());
            }
            "StartContainer" => {
                let StartContainerRequest { pod, container } = decode(payload)?;
                plugin.start_container(given(pod)?, given(container)?).await.map_err(refused)?;
            }
            "StopContainer" => {
                let StopContainerRequest { pod, container } = decode(payload)?;
                observe(Event::StopContainer, pod, container, plugin).await?;
            }
            "RemoveContainer" => {
                let RemoveContainerRequest { pod, container } = decode(payload)?;
                observe(Event::RemoveContainer, pod, container, plugin).await?;
            }
            "StopPodSandbox" => {
                let StopPodSandboxRequest { pod } = decode(payload)?;
                observe(Event::StopPodSandbox, pod, None, plugin).await?;
            }
            "RemovePodSandbox" => {
                let RemovePodSandboxRequest { pod } = decode(payload)?;
                observe(Event::RemovePodSandbox, pod, None, plugin).await?;
            }
            // Up to NRI 0.11 it brings all events but the creation and the stop of a container.
            "StateChange" => {
                let change: StateChangeEvent = decode(payload)?;
                match change.event() {
                    Event::StartContainer => {
                        let (pod, container) = (given(change.pod)?, given(change.container)?);
                        plugin.start_container(pod, container).await.map_err(refused)?;
                    }
                    event => observe(event, change.pod, change.container, plugin).await?,
                }
            }
            "Shutdown" => (),
            _ => {
                let message = format!("the plugin `{NAME}` has no method {method}");
                return Err(Status { code: code::UNIMPLEMENTED, message });
            }
        }
        // The responses of all other methods are empty.
        Ok(Vec::new())
    }
}

/// Whether the runtime has accepted the registration.
fn registered(response: &[u8]) -> Result<(), SessionError> {
    let refused = |status: Status| SessionError::Refused { code: status.code, message: status.message };
    let response: Response = decode(response).map_err(refused)?;
    match response.status.filter(|status| status.code != code::OK) {
        Some(status) => Err(refused(status)),
        None => Ok(()),
    }
}

async fn observe(
    event: Event,
    pod: Option<PodSandbox>,
    container: Option<Container>,
    plugin: &mut impl Plugin,
) -> Result<(), Status> {
    plugin.observe(ContainerEvent { event, pod: given(pod)?, container }).await;
    Ok(())
}

fn decode<T: prost::Message + Default>(bytes: &[u8]) -> Result<T, Status> {
    T::decode(bytes).map_err(|error| Status { code: code::INVALID_ARGUMENT, message: error.to_string() })
}

fn given<T>(field: Option<T>) -> Result<T, Status> {
    let missing = || Status { code: code::INVALID_ARGUMENT, message: "a pod or container is missing".into() };
    field.ok_or_else(missing)
}

fn refused(Refusal(message): Refusal) -> Status {
    Status { code: code::UNKNOWN, message }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use berth_proto::nri::{ContainerAdjustment, KeyValue};
    use tokio::io::DuplexStream;

    #[derive(Default)]
    struct Recorder {
        runtime: Option<RuntimeInfo>,
        synchronized: Vec<(usize, usize)>,
        started: Vec<String>,
        events: Vec<(Event, String)>,
    }

    impl Plugin for Recorder {
        fn configure(&mut self, runtime: RuntimeInfo) {
            self.runtime = Some(runtime);
        }

        async fn synchronize(&mut self, pods: Vec<PodSandbox>, containers: Vec<Container>) {
            self.synchronized.push((pods.len(), containers.len()));
        }

        async fn create_container(
            &mut self,
            _: PodSandbox,
            container: Container,
        ) -> Result<ContainerAdjustment, Refusal> {
            if container.name == "refused" {
                return Err(Refusal("ask for nvidia.com/gpu".into()));
            }
            let env = vec![KeyValue { key: "SEEN".into(), value: container.name }];
            Ok(ContainerAdjustment { env, ..ContainerAdjustment::default() })
        }

        async fn start_container(&mut self, _: PodSandbox, container: Container) -> Result<(), Refusal> {
            self.started.push(container.name);
            Ok(())
        }

        async fn observe(&mut self, event: ContainerEvent) {
            self.events.push((event.event, event.pod.name));
        }
    }

    /// The runtime's end of a connection.
    pub(crate) struct Runtime<S> {
        session: Session<S>,
        calls: u32,
    }

    impl<S: AsyncRead + AsyncWrite + Unpin + Send> Runtime<S> {
        pub(crate) fn new(socket: S) -> Self {
            Self { session: Session::new(socket), calls: 0 }
        }

        pub(crate) async fn call<T: prost::Message>(
            &mut self,
            method: &str,
            payload: &T,
        ) -> Result<Vec<u8>, Status> {
            let stream = 2 * self.calls + 1;
            self.calls += 1;
            let payload = payload.encode_to_vec();
            let (service, method) = ("nri.pkg.api.v1alpha1.Plugin".into(), method.into());
            let request = Request { service, method, payload, timeout_nano: 0 }.encode_to_vec().into();
            let (channel, kind) = (Channel::Plugin, Kind::Request);
            self.session.send(Message { channel, stream, kind, payload: request }).await.unwrap();
            let answer = self.session.receive().await.unwrap().expect("an answer");
            assert_eq!((answer.channel, answer.stream, answer.kind), (channel, stream, Kind::Response));
            let response = Response::decode(answer.payload).unwrap();
            response.status.map_or(Ok(response.payload), Err)
        }

        /// Answers the registration.
        async fn accept(&mut self, status: Option<Status>) -> RegisterPluginRequest {
            let message = self.session.receive().await.unwrap().expect("a registration");
            assert_eq!((message.channel, message.kind), (Channel::Runtime, Kind::Request));
            let request = Request::decode(message.payload).unwrap();
            let payload = Response { status, payload: Vec::new() }.encode_to_vec().into();
            let answer =
                Message { channel: message.channel, stream: message.stream, kind: Kind::Response, payload };
            self.session.send(answer).await.unwrap();
            RegisterPluginRequest::decode(request.payload.as_slice()).unwrap()
        }

        pub(crate) async fn configure(&mut self) {
            self.accept(None).await;
            let request = ConfigureRequest {
                runtime_name: "containerd".into(),
                runtime_version: "2.4.2".into(),
                request_timeout: 2000,
                ..ConfigureRequest::default()
            };
            let answer = self.call("Configure", &request).await.unwrap();
            let events = ConfigureResponse::decode(answer.as_slice()).unwrap().events;
            assert_eq!(
                events, 0x62E,
                "stop and removal of pods; creation, start, stop and removal of containers"
            );
        }
    }

    /// A plugin that runs against what a test does as the runtime.
    async fn with_runtime(
        test: impl AsyncFnOnce(&mut Runtime<DuplexStream>),
    ) -> (Recorder, Result<(), SessionError>) {
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        let mut plugin = Recorder::default();
        let mut runtime = Runtime::new(theirs);
        let (ended, ()) = tokio::join!(run(ours, &mut plugin), async {
            test(&mut runtime).await;
            drop(runtime);
        });
        (plugin, ended)
    }

    fn pod(name: &str) -> PodSandbox {
        PodSandbox { name: name.into(), ..PodSandbox::default() }
    }

    fn container(name: &str) -> Container {
        Container { name: name.into(), ..Container::default() }
    }

    #[tokio::test]
    async fn a_container_is_seen_from_its_creation_to_its_removal() {
        let (plugin, ended) = with_runtime(async |runtime| {
            runtime.configure().await;
            let (pod, container) = (Some(pod("p")), Some(container("main")));
            let create = CreateContainerRequest { pod: pod.clone(), container: container.clone() };
            let answer = runtime.call("CreateContainer", &create).await.unwrap();
            let adjust = CreateContainerResponse::decode(answer.as_slice()).unwrap().adjust.unwrap();
            assert_eq!(adjust.env, [KeyValue { key: "SEEN".into(), value: "main".into() }]);
            let start = StartContainerRequest { pod: pod.clone(), container: container.clone() };
            assert_eq!(runtime.call("StartContainer", &start).await, Ok(Vec::new()));
            let stop = StopContainerRequest { pod: pod.clone(), container: container.clone() };
            runtime.call("StopContainer", &stop).await.unwrap();
            // An older runtime's start and removal.
            for event in [Event::StartContainer, Event::RemoveContainer] {
                let change =
                    StateChangeEvent { event: event.into(), pod: pod.clone(), container: container.clone() };
                runtime.call("StateChange", &change).await.unwrap();
            }
            runtime.call("StopPodSandbox", &StopPodSandboxRequest { pod: pod.clone() }).await.unwrap();
            runtime.call("RemovePodSandbox", &RemovePodSandboxRequest { pod }).await.unwrap();
        })
        .await;
        ended.unwrap();
        let request_timeout = Some(Duration::from_secs(2));
        let runtime = RuntimeInfo { name: "containerd".into(), version: "2.4.2".into(), request_timeout };
        assert_eq!(plugin.runtime, Some(runtime));
        assert_eq!(plugin.started, ["main", "main"]);
        let events =
            [Event::StopContainer, Event::RemoveContainer, Event::StopPodSandbox, Event::RemovePodSandbox];
        assert_eq!(plugin.events, events.map(|event| (event, "p".to_owned())));
    }

    #[tokio::test]
    async fn a_synchronization_of_several_calls_is_one_view() {
        let (plugin, _) = with_runtime(async |runtime| {
            runtime.configure().await;
            for more in [true, true, false] {
                let pods = vec![pod("p")];
                let containers = vec![container("a"), container("b")];
                let answer =
                    runtime.call("Synchronize", &SynchronizeRequest { pods, containers, more }).await;
                let answer = SynchronizeResponse::decode(answer.unwrap().as_slice()).unwrap();
                assert_eq!(answer.more, more, "a plugin that does not repeat it is given up");
            }
        })
        .await;
        assert_eq!(plugin.synchronized, [(3, 6)]);
    }

    #[tokio::test]
    async fn a_refusal_an_unknown_method_and_a_malformed_call_are_errors_of_that_call() {
        let (plugin, ended) = with_runtime(async |runtime| {
            runtime.configure().await;
            let refused =
                CreateContainerRequest { pod: Some(pod("p")), container: Some(container("refused")) };
            let status = runtime.call("CreateContainer", &refused).await.unwrap_err();
            assert_eq!(status.message, "ask for nvidia.com/gpu");
            let status = runtime.call("UpdateContainer", &refused).await.unwrap_err();
            assert_eq!(status.code, code::UNIMPLEMENTED);
            let missing = StartContainerRequest { pod: Some(pod("p")), container: None };
            let status = runtime.call("StartContainer", &missing).await.unwrap_err();
            assert_eq!(status.code, code::INVALID_ARGUMENT);
            let many = vec![pod("p"); SYNCHRONIZED_MAX + 1];
            let many = SynchronizeRequest { pods: many, ..SynchronizeRequest::default() };
            let status = runtime.call("Synchronize", &many).await.unwrap_err();
            assert_eq!(status.code, code::RESOURCE_EXHAUSTED);
        })
        .await;
        ended.unwrap();
        assert!(plugin.started.is_empty() && plugin.synchronized.is_empty());
    }

    #[tokio::test]
    async fn a_registration_that_is_refused_closed_or_not_answered_ends_the_session() {
        let (_, ended) = with_runtime(async |runtime| {
            let status = Status { code: code::UNKNOWN, message: "plugins are disabled".into() };
            let request = runtime.accept(Some(status)).await;
            assert_eq!((request.plugin_name.as_str(), request.plugin_idx.as_str()), ("berth", "90"));
            assert!(runtime.session.receive().await.unwrap().is_none(), "it is closed");
        })
        .await;
        let refused = ended.unwrap_err().to_string();
        assert!(refused.contains("plugins are disabled"), "{refused}");
        let (_, ended) = with_runtime(async |runtime| drop(runtime.accept(None).await)).await;
        assert!(matches!(ended, Err(SessionError::ClosedEarly)), "{ended:?}");
        let (ours, _silent) = tokio::io::duplex(1 << 20);
        let max = Duration::from_millis(1);
        let ended = run_registering(ours, &mut Recorder::default(), max).await;
        assert!(matches!(ended, Err(SessionError::NotConfigured { .. })), "{ended:?}");
    }

    #[tokio::test]
    async fn bytes_that_are_not_the_protocol_end_the_session_with_their_cause() {
        let (_, ended) = with_runtime(async |runtime| {
            runtime.configure().await;
            runtime.session.socket.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        })
        .await;
        let ended = ended.unwrap_err().to_string();
        assert!(ended.contains("do not understand each other"), "{ended}");
    }
}
