//! The spans that the daemon makes of its work, for traces: every one of them, so that their names and
//! attributes are read in one place. Made only where a collector is configured; else each of these
//! functions costs a look at a flag, and gives a span that is none.
//!
//! Names are of a closed list, or of the routes of the API. Attributes follow OpenTelemetry's semantic
//! conventions (1.42) where these have a word, else they begin with `berth.`. None holds a token, an
//! environment, parameters of a policy or what an operator typed.

use std::fmt::Display;
use std::sync::OnceLock;
use tracing::field::{Empty, display};
use tracing::{Span, info_span};

/// By this target logs leave these spans out, and traces take no others.
pub const TARGET: &str = module_path!();
/// Longest path of a request that is kept, bytes: what the API has are names and UUIDs.
const PATH_BYTES_MAX: usize = 256;

/// Written once, before there are threads.
static EXPORTER: OnceLock<Exporter> = OnceLock::new();

/// The exporter of traces, as far as those who make spans need it.
#[derive(Clone, Copy, Debug)]
pub struct Exporter {
    /// Makes a span part of its caller's trace, by the headers `traceparent` and `tracestate`.
    pub set_parent: fn(&Span, traceparent: Option<&str>, tracestate: Option<&str>),
    /// What became of the spans so far.
    pub counts: fn() -> SpanCounts,
}

/// What became of the spans since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanCounts {
    /// Spans that the collector took.
    pub exported: u64,
    /// Spans that it did not take.
    pub failed: u64,
    /// Spans that found no room in the queue.
    pub dropped: u64,
}

/// From now on spans are made.
pub fn turn_on(exporter: Exporter) {
    let _ = EXPORTER.set(exporter);
}

/// Makes a span part of its caller's trace, where the headers name one.
pub fn set_parent(span: &Span, traceparent: Option<&str>, tracestate: Option<&str>) {
    if let Some(exporter) = EXPORTER.get() {
        (exporter.set_parent)(span, traceparent, tracestate);
    }
}

/// What became of the spans so far; all zero while traces are off.
#[must_use]
pub fn counts() -> SpanCounts {
    EXPORTER.get().map(|exporter| (exporter.counts)()).unwrap_or_default()
}

/// Whether spans are made.
#[must_use]
pub fn is_on() -> bool {
    EXPORTER.get().is_some()
}

/// The span of the work at hand, to go along with it to another thread.
#[must_use]
pub fn here() -> Span {
    if is_on() { Span::current() } else { Span::none() }
}

/// Work for another thread, in the span of the work at hand.
pub fn carried<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let span = here();
    move || span.in_scope(work)
}

/// A request to the admin API. `route` is its template.
#[must_use]
pub fn http(method: &'static str, route: Option<&str>, path: &str, tls: bool) -> Span {
    if !is_on() {
        return Span::none();
    }
    let word = if method == "_OTHER" { "HTTP" } else { method };
    let name = route.map_or_else(|| word.to_owned(), |route| format!("{word} {route}"));
    let path = &path[..path.floor_char_boundary(PATH_BYTES_MAX)];
    info_span!(
        "http", otel.name = name, otel.kind = "server", otel.status_code = Empty,
        http.request.method = method, http.route = route, url.path = path,
        url.scheme = if tls { "https" } else { "http" },
        http.response.status_code = Empty, error.type = Empty
    )
}

/// What a request was answered. A client's mistake is no error of ours.
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

/// What a call was answered, by gRPC's word and number for it. A refusal is no error of ours.
pub fn grpc_answered(span: &Span, word: &'static str, code: i32) {
    span.record("rpc.response.status_code", word);
    if code != 0 {
        span.record("error.type", word);
    }
    // Those that the conventions hold a server to: UNKNOWN, DEADLINE_EXCEEDED, UNIMPLEMENTED, INTERNAL,
    // UNAVAILABLE, DATA_LOSS.
    if [2, 4, 12, 13, 14, 15].contains(&code) {
        span.record("otel.status_code", "ERROR");
    }
}

/// Which allocation the call at hand came to.
pub fn granted(allocation: &dyn Display) {
    if is_on() {
        Span::current().record("berth.allocation", display(allocation));
    }
}

/// One list that the kubelet is sent, with whether each device is healthy. The stream itself lasts as long as the kubelet, and a span is only
/// seen when it ends.
#[must_use]
pub fn device_list(resource: &dyn Display, devices: impl Iterator<Item = bool>) -> Span {
    if !is_on() {
        return Span::none();
    }
    let (devices, healthy) =
        devices.fold((0_usize, 0_usize), |(all, well), is| (all + 1, well + usize::from(is)));
    info_span!(
        "v1beta1.DevicePlugin/ListAndWatch list", otel.kind = "producer",
        rpc.system.name = "grpc", rpc.method = "v1beta1.DevicePlugin/ListAndWatch",
        berth.resource = %resource, berth.devices = devices, berth.devices.healthy = healthy
    )
}

/// A look at the kubelet's accounts of who holds what.
#[must_use]
pub fn round() -> Span {
    info_span!("round", berth.outcome = Empty)
}

/// The stack asked one thing, policy by policy.
#[must_use]
pub fn stack(hook: &'static str) -> Span {
    if !is_on() {
        return Span::none();
    }
    info_span!("stack", otel.name = format!("stack {hook}"), berth.hook = hook, berth.calls = Empty)
}

/// How many policies were called.
pub fn stack_answered(span: &Span, calls: usize) {
    span.record("berth.calls", calls);
}

/// One call of one policy; `policy` is its name and the beginning of its digest.
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

/// What a policy said, for how much fuel; `fault` is the kind of what went wrong.
pub fn policy_answered(span: &Span, outcome: &'static str, fault: Option<&'static str>, fuel: u64) {
    span.record("berth.outcome", outcome).record("berth.fuel", fuel);
    if let Some(kind) = fault {
        span.record("error.type", kind).record("otel.status_code", "ERROR");
    }
}

/// A turn of the keeper for whoever asked. Turns that nobody traced waits for, such as that of each
/// second's tick, are none.
#[must_use]
pub fn turn(asked: &Span, command: &'static str) -> Span {
    if asked.is_none() {
        return Span::none();
    }
    info_span!(
        parent: asked, "keeper turn", otel.status_code = Empty, berth.command = command,
        berth.generation = Empty, berth.outcome = Empty, error.type = Empty
    )
}

/// What came of a turn. A refusal is an answer; the store's failing is an error.
pub fn turned(span: &Span, generation: u64, outcome: &'static str, failed: bool) {
    span.record("berth.generation", generation).record("berth.outcome", outcome);
    if failed {
        span.record("error.type", outcome).record("otel.status_code", "ERROR");
    }
}

/// Until a change is durable.
#[must_use]
pub fn append(writes: usize) -> Span {
    // Of a turn that is none, this is none, too.
    if here().is_none() { Span::none() } else { info_span!("store append", berth.records = writes) }
}

/// A policy taken in.
#[must_use]
pub fn upload(bytes: usize) -> Span {
    info_span!("policy upload", berth.module.bytes = bytes)
}

/// A policy compiled, in a process of its own.
#[must_use]
pub fn compile(bytes: usize) -> Span {
    info_span!("policy compile", berth.module.bytes = bytes, otel.status_code = Empty)
}

/// A GPU from the order to empty it until that is done or off.
#[must_use]
pub fn drain(gpu: &dyn Display, evict: bool) -> Span {
    info_span!("gpu drain", berth.gpu = %gpu, berth.evict = evict, berth.outcome = Empty)
}

/// A pod asked to leave a GPU, or deleted.
#[must_use]
pub fn evict(delete: bool, namespace: &str, pod: &str, uid: &str, gpu: &dyn Display) -> Span {
    info_span!(
        "pod evict", otel.name = if delete { "pod delete" } else { "pod evict" }, otel.kind = "client",
        k8s.namespace.name = namespace, k8s.pod.name = pod, k8s.pod.uid = uid, berth.gpu = %gpu,
        berth.outcome = Empty
    )
}

/// How a thing ended, in a word of a closed list.
pub fn ended(span: &Span, outcome: &'static str) {
    span.record("berth.outcome", outcome);
}

/// That a thing failed.
pub fn failed(span: &Span) {
    span.record("otel.status_code", "ERROR");
}
