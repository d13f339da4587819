//! Malformed requests: heads, lengths and values that are wrong, too long or ambiguous. Each ends in an error or a
//! closed connection; no byte behind it counts as another request.

use crate::support::admin_node::AdminNode;
use crate::support::wait::until;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Longest time that a connection may stay open after a malformed request: a head has 5 s. Without that
/// deadline the server would close the connection as an idle one, after 35 s.
const PATIENCE: Duration = Duration::from_secs(30);

/// Largest answer to a value of 60 KB, bytes: words of 4 KiB, and what is around them.
const READABLE: usize = 5_000;

/// Sends the bytes and leaves the connection open for sending; what came until the server closed it, or
/// until it had answered and nothing more came.
fn sent(node: &AdminNode, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(node.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    // The server may have had enough before all of it is there.
    let _ = stream.write_all(bytes);
    let (mut answer, mut piece) = (Vec::new(), [0; 4096]);
    let end = Instant::now() + PATIENCE;
    loop {
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(n) => answer.extend_from_slice(&piece[..n]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                if !answer.is_empty() {
                    break;
                }
                assert!(Instant::now() < end, "neither an answer nor an end: {bytes:.60?}");
            }
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&answer).into_owned()
}

fn answers(text: &str) -> Vec<u16> {
    text.split("HTTP/1.1 ").skip(1).filter_map(|rest| rest.get(..3)?.parse().ok()).collect()
}

/// None of it is a success or an error of ours, and the first error ends the connection.
fn turned_away(node: &AdminNode, bytes: &[u8]) {
    let text = sent(node, bytes);
    let all = answers(&text);
    assert!(all.iter().all(|status| (400..500).contains(status)), "{bytes:.200?}: {text}");
    assert!(all.len() <= 1, "something behind it was answered: {bytes:.200?}: {text}");
}

#[test]
fn malformed_heads_end_their_connection_with_at_most_one_error() {
    let node = AdminNode::new(1);
    let host = "Host: localhost\r\n";
    let livez = |more: &str| format!("GET /livez HTTP/1.1\r\n{host}{more}\r\n");
    let heads = [
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\u{12}\u{4}\0\0\0\0\0".to_owned(),
        format!("GET /livez\r\n{host}\r\n"),
        format!("GET  /livez HTTP/1.1\r\n{host}\r\n"),
        format!("GET /live z HTTP/1.1\r\n{host}\r\n"),
        format!("GET /livez HTTP/1.2\r\n{host}\r\n"),
        format!("GET /livez HTTP/11\r\n{host}\r\n"),
        format!("G\0T /livez HTTP/1.1\r\n{host}\r\n"),
        format!("GET /li\0vez HTTP/1.1\r\n{host}\r\n"),
        format!("GET /livez?a=\0 HTTP/1.1\r\n{host}\r\n"),
        "\u{16}\u{3}\u{1}\u{2}\0\u{1}\0\u{1}\u{fc}\u{3}\u{3}".to_owned() + &"\0".repeat(600),
        livez("X-A\0: b\r\n"),
        livez("X-A: b\0c\r\n"),
        livez("X A: b\r\n"),
        livez("X-A : b\r\n"),
        livez(": b\r\n"),
        livez("no colon\r\n"),
        livez("X-A: b\r\n folded\r\n"),
        livez(&"X-A: b\r\n".repeat(97)),
        livez(&format!("X-A: {}\r\n", "b".repeat(140_000))),
        format!("GET /{} HTTP/1.1\r\n{host}\r\n", "a".repeat(140_000)),
        format!("GET /?{} HTTP/1.1\r\n{host}\r\n", "a".repeat(140_000)),
        "A".repeat(200_000),
        "\r\n".repeat(100_000),
    ];
    for head in &heads {
        turned_away(&node, head.as_bytes());
        node.get("/api/v1/node").expect(200);
    }
    // As many as there may be, and as long.
    assert_eq!(answers(&sent(&node, livez(&"X-A: b\r\n".repeat(90)).as_bytes())), [200]);
    let long = livez(&format!("X-A: {}\r\n", "b".repeat(60_000)));
    assert_eq!(answers(&sent(&node, long.as_bytes())), [200]);
}

#[test]
fn bytes_that_are_not_utf8_are_an_error_everywhere() {
    let node = AdminNode::new(1);
    let asked = |path: &[u8], header: &[u8]| {
        let mut bytes = b"GET ".to_vec();
        bytes.extend_from_slice(path);
        bytes.extend_from_slice(b" HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ");
        bytes.extend_from_slice(node.token.as_bytes());
        bytes.extend_from_slice(b"\r\n");
        bytes.extend_from_slice(header);
        bytes.extend_from_slice(b"\r\n");
        answers(&sent(&node, &bytes))
    };
    let paths: &[&[u8]] = &[
        b"/api/v1/gpus/\xff\xfe",
        b"/api/v1/gpus/%ff%fe",
        b"/api/v1/gpus/%00",
        b"/api/v1/gpus?model=\xff",
        b"/api/v1/gpus?model=%ff",
        b"/api/v1/decisions?cursor=%ff%00",
        b"/api/v1/decisions?cursor=%zz",
        b"/api/v1/events?since=%00",
    ];
    for path in paths {
        let got = asked(path, b"");
        assert!(matches!(got[..], [400..=499]), "{path:?}: {got:?}");
    }
    let headers: &[&[u8]] = &[
        b"Last-Event-ID: \xff\r\n",
        b"Last-Event-ID: 1-1\r\nLast-Event-ID: 1-1\r\n",
        b"Last-Event-ID: \r\n",
    ];
    for header in headers {
        let got = asked(b"/api/v1/events?follow=false", header);
        assert_eq!(got, [400], "{header:?}");
    }
    assert_eq!(asked(b"/api/v1/gpus", b""), [200]);
}

#[test]
fn ambiguous_body_lengths_are_refused() {
    let node = AdminNode::new(1);
    // After each follow bytes that would be another request under the other length.
    let behind = "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let put = |more: &str, body: &str| {
        format!(
            "PUT /api/v1/gpus/GPU-0/cordon HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Authorization: Bearer {}\r\n{more}\r\n{body}{behind}",
            node.token
        )
    };
    let chunked = "Transfer-Encoding: chunked\r\n";
    for ambiguous in [
        put("Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"),
        put("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", "0\r\n\r\n"),
        put("Content-Length: 2\r\nContent-Length: 3\r\n", "{}"),
        put("Content-Length: 2\r\nContent-Length: 2\r\n", "{}"),
        put("Content-Length: 2, 2\r\n", "{}"),
        put("Content-Length: +2\r\n", "{}"),
        put("Content-Length: -2\r\n", "{}"),
        put("Content-Length: 0x2\r\n", "{}"),
        put("Content-Length: 99999999999999999999999\r\n", "{}"),
        put("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"),
        put("Transfer-Encoding: chunked, identity\r\n", "0\r\n\r\n"),
        put("Transfer-Encoding: gzip, chunked\r\n", "0\r\n\r\n"),
        put("Transfer-Encoding: xchunked\r\n", "0\r\n\r\n"),
        put("Transfer-Encoding: \u{b}chunked\r\n", "0\r\n\r\n"),
        put(chunked, "ffffffffffffffff\r\n{}\r\n0\r\n\r\n"),
        put(chunked, "10000000000000002\r\n{}\r\n0\r\n\r\n"),
        put(chunked, "-2\r\n{}\r\n0\r\n\r\n"),
        put(chunked, "0x2\r\n{}\r\n0\r\n\r\n"),
        put(chunked, "2\n{}\r\n0\r\n\r\n"),
        put(chunked, "2\r\n{}xx0\r\n\r\n"),
    ] {
        let text = sent(&node, ambiguous.as_bytes());
        let all = answers(&text);
        assert!(all.iter().all(|status| (400..500).contains(status)), "{ambiguous}\n{text}");
        assert!(all.len() <= 1, "{ambiguous}\n{text}");
        assert_eq!(node.get("/api/v1/gpus/GPU-0").expect(200)["drain"]["state"], "active", "{ambiguous}");
    }
    // With a clear length the bytes after the body are a second request, which is answered after the first. On a busy
    // machine its response may come too late for `sent`, and the test repeats.
    for clear in [put("Content-Length: 2\r\n", "{}"), put(chunked, "2\r\n{}\r\n0\r\n\r\n")] {
        until("both are answered", || answers(&sent(&node, clear.as_bytes())) == [200, 200]);
    }
}

#[test]
fn values_that_are_too_long_are_an_error_of_a_readable_size() {
    let node = AdminNode::new(1);
    let long = "9".repeat(60_000);
    for (path, header) in
        [("/api/v1/events?follow=false", "last-event-id"), ("/api/v1/events?follow=false", "LAST-EVENT-ID")]
    {
        let answer = node.ask("GET", path, &[(header, &long)], b"");
        answer.problem(400, "malformed-header");
        assert!(answer.body.len() < READABLE, "{} bytes", answer.body.len());
    }
    let json = ("content-type", "application/json");
    let wasm = ("content-type", "application/wasm");
    let answer = node.ask("PUT", "/api/v1/stack", &[json, ("if-match", &long)], b"{\"entries\": []}");
    assert!(
        (400..500).contains(&answer.status) && answer.body.len() < READABLE,
        "{} bytes",
        answer.body.len()
    );
    let answer = node.ask("POST", "/api/v1/policies", &[wasm, ("berth-signature", &long)], b"\0asm a 1");
    answer.problem(400, "malformed-header");
    assert!(answer.body.len() < READABLE, "{} bytes", answer.body.len());
    for path in ["/api/v1/decisions?cursor=", "/api/v1/allocations?cursor=", "/api/v1/events?kind="] {
        let answer = node.get(&format!("{path}{long}"));
        assert!(
            (400..500).contains(&answer.status) && answer.body.len() < READABLE,
            "{path}: {} bytes",
            answer.body.len()
        );
    }
    let bearer = format!("Bearer {long}");
    node.ask_bare("GET", "/api/v1/node", &[("authorization", &bearer)], b"").problem(401, "unauthorized");
}

#[test]
fn a_compressed_body_is_refused() {
    let node = AdminNode::new(1);
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    packed.write_all(&vec![b' '; 64 << 20]).unwrap();
    packed.write_all(b"{}").unwrap();
    let packed = packed.finish().unwrap();
    for encoding in ["gzip", "deflate", "br", "zstd", "GZIP, identity"] {
        for (method, path, kind) in [
            ("PUT", "/api/v1/gpus/GPU-0/cordon", "application/json"),
            ("POST", "/api/v1/policies", "application/wasm"),
        ] {
            let headers = [("content-type", kind), ("content-encoding", encoding)];
            let message = node.ask(method, path, &headers, &packed).problem(415, "unsupported-media-type");
            assert!(message.contains("Content-Encoding"), "{message}");
        }
    }
    let plain = [("content-type", "application/json"), ("content-encoding", "identity")];
    node.ask("PUT", "/api/v1/gpus/GPU-0/cordon", &plain, b"{}").expect(200);
}
