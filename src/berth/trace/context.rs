//! The trace that a request is part of, by the W3C header `traceparent`.

use opentelemetry::Context;
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry::trace::TraceContextExt;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// Longest `tracestate` that is propagated, bytes: the W3C's minimum.
const STATE_BYTES_MAX: usize = 512;

/// Makes a span that has not started part of its caller's trace. A malformed header is ignored, so that the request starts
/// a new trace.
pub(super) fn adopt(span: &Span, traceparent: Option<&str>, tracestate: Option<&str>) {
    let Some(parent) = traceparent.filter(|_| !span.is_none()) else { return };
    let state = tracestate.filter(|state| state.len() <= STATE_BYTES_MAX);
    let context =
        TraceContextPropagator::new().extract_with_context(&Context::new(), &Headers { parent, state });
    if context.span().span_context().is_valid() {
        // An error for a started or untraced span, which then keeps its parent.
        let _ = span.set_parent(context);
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
