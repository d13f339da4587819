//! The queue before the collector, and the task that empties it.

use super::client::{Client, Taken};
use berth_core::spans::SpanCounts;
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

/// Spans that may wait. One is 1 to 2 KiB with its attributes, so 4 MiB at most; an Allocate makes five.
const QUEUE: usize = 2048;
/// Spans of one request: under 1 MiB on the wire, a quarter of what a gRPC server takes by default.
const BATCH: usize = 512;
/// How often the queue is emptied; earlier where a batch waits.
const EVERY: Duration = Duration::from_secs(2);
/// Interval of the log lines about a collector that accepts nothing.
const SAY_EVERY: Duration = Duration::from_secs(60);

static EXPORTED: AtomicU64 = AtomicU64::new(0);
static FAILED: AtomicU64 = AtomicU64::new(0);
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// What became of spans; of the process, like the subscriber that makes them.
pub fn counts() -> SpanCounts {
    let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
    SpanCounts { exported: count(&EXPORTED), failed: count(&FAILED), dropped: count(&DROPPED) }
}

/// Where spans go as they end.
#[derive(Debug)]
pub(super) struct Queue {
    spans: mpsc::Sender<SpanData>,
    /// Told when a batch waits. Each span would wake the task at each Allocate.
    much: Arc<Notify>,
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
        if self.spans.capacity() <= QUEUE - BATCH {
            self.much.notify_one();
        }
    }

    // Both are the pump's: it has a limit, and what would wait here may be any thread.
    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// The other end of the queue, not yet at work.
pub struct Pump {
    spans: mpsc::Receiver<SpanData>,
    much: Arc<Notify>,
    client: Client,
    resource: ResourceAttributesWithSchema,
    trouble: Trouble,
}

pub(super) fn new(client: Client, resource: &Resource) -> (Queue, Pump) {
    let (sender, spans) = mpsc::channel(QUEUE);
    let much = Arc::<Notify>::default();
    let queue = Queue { spans: sender, much: Arc::clone(&much) };
    (queue, Pump { spans, much, client, resource: resource.into(), trouble: Trouble::default() })
}

/// A pump at work.
pub struct Pumping {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Pump {
    /// Sends what there is, from now on, on the runtime at hand.
    #[must_use]
    pub fn run(self) -> Pumping {
        let (stop, stopped) = watch::channel(false);
        Pumping { stop, task: tokio::spawn(self.work(stopped)) }
    }

    async fn work(mut self, mut stopped: watch::Receiver<bool>) {
        loop {
            let last = tokio::select! {
                () = tokio::time::sleep(EVERY) => false,
                () = self.much.notified() => false,
                _ = stopped.wait_for(|stop| *stop) => true,
            };
            loop {
                let batch = self.batch();
                // Of a collector that takes nothing the next batch would hear the same.
                if batch.is_empty() || !self.send(batch).await {
                    break;
                }
            }
            if last {
                return;
            }
        }
    }

    fn batch(&mut self) -> Vec<SpanData> {
        let mut batch = Vec::new();
        while batch.len() < BATCH
            && let Ok(span) = self.spans.try_recv()
        {
            batch.push(span);
        }
        batch
    }

    /// Whether the collector answered. What it does not take is not sent again: it would push out what
    /// is newer.
    async fn send(&mut self, batch: Vec<SpanData>) -> bool {
        let count = batch.len() as u64;
        let resource_spans = group_spans_by_resource_and_scope(batch, &self.resource);
        match self.client.export(ExportTraceServiceRequest { resource_spans }).await {
            Ok(Taken { refused, why }) => {
                let refused = refused.min(count);
                EXPORTED.fetch_add(count - refused, Ordering::Relaxed);
                FAILED.fetch_add(refused, Ordering::Relaxed);
                if refused == 0 {
                    self.trouble.over(self.client.url());
                } else {
                    self.trouble
                        .say(self.client.url(), &format!("it refused {refused} of {count} spans: {why}"));
                }
                true
            }
            Err(error) => {
                FAILED.fetch_add(count, Ordering::Relaxed);
                self.trouble.say(self.client.url(), &error.words());
                false
            }
        }
    }
}

impl Pumping {
    /// Sends what is left, for at most `limit`.
    pub async fn finish(mut self, limit: Duration) {
        let _ = self.stop.send(true);
        if tokio::time::timeout(limit, &mut self.task).await.is_err() {
            self.task.abort();
            tracing::warn!("the last spans did not reach the collector of traces in time");
        }
    }
}

/// What was last logged.
#[derive(Debug, Default)]
struct Trouble {
    /// When, and how much was lost until then.
    said: Option<(Instant, SpanCounts)>,
}

impl Trouble {
    fn say(&mut self, collector: &str, why: &str) {
        if self.said.as_ref().is_some_and(|(at, _)| at.elapsed() < SAY_EVERY) {
            return;
        }
        let now = counts();
        let before = self.said.map_or_else(SpanCounts::default, |(_, counts)| counts);
        let lost = now.failed + now.dropped - before.failed - before.dropped;
        tracing::warn!(
            collector,
            why,
            lost,
            "spans do not reach the collector of traces; all else goes on (said once a minute at most)"
        );
        self.said = Some((Instant::now(), now));
    }

    fn over(&mut self, collector: &str) {
        if self.said.take().is_some() {
            tracing::info!(collector, "spans reach the collector of traces again");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::config::{Endpoint, Protocol, TracingSettings};
    use crate::trace::headers::Headers;
    use opentelemetry::trace::{Tracer, TracerProvider};
    use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};

    /// One test, since what is counted is counted for the process.
    #[tokio::test]
    async fn what_finds_no_room_is_dropped_at_once_and_what_cannot_be_sent_is_counted() {
        let settings = TracingSettings {
            // Nobody listens at port 1.
            endpoint: Endpoint { url: "http://127.0.0.1:1".into(), protocol: Protocol::Grpc },
            sample_ratio: 1.0,
            timeout: Duration::from_secs(5),
        };
        let resource = Resource::builder_empty().build();
        let (queue, mut pump) = new(Client::new(&settings, Headers::default()), &resource);
        let much = Arc::clone(&queue.much);
        let provider =
            SdkTracerProvider::builder().with_sampler(Sampler::AlwaysOn).with_span_processor(queue).build();
        let tracer = provider.tracer("test");
        for _ in 0..QUEUE + 3 {
            drop(tracer.start("a"));
        }
        much.notified().await;
        assert_eq!(counts(), SpanCounts { exported: 0, failed: 0, dropped: 3 });
        assert_eq!(pump.spans.len(), QUEUE);
        loop {
            let batch = pump.batch();
            assert!(batch.len() <= BATCH);
            if batch.is_empty() {
                break;
            }
            assert!(!pump.send(batch).await);
        }
        assert_eq!(counts(), SpanCounts { exported: 0, failed: QUEUE as u64, dropped: 3 });
        // Said once, whatever the number of batches.
        assert!(pump.trouble.said.is_some_and(|(_, then)| then.failed == BATCH as u64));
        // At the end, too, there is no wait for a collector that hangs or is away.
        let began = Instant::now();
        pump.run().finish(Duration::from_secs(60)).await;
        assert!(began.elapsed() < Duration::from_secs(30));
    }
}
