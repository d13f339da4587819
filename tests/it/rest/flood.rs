//! Floods of connections: more than there are slots, none of which sends a request in time or reads its response.
//! `just flood-admin` does the same, heavier, with the release build.

use crate::support::admin_node::{AdminNode, ask};
use crate::support::wait::{SOON, until, until_some};
use berth_http::Settings;
use berth_http::{AdminAccess, RateLimits};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// More than the admin listener's 256 slots.
const CROWD: usize = 300;
/// More than the 64 slots of the health listener, or of the Unix socket.
const SMALL_CROWD: usize = 100;
/// The longest that a good client may wait for an answer that takes a millisecond: the head of a silent
/// connection has 5 s, so that a client that had to wait for one to end would wait for longer than this.
const GOOD_WAIT: Duration = Duration::from_secs(3);
/// An idle connection is closed after 30 s, so that a client that had to wait for its end would wait for longer than
/// this.
const IDLE_WAIT: Duration = Duration::from_secs(25);
/// Both ends of each connection are in this process.
pub(crate) fn allow_descriptors() {
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current = limit.maximum.map_or(Some(8192), |most| Some(most.min(8192)));
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
}

/// Connections that send these bytes, and then nothing.
fn crowd(address: SocketAddr, count: usize, bytes: &[u8]) -> Vec<TcpStream> {
    let connect = |_| {
        let mut stream = TcpStream::connect(address).unwrap();
        // One whose place was taken already may be closed.
        let _ = stream.write_all(bytes);
        stream
    };
    (0..count).map(connect).collect()
}

/// Whether the requests of a good client are answered in time. Tests repeat them beside another crowd until they are:
/// on a busy machine some attempts may be late, but not all.
fn is_quick(work: impl FnOnce()) -> bool {
    let began = Instant::now();
    work();
    began.elapsed() < GOOD_WAIT
}

/// Sends a request and reads its answer's head.
fn status(stream: &mut (impl Read + Write), request: &str) -> std::io::Result<String> {
    stream.write_all(request.as_bytes())?;
    let mut answer = [0; 4096];
    let n = stream.read(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer[..n]).lines().next().unwrap_or_default().to_owned())
}

fn open(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    let left = matches!((&*stream).read(&mut [0; 1]), Err(error) if error.kind() == ErrorKind::WouldBlock);
    stream.set_nonblocking(false).unwrap();
    left
}

fn node_request(node: &AdminNode) -> String {
    format!("GET /api/v1/node HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\n\r\n", node.token)
}

#[test]
fn many_silent_or_half_sent_requests_block_no_other_client() {
    allow_descriptors();
    let node = AdminNode::new(1);
    let heads: [&[u8]; 3] = [b"", b"GET /livez HTTP/1.1\r\nX-A: ", &[b'A'; 20_000]];
    for head in heads {
        until("a new client and the page are served beside the crowd", || {
            let mut known = TcpStream::connect(node.address()).unwrap();
            known.set_read_timeout(Some(SOON)).unwrap();
            assert_eq!(status(&mut known, &node_request(&node)).unwrap(), "HTTP/1.1 200 OK");
            let crowd = crowd(node.address(), CROWD, head);
            let is_served = is_quick(|| {
                node.get("/api/v1/node").expect(200);
                assert_eq!(node.ask_bare("GET", "/", &[], b"").status, 200);
            });
            if !is_served {
                return false;
            }
            // Those that lost their place end a moment later.
            until("no more are open than there are slots", || {
                crowd.iter().filter(|stream| open(stream)).count() <= 256
            });
            // Its slot is not a stranger's.
            assert_eq!(status(&mut known, &node_request(&node)).unwrap(), "HTTP/1.1 200 OK");
            true
        });
    }
}

#[test]
fn idle_connections_are_closed_for_new_ones() {
    allow_descriptors();
    let node = AdminNode::new(1);
    let served = |request: &str| {
        let mut stream = TcpStream::connect(node.address()).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        assert_eq!(status(&mut stream, request).unwrap(), "HTTP/1.1 200 OK");
        stream
    };
    let request = "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let _crowd = until_some("all are served before an idle one would end", || {
        let began = Instant::now();
        let crowd: Vec<_> = (0..CROWD).map(|_| served(request)).collect();
        node.get("/api/v1/node").expect(200);
        // The connection is closed shortly after its slot was given to another one.
        until("the oldest is closed", || !open(&crowd[0]) || began.elapsed() >= IDLE_WAIT);
        if began.elapsed() >= IDLE_WAIT {
            return None;
        }
        let gone: Vec<_> = crowd.iter().map(|stream| !open(stream)).collect();
        assert!(gone[0] && !gone[CROWD - 1], "the oldest is closed first");
        Some(crowd)
    });
    // The same of authenticated clients.
    until("all that are known are served before an idle one would end", || {
        let began = Instant::now();
        let known: Vec<_> = (0..CROWD).map(|_| served(&node_request(&node))).collect();
        node.get("/api/v1/node").expect(200);
        if began.elapsed() >= IDLE_WAIT {
            return false;
        }
        assert!(open(&known[CROWD - 1]));
        true
    });
}

#[test]
fn the_kubelets_probe_is_answered_while_others_use_all_connections_of_its_listener() {
    allow_descriptors();
    let node = AdminNode::new(1);
    let health = node.api.as_ref().unwrap().health_address.unwrap();
    for head in [&b""[..], b"GET /livez HTTP/1.1\r\n"] {
        until("the probe is answered in time", || {
            let _crowd = crowd(health, SMALL_CROWD, head);
            // Its default timeout is a second.
            let began = Instant::now();
            assert_eq!(ask(health, "GET", "/livez", &[], b"").status, 200);
            began.elapsed() < Duration::from_secs(1)
        });
    }
}

#[test]
fn root_is_served_over_the_socket_under_any_load() {
    allow_descriptors();
    let mut node = AdminNode::new(1);
    let socket = node.dir.path().join("admin.sock");
    let access = AdminAccess { socket: Some(socket.clone()), ..AdminAccess::default() };
    node.start_again(Settings { access, ..node.settings() });
    let connect = |path: &Path| {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream
    };
    let request = "GET /api/v1/node HTTP/1.1\r\nHost: localhost\r\n\r\n";
    until("root is served beside the crowds", || {
        let _elsewhere = crowd(node.address(), CROWD, b"");
        let _crowd: Vec<_> = (0..SMALL_CROWD).map(|_| connect(&socket)).collect();
        is_quick(|| assert_eq!(status(&mut connect(&socket), request).unwrap(), "HTTP/1.1 200 OK"))
    });
}

#[test]
fn bodies_that_are_never_sent_block_no_other_request() {
    allow_descriptors();
    let node = AdminNode::new(1);
    let head = |token: &str, length: usize| {
        format!(
            "PUT /api/v1/gpus/GPU-0/cordon HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Authorization: Bearer {token}\r\nContent-Length: {length}\r\n\r\n{{"
        )
    };
    // Known clients at work go last, but a new one is not made to wait for them.
    for token in ["wrong", &node.token] {
        until("a new client is served beside the crowd", || {
            let _crowd = crowd(node.address(), CROWD, head(token, 200_000).as_bytes());
            is_quick(|| {
                node.get("/api/v1/node").expect(200);
            })
        });
    }
    node.json("PUT", "/api/v1/gpus/GPU-0/cordon", "{}");
    node.get("/api/v1/node").expect(200);
}

#[test]
fn requests_of_a_client_that_reads_no_responses_are_not_read() {
    let mut node = AdminNode::new(1);
    // No rate stands before the memory.
    let limits = RateLimits { reads_per_second: 1_000_000, changes_per_second: 100 };
    let access = AdminAccess { limits, ..AdminAccess::default() };
    node.start_again(Settings { access, ..node.settings() });
    for request in [
        // A response without a body, which the library buffers without limit.
        "GET / HTTP/1.1\r\nHost: localhost\r\nIf-None-Match: *\r\n\r\n",
        "HEAD /livez HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ] {
        let mut tries = 0..SLOW_TRIES_MAX;
        loop {
            let began = Instant::now();
            let Err(error) = read_after_flood(&mut node, request) else { break };
            // On a busy machine the client may need longer than the server waits for the rest of a head.
            assert!(began.elapsed() >= HEAD_WAIT && tries.next().is_some(), "{request}: {error}");
        }
    }
}

/// How long the server waits for the rest of a request's head (`src/http/listeners.rs`). A client that can write no more, since
/// the server does not read, may have sent half a head.
const HEAD_WAIT: Duration = Duration::from_secs(5);
/// Most tries with one request in which the client was slower than that.
const SLOW_TRIES_MAX: usize = 20;

/// Sends requests until the server reads no more of them, and then reads the responses.
fn read_after_flood(node: &mut AdminNode, request: &str) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(node.address())?;
    stream.set_write_timeout(Some(Duration::from_secs(1)))?;
    let many = request.repeat(1_000);
    let mut sent = 0;
    // The system's buffers take some megabytes on both ways; what is beyond would be in ours.
    while sent < 64 << 20 {
        match stream.write(&many.as_bytes()[sent % request.len()..]) {
            Ok(n) => sent += n,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    assert!(sent < 48 << 20, "{request}: it took {sent} bytes of requests in and read on");
    until("another client is served", || {
        is_quick(|| {
            node.get("/api/v1/node").expect(200);
        })
    });
    // Once it reads, it is listened to again.
    let (mut read, mut piece) = (0, vec![0; 1 << 20]);
    stream.set_nonblocking(true)?;
    let many = &many[sent % request.len()..];
    let (end, mut more) = (Instant::now() + SOON, 0);
    let so_far = |result: std::io::Result<usize>| match result {
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(0),
        result => result,
    };
    while more < many.len() && Instant::now() < end {
        read += so_far(stream.read(&mut piece))?;
        more += so_far(stream.write(&many.as_bytes()[more..]))?;
    }
    assert!(read > 0 && more == many.len(), "{request}: {read} bytes read, {more} sent after it");
    Ok(())
}

#[test]
fn ten_thousand_pipelined_requests_have_ten_thousand_responses() {
    const MANY: usize = 10_000;
    let mut node = AdminNode::new(1);
    let limits = RateLimits { reads_per_second: 1_000_000, changes_per_second: 100 };
    node.start_again(Settings {
        access: AdminAccess { limits, ..AdminAccess::default() },
        ..node.settings()
    });
    let stream = TcpStream::connect(node.address()).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    let request = "HEAD /api/v1/node HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer TOKEN\r\n\r\n"
        .replace("TOKEN", &node.token);
    let mut writes = stream.try_clone().unwrap();
    let writer = std::thread::spawn(move || writes.write_all(request.repeat(MANY).as_bytes()));
    let (mut count, mut reads, mut line) = (0, std::io::BufReader::new(stream), String::new());
    while count < MANY {
        line.clear();
        let n = std::io::BufRead::read_line(&mut reads, &mut line).unwrap();
        assert!(n > 0, "it ended after {count} answers");
        count += usize::from(line.starts_with("HTTP/1.1 200"));
        assert!(!line.starts_with("HTTP/1.1 ") || line.contains(" 200 "), "{line}");
    }
    writer.join().unwrap().unwrap();
}
