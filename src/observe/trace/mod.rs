//! Traces by OTLP: queues the spans of [`crate::spans`] and sends them to a collector in the background. The end
//! of a span never waits: spans that find the queue full, and spans that the collector refuses, are counted and
//! dropped.
//!
//! ```text
//!   spans (any thread) -> tracing-opentelemetry -> Queue (2048) -> Pump (a task) -> Client -> collector
//! ```
//!
//! The exporter is our own, since those of the OpenTelemetry libraries do not report dropped spans and read their
//! settings from the environment. There are no metrics and logs by OTLP.

mod client;
mod headers;
mod pump;

pub use pump::{Pump, RunningPump, counts};

use crate::spans::{self, Exporter};
use client::Client;
use headers::Headers;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{TraceContextExt, TracerProvider};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::resource::{EnvResourceDetector, TelemetryResourceDetector};
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};
use std::collections::HashMap;
use std::fmt;
use std::time::Duration;
use tracing::{Span, Subscriber};
use tracing_opentelemetry::{OpenTelemetryLayer, OpenTelemetrySpanExt};
use tracing_subscriber::registry::LookupSpan;

/// The instrumentation scope of the spans.
const SCOPE: &str = "berth";
/// Longest `tracestate` that is propagated, bytes: the W3C's minimum.
const STATE_BYTES_MAX: usize = 512;

/// Export of traces.
#[derive(Clone, Debug, PartialEq)]
pub struct TracingSettings {
    /// The collector.
    pub endpoint: Endpoint,
    /// Fraction of traces that are exported, 0 to 1. A caller's own decision takes precedence.
    pub sample_ratio: f64,
    /// Timeout of one export.
    pub timeout: Duration,
}

/// A collector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The URL of requests: scheme, host and port; for HTTP with the path.
    pub url: String,
    /// Its protocol.
    pub protocol: Protocol,
}

/// The protocol of a collector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// OTLP over gRPC.
    Grpc,
    /// OTLP as protobuf over HTTP.
    HttpProtobuf,
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Grpc => "grpc",
            Self::HttpProtobuf => "http/protobuf",
        })
    }
}

/// Creates the layer that queues spans, and the pump that sends them once it runs.
///
/// # Errors
/// If the variables with the collector's headers are malformed.
pub fn start<S: Subscriber + for<'s> LookupSpan<'s>>(
    settings: &TracingSettings,
    node: &str,
) -> anyhow::Result<(OpenTelemetryLayer<S, SdkTracer>, Pump)> {
    let client = Client::new(settings, Headers::from_environment()?);
    let resource = resource(node);
    let (queue, pump) = pump::new(client, &resource);
    // The caller's decision takes precedence, so that traces are complete or absent.
    let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(settings.sample_ratio)));
    let provider = SdkTracerProvider::builder()
        .with_resource(resource)
        .with_sampler(sampler)
        .with_span_processor(queue)
        .build();
    // The subscriber owns the tracer, and the tracer its provider, until the process ends.
    let layer = tracing_opentelemetry::layer()
        .with_tracer(provider.tracer(SCOPE))
        .with_location(false)
        .with_threads(false)
        .with_target(false)
        .with_level(false)
        .with_tracked_inactivity(false)
        .with_context_activation(false);
    spans::turn_on(Exporter { set_parent: adopt, counts });
    Ok((layer, pump))
}

/// The attributes of this daemon. `OTEL_RESOURCE_ATTRIBUTES` takes precedence.
fn resource(node: &str) -> Resource {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Resource::builder_empty()
        .with_service_name("berth")
        .with_attributes([
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::new("k8s.node.name", node.to_owned()),
            KeyValue::new("host.name", host),
        ])
        .with_detectors(&[Box::new(TelemetryResourceDetector), Box::new(EnvResourceDetector::new())])
        .build()
}

/// Makes a span that has not started part of its caller's trace, by the W3C headers `traceparent` and `tracestate`. A
/// malformed header is ignored, so that the request starts a new trace.
fn adopt(span: &Span, traceparent: Option<&str>, tracestate: Option<&str>) {
    let Some(parent) = traceparent.filter(|_| !span.is_none()) else { return };
    let mut headers = HashMap::from([("traceparent".to_owned(), parent.to_owned())]);
    if let Some(state) = tracestate.filter(|state| state.len() <= STATE_BYTES_MAX) {
        headers.insert("tracestate".to_owned(), state.to_owned());
    }
    let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &headers);
    if context.span().span_context().is_valid() {
        // An error for a started or untraced span, which then keeps its parent.
        let _ = span.set_parent(context);
    }
}
