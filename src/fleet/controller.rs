//! The controller: watches Nodes, GPUNodes and SharingPolicies, and writes what the [`plan`](crate::plan) says while it holds the lease.
//!
//! The nodes need no living controller: each judges by itself whether it keeps a stack. Each write names the version that was read,
//! so that a controller that has lost the lease without knowing it changes nothing that its successor has written.

use crate::gpu_node::GpuNode;
use crate::lease;
use crate::plan::{Assignment, Memory, NodeFacts, Now, Plan, View, plan};
use crate::resolver::Resolver;
use crate::sharing_policy::{RolloutStatus, SharingPolicy, SharingPolicyStatus};
use crate::{CONTROLLER, GROUP};
use berth_kube::{Backoff, Cause, Connection, Error, Event, RequestError, events, random, request};
use berth_oci::{PullSettings, Puller};
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout_at};

/// How often the plan is made; `perSecond` counts on it.
const PLANNED_EVERY: Duration = Duration::from_secs(1);
/// The longest wait after the watches were lost.
const RECONNECT_WAIT_MAX: Duration = Duration::from_secs(10);
/// What the watches need.
const RIGHT: &str = "list and watch nodes, gpunodes and sharingpolicies; ClusterRole berth-controller";
/// What the writes need.
const WRITE_RIGHT: &str = "patch gpunodes and sharingpolicies/status; ClusterRole berth-controller";
/// What a 404 means.
const NO_KIND: &str = "the CustomResourceDefinitions of fleet.berth.dev are not installed: run `kubectl apply -f deploy/helm/berth/files/crds`";

/// Settings of the controller.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The connection to the API server.
    pub connection: Connection,
    /// The namespace of the lease; `None`: that of the service account or kubeconfig.
    pub namespace: Option<String>,
    /// The beginning of the name by which the lease knows this process, such as the name of its pod.
    pub name: String,
    /// Where the tags of stacks are resolved.
    pub pull: PullSettings,
}

/// A running controller.
pub struct Controller {
    connection: Connection,
    client: Client,
    leases: Api<Lease>,
    identity: String,
    puller: Puller,
}

impl Controller {
    /// A controller, which has sent no request yet.
    ///
    /// # Errors
    /// If the API server cannot be used; the error names the remedy.
    pub async fn new(settings: Settings) -> Result<Self, berth_kube::ConnectError> {
        let Settings { connection, namespace, name, pull } = settings;
        let (client, url) = connection.client().await?;
        let namespace = namespace.unwrap_or_else(|| client.default_namespace().to_owned());
        let identity = format!("{name}_{:08x}", random());
        tracing::info!(api_server = url, namespace, identity, "the controller starts");
        let leases = Api::namespaced(client.clone(), &namespace);
        Ok(Self { connection, client, leases, identity, puller: Puller::new(pull) })
    }

    /// Runs; never returns.
    pub async fn run(&self) {
        let (held_until, lease) = watch::channel(None);
        tokio::join!(
            lease::keep(&self.connection, self.leases.clone(), &self.identity, &held_until),
            self.follow(lease),
        );
    }

    /// Gives the lease back at the end. An error is logged: the lease ends by itself.
    pub async fn release(&self) {
        if let Err(why) = lease::release(&self.leases, &self.identity).await {
            tracing::warn!(why, "the lease of the controller was not given back; it ends by itself");
        }
    }

    async fn follow(&self, lease: watch::Receiver<Option<Instant>>) {
        let start = Instant::now();
        let mut nodes =
            Source::new(&self.connection, "the nodes", Api::<Node>::all(self.client.clone()), node_facts);
        let mut gpu_nodes = Source::new(
            &self.connection,
            "the GPUNodes",
            Api::<GpuNode>::all(self.client.clone()),
            trimmed_gpu_node,
        );
        let mut policies = Source::new(
            &self.connection,
            "the SharingPolicies",
            Api::<SharingPolicy>::all(self.client.clone()),
            trimmed_policy,
        );
        let mut writer = Writer {
            gpu_nodes: Api::all(self.client.clone()),
            policies: Api::all(self.client.clone()),
            connection: &self.connection,
            lease,
            from: start,
            backoff: Backoff::new(self.connection.retry_interval),
            last_error: None,
        };
        let mut resolver = Resolver::new(self.puller.clone());
        let mut view = View::default();
        let mut memory: Option<Memory> = None;
        let mut ticks = interval(PLANNED_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                event = nodes.next() => apply(&mut view.nodes, event, |_, _| true),
                event = gpu_nodes.next() => apply(&mut view.gpu_nodes, event, is_newer),
                event = policies.next() => apply(&mut view.policies, event, is_newer),
                () = resolver.done() => {}
                _ = ticks.tick() => {
                    if writer.held_until().is_none() {
                        if memory.take().is_some() {
                            tracing::warn!("the controller has lost its lease, and writes nothing");
                        }
                        continue;
                    }
                    if !(nodes.is_current && gpu_nodes.is_current && policies.is_current) {
                        continue;
                    }
                    // A controller that gets the lease has seen nothing yet: its waits begin now.
                    let memory = memory.get_or_insert_with(|| {
                        tracing::info!("the controller has the lease");
                        Memory::default()
                    });
                    let now = Now { since_start: start.elapsed(), wall: wall_time() };
                    let plan = plan(&view, memory, resolver.known(), &now);
                    resolver.begin(&plan.unresolved, &view.policies);
                    writer.write(plan, &mut view).await;
                }
            }
        }
    }
}

/// The wall clock in whole seconds, as Kubernetes has it.
fn wall_time() -> Time {
    Time(Timestamp::from_second(Timestamp::now().as_second()).unwrap_or(Timestamp::MAX))
}

/// Objects of one kind.
struct Source<T> {
    connection: Connection,
    stream: BoxStream<'static, Result<Event<(String, T)>, Error>>,
    backoff: Backoff,
    from: Instant,
    /// Whether all objects were listed and are watched.
    is_current: bool,
    last_error: Option<String>,
}

impl<T: Send + 'static> Source<T> {
    fn new<K>(
        connection: &Connection,
        what: &'static str,
        api: Api<K>,
        convert: fn(&K) -> Option<(String, T)>,
    ) -> Self
    where
        K: kube::Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + Sync + 'static,
    {
        Self {
            connection: connection.clone(),
            stream: events(connection, what, api, None, convert).boxed(),
            backoff: Backoff::new(connection.retry_interval),
            from: Instant::now(),
            is_current: false,
            last_error: None,
        }
    }

    /// The next event. The future can be dropped at any time.
    async fn next(&mut self) -> Event<(String, T)> {
        loop {
            sleep_until(self.from).await;
            match self.stream.next().await {
                Some(Ok(event)) => {
                    match &event {
                        Event::Listing => self.is_current = false,
                        Event::Opened => {
                            self.is_current = true;
                            self.last_error = None;
                            self.backoff.reset();
                        }
                        Event::Listed(_) | Event::Applied(_) | Event::Deleted(_) => {}
                    }
                    return event;
                }
                Some(Err(error)) => self.note(&error),
                None => std::future::pending().await,
            }
        }
    }

    fn note(&mut self, error: &Error) {
        let was_open = std::mem::replace(&mut self.is_current, false);
        self.from = error.retry_at(&self.connection, &mut self.backoff, was_open, RECONNECT_WAIT_MAX);
        let text = error.text(RIGHT, NO_KIND);
        if !matches!(error.cause, Cause::Expired) && self.last_error.as_ref() != Some(&text) {
            tracing::warn!(why = text, "the controller assigns nothing until it sees all objects again");
            self.last_error = Some(text);
        }
    }
}

/// Applies an event. `is_newer(new, known)`: whether an object replaces the known one of its name, which may be the answer to a
/// write that was later.
fn apply<T>(known: &mut BTreeMap<String, T>, event: Event<(String, T)>, is_newer: fn(&T, &T) -> bool) {
    match event {
        Event::Listing | Event::Opened => {}
        Event::Listed(all) => *known = all.into_iter().collect(),
        Event::Applied((name, object)) => {
            if known.get(&name).is_none_or(|before| is_newer(&object, before)) {
                known.insert(name, object);
            }
        }
        Event::Deleted((name, _)) => {
            known.remove(&name);
        }
    }
}

/// Whether an object is not older than the known one, by its specification: the status has no number.
fn is_newer<K: ResourceExt>(object: &K, known: &K) -> bool {
    object.uid() != known.uid() || object.meta().generation >= known.meta().generation
}

fn node_facts(node: &Node) -> Option<(String, NodeFacts)> {
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let is_true = |type_: &str| {
        conditions.is_some_and(|all| all.iter().any(|one| one.type_ == type_ && one.status == "True"))
    };
    let facts = NodeFacts {
        uid: node.metadata.uid.clone()?,
        labels: node.metadata.labels.clone().unwrap_or_default(),
        is_ready: is_true("Ready") && !is_true("MaintenanceInProgress"),
    };
    Some((node.metadata.name.clone()?, facts))
}

fn trimmed_gpu_node(object: &GpuNode) -> Option<(String, GpuNode)> {
    let mut object = object.clone();
    object.metadata.managed_fields = None;
    if let Some(status) = &mut object.status {
        status.gpus = None;
    }
    Some((object.metadata.name.clone()?, object))
}

fn trimmed_policy(object: &SharingPolicy) -> Option<(String, SharingPolicy)> {
    let mut object = object.clone();
    object.metadata.managed_fields = None;
    Some((object.metadata.name.clone()?, object))
}

/// Writes what a plan says.
struct Writer<'c> {
    gpu_nodes: Api<GpuNode>,
    policies: Api<SharingPolicy>,
    connection: &'c Connection,
    lease: watch::Receiver<Option<Instant>>,
    /// Nothing is written before.
    from: Instant,
    backoff: Backoff,
    last_error: Option<String>,
}

impl Writer<'_> {
    /// Until when this process may write; `None` if it may not.
    fn held_until(&self) -> Option<Instant> {
        self.lease.borrow().filter(|until| *until > Instant::now())
    }

    /// The answers replace the objects of the view.
    async fn write(&mut self, plan: Plan, view: &mut View) {
        if Instant::now() < self.from {
            return;
        }
        for (name, status) in plan.statuses {
            let Some(policy) = view.policies.get(&name) else { continue };
            log_change(&name, policy.status.as_ref(), &status);
            let patch = Patch::Apply(json!({
                "apiVersion": format!("{GROUP}/v1alpha1"),
                "kind": "SharingPolicy",
                "metadata": identity(policy),
                "status": status,
            }));
            let params = PatchParams::apply(CONTROLLER).force();
            match self.send(self.policies.patch_status(&name, &params, &patch)).await {
                Some(Ok(written)) => view.policies.extend(trimmed_policy(&written)),
                Some(Err(error)) if self.note(&error, &format!("the status of SharingPolicy {name}")) => {}
                Some(Err(_)) | None => return,
            }
        }
        for Assignment { node, stack } in plan.assignments {
            let Some(object) = view.gpu_nodes.get(&node) else { continue };
            tracing::info!(
                node,
                policy = stack.policy,
                revision = stack.revision,
                "a node is assigned a stack"
            );
            let patch = Patch::Apply(json!({
                "apiVersion": format!("{GROUP}/v1alpha1"),
                "kind": "GPUNode",
                "metadata": identity(object),
                "spec": {"stack": stack},
            }));
            let params = PatchParams::apply(CONTROLLER).force();
            match self.send(self.gpu_nodes.patch(&node, &params, &patch)).await {
                Some(Ok(written)) => view.gpu_nodes.extend(trimmed_gpu_node(&written)),
                Some(Err(error)) if self.note(&error, &format!("GPUNode {node}")) => {}
                Some(Err(_)) | None => return,
            }
        }
        self.backoff.reset();
        self.last_error = None;
    }

    /// Sends a request while the lease is held; `None` if it is not, or no longer.
    async fn send<T>(&self, write: impl Future<Output = kube::Result<T>>) -> Option<Result<T, RequestError>> {
        let until = self.held_until()?;
        timeout_at(until, request(write, WRITE_RIGHT)).await.ok()
    }

    /// Whether the next write can follow: the object was changed or deleted meanwhile, and the watch shows it.
    fn note(&mut self, error: &RequestError, what: &str) -> bool {
        if matches!(error.code(), 404 | 409) {
            return true;
        }
        let now = Instant::now();
        self.from = now + self.connection.retry_after.delay(self.backoff.next(random()), now);
        let text = format!("{what}: {}", error.why);
        if self.last_error.as_ref() != Some(&text) {
            tracing::warn!(why = text, "a write of the controller has failed; it writes again after a while");
            self.last_error = Some(text);
        }
        false
    }
}

/// What a write is about: the object that was read, in the version that was read.
fn identity(object: &impl ResourceExt) -> serde_json::Value {
    json!({
        "name": object.name_any(),
        "uid": object.uid(),
        "resourceVersion": object.resource_version(),
    })
}

/// Logs a rollout that goes on to another step, or ends.
fn log_change(name: &str, before: Option<&SharingPolicyStatus>, after: &SharingPolicyStatus) {
    let state =
        |rollout: &RolloutStatus| (rollout.revision.clone(), rollout.attempt, rollout.phase, rollout.step);
    let known = before.and_then(|status| status.rollout.as_ref()).map(state);
    let Some(rollout) = &after.rollout else { return };
    if known.as_ref() != Some(&state(rollout)) {
        let RolloutStatus { revision, phase, step, .. } = rollout;
        let stalled = after.conditions.iter().flatten().find(|one| one.type_ == "Stalled");
        let why = stalled.map_or("", |one| one.message.as_str());
        tracing::info!(policy = name, revision, ?phase, step, why, "a rollout has changed");
    }
}
