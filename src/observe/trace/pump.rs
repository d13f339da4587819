//! The queue of spans, and the task that sends them to the collector.

use super::client::{Client, message, truncated};
use crate::spans::SpanCounts;
use opentelemetry::Context;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Most queued spans. A span takes 1 to 2 KiB with its attributes, so the queue takes at most 4 MiB; an Allocate has
/// five.
const QUEUE_SPANS_MAX: usize = 2048;
/// Most spans of a request: under 1 MiB encoded, a quarter of a gRPC server's default limit.
const BATCH_SPANS_MAX: usize = 512;
/// Interval of exports; a full batch is sent earlier.
const EXPORT_EVERY: Duration = Duration::from_secs(2);
/// Shortest interval of log lines about failed exports.
const LOG_EVERY: Duration = Duration::from_secs(60);

static EXPORTED: AtomicU64 = AtomicU64::new(0);
static FAILED: AtomicU64 = AtomicU64::new(0);
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// The counts of exported, failed and dropped spans since the process started.
pub fn counts() -> SpanCounts {
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    SpanCounts { exported: count(&EXPORTED), failed: count(&FAILED), dropped: count(&DROPPED) }
}

/// The processor that queues ended spans.
#[derive(Debug)]
pub(super) struct Queue {
    spans: mpsc::Sender<SpanData>,
    /// Notified when a batch is full, not for each span, which would wake the task at each Allocate.
    batch_ready: Arc<Notify>,
}

impl SpanProcessor for Queue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if !span.span_context.is_sampled() {
            return;
        }
        if self.spans.try_send(span).is_err() {
            DROPPED.fetch_add(1, Ordering::Relaxed);
        }
        if self.spans.capacity() <= QUEUE_SPANS_MAX - BATCH_SPANS_MAX {
            self.batch_ready.notify_one();
        }
    }

    // Nothing to do: `Pump` flushes with a time limit, and these calls may block any thread.
    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// The receiving end of the queue, not running yet.
pub struct Pump {
    spans: mpsc::Receiver<SpanData>,
    batch_ready: Arc<Notify>,
    client: Client,
    resource: ResourceAttributesWithSchema,
    failure_log: FailureLog,
}

pub(super) fn new(client: Client, resource: &Resource) -> (Queue, Pump) {
    let (sender, spans) = mpsc::channel(QUEUE_SPANS_MAX);
    let batch_ready = Arc::<Notify>::default();
    let queue = Queue { spans: sender, batch_ready: Arc::clone(&batch_ready) };
    (
        queue,
        Pump { spans, batch_ready, client, resource: resource.into(), failure_log: FailureLog::default() },
    )
}

/// A running pump.
pub struct RunningPump {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Pump {
    /// Starts sending spans, on the current runtime.
    #[must_use]
    pub fn run(self) -> RunningPump {
        let (stop, stopped) = watch::channel(false);
        RunningPump { stop, task: tokio::spawn(self.send_until(stopped)) }
    }

    async fn send_until(mut self, mut stopped: watch::Receiver<bool>) {
        loop {
            let last = tokio::select! {
                () = tokio::time::sleep(EXPORT_EVERY) => false,
                () = self.batch_ready.notified() => false,
                _ = stopped.wait_for(|stop| *stop) => true,
            };
            loop {
                let batch = self.take_batch();
                // After a failure the next batch would fail, too.
                if batch.is_empty() || !self.send(batch).await {
                    break;
                }
            }
            if last {
                return;
            }
        }
    }

    fn take_batch(&mut self) -> Vec<SpanData> {
        let mut batch = Vec::new();
        while batch.len() < BATCH_SPANS_MAX
            && let Ok(span) = self.spans.try_recv()
        {
            batch.push(span);
        }
        batch
    }

    /// Sends a batch; returns whether the collector answered. Failed spans are not sent again: they would displace
    /// newer ones.
    async fn send(&mut self, batch: Vec<SpanData>) -> bool {
        let count = batch.len() as u64;
        let resource_spans = group_spans_by_resource_and_scope(batch, &self.resource);
        match self.client.export(ExportTraceServiceRequest { resource_spans }).await {
            Ok(partial) => {
                let refused = u64::try_from(partial.rejected_spans).unwrap_or(0).min(count);
                EXPORTED.fetch_add(count - refused, Ordering::Relaxed);
                FAILED.fetch_add(refused, Ordering::Relaxed);
                if refused == 0 {
                    self.failure_log.log_recovery(self.client.url());
                } else {
                    let reason = truncated(partial.error_message);
                    let why = format!("it refused {refused} of {count} spans: {reason}");
                    self.failure_log.log(self.client.url(), &why);
                }
                true
            }
            Err(error) => {
                FAILED.fetch_add(count, Ordering::Relaxed);
                self.failure_log.log(self.client.url(), &message(&error));
                false
            }
        }
    }
}

impl RunningPump {
    /// Sends the remaining spans, for at most `limit`.
    pub async fn finish(mut self, limit: Duration) {
        let _ = self.stop.send(true);
        if tokio::time::timeout(limit, &mut self.task).await.is_err() {
            self.task.abort();
            tracing::warn!("the last spans were not sent to the collector of traces in time");
        }
    }
}

/// Limits the log lines about failed exports.
#[derive(Debug, Default)]
struct FailureLog {
    /// Time and counts of the last log line since the last success.
    last_logged: Option<(Instant, SpanCounts)>,
}

impl FailureLog {
    fn log(&mut self, collector: &str, why: &str) {
        if self.last_logged.as_ref().is_some_and(|(at, _)| at.elapsed() < LOG_EVERY) {
            return;
        }
        let now = counts();
        let before = self.last_logged.map_or_else(SpanCounts::default, |(_, counts)| counts);
        let lost = now.failed + now.dropped - before.failed - before.dropped;
        tracing::warn!(
            collector,
            why,
            lost,
            "spans do not reach the collector of traces; the daemon is otherwise unaffected (logged at most once a minute)"
        );
        self.last_logged = Some((Instant::now(), now));
    }

    fn log_recovery(&mut self, collector: &str) {
        if self.last_logged.take().is_some() {
            tracing::info!(collector, "spans reach the collector of traces again");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::trace::headers::Headers;
    use crate::trace::{Endpoint, Protocol, TracingSettings};
    use opentelemetry::trace::{Tracer, TracerProvider};
    use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};

    /// One test only, since the counters belong to the process.
    #[tokio::test]
    async fn spans_beyond_the_queue_are_dropped_and_failed_exports_are_counted() {
        let settings = TracingSettings {
            // No process listens at port 1.
            endpoint: Endpoint { url: "http://127.0.0.1:1".into(), protocol: Protocol::Grpc },
            sample_ratio: 1.0,
            timeout: Duration::from_secs(5),
        };
        let resource = Resource::builder_empty().build();
        let (queue, mut pump) = new(Client::new(&settings, Headers::default()), &resource);
        let batch_ready = Arc::clone(&queue.batch_ready);
        let provider =
            SdkTracerProvider::builder().with_sampler(Sampler::AlwaysOn).with_span_processor(queue).build();
        let tracer = provider.tracer("test");
        for _ in 0..QUEUE_SPANS_MAX + 3 {
            drop(tracer.start("a"));
        }
        batch_ready.notified().await;
        assert_eq!(counts(), SpanCounts { exported: 0, failed: 0, dropped: 3 });
        assert_eq!(pump.spans.len(), QUEUE_SPANS_MAX);
        loop {
            let batch = pump.take_batch();
            assert!(batch.len() <= BATCH_SPANS_MAX);
            if batch.is_empty() {
                break;
            }
            assert!(!pump.send(batch).await);
        }
        assert_eq!(counts(), SpanCounts { exported: 0, failed: QUEUE_SPANS_MAX as u64, dropped: 3 });
        // Logged once for all batches.
        assert!(
            pump.failure_log.last_logged.is_some_and(|(_, counts)| counts.failed == BATCH_SPANS_MAX as u64)
        );
        // The end does not wait for an absent collector either.
        let start = Instant::now();
        pump.run().finish(Duration::from_secs(60)).await;
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
