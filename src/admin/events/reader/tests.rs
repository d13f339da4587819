//! What a stream says, and when it ends.

use super::super::places::{Places, STREAMS_MAX};
use super::super::recent::EVENTS_MAX;
use super::*;
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

const QUICK: Waits = Waits {
    keep_alive: Duration::from_millis(20),
    look: Duration::from_secs(3600),
    life: Duration::from_secs(3600),
};

fn reader(ring: &Arc<Ring>, kinds: Option<EventKind>, gpu: Option<&str>, follow: bool) -> Reader {
    with(ring, kinds, gpu, follow, QUICK)
}

fn with(ring: &Arc<Ring>, kinds: Option<EventKind>, gpu: Option<&str>, follow: bool, waits: Waits) -> Reader {
    let place = Arc::new(Places::default()).take("");
    let wanted = Wanted { kinds: kinds.map(|k| [k].into()), gpu: gpu.map(str::to_owned) };
    let still: Still = Box::new(|| std::future::ready(true).boxed_local());
    let begin = Begin { after: 0, follow, first: "first".into(), generation: Box::new(|| 42), still };
    Reader::new(Arc::clone(ring), wanted, begin, place, waits)
}

fn kinds(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| line.strip_prefix("event: ")).collect()
}

#[tokio::test]
async fn a_reader_gets_what_he_wants_and_a_word_while_there_is_nothing() {
    let ring = Arc::new(Ring::new(5));
    let mut all = reader(&ring, None, None, true);
    let mut some = reader(&ring, Some(EventKind::GpuHealth), Some("GPU-1"), true);
    assert_eq!(all.next().await.unwrap(), "first");
    assert_eq!(some.next().await.unwrap(), "first");
    for (kind, gpu) in
        [(EventKind::GpuHealth, "GPU-1"), (EventKind::GpuHealth, "GPU-2"), (EventKind::GpuDrained, "GPU-1")]
    {
        ring.add(&event(kind, gpu));
    }
    assert_eq!(kinds(&all.next().await.unwrap()), ["gpuHealth", "gpuHealth", "gpuDrained"]);
    assert_eq!(kinds(&some.next().await.unwrap()), ["gpuHealth"]);
    // Nothing more comes; the id moves past what was not wanted.
    assert_eq!(some.next().await.unwrap(), ": still here\nid: 5-3\n\n");
    // Whoever waits is woken long before it is time for another word.
    all.keep_alive = Duration::from_secs(60);
    let comes = async { ring.add(&event(EventKind::Bypass, "GPU-1")) };
    let (piece, ()) = tokio::join!(all.next(), comes);
    assert_eq!(kinds(&piece.unwrap()), ["bypass"]);
}

#[tokio::test]
async fn a_reader_who_does_not_follow_ends_with_what_is_there() {
    let ring = Arc::new(Ring::new(5));
    for _ in 0..2 * EVENTS_AT_ONCE {
        ring.add(&event(EventKind::GpuHealth, "GPU-1"));
    }
    let mut reader = reader(&ring, None, None, false);
    let (mut pieces, mut events) = (0, 0);
    while let Some(piece) = reader.next().await {
        pieces += 1;
        events += kinds(&piece).len();
    }
    assert_eq!((pieces, events), (3, 2 * EVENTS_AT_ONCE));
}

#[tokio::test]
async fn events_that_are_not_wanted_do_not_keep_a_stream_silent_nor_its_id_where_it_was() {
    let ring = Arc::new(Ring::new(5));
    let mut reader = reader(&ring, Some(EventKind::GpuDrained), None, true);
    assert_eq!(reader.next().await.unwrap(), "first");
    let others = Arc::clone(&ring);
    let busy = tokio::spawn(async move {
        loop {
            others.add(&event(EventKind::GpuHealth, "GPU-1"));
            tokio::time::sleep(QUICK.keep_alive / 10).await;
        }
    });
    let mut ids = Vec::new();
    for _ in 0..3 {
        let word = tokio::time::timeout(Duration::from_secs(20), reader.next()).await;
        let word = word.expect("a stream with a filter says nothing while others have news").unwrap();
        ids.push(word.strip_prefix(": still here\nid: ").unwrap().trim().to_owned());
    }
    busy.abort();
    ids.dedup();
    assert_eq!(ids.len(), 3, "the id stays where it was: {ids:?}");
}

#[tokio::test]
async fn whoever_does_not_follow_is_told_how_far_he_came() {
    let ring = Arc::new(Ring::new(5));
    ring.add(&event(EventKind::GpuHealth, "GPU-1"));
    let mut reader = reader(&ring, Some(EventKind::GpuDrained), None, false);
    assert_eq!(reader.next().await.unwrap(), "first");
    assert_eq!(reader.next().await.unwrap(), "id: 5-1\n\n");
    assert_eq!(reader.next().await, None);
}

#[tokio::test]
async fn a_stream_that_is_nudged_says_a_word_at_once() {
    let ring = Arc::new(Ring::new(5));
    let waits = Waits { keep_alive: Duration::from_secs(60), ..QUICK };
    let mut reader = with(&ring, None, None, true, waits);
    reader.next().await.unwrap();
    tokio::time::sleep(NUDGE_APART).await;
    ring.nudge();
    let word = tokio::time::timeout(Duration::from_secs(20), reader.next()).await;
    assert_eq!(word.expect("no word").unwrap(), ": still here\nid: 5-0\n\n");
}

#[tokio::test]
async fn a_slow_reader_is_ended_with_words_and_so_is_everybody_at_the_end() {
    let ring = Arc::new(Ring::new(5));
    let (mut slow, mut quick) = (reader(&ring, None, None, true), reader(&ring, None, None, true));
    slow.next().await;
    quick.next().await;
    for _ in 0..=EVENTS_MAX {
        ring.add(&event(EventKind::GpuHealth, "GPU-1"));
    }
    let end = slow.next().await.unwrap();
    assert!(kinds(&end) == ["end"] && end.contains("too slow"), "{end}");
    assert!(end.contains("\"generation\":42"), "{end}");
    assert_eq!(slow.next().await, None);
    quick.after = ring.newest();
    ring.close("the daemon stops");
    let end = quick.next().await.unwrap();
    assert!(kinds(&end) == ["end"] && end.contains("the daemon stops"), "{end}");
    assert_eq!(quick.next().await, None);
}

#[tokio::test]
async fn a_stream_ends_when_its_client_is_no_longer_let_in_or_its_place_is_needed() {
    let ring = Arc::new(Ring::new(5));
    let mut shut = with(&ring, None, None, true, Waits { look: Duration::ZERO, ..QUICK });
    assert_eq!(shut.next().await.unwrap(), "first");
    assert!(shut.next().await.unwrap().starts_with(": still here"));
    shut.still = Box::new(|| std::future::ready(false).boxed_local());
    let end = shut.next().await.unwrap();
    assert!(kinds(&end) == ["end"] && end.contains("no longer let in"), "{end}");
    assert_eq!(shut.next().await, None);

    let places = Arc::new(Places::default());
    let mut moved = with(&ring, None, None, true, QUICK);
    moved.place = places.take("a");
    moved.next().await.unwrap();
    let _others: Vec<_> = (1..STREAMS_MAX).map(|_| places.take("a").unwrap()).collect();
    let _new = places.take_over("b").unwrap();
    let end = moved.next().await.unwrap();
    assert!(kinds(&end) == ["end"] && end.contains("fewer streams"), "{end}");
}

#[tokio::test]
async fn a_stream_ends_when_its_time_is_over() {
    let ring = Arc::new(Ring::new(5));
    let waits = Waits { life: Duration::from_millis(70), ..QUICK };
    let mut reader = with(&ring, None, None, true, waits);
    let mut pieces = Vec::new();
    while let Some(piece) = reader.next().await {
        pieces.push(piece);
    }
    let last = pieces.pop().unwrap();
    assert!(kinds(&last) == ["end"] && last.contains("come back"), "{last}");
    assert!(pieces.len() > 1, "{pieces:?}");
}
