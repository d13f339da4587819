//! `/events` over HTTP: a client that reconnects misses nothing; limits on streams and slow readers.

use crate::rest::access::until_burst_refused;
use crate::support::admin_fakes::module;
use crate::support::admin_node::AdminNode;
use crate::support::wait::SOON;
use berth_http::Settings;
use berth_http::{AdminAccess, NamedToken, Right, TokenSource};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// One frame of a stream.
#[derive(Clone, Debug)]
struct Frame {
    id: String,
    event: String,
    data: Value,
}

impl Frame {
    fn words(&self) -> &str {
        self.data["words"].as_str().unwrap()
    }
}

/// An open stream.
struct Stream {
    lines: BufReader<TcpStream>,
    head: String,
}

impl Stream {
    fn open(node: &AdminNode, query: &str, headers: &str) -> Self {
        Self::open_as(node, &node.token, query, headers)
    }

    fn open_as(node: &AdminNode, token: &str, query: &str, headers: &str) -> Self {
        let mut stream = TcpStream::connect(node.address()).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        write!(
            stream,
            "GET /api/v1/events{query} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n\
             accept-encoding: gzip\r\n{headers}\r\n"
        )
        .unwrap();
        let mut lines = BufReader::new(stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(lines.read_line(&mut head).unwrap() > 0, "{head}");
        }
        Self { lines, head }
    }

    /// The next frame with data; `None` at the end.
    fn next(&mut self) -> Option<Frame> {
        let (mut id, mut event, mut data) = (String::new(), String::new(), String::new());
        // The comments that say that a stream lives are no answer.
        let deadline = Instant::now() + SOON;
        loop {
            assert!(Instant::now() < deadline, "nothing came");
            let mut line = String::new();
            if self.lines.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            // What lies between is the framing of the transfer: sizes of chunks.
            let line = line.trim_end();
            if let Some(value) = line.strip_prefix("id: ") {
                id = value.into();
            } else if let Some(value) = line.strip_prefix("event: ") {
                event = value.into();
            } else if let Some(value) = line.strip_prefix("data: ") {
                data = value.into();
            } else if line.is_empty() && !data.is_empty() {
                return Some(Frame { id, event, data: serde_json::from_str(&data).unwrap() });
            } else if line == "0" {
                return None;
            }
        }
    }

    /// The next frame of this kind; frames before it are checked.
    fn until(&mut self, kind: &str) -> Frame {
        loop {
            let frame = self.next().unwrap_or_else(|| panic!("the stream ended before {kind}"));
            assert_eq!(frame.data["kind"], frame.event);
            if frame.event == kind {
                return frame;
            }
        }
    }
}

fn kinds(node: &AdminNode, query: &str) -> Vec<Frame> {
    let mut stream = Stream::open(node, query, "");
    std::iter::from_fn(move || stream.next()).collect()
}

#[test]
fn a_stream_begins_with_the_state_and_continues_with_changes() {
    let node = AdminNode::new(2);
    let mut stream = Stream::open(&node, "", "");
    assert!(stream.head.starts_with("HTTP/1.1 200"), "{}", stream.head);
    assert!(stream.head.contains("content-type: text/event-stream"), "{}", stream.head);
    // Frames must not wait for others; and "identity" is no coding to be named (RFC 9110, 12.5.3).
    assert!(!stream.head.contains("content-encoding"), "{}", stream.head);
    let here = stream.next().unwrap();
    assert_eq!((here.event.as_str(), here.words()), ("here", "2 GPUs, 0 allocations, stack 0"));

    node.json("PUT", "/api/v1/gpus/GPU-1/cordon", r#"{"reason": "fan"}"#).expect(200);
    let cordoned = stream.until("gpuCordoned");
    assert_eq!(cordoned.data["gpu"], "GPU-1");
    assert_eq!(cordoned.words(), "GPU 1 is cordoned by admin (fan)");
    assert!(cordoned.data["generation"].as_u64() > here.data["generation"].as_u64());
    assert!(cordoned.data["at"].as_str().unwrap().ends_with('Z'));

    let allocation = node.allocate(0).id.to_string();
    let granted = stream.until("allocationGranted");
    assert_eq!(
        (&granted.data["allocation"], &granted.data["gpu"]),
        (&allocation.clone().into(), &"GPU-0".into())
    );
    node.delete(&format!("/api/v1/allocations/{allocation}?force=true")).expect(200);
    assert_eq!(stream.until("allocationEnded").data["allocation"], allocation);
    node.json("PUT", "/api/v1/stack", r#"{"entries": [], "reason": "bare"}"#).expect(200);
    assert_eq!(
        stream.until("stackActivated").words(),
        "stack 1 was activated by admin (bare): the baseline alone"
    );
    node.upload(&module("a", "")).expect(201);
    assert!(stream.until("policyUploaded").data["policy"].as_str().unwrap().contains('@'));
}

#[test]
fn a_reconnected_client_gets_the_missed_events() {
    let node = AdminNode::new(2);
    let mut stream = Stream::open(&node, "?gpu=GPU-0", "");
    assert_eq!(stream.next().unwrap().event, "here");
    node.json("PUT", "/api/v1/gpus/GPU-0/cordon", "{}").expect(200);
    let last = stream.until("gpuCordoned");
    drop(stream);
    node.delete("/api/v1/gpus/GPU-0/cordon").expect(200);
    // Each change is an event of its own only if the ring is read between them.
    let seen = |kind: &str| kinds(&node, "?since=0&follow=false").iter().any(|f| f.event == kind);
    let deadline = Instant::now() + SOON;
    while !seen("gpuUncordoned") {
        assert!(Instant::now() < deadline, "there is no event of the change");
    }
    node.json("PUT", "/api/v1/gpus/GPU-1/cordon", "{}").expect(200);

    let mut again = Stream::open(&node, "?gpu=GPU-0", &format!("last-event-id: {}\r\n", last.id));
    let here = again.next().unwrap();
    assert_eq!((here.event.as_str(), &here.id), ("here", &last.id));
    assert_eq!(again.next().unwrap().event, "gpuUncordoned");
    // The same without the header, and of another GPU.
    let mut other = Stream::open(&node, &format!("?kind=gpuCordoned,gpuFound&since={}", last.id), "");
    assert_eq!(other.next().unwrap().event, "here");
    let received = other.next().unwrap();
    assert_eq!((received.event.as_str(), &received.data["gpu"]), ("gpuCordoned", &"GPU-1".into()));
}

#[test]
fn an_id_of_another_run_or_of_a_dropped_event_requires_a_new_read() {
    let node = AdminNode::new(1);
    let all = kinds(&node, "?since=0&follow=false");
    assert_eq!(all[0].event, "here");
    let (start, seq) = all[0].id.split_once('-').unwrap();
    let newest: u64 = seq.parse().unwrap();
    for id in [format!("1-{seq}"), format!("{start}-{}", newest + 1_000_000)] {
        let received = kinds(&node, &format!("?follow=false&since={id}"));
        let received: Vec<_> = received.iter().map(|f| f.event.as_str()).collect();
        assert_eq!(received, ["here", "missed"], "{id}");
    }
    // More than a ring of changes, each by a scan of its own, would take a minute: `recent` has that test.
    for odd in ["x", "1", "-", "1-x", "1-01"] {
        let path = format!("/api/v1/events?since={odd}");
        node.get(&path).problem(400, "malformed-query");
        let headers = [("last-event-id", odd)];
        node.ask("GET", "/api/v1/events", &headers, b"").problem(400, "malformed-header");
    }
    for odd in ["kind=none", "kind=", "gpu=%20", "more=1", "follow=maybe"] {
        node.get(&format!("/api/v1/events?{odd}")).problem(400, "malformed-query");
    }
    node.ask_bare("GET", "/api/v1/events", &[], b"").problem(401, "unauthorized");
}

/// One that opens reading as well, and the file that it is in.
fn other_token(node: &mut AdminNode) -> (String, PathBuf) {
    let other = "o".repeat(40);
    let file = node.dir.path().join("other");
    std::fs::write(&file, &other).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o600)).unwrap();
    let source = TokenSource::File(file.clone());
    let token = NamedToken { name: "other".into(), right: Right::Read, source };
    let access = AdminAccess { tokens: vec![token], ..AdminAccess::default() };
    node.start_again(Settings { access, ..node.settings() });
    (other, file)
}

#[test]
fn a_stream_ends_after_its_token_was_removed_despite_many_refused_requests() {
    let mut node = AdminNode::new(1);
    let (other, file) = other_token(&mut node);
    let mut stream = Stream::open_as(&node, &other, "", "");
    assert_eq!(stream.next().unwrap().event, "here");
    let (address, ended) = (node.address(), Arc::new(AtomicBool::new(false)));
    let until = Arc::clone(&ended);
    // From the stream's own address, more than are answered 401.
    let knocking = std::thread::spawn(move || {
        loop {
            until_burst_refused(address, "GET /api/v1/node HTTP/1.1\r\nHost: localhost\r\n");
            if until.load(Ordering::Relaxed) {
                return;
            }
        }
    });
    std::fs::remove_file(file).unwrap();
    let end = stream.until("end");
    ended.store(true, Ordering::Relaxed);
    assert!(end.words().contains("no longer authorized"), "{}", end.words());
    knocking.join().unwrap();
}

#[test]
fn too_many_streams_get_a_retry_after() {
    let deadline = Instant::now() + SOON;
    // The test repeats if a busy machine released the slot late.
    loop {
        let mut node = AdminNode::new(1);
        let (other, _file) = other_token(&mut node);
        let mut open: Vec<_> = (0..32).map(|_| Stream::open(&node, "", "")).collect();
        for stream in &mut open {
            assert_eq!(stream.next().unwrap().event, "here");
        }
        let refused = node.get("/api/v1/events");
        assert!(refused.problem(503, "too-many-streams").contains("32"));
        assert!(refused.headers.contains_key("retry-after"));
        // The other routes still work, and so do open streams.
        node.json("PUT", "/api/v1/gpus/GPU-0/cordon", "{}").expect(200);
        for stream in &mut open {
            stream.until("gpuCordoned");
        }
        // Who does not stay needs no place, and another caller gets that of the oldest stream.
        assert_eq!(Stream::open(&node, "?follow=false", "").next().unwrap().event, "here");
        let mut fair = Stream::open_as(&node, &other, "", "");
        assert_eq!(fair.next().unwrap().event, "here");
        assert!(open[0].until("end").words().contains("fewer streams"));
        drop(open);
        let dropped = Instant::now();
        while Stream::open(&node, "", "").head.contains(" 503") {
            assert!(Instant::now() < deadline, "a released stream slot stays in use");
        }
        // Nothing else happens on the node, and a stream sends a comment only every 15 seconds.
        if dropped.elapsed() < Duration::from_secs(10) {
            return;
        }
        assert!(Instant::now() < deadline, "the slot was free only when the stream sent its next comment");
    }
}

#[test]
fn head_returns_only_the_headers_and_uses_no_stream() {
    let node = AdminNode::new(1);
    for _ in 0..40 {
        let head = node.ask("HEAD", "/api/v1/events", &[], b"");
        assert_eq!((head.status, head.headers["content-type"].as_str()), (200, "text/event-stream"));
        assert!(head.body.is_empty() && !head.headers.contains_key("content-length"));
    }
    assert_eq!(Stream::open(&node, "", "").next().unwrap().event, "here");
    assert_eq!(node.ask("HEAD", "/api/v1/events?kind=none", &[], b"").status, 400);
}

#[test]
fn a_stopping_daemon_reports_that_to_its_clients() {
    let deadline = Instant::now() + SOON;
    loop {
        let mut node = AdminNode::new(1);
        let mut stream = Stream::open(&node, "", "");
        assert_eq!(stream.next().unwrap().event, "here");
        let begun = Instant::now();
        node.api.take().unwrap().stop();
        let took = begun.elapsed();
        let end = std::iter::from_fn(|| stream.next()).find(|frame| frame.event == "end");
        // If the stream's thread stands still, the stop closes the stream without an `end`, and the test repeats.
        let Some(end) = end.filter(|_| took < Duration::from_secs(1)) else {
            assert!(Instant::now() < deadline, "a stream delays the stop, or ends without an `end`");
            continue;
        };
        assert!(end.words().contains("stops"), "{end:?}");
        assert_eq!(end.data["generation"], node.kernel.snapshot().generation);
        assert!(stream.next().is_none());
        let mut rest = Vec::new();
        // Reset or closed: nothing more comes.
        let _ = stream.lines.read_to_end(&mut rest);
        assert!(rest.len() < 8, "{rest:?}");
        return;
    }
}
