//! All spans of the daemon, so that their names and attributes are in one place. Spans are created only if a collector
//! is configured; otherwise each of these functions checks a flag and returns [`Span::none`].
//!
//! Names come from a closed list or from the API's routes. Attributes follow OpenTelemetry's semantic
//! conventions (1.42) where these define one, else they begin with `berth.`. No attribute holds a token, an
//! environment, policy parameters or text from an operator.

use std::fmt::Display;
use std::sync::OnceLock;
use tracing::field::{Empty, display};
use tracing::{Span, info_span};

/// Target of all these spans: logs exclude it, and traces include no other.
pub const TARGET: &str = module_path!();
/// Longest request path in an attribute, bytes: the API's paths hold names and UUIDs.
const PATH_BYTES_MAX: usize = 256;

/// Set once, before any thread starts.
static EXPORTER: OnceLock<Exporter> = OnceLock::new();

/// The part of the trace exporter that creating spans needs.
#[derive(Clone, Copy, Debug)]
pub struct Exporter {
    /// Makes a span part of its client's trace, from the headers `traceparent` and `tracestate`.
    pub set_parent: fn(&Span, traceparent: Option<&str>, tracestate: Option<&str>),
    /// Counts the spans so far by outcome.
    pub counts: fn() -> SpanCounts,
}

/// Spans since the start, by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanCounts {
    /// Spans that the collector accepted.
    pub exported: u64,
    /// Spans that the collector refused, or that could not be sent.
    pub failed: u64,
    /// Spans dropped because the queue was full.
    pub dropped: u64,
}

/// Enables spans.
pub fn turn_on(exporter: Exporter) {
    let _ = EXPORTER.set(exporter);
}

/// Makes a span part of its client's trace, if the headers name one.
pub fn set_parent(span: &Span, traceparent: Option<&str>, tracestate: Option<&str>) {
    if let Some(exporter) = EXPORTER.get() {
        (exporter.set_parent)(span, traceparent, tracestate);
    }
}

/// Spans so far, by outcome; all zero while traces are off.
#[must_use]
pub fn counts() -> SpanCounts {
    EXPORTER.get().map(|exporter| (exporter.counts)()).unwrap_or_default()
}

/// Whether spans are enabled.
#[must_use]
pub fn is_on() -> bool {
    EXPORTER.get().is_some()
}

/// The current span, to be passed to another thread with the work.
#[must_use]
pub fn current() -> Span {
    if is_on() { Span::current() } else { Span::none() }
}

/// Wraps work for another thread so that it runs in the current span.
pub fn in_current_span<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let span = current();
    move || span.in_scope(work)
}

/// A request to the admin API. `route` is its template.
#[must_use]
pub fn http(method: &'static str, route: Option<&str>, path: &str, tls: bool) -> Span {
    if !is_on() {
        return Span::none();
    }
    let verb = if method == "_OTHER" { "HTTP" } else { method };
    let name = route.map_or_else(|| verb.to_owned(), |route| format!("{verb} {route}"));
    let path = &path[..path.floor_char_boundary(PATH_BYTES_MAX)];
    info_span!(
        "http", otel.name = name, otel.kind = "server", otel.status_code = Empty,
        http.request.method = method, http.route = route, url.path = path,
        url.scheme = if tls { "https" } else { "http" },
        http.response.status_code = Empty, error.type = Empty
    )
}

/// Records a response's status. A client error does not mark the span as failed.
pub fn http_answered(span: &Span, status: u16) {
    span.record("http.response.status_code", status);
    if status >= 500 {
        span.record("error.type", display(status)).record("otel.status_code", "ERROR");
    }
}

/// A call of the device plugin API, on the socket of one resource.
#[must_use]
pub fn grpc(method: &'static str, resource: &dyn Display) -> Span {
    if !is_on() {
        return Span::none();
    }
    let method = format!("v1beta1.DevicePlugin/{method}");
    info_span!(
        "grpc", otel.name = method, otel.kind = "server", otel.status_code = Empty,
        rpc.system.name = "grpc", rpc.method = method, rpc.response.status_code = Empty, error.type = Empty,
        network.transport = "unix", berth.resource = %resource, berth.allocation = Empty
    )
}

/// Records a call's gRPC status by name and number. A refusal does not mark the span as failed.
pub fn grpc_answered(span: &Span, name: &'static str, code: i32) {
    span.record("rpc.response.status_code", name);
    if code != 0 {
        span.record("error.type", name);
    }
    // The conventions count these as server errors: UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED, INTERNAL,
    // UNAVAILABLE, DATA_LOSS.
    if [2, 4, 12, 13, 14, 15].contains(&code) {
        span.record("otel.status_code", "ERROR");
    }
}

/// Records the allocation that the current call was granted.
pub fn granted(allocation: &dyn Display) {
    if is_on() {
        Span::current().record("berth.allocation", display(allocation));
    }
}

/// One device list sent to the kubelet; `devices` yields whether each device is healthy. The stream itself has no span:
/// it lasts as long as the kubelet, and a span is exported only when it ends.
#[must_use]
pub fn device_list(resource: &dyn Display, devices: impl Iterator<Item = bool>) -> Span {
    if !is_on() {
        return Span::none();
    }
    let (devices, healthy) =
        devices.fold((0_usize, 0_usize), |(all, healthy), is| (all + 1, healthy + usize::from(is)));
    info_span!(
        "v1beta1.DevicePlugin/ListAndWatch list", otel.kind = "producer",
        rpc.system.name = "grpc", rpc.method = "v1beta1.DevicePlugin/ListAndWatch",
        berth.resource = %resource, berth.devices = devices, berth.devices.healthy = healthy
    )
}

/// A reconcile pass over the kubelet's reports of device holders.
#[must_use]
pub fn reconcile_pass() -> Span {
    info_span!("reconcile pass", berth.outcome = Empty)
}

/// One evaluation of the stack.
#[must_use]
pub fn stack(hook: &'static str) -> Span {
    if !is_on() {
        return Span::none();
    }
    info_span!("stack", otel.name = format!("stack {hook}"), berth.hook = hook, berth.calls = Empty)
}

/// Records the number of policy calls of an evaluation.
pub fn stack_evaluated(span: &Span, calls: usize) {
    span.record("berth.calls", calls);
}

/// One call of one policy; `policy` returns its name and the beginning of its digest.
#[must_use]
pub fn policy(hook: &'static str, policy: impl FnOnce() -> String) -> Span {
    if !is_on() {
        return Span::none();
    }
    let policy = policy();
    info_span!(
        "policy", otel.name = format!("policy {hook}"), otel.status_code = Empty, berth.hook = hook,
        berth.policy = policy, berth.fuel = Empty, berth.outcome = Empty, error.type = Empty
    )
}

/// Records a policy's answer and fuel; `fault` is the kind of fault, if any.
pub fn policy_answered(span: &Span, outcome: &'static str, fault: Option<&'static str>, fuel: u64) {
    span.record("berth.outcome", outcome).record("berth.fuel", fuel);
    if let Some(kind) = fault {
        span.record("error.type", kind).record("otel.status_code", "ERROR");
    }
}

/// A turn of the keeper, as a child of the submitter's span. Turns without one, such as ticks, have no span.
#[must_use]
pub fn turn(submitter: &Span, command: &'static str) -> Span {
    if submitter.is_none() {
        return Span::none();
    }
    info_span!(
        parent: submitter, "keeper turn", otel.status_code = Empty, berth.command = command,
        berth.generation = Empty, berth.outcome = Empty, error.type = Empty
    )
}

/// Records a turn's outcome. A refusal does not mark the span as failed, a failure of the store does.
pub fn turn_ended(span: &Span, generation: u64, outcome: &'static str, failed: bool) {
    span.record("berth.generation", generation).record("berth.outcome", outcome);
    if failed {
        span.record("error.type", outcome).record("otel.status_code", "ERROR");
    }
}

/// An append to the store, until it is durable.
#[must_use]
pub fn append(writes: usize) -> Span {
    // A turn without a span has no append span either.
    if current().is_none() { Span::none() } else { info_span!("store append", berth.records = writes) }
}

/// An upload of a policy.
#[must_use]
pub fn upload(bytes: usize) -> Span {
    info_span!("policy upload", berth.module.bytes = bytes)
}

/// A compilation of a policy, in the compile child.
#[must_use]
pub fn compile(bytes: usize) -> Span {
    info_span!("policy compile", berth.module.bytes = bytes, otel.status_code = Empty)
}

/// A GPU's drain, from the order until the GPU is drained, or the drain is stopped or given up.
#[must_use]
pub fn drain(gpu: &dyn Display, evict: bool) -> Span {
    info_span!("gpu drain", berth.gpu = %gpu, berth.evict = evict, berth.outcome = Empty)
}

/// An eviction or deletion of a pod on a GPU that is being drained.
#[must_use]
pub fn evict(delete: bool, namespace: &str, pod: &str, uid: &str, gpu: &dyn Display) -> Span {
    info_span!(
        "pod evict", otel.name = if delete { "pod delete" } else { "pod evict" }, otel.kind = "client",
        k8s.namespace.name = namespace, k8s.pod.name = pod, k8s.pod.uid = uid, berth.gpu = %gpu,
        berth.outcome = Empty
    )
}

/// Records an outcome, from a closed list.
pub fn ended(span: &Span, outcome: &'static str) {
    span.record("berth.outcome", outcome);
}

/// Marks a span as failed.
pub fn failed(span: &Span) {
    span.record("otel.status_code", "ERROR");
}
