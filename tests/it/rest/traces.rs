//! Traces by OTLP: the daemon as a process, with a collector of the test that decodes them.

use crate::support::gpus::WHOLE;
use crate::support::process_node::{DaemonProcess, ProcessNode, berth, ended};
use crate::support::wait::SOON;
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value as Is};
use opentelemetry_proto::tonic::trace::v1::{Span, span::SpanKind};
use prost::Message;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// What a collector has got.
#[derive(Clone, Default)]
struct Got {
    spans: Arc<Mutex<Vec<Span>>>,
    resource: Arc<Mutex<BTreeMap<String, String>>>,
    /// Of the newest request.
    authorization: Arc<Mutex<Option<String>>>,
}

#[tonic::async_trait]
impl TraceService for Got {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let authorization = request.metadata().get("authorization").map(|v| v.to_str().unwrap().to_owned());
        self.take(request.into_inner(), authorization);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Got {
    fn take(&self, request: ExportTraceServiceRequest, authorization: Option<String>) {
        *self.authorization.lock().unwrap() = authorization;
        for of_resource in request.resource_spans {
            *self.resource.lock().unwrap() = words(&of_resource.resource.unwrap().attributes);
            let spans = of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            self.spans.lock().unwrap().extend(spans);
        }
    }

    fn spans(&self) -> Vec<Span> {
        self.spans.lock().unwrap().clone()
    }

    /// Waits for a span.
    fn until(&self, what: &str, is: impl Fn(&Span) -> bool) -> Span {
        let end = Instant::now() + SOON;
        loop {
            if let Some(span) = self.spans().into_iter().find(&is) {
                return span;
            }
            let names: Vec<_> = self.spans().into_iter().map(|span| span.name).collect();
            assert!(Instant::now() < end, "waited in vain for {what}: {names:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn named(&self, name: &str) -> Span {
        self.until(name, |span| span.name == name)
    }

    /// The span of this name right below another one.
    fn below(&self, parent: &Span, name: &str) -> Span {
        let span = self.until(name, |span| span.name == name && span.parent_span_id == parent.span_id);
        assert_eq!(span.trace_id, parent.trace_id, "{name}");
        assert!(span.start_time_unix_nano >= parent.start_time_unix_nano, "{name}");
        span
    }
}

fn words(attributes: &[KeyValue]) -> BTreeMap<String, String> {
    let word = |pair: &KeyValue| match pair.value.as_ref().unwrap().value.as_ref().unwrap() {
        Is::StringValue(text) => text.clone(),
        Is::IntValue(number) => number.to_string(),
        Is::BoolValue(yes) => yes.to_string(),
        other => panic!("{other:?}"),
    };
    attributes.iter().map(|pair| (pair.key.clone(), word(pair))).collect()
}

fn attribute(span: &Span, key: &str) -> String {
    words(&span.attributes).remove(key).unwrap_or_else(|| panic!("{} has no {key}", span.name))
}

/// A collector that speaks gRPC.
async fn collector() -> (Got, SocketAddr) {
    collector_by(tonic::transport::Server::builder()).await
}

async fn collector_by(server: tonic::transport::Server) -> (Got, SocketAddr) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let got = Got::default();
    let service = TraceServiceServer::new(got.clone());
    tokio::spawn(async move { server.serve_with_incoming(service, TcpListenerStream::new(listener)).await });
    (got, address)
}

/// One that speaks HTTP/1.1, as far as the daemon does, over TLS if it is to.
fn collector_by_http(tls: Option<rustls::ServerConfig>) -> (Got, SocketAddr) {
    let tls = tls.map(Arc::new);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let got = Got::default();
    let into = got.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, into, tls) = (stream.unwrap(), into.clone(), tls.clone());
            std::thread::spawn(move || match tls {
                None => answer(BufReader::new(stream), &into),
                Some(tls) => {
                    let tls = rustls::ServerConnection::new(tls).unwrap();
                    answer(BufReader::new(rustls::StreamOwned::new(tls, stream)), &into);
                }
            });
        }
    });
    (got, address)
}

fn answer(mut stream: BufReader<impl Read + Write>, into: &Got) {
    loop {
        let (mut head, mut length, mut authorization) = (Vec::new(), 0, None);
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            let line = line.trim_end().to_owned();
            if line.is_empty() {
                break;
            }
            if let Some((name, value)) = line.split_once(": ") {
                match name.to_ascii_lowercase().as_str() {
                    "content-length" => length = value.parse().unwrap(),
                    "authorization" => authorization = Some(value.to_owned()),
                    "content-type" => assert_eq!(value, "application/x-protobuf"),
                    _ => {}
                }
            }
            head.push(line);
        }
        assert_eq!(head[0], "POST /v1/traces HTTP/1.1");
        let mut body = vec![0; length];
        stream.read_exact(&mut body).unwrap();
        into.take(ExportTraceServiceRequest::decode(body.as_slice()).unwrap(), authorization);
        stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
    }
}

fn get(daemon: &DaemonProcess, path: &str, traceparent: &str) -> u16 {
    let agent: ureq::Agent =
        ureq::Agent::config_builder().http_status_as_error(false).proxy(None).build().into();
    let request = agent.get(format!("{}{path}", daemon.base)).header("traceparent", traceparent);
    let answered = request.header("Authorization", format!("Bearer {}", daemon.token)).call();
    answered.unwrap().status().as_u16()
}

fn spans_by_outcome(daemon: &DaemonProcess, outcome: &str) -> u64 {
    let url = daemon.base.replace("/api/v1", "/metrics");
    let agent: ureq::Agent = ureq::Agent::config_builder().proxy(None).build().into();
    let text = agent.get(url).call().unwrap().body_mut().read_to_string().unwrap();
    let sample = format!("berth_trace_spans_total{{outcome=\"{outcome}\"}} ");
    let value = text.lines().find_map(|line| line.strip_prefix(&sample));
    value.unwrap_or_else(|| panic!("no {sample} in {text}")).parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_allocate_and_requests_are_traces_with_their_child_spans() {
    let (got, address) = collector().await;
    let settings = format!(
        "nodeName: node-7\ngpus: sim:2xt4\nstack: [{{ policy: quota }}, {{ policy: exclusive }}]\n\
        tracing: {{ endpoint: 'http://{address}', timeoutSeconds: 60 }}"
    );
    let node = ProcessNode::new(&settings).await;
    let serve =
        || node.serve_as(node.command().env("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x"));
    let mut daemon = serve();
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let uid = node.start("a", WHOLE, 1).await.unwrap();

    let allocate = got.named("v1beta1.DevicePlugin/Allocate");
    assert_eq!((allocate.kind(), allocate.parent_span_id.len()), (SpanKind::Server, 0));
    assert_eq!(attribute(&allocate, "rpc.system.name"), "grpc");
    assert_eq!(attribute(&allocate, "rpc.method"), "v1beta1.DevicePlugin/Allocate");
    assert_eq!(attribute(&allocate, "rpc.response.status_code"), "OK");
    assert_eq!(attribute(&allocate, "berth.resource"), WHOLE);
    let view = node.kubelet.view(&uid, "main").unwrap();
    assert_eq!(attribute(&allocate, "berth.allocation"), view.envs["BERTH_ALLOCATION_ID_NVIDIA_COM_GPU"]);
    let stack = got.below(&allocate, "stack admit");
    let policy = got.below(&stack, "policy admit");
    assert!(attribute(&policy, "berth.policy").starts_with("quota@"), "{policy:?}");
    assert!(attribute(&policy, "berth.fuel").parse::<u64>().unwrap() > 0);
    let turn = got.below(&allocate, "keeper turn");
    assert_eq!(
        (attribute(&turn, "berth.command"), attribute(&turn, "berth.outcome")),
        ("allocate".into(), "applied".into())
    );
    assert!(turn.start_time_unix_nano >= stack.end_time_unix_nano);
    assert!(turn.end_time_unix_nano <= allocate.end_time_unix_nano);
    got.below(&turn, "store append");
    got.named("v1beta1.DevicePlugin/ListAndWatch list");
    got.named("reconcile pass");
    let who = got.resource.lock().unwrap().clone();
    assert_eq!((who["service.name"].as_str(), who["k8s.node.name"].as_str()), ("berth", "node-7"));
    assert!(who.contains_key("service.version") && who.contains_key("host.name"), "{who:?}");
    assert_eq!(got.authorization.lock().unwrap().as_deref(), Some("Bearer x"));

    // A caller's trace continues here; a malformed header begins a new one.
    let (trace, caller) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
    let gpus = daemon.call("GET", "/gpus", &Value::Null);
    let gpu = format!("/gpus/{}", gpus["items"][0]["uuid"].as_str().unwrap());
    assert_eq!(get(&daemon, "/allocations?limit=1", &format!("00-{trace}-{caller}-01")), 200);
    let read = got.named("GET /api/v1/allocations");
    let hex = |id: &[u8]| id.iter().map(|b| format!("{b:02x}")).collect::<String>();
    assert_eq!((hex(&read.trace_id), hex(&read.parent_span_id)), (trace.to_owned(), caller.to_owned()));
    assert_eq!(attribute(&read, "http.route"), "/api/v1/allocations");
    assert_eq!(attribute(&read, "url.path"), "/api/v1/allocations");
    assert_eq!(attribute(&read, "http.response.status_code"), "200");
    assert_eq!(get(&daemon, "/of-no-table", "00-zz-01"), 404);
    let lost = got.until("a request of no route", |span| span.name == "GET");
    assert!(lost.parent_span_id.is_empty());

    // An order, what the keeper made of it, and the drain as long as it lasts.
    daemon.call("PUT", &format!("{gpu}/drain"), &json!({}));
    let put = got.named("PUT /api/v1/gpus/{uuid}/drain");
    assert_eq!(attribute(&got.below(&put, "keeper turn"), "berth.command"), "drain");
    daemon.call("DELETE", &format!("{gpu}/drain"), &Value::Null);
    assert_eq!(attribute(&got.named("gpu drain"), "berth.outcome"), "stopped");

    let module = crate::support::guests::guest("answer-no-case");
    daemon.push(&module);
    let post = got.named("POST /api/v1/policies");
    let upload = got.below(&post, "policy upload");
    got.below(&upload, "policy compile");
    assert!(spans_by_outcome(&daemon, "exported") > 0);
    assert_eq!((spans_by_outcome(&daemon, "failed"), spans_by_outcome(&daemon, "dropped")), (0, 0));

    // The spans of the last requests are sent before the exit. On a busy machine the time for that may be too short,
    // and the test repeats.
    let token = daemon.token.clone();
    let since = Instant::now();
    loop {
        get(&daemon, "/stack", "");
        daemon.stop();
        if got.spans().iter().any(|span| span.name == "GET /api/v1/stack") {
            break;
        }
        assert!(since.elapsed() < SOON, "the last span is never sent");
        daemon = serve();
    }
    assert!(!format!("{:?}", got.spans()).contains(&token));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sample_ratio_drops_traces_and_http_works_as_well() {
    let (got, address) = collector_by_http(None);
    let tracing = "tracing: { sampleRatio: 0, protocol: http/protobuf, timeoutSeconds: 60 }";
    let node = ProcessNode::new(&format!("gpus: sim:1xt4\n{tracing}")).await;
    let mut command = node.command();
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{address}"));
    let daemon = node.serve_as(command.env("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20y"));
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    node.start("a", WHOLE, 1).await.unwrap();
    assert_eq!(get(&daemon, "/node", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"), 200);
    assert_eq!(get(&daemon, "/gpus", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), 200);
    got.named("GET /api/v1/gpus");
    assert_eq!(got.authorization.lock().unwrap().as_deref(), Some("Bearer y"));
    daemon.stop();
    let names: Vec<_> = got.spans().into_iter().map(|span| span.name).collect();
    assert_eq!(names, ["GET /api/v1/gpus"]);
}

/// Takes connections and says nothing.
fn hanging() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_or_hanging_collector_delays_no_request() {
    let (listener, gone) = hanging();
    drop(listener);
    let (_listening, mute) = hanging();
    for (collector, away) in [(gone, true), (mute, false)] {
        for protocol in ["grpc", "http/protobuf"] {
            let tracing = format!(
                "tracing: {{ endpoint: 'http://{collector}', protocol: {protocol}, timeoutSeconds: 60 }}"
            );
            let node = ProcessNode::new(&format!("gpus: sim:2xt4\n{tracing}")).await;
            let daemon = node.serve();
            node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
            let began = Instant::now();
            node.start("a", WHOLE, 1).await.unwrap();
            let end = Instant::now() + SOON;
            while away && spans_by_outcome(&daemon, "failed") == 0 {
                assert!(Instant::now() < end, "nothing failed: {}", daemon.log());
                std::thread::sleep(Duration::from_millis(50));
            }
            node.start("b", WHOLE, 1).await.unwrap();
            assert!(began.elapsed() < Duration::from_secs(55), "{protocol} {collector}");
            assert_eq!(spans_by_outcome(&daemon, "exported"), 0);
            if away {
                daemon.line(|line| line.contains("spans do not reach"));
            }
            let log = daemon.log();
            let count = log.matches("spans do not reach").count();
            assert_eq!(count, usize::from(away), "{log}");
            // Exports may take a minute; a stop, with what is left to be sent, about a second.
            let began = Instant::now();
            daemon.stop();
            assert!(
                began.elapsed() < Duration::from_secs(45),
                "{protocol} {collector}: {:?}",
                began.elapsed()
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_behind_tls_is_believed_if_its_ca_is_known() {
    berth_cli::endpoint::use_ring();
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (pem, key) = (own.cert.pem(), own.signing_key.serialize_pem());
    let identity = tonic::transport::Identity::from_pem(&pem, &key);
    let tls = tonic::transport::ServerTlsConfig::new().identity(identity);
    let by_grpc = collector_by(tonic::transport::Server::builder().tls_config(tls).unwrap()).await;
    let key = rustls::pki_types::PrivateKeyDer::try_from(own.signing_key.serialize_der()).unwrap();
    let tls = rustls::ServerConfig::builder().with_no_client_auth();
    let by_http = collector_by_http(Some(tls.with_single_cert(vec![own.cert.der().clone()], key).unwrap()));
    for (protocol, (got, address)) in [("grpc", by_grpc), ("http/protobuf", by_http)] {
        let url = format!("https://localhost:{}", address.port());
        let tracing = format!("tracing: {{ endpoint: '{url}', protocol: {protocol}, timeoutSeconds: 60 }}");
        let node = ProcessNode::new(&format!("gpus: sim:1xt4\n{tracing}")).await;
        let ca = node.folder.path().join("ca.pem");
        std::fs::write(&ca, &pem).unwrap();
        let daemon = node.serve_as(node.command().env("SSL_CERT_FILE", &ca));
        got.named("stack offer");
        daemon.stop();
        // The last spans of the first daemon may arrive after its end.
        let first_stopped = SystemTime::now();
        std::fs::write(&ca, rcgen::generate_simple_self_signed(["other".to_owned()]).unwrap().cert.pem())
            .unwrap();
        let daemon = node.serve_as(node.command().env("SSL_CERT_FILE", &ca));
        let end = Instant::now() + SOON;
        while spans_by_outcome(&daemon, "failed") == 0 {
            assert!(Instant::now() < end, "{protocol}: {}", daemon.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        daemon.line(|line| line.contains("invalid peer certificate"));
        let began = |span: &Span| SystemTime::UNIX_EPOCH + Duration::from_nanos(span.start_time_unix_nano);
        assert!(got.spans().iter().all(|span| began(span) <= first_stopped), "{protocol}");
    }
}

#[test]
fn a_bad_endpoint_is_reported_with_the_expected_form() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yaml");
    for (tracing, says) in [
        ("{ endpoint: 'collector:4317' }", "such as http://otel-collector.observability:4317"),
        ("{ endpoint: 'http://a', protocol: http/json }", "grpc or http/protobuf"),
        ("{ endpoint: 'http://me:secret@a' }", "OTEL_EXPORTER_OTLP_HEADERS"),
        ("{ endpoint: 'http://a', sampleRatio: 2 }", "0 (none) to 1 (all)"),
        ("{ endpint: 'http://a' }", "endpint"),
    ] {
        std::fs::write(&file, format!("gpus: sim:1xt4\ntracing: {tracing}\n")).unwrap();
        let (code, output) = ended(berth().args(["config", "check"]).arg(&file));
        assert_eq!(code, Some(1), "{output}");
        assert!(output.contains("tracing") || output.contains("endpint"), "{output}");
        assert!(output.contains(says) && !output.contains("secret"), "{output}");
    }
    let mut serve = berth();
    serve.args(["serve", "--gpus", "sim:1xt4", "--state-dir"]).arg(folder.path());
    let (code, output) = ended(serve.env("OTEL_EXPORTER_OTLP_ENDPOINT", "collector"));
    assert_eq!(code, Some(2), "{output}");
    assert!(output.contains("--tracing-endpoint") && output.contains("otel-collector"), "{output}");
    let mut serve = berth();
    serve.args(["serve", "--gpus", "sim:1xt4", "--tracing-endpoint", "http://127.0.0.1:1", "--state-dir"]);
    let headers = ("OTEL_EXPORTER_OTLP_HEADERS", "hunter2");
    let (code, output) = ended(serve.arg(folder.path()).env(headers.0, headers.1));
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains(headers.0) && !output.contains(headers.1), "{output}");
}
