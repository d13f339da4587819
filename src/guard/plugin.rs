//! What a session calls: the plugin, as the runtime sees it.

use berth_proto::nri::{Container, ContainerAdjustment, Event, PodSandbox};
use std::time::Duration;

/// The runtime, as it introduces itself in `Configure`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeInfo {
    /// Such as `containerd`.
    pub name: String,
    /// Its own version, not that of NRI.
    pub version: String,
    /// How long it waits for the answer of a call. A later answer closes the session, and the container goes on without
    /// the plugin.
    pub request_timeout: Option<Duration>,
}

/// Why a container is not to run. The runtime puts the text into its error, which the kubelet shows as an event of the
/// pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal(pub String);

/// An event that cannot be refused.
#[derive(Clone, Debug, PartialEq)]
pub struct ContainerEvent {
    /// Stop or removal of a container or pod.
    pub event: Event,
    /// The pod.
    pub pod: PodSandbox,
    /// The container, for an event of a container.
    pub container: Option<Container>,
}

/// A plugin of the runtime.
///
/// The runtime holds one lock for all plugins during a call, so each call delays every container of the node.
pub trait Plugin: Send {
    /// The runtime has accepted the registration.
    fn configure(&mut self, runtime: RuntimeInfo);

    /// All pods and containers that the runtime shows, once after `configure`. The runtime leaves out containers that it
    /// does not know or that have exited.
    fn synchronize(
        &mut self,
        pods: Vec<PodSandbox>,
        containers: Vec<Container>,
    ) -> impl Future<Output = ()> + Send;

    /// A container is being created; the adjustment is applied to it.
    ///
    /// # Errors
    /// A refusal fails the creation, and the kubelet tries again.
    fn create_container(
        &mut self,
        pod: PodSandbox,
        container: Container,
    ) -> impl Future<Output = Result<ContainerAdjustment, Refusal>> + Send;

    /// A container is about to run its first instruction; its cgroup and process exist.
    ///
    /// # Errors
    /// A refusal fails the start on containerd; CRI-O only logs it.
    fn start_container(
        &mut self,
        pod: PodSandbox,
        container: Container,
    ) -> impl Future<Output = Result<(), Refusal>> + Send;

    /// A container or pod has stopped or was removed. The runtime sends `StopContainer` after the stop, and also for a
    /// container that exited.
    fn observe(&mut self, event: ContainerEvent) -> impl Future<Output = ()> + Send;
}
