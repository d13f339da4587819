//! Traces by OTLP: queues the spans of [`berth_core::spans`] and sends them to a collector in the background. The end of a
//! span never waits: spans that find the queue full, and spans that the collector refuses, are counted and dropped.
//!
//! ```text
//!   spans (any thread) -> tracing-opentelemetry -> Queue (2048) -> Pump (a task) -> Client -> collector
//! ```
//!
//! The exporter is our own, since those of the OpenTelemetry libraries do not report dropped spans and read their settings
//! from the environment. There are no metrics and logs by OTLP.

mod client;
mod context;
mod headers;
mod pump;

pub use headers::HeaderError;
pub use pump::{Pump, RunningPump, counts};

use crate::config::TracingSettings;
use berth_core::spans::{self, Exporter};
use client::Client;
use headers::Headers;
use opentelemetry::KeyValue;
use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::{EnvResourceDetector, TelemetryResourceDetector};
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};
use tracing::Subscriber;
use tracing_opentelemetry::OpenTelemetryLayer;
use tracing_subscriber::registry::LookupSpan;

/// The instrumentation scope of the spans.
const SCOPE: &str = "berth";

/// Creates the layer that queues spans, and the pump that sends them once it runs.
///
/// # Errors
/// If the variables with the collector's headers are malformed.
pub fn start<S: Subscriber + for<'s> LookupSpan<'s>>(
    settings: &TracingSettings,
    node: &str,
) -> Result<(OpenTelemetryLayer<S, SdkTracer>, Pump), HeaderError> {
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
    spans::turn_on(Exporter { set_parent: context::adopt, counts });
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
