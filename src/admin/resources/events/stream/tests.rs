use super::*;
use crate::event_feed::{EVENTS_MAX, STREAMS_MAX, StreamPermits};
use futures_util::FutureExt as _;

fn event(kind: EventKind, gpu: &str) -> Event {
    Event {
        kind,
        at: String::new(),
        generation: 1,
        gpu: Some(gpu.into()),
        allocation: None,
        policy: None,
        words: "w".into(),
    }
}

const QUICK: StreamTimes = StreamTimes {
    keep_alive: Duration::from_millis(20),
    admission_check: Duration::from_secs(3600),
    life: Duration::from_secs(3600),
};
/// The interval of comments is longer than any test, so that none is sent while a test waits for an event.
const SILENT: StreamTimes = StreamTimes { keep_alive: Duration::from_secs(3600), ..QUICK };
const PATIENCE: Duration = Duration::from_secs(300);

fn stream(ring: &Arc<Ring>, kinds: Option<EventKind>, gpu: Option<&str>, follow: bool) -> EventStream {
    stream_with(ring, kinds, gpu, follow, SILENT)
}

fn stream_with(
    ring: &Arc<Ring>,
    kinds: Option<EventKind>,
    gpu: Option<&str>,
    follow: bool,
    times: StreamTimes,
) -> EventStream {
    let permit = Arc::new(StreamPermits::default()).acquire("");
    let filter = EventFilter { kinds: kinds.map(|k| [k].into()), gpu: gpu.map(str::to_owned) };
    let is_admitted: IsAdmitted = Box::new(|| std::future::ready(true).boxed_local());
    let start = Start { after: 0, follow, first: "first".into(), generation: Box::new(|| 42), is_admitted };
    EventStream::new(Arc::clone(ring), filter, start, permit, times)
}

fn kinds(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| line.strip_prefix("event: ")).collect()
}

#[tokio::test]
async fn a_stream_sends_the_events_of_its_filter_and_comments_in_between() {
    let ring = Arc::new(Ring::new(5));
    let mut all = stream(&ring, None, None, true);
    let mut some = stream(&ring, Some(EventKind::GpuHealth), Some("GPU-1"), true);
    assert_eq!(all.next().await.unwrap(), "first");
    assert_eq!(some.next().await.unwrap(), "first");
    for (kind, gpu) in
        [(EventKind::GpuHealth, "GPU-1"), (EventKind::GpuHealth, "GPU-2"), (EventKind::GpuDrained, "GPU-1")]
    {
        ring.add(&event(kind, gpu));
    }
    assert_eq!(kinds(&all.next().await.unwrap()), ["gpuHealth", "gpuHealth", "gpuDrained"]);
    assert_eq!(kinds(&some.next().await.unwrap()), ["gpuHealth"]);
    // No more events; the id advances past those that the filter dropped.
    some.times.keep_alive = QUICK.keep_alive;
    assert_eq!(some.next().await.unwrap(), ": still here\nid: 5-3\n\n");
    // An event wakes a waiting stream long before its next comment.
    let added = async { ring.add(&event(EventKind::Bypass, "GPU-1")) };
    let (chunk, ()) = tokio::join!(tokio::time::timeout(PATIENCE, all.next()), added);
    assert_eq!(kinds(&chunk.expect("no event").unwrap()), ["bypass"]);
}

#[tokio::test]
async fn a_stream_that_does_not_follow_ends_after_the_kept_events() {
    let ring = Arc::new(Ring::new(5));
    for _ in 0..2 * EVENTS_AT_ONCE {
        ring.add(&event(EventKind::GpuHealth, "GPU-1"));
    }
    let mut reader = stream(&ring, None, None, false);
    let (mut chunks, mut events) = (0, 0);
    while let Some(chunk) = reader.next().await {
        chunks += 1;
        events += kinds(&chunk).len();
    }
    assert_eq!((chunks, events), (3, 2 * EVENTS_AT_ONCE));
}

#[tokio::test]
async fn events_outside_the_filter_do_not_keep_a_stream_silent_and_advance_its_id() {
    let ring = Arc::new(Ring::new(5));
    let mut reader = stream_with(&ring, Some(EventKind::GpuDrained), None, true, QUICK);
    assert_eq!(reader.next().await.unwrap(), "first");
    let others = Arc::clone(&ring);
    let busy = tokio::spawn(async move {
        loop {
            others.add(&event(EventKind::GpuHealth, "GPU-1"));
            tokio::time::sleep(QUICK.keep_alive / 10).await;
        }
    });
    // Two comments have the same id if no event was added between them.
    let (mut ids, end) = (BTreeSet::new(), Instant::now() + PATIENCE);
    while ids.len() < 3 {
        let comment = tokio::time::timeout_at(end, reader.next()).await;
        let comment = comment.expect("no comment while there are events outside the filter").unwrap();
        ids.insert(comment.strip_prefix(": still here\nid: ").unwrap().trim().to_owned());
        assert!(Instant::now() < end, "the id did not advance: {ids:?}");
    }
    busy.abort();
}

#[tokio::test]
async fn a_stream_that_does_not_follow_ends_with_the_id_of_the_last_kept_event() {
    let ring = Arc::new(Ring::new(5));
    ring.add(&event(EventKind::GpuHealth, "GPU-1"));
    let mut reader = stream(&ring, Some(EventKind::GpuDrained), None, false);
    assert_eq!(reader.next().await.unwrap(), "first");
    assert_eq!(reader.next().await.unwrap(), "id: 5-1\n\n");
    assert_eq!(reader.next().await, None);
}

#[tokio::test]
async fn a_nudged_stream_sends_a_comment_at_once() {
    let ring = Arc::new(Ring::new(5));
    let mut reader = stream(&ring, None, None, true);
    reader.next().await.unwrap();
    tokio::time::sleep(NUDGE_MIN_GAP).await;
    ring.nudge();
    let comment = tokio::time::timeout(PATIENCE, reader.next()).await;
    assert_eq!(comment.expect("no comment").unwrap(), ": still here\nid: 5-0\n\n");
}

#[tokio::test]
async fn a_slow_reader_is_ended_with_the_reason_and_all_are_when_the_daemon_stops() {
    let ring = Arc::new(Ring::new(5));
    let (mut slow, mut quick) = (stream(&ring, None, None, true), stream(&ring, None, None, true));
    slow.next().await;
    quick.next().await;
    for _ in 0..=EVENTS_MAX {
        ring.add(&event(EventKind::GpuHealth, "GPU-1"));
    }
    let end = slow.next().await.unwrap();
    assert!(kinds(&end) == ["end"] && end.contains("too slowly"), "{end}");
    assert!(end.contains("\"generation\":42"), "{end}");
    assert_eq!(slow.next().await, None);
    quick.after = ring.newest();
    ring.close("the daemon stops");
    let end = quick.next().await.unwrap();
    assert!(kinds(&end) == ["end"] && end.contains("the daemon stops"), "{end}");
    assert_eq!(quick.next().await, None);
}

#[tokio::test]
async fn a_stream_ends_when_its_client_is_no_longer_authorized_or_its_permit_is_revoked() {
    let ring = Arc::new(Ring::new(5));
    let mut rejected =
        stream_with(&ring, None, None, true, StreamTimes { admission_check: Duration::ZERO, ..QUICK });
    assert_eq!(rejected.next().await.unwrap(), "first");
    assert!(rejected.next().await.unwrap().starts_with(": still here"));
    rejected.admission.is_admitted = Box::new(|| std::future::ready(false).boxed_local());
    let end = rejected.next().await.unwrap();
    assert!(kinds(&end) == ["end"] && end.contains("no longer authorized"), "{end}");
    assert_eq!(rejected.next().await, None);

    let permits = Arc::new(StreamPermits::default());
    let mut replaced = stream_with(&ring, None, None, true, QUICK);
    replaced.admission.permit = permits.acquire("a");
    replaced.next().await.unwrap();
    let _others: Vec<_> = (1..STREAMS_MAX).map(|_| permits.acquire("a").unwrap()).collect();
    let _new = permits.acquire_from_largest("b").unwrap();
    let end = replaced.next().await.unwrap();
    assert!(kinds(&end) == ["end"] && end.contains("fewer streams"), "{end}");
}

#[tokio::test]
async fn a_stream_ends_at_its_greatest_age() {
    let ring = Arc::new(Ring::new(5));
    let mut life = Duration::from_millis(70);
    loop {
        let times = StreamTimes { life, ..QUICK };
        let mut reader = stream_with(&ring, None, None, true, times);
        let mut chunks = Vec::new();
        while let Some(chunk) = reader.next().await {
            chunks.push(chunk);
        }
        let last = chunks.pop().unwrap();
        assert!(kinds(&last) == ["end"] && last.contains("reconnect"), "{last}");
        // If the thread stands still for the stream's whole life, no comment is sent, and the test doubles the life.
        if chunks.len() > 1 {
            break;
        }
        life *= 2;
        assert!(life < PATIENCE, "{chunks:?}");
    }
}
