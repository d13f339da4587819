//! Whose trace a request is part of, by the header of the W3C.

use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::TraceContextExt;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// Longest `tracestate` that is handed on, bytes: what the W3C asks of everybody.
const STATE_BYTES_MAX: usize = 512;

/// Makes a span that has not begun part of its caller's trace. What is malformed counts as none, so
/// that the request begins a trace of its own.
pub(super) fn adopt(span: &Span, traceparent: Option<&str>, tracestate: Option<&str>) {
    let Some(parent) = traceparent.filter(|_| !span.is_none()) else { return };
    let state = tracestate.filter(|state| state.len() <= STATE_BYTES_MAX);
    let theirs =
        TraceContextPropagator::new().extract_with_context(&Context::new(), &Headers { parent, state });
    if theirs.span().span_context().is_valid() {
        // Fails for a span that has begun, or is not traced: then it stays as it is.
        let _ = span.set_parent(theirs);
    }
}

struct Headers<'h> {
    parent: &'h str,
    state: Option<&'h str>,
}

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        match key {
            "traceparent" => Some(self.parent),
            "tracestate" => self.state,
            _ => None,
        }
    }

    fn keys(&self) -> Vec<&str> {
        vec!["traceparent", "tracestate"]
    }
}
