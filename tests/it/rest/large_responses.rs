//! Large responses: what the daemon keeps in memory while clients do not read, and which clients get a 503.

use crate::rest::flood::allow_descriptors;
use crate::support::admin_fakes::{digest_of, module};
use crate::support::admin_node::{AdminNode, Answer, ask};
use crate::support::wait::until;
use berth_http::Settings;
use berth_http::{AdminAccess, NamedToken, Right, TokenSource};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// More than the system buffers of an unread response: some megabytes at either end.
const LARGE: usize = 24 << 20;
const WAIT: Duration = Duration::from_secs(30);

/// A module of so many bytes, no two pieces of which are the same.
fn large(bytes: usize) -> Vec<u8> {
    let mut all = module("large", "1");
    all.extend((0..bytes - all.len()).map(|n| (n.wrapping_mul(2_654_435_761) >> 9).to_le_bytes()[0]));
    all
}

/// Takes further tokens, each of which may do this.
fn with_tokens(node: &mut AdminNode, names: &[&str], right: Right) {
    let token = |name: &&str| NamedToken {
        name: (*name).into(),
        right,
        source: TokenSource::Sha256(Sha256::digest(name.repeat(40)).into()),
    };
    let tokens = names.iter().map(token).collect();
    let access = AdminAccess { tokens, ..AdminAccess::default() };
    node.start_again(Settings { access, ..node.settings() });
}

fn ask_as(
    address: SocketAddr,
    name: &str,
    method: &str,
    path: &str,
    more: &[(&str, &str)],
    body: &[u8],
) -> Answer {
    let bearer = format!("Bearer {}", name.repeat(40));
    let mut headers = vec![("authorization", bearer.as_str())];
    headers.extend(more);
    ask(address, method, path, &headers, body)
}

/// A request whose response is not read yet.
fn begin(node: &AdminNode, token: &str, path: &str, times: usize) -> TcpStream {
    let mut stream = TcpStream::connect(node.address()).unwrap();
    stream.set_read_timeout(Some(WAIT)).unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n")
        .repeat(times);
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

/// The status and the length of an answer whose body is still to come.
fn head(reader: &mut impl BufRead) -> (u16, usize) {
    let (mut status, mut length, mut line) = (0, 0, String::new());
    while reader.read_line(&mut line).unwrap() > 0 && line != "\r\n" {
        if let Some(text) = line.strip_prefix("HTTP/1.1 ") {
            status = text[..3].parse().unwrap();
        }
        if let Some(text) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = text.trim().parse().unwrap();
        }
        line.clear();
    }
    (status, length)
}

#[test]
fn a_module_is_downloaded_whole_with_its_length_and_uncompressed() {
    let node = AdminNode::new(1);
    for bytes in [20, 64 << 10, (3 << 20) + 7] {
        let module = large(bytes);
        let digest = node.upload(&module).expect(201)["digest"].as_str().unwrap().to_owned();
        let path = format!("/api/v1/policies/{digest}/module");
        let kinds: [&[(&str, &str)]; 3] = [&[], &[("accept-encoding", "gzip")], &[("range", "bytes=1-5")]];
        for headers in kinds {
            let answer = node.ask("GET", &path, headers, b"");
            assert!(answer.status == 200 && answer.body == module, "{headers:?}");
            assert_eq!(answer.headers["content-length"], bytes.to_string());
            assert!(!answer.headers.contains_key("content-encoding"), "{headers:?}");
        }
        let head = node.ask("HEAD", &path, &[], b"");
        assert_eq!((head.status, head.body.len()), (200, 0));
        assert_eq!(head.headers["content-length"], bytes.to_string());
    }
}

#[test]
fn a_module_is_read_while_it_is_sent_and_a_changed_one_is_never_complete() {
    let node = AdminNode::new(1);
    let module = large(LARGE);
    node.upload(&module).expect(201);
    let path = format!("/api/v1/policies/{}/module", digest_of(&module));
    let mut reader = BufReader::new(begin(&node, &node.token, &path, 1));
    assert_eq!(head(&mut reader), (200, LARGE));
    // What was not read of it when it changes comes changed, if at all.
    let good = node.policies.spoil(&digest_of(&module));
    let (mut came, mut piece) = (Vec::new(), vec![0; 1 << 20]);
    loop {
        match reader.read(&mut piece) {
            Ok(0) => break,
            Ok(n) => came.extend(&piece[..n]),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
            Err(error) => panic!("{error}"),
        }
    }
    assert!(came.len() < LARGE, "all of it came, and it is not what its digest says");
    assert!(module.starts_with(&came[..came.len().min(64 << 10)]));
    node.get(&path).problem(410, "lost");
    node.policies.mend(good);
    assert!(node.get(&path).body == module);
}

#[test]
fn a_client_that_reads_no_lists_is_refused_further_ones_and_blocks_no_other() {
    allow_descriptors();
    let mut node = AdminNode::new(1);
    with_tokens(&mut node, &["reader", "other"], Right::Read);
    // The largest answer that a few requests make: 16 past stacks of 16 entries with parameters of 6 KiB.
    node.upload(&module("share", "1")).expect(201);
    let entry = json!({"policy": "share", "parameters": {"shares": 2, "more": "x".repeat(6_000)}});
    let stack = json!({ "entries": vec![entry; 16] }).to_string();
    for _ in 0..17 {
        node.json("PUT", "/api/v1/stack", &stack).expect(200);
    }
    let list = "/api/v1/stack/history";
    let address = node.address();
    let get =
        |name: &str, path: &str| ask_as(address, name, "GET", path, &[("accept-encoding", "identity")], b"");
    let first = get("reader", list);
    let (size, tag) = (first.body.len(), first.headers["etag"].clone());
    assert!(size > 1 << 20, "{size}");
    // One client's share is 24 MiB; each sends requests until one response stays unread.
    let times = (12 << 20) / size + 1;
    let crowd = (24 << 20) / size + 8;
    let crowd: Vec<_> = (0..crowd).map(|_| begin(&node, &"reader".repeat(40), list, times)).collect();
    // A refused client is not answered with 304 either, since the list is not made for it.
    let known = |name: &str| {
        let headers = [("accept-encoding", "identity"), ("if-none-match", tag.as_str())];
        ask_as(address, name, "GET", list, &headers, b"").status
    };
    let mut refused = None;
    // While the system's socket buffers still accept responses to the crowd, a request may succeed again.
    until("a refusal, and another one before anything is read", || {
        let answer = get("reader", list);
        // On a busy machine the request itself may come too slowly (408).
        let is_refused = answer.status == 503;
        refused = Some(answer);
        is_refused && known("reader") == 503
    });
    let refused = refused.unwrap();
    let message = refused.problem(503, "answers-unread");
    assert!(message.contains("other connections") && message.contains("limit"), "{message}");
    assert_eq!(refused.headers["retry-after"], "5");
    assert_eq!(known("other"), 304);
    // What is small is answered, and so are others, and changes.
    for small in ["/api/v1/gpus", "/api/v1/gpus/GPU-0", "/api/v1/allocations"] {
        get("reader", small).expect(200);
    }
    get("other", list).expect(200);
    node.get(list).expect(200);
    node.json("PUT", "/api/v1/gpus/GPU-0/cordon", "{}").expect(200);
    assert_eq!(node.ask_bare("GET", "/openapi.json", &[], b"").status, 200);
    drop(crowd);
    until("the share is free again", || get("reader", list).status == 200);
}

#[test]
fn a_caller_has_at_most_one_of_the_two_upload_permits() {
    let mut node = AdminNode::new(1);
    with_tokens(&mut node, &["ann", "ben", "cid"], Right::Change);
    node.policies.set_hold(true);
    let address = node.address();
    let upload = |name: &str, more: &str| {
        let headers = [("content-type", "application/wasm")];
        ask_as(address, name, "POST", "/api/v1/policies", &headers, &module(name, more))
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| upload("ann", "1"));
        until("the first is at work", || node.policies.waiters() == 1);
        let own = upload("ann", "2");
        assert!(own.problem(503, "busy").contains("the same caller"));
        assert!(own.headers.contains_key("retry-after"));
        let second = scope.spawn(|| upload("ben", "1"));
        until("the second is at work", || node.policies.waiters() == 2);
        let busy = upload("cid", "1");
        assert!(busy.problem(503, "busy").contains("other callers"));
        assert!(busy.headers.contains_key("retry-after"));
        node.get("/api/v1/policies").expect(200);
        node.policies.set_hold(false);
        for upload in [first, second] {
            upload.join().unwrap().expect(201);
        }
    });
    upload("ann", "2").expect(201);
    upload("cid", "1").expect(201);
}

/// Both are compiled before either is recorded.
#[test]
fn of_two_uploads_of_the_same_bytes_one_is_new() {
    let mut node = AdminNode::new(1);
    with_tokens(&mut node, &["ann", "ben"], Right::Change);
    let address = node.address();
    for n in 0..10 {
        let bytes = module("same", &n.to_string());
        let upload = |name: &str| {
            let headers = [("content-type", "application/wasm")];
            ask_as(address, name, "POST", "/api/v1/policies", &headers, &bytes)
        };
        node.policies.set_hold(true);
        let answers = std::thread::scope(|scope| {
            let upload = &upload;
            let uploads = ["ann", "ben"].map(|name| scope.spawn(move || upload(name)));
            until("both are at work", || node.policies.waiters() == 2);
            node.policies.set_hold(false);
            uploads.map(|upload| upload.join().unwrap())
        });
        let mut statuses = answers.each_ref().map(|answer| answer.status);
        statuses.sort_unstable();
        assert_eq!(statuses, [200, 201], "round {n}");
        assert!(
            answers.iter().all(|answer| answer.headers.contains_key("location") == (answer.status == 201))
        );
        let by = |answer: &Answer| answer.expect(answer.status)["by"].clone();
        assert_eq!(by(&answers[0]), by(&answers[1]), "the second does not replace the author");
    }
}
