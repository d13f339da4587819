//! Checks before a handler: token, host, sizes, methods, broken requests; start and stop of the admin API.

use crate::rest::queries::operations;
use crate::support::admin_fakes::module;
use crate::support::admin_node::{AdminNode, ask};
use crate::support::port::Port;
use crate::support::wait::{SOON, until};
use berth_admin::AdminServer;
use berth_http::{AdminError, Settings};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

fn raw(node: &AdminNode, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(node.address()).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(request).unwrap();
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn all_of_api_v1_needs_the_token_which_is_never_part_of_a_url() {
    let node = AdminNode::new(1);
    let wrong = format!("Bearer {}", "0".repeat(64));
    let operations = operations(&node).into_iter().map(|operation| (operation.method, operation.path));
    // What is no operation needs it, too.
    let unknown = [
        ("GET", "/api/v1"),
        ("GET", "/api/v1/"),
        ("GET", "/api/v1/nothing"),
        ("DELETE", "/api/v1/nothing"),
        ("PATCH", "/api/v1/node"),
        ("OPTIONS", "/api/v1/gpus"),
    ];
    let unknown = unknown.map(|(method, path)| (method.to_owned(), path.to_owned()));
    let (guarded, open): (Vec<_>, Vec<_>) =
        operations.chain(unknown).partition(|(_, path)| path == "/api/v1" || path.starts_with("/api/v1/"));
    let open: Vec<&str> = open.iter().map(|(_, path)| path.as_str()).collect();
    assert_eq!(open, ["/livez", "/metrics", "/readyz"]);
    for (method, path) in &guarded {
        let bare = node.ask_bare(method, path, &[], b"");
        bare.problem(401, "unauthorized");
        assert!(bare.headers["www-authenticate"].starts_with("Bearer"));
        node.ask_bare(method, path, &[("authorization", &wrong)], b"").problem(401, "unauthorized");
    }
    for query in ["token", "access_token", "authorization"] {
        let path = format!("/api/v1/node?{query}={}", node.token);
        node.ask_bare("GET", &path, &[], b"").problem(401, "unauthorized");
    }
    node.get("/api/v1/node").expect(200);
}

#[test]
fn other_hosts_are_refused_on_every_route() {
    let node = AdminNode::new(1);
    for path in [
        "/",
        "/page/page.js",
        "/livez",
        "/metrics",
        "/openapi.json",
        "/swagger-ui/",
        "/api/v1/node",
        "/nothing",
    ] {
        for host in ["evil.example", "10.0.0.1:9470", "127.0.0.1.evil.example"] {
            node.ask("GET", path, &[("host", host)], b"").problem(421, "wrong-host");
        }
    }
    let port = node.address().port();
    for host in ["localhost", "127.0.0.1", "[::1]"] {
        for host in [host.to_owned(), format!("{host}:{port}")] {
            node.ask("GET", "/api/v1/node", &[("host", &host)], b"").expect(200);
        }
    }
    let none = raw(&node, b"GET /livez HTTP/1.0\r\n\r\n");
    assert!(none.starts_with("HTTP/1.0 421"), "{none}");
    let two = raw(&node, b"GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n");
    assert!(two.starts_with("HTTP/1.1 4"), "{two}");
}

#[test]
fn unknown_resources_and_impossible_changes_are_problems() {
    let node = AdminNode::new(1);
    for path in [
        "/nothing",
        "/api",
        "/api/v1/",
        "/api/v1/nothing",
        "/api/v1/gpus/",
        "/api/v1/gpus/GPU-0/x",
        "/metrics/x",
    ] {
        node.get(path).problem(404, "no-such-route");
    }
    for (method, path, allow) in [
        ("POST", "/api/v1/gpus", "GET, HEAD"),
        ("PATCH", "/api/v1/gpus/GPU-0", "GET, HEAD, DELETE"),
        ("GET", "/api/v1/gpus/GPU-0/cordon", "PUT, DELETE"),
        ("POST", "/api/v1/stack", "GET, HEAD, PUT"),
        ("DELETE", "/livez", "GET, HEAD"),
        ("POST", "/metrics", "GET, HEAD"),
        ("POST", "/openapi.json", "GET, HEAD"),
        ("OPTIONS", "/api/v1/policies", "GET, HEAD, POST"),
        ("DELETE", "/swagger-ui/", "GET, HEAD"),
        ("POST", "/", "GET, HEAD"),
        ("PUT", "/page/page.js", "GET, HEAD"),
    ] {
        let answer = node.ask(method, path, &[], b"");
        answer.problem(405, "method-not-allowed");
        assert_eq!(answer.headers["allow"], allow, "{method} {path}");
    }
    for path in [
        "/api/v1/gpus/a%20b",
        "/api/v1/gpus/%00",
        "/api/v1/gpus/%ff%fe",
        "/api/v1/gpus/%zz",
        "/api/v1/allocations/17",
        "/api/v1/allocations/-1",
        "/api/v1/policies/latest",
        "/api/v1/policies/latest/module",
    ] {
        node.get(path).problem(400, "malformed-path");
    }
    node.get(&format!("/api/v1/gpus/{}", "x".repeat(10_000))).problem(400, "malformed-path");
}

#[test]
fn bodies_must_match_their_content_type_and_the_route() {
    let node = AdminNode::new(1);
    let cordon = "/api/v1/gpus/GPU-0/cordon";
    for broken in ["{", "{\"reason\": \"x\"", "nonsense", "{\"reason\": \"\u{0}\"}", "\u{feff}{}"] {
        node.json("PUT", cordon, broken).problem(400, "malformed-json");
    }
    node.ask("PUT", cordon, &[("content-type", "application/json")], b"\xff\xfe")
        .problem(400, "malformed-json");
    let deep = format!("{{\"entries\": [{{\"parameters\": {{\"a\": {}", "[".repeat(100_000));
    node.json("PUT", "/api/v1/stack", &deep).problem(400, "malformed-json");
    node.json("PUT", "/api/v1/stack", "").problem(400, "malformed-json");
    for invalid in ["[]", "3", "{\"reason\": 3}", "{\"why\": \"x\"}", "{\"reason\": \"a\\nb\"}"] {
        node.json("PUT", cordon, invalid).problem(422, "invalid");
    }
    let long = format!("{{\"reason\": \"{}\"}}", "x".repeat(2000));
    node.json("PUT", cordon, &long).problem(422, "invalid");
    node.ask("PUT", cordon, &[], b"{}").problem(415, "unsupported-media-type");
    node.ask("PUT", cordon, &[("content-type", "text/plain")], b"{}").problem(415, "unsupported-media-type");
    let charset = [("content-type", "application/json; charset=utf-8")];
    node.ask("PUT", cordon, &charset, b"{}").expect(200);
    node.json("POST", "/api/v1/policies", "{}").problem(415, "unsupported-media-type");
    let huge = format!("{{\"reason\": \"{}\"}}", "x".repeat(300 * 1024));
    node.json("PUT", cordon, &huge).problem(413, "too-large");
}

#[test]
fn a_gigabyte_is_refused_before_it_is_read_whether_declared_or_not() {
    let node = AdminNode::new(1);
    let head = |path: &str, more: &str| {
        let method = if path.ends_with("stack") { "PUT" } else { "POST" };
        let kind = if path.ends_with("stack") { "application/json" } else { "application/wasm" };
        format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\nContent-Type: {kind}\r\n{more}\r\n\r\n",
            node.token
        )
    };
    for path in ["/api/v1/policies", "/api/v1/stack"] {
        let declared = head(path, "Content-Length: 1073741824");
        until("an answer before the body", || {
            let began = Instant::now();
            let mut stream = TcpStream::connect(node.address()).unwrap();
            stream.set_read_timeout(Some(SOON)).unwrap();
            stream.write_all(declared.as_bytes()).unwrap();
            let mut answer = [0; 4096];
            let n = stream.read(&mut answer).unwrap();
            let answer = String::from_utf8_lossy(&answer[..n]);
            assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
            began.elapsed() < Duration::from_secs(5)
        });

        until("a connection that is closed while a body is sent", || {
            let mut stream = TcpStream::connect(node.address()).unwrap();
            stream.set_read_timeout(Some(SOON)).unwrap();
            stream.write_all(head(path, "Transfer-Encoding: chunked").as_bytes()).unwrap();
            let (answer, took) = flood(stream);
            assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
            took < Duration::from_secs(10)
        });
    }
    // Without the token nothing of it is read at all.
    let mut stream = TcpStream::connect(node.address()).unwrap();
    let anonymous = "POST /api/v1/policies HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\n";
    stream.write_all(anonymous.as_bytes()).unwrap();
    let mut answer = [0; 4096];
    let n = stream.read(&mut answer).unwrap();
    assert!(String::from_utf8_lossy(&answer[..n]).starts_with("HTTP/1.1 401"));
    node.upload(&module("fine", "1")).expect(201);
}

/// Sends chunks until the server closes the connection. Returns its response, and how long that took.
fn flood(mut stream: TcpStream) -> (String, Duration) {
    let mut reading = stream.try_clone().unwrap();
    let reader = std::thread::spawn(move || {
        let mut answer = vec![0; 4096];
        let n = reading.read(&mut answer).unwrap();
        String::from_utf8_lossy(&answer[..n]).into_owned()
    });
    let mut chunk = b"100000\r\n".to_vec();
    chunk.extend(vec![b'x'; 1 << 20]);
    chunk.extend(b"\r\n");
    stream.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(15) && stream.write_all(&chunk).is_ok() {}
    (reader.join().unwrap(), began.elapsed())
}

#[test]
fn malformed_requests_close_only_their_own_connection() {
    let node = AdminNode::new(1);
    let many = format!("GET /livez HTTP/1.1\r\nHost: localhost\r\n{}\r\n", "X-A: b\r\n".repeat(200));
    let long = format!("GET /livez HTTP/1.1\r\nHost: localhost\r\nX-A: {}\r\n\r\n", "b".repeat(300_000));
    let cut = "PUT /api/v1/stack HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{";
    let smuggled = "GET /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n";
    for request in
        ["\r\n\r\n", "nonsense\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", &many, &long, cut, smuggled, "\0\0\0\0"]
    {
        let answer = raw(&node, request.as_bytes());
        assert!(!answer.starts_with("HTTP/1.1 2"), "{request:.40}: {answer}");
    }
    node.get("/api/v1/node").expect(200);
}

#[test]
fn a_port_in_use_and_a_bad_token_file_are_reported_with_advice() {
    let node = AdminNode::new(1);
    let bind = |settings: Settings| AdminServer::bind(settings).err().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = listener.local_addr().unwrap();
    let error = bind(Settings { listen: taken, ..node.settings() });
    assert!(
        matches!(error, AdminError::Taken { .. }) && error.to_string().contains("--admin-listen"),
        "{error}"
    );
    let error = bind(Settings { health_listen: Some(taken), ..node.settings() });
    assert!(error.to_string().contains("--health-listen"), "{error}");
    let nowhere = "192.0.2.1:1".parse().unwrap();
    let error = bind(Settings { listen: nowhere, ..node.settings() });
    assert!(matches!(error, AdminError::Listen { .. }), "{error}");
    let error = bind(Settings { token_file: node.dir.path().into(), ..node.settings() });
    assert!(matches!(error, AdminError::Token { .. }), "{error}");
}

#[test]
fn a_stop_finishes_requests_and_frees_the_port_within_a_second() {
    // On a busy machine a stop may be slow, or close the connection of the upload. The whole test repeats then.
    until("a stop within a second", || {
        let mut node = AdminNode::new(1);
        // Held, so that no other process takes it when it is free.
        let port = Port::held();
        node.start_at(&port);
        let (address, token) = (node.address(), node.token.clone());
        // Idle connections, one of them in the middle of a head, do not hold the stop up.
        let idle: Vec<_> = (0..5).map(|_| TcpStream::connect(address).unwrap()).collect();
        (&idle[0]).write_all(b"GET /livez HT").unwrap();
        let running = node.api.take().unwrap();
        let began = Instant::now();
        running.stop();
        if began.elapsed() >= Duration::from_secs(1) || TcpListener::bind(address).is_err() {
            return false;
        }

        node.start();
        assert_eq!(node.token, token, "the token outlives a restart");
        // A request under way is answered, not cut.
        node.policies.set_hold(true);
        let (address, bearer) = (node.address(), format!("Bearer {token}"));
        let upload = std::thread::spawn(move || {
            let headers = [("authorization", bearer.as_str()), ("content-type", "application/wasm")];
            ask(address, "POST", "/api/v1/policies", &headers, &module("late", "1"))
        });
        until("the upload", || node.policies.waiting());
        let running = node.api.take().unwrap();
        let stopping = std::thread::spawn(move || {
            let began = Instant::now();
            running.stop();
            began.elapsed()
        });
        node.policies.set_hold(false);
        let took = stopping.join().unwrap();
        upload.join().is_ok_and(|answer| answer.status == 201) && took < Duration::from_secs(1)
    });
}
