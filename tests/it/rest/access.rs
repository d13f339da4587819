//! Access to the admin API: named tokens and their rights, the Unix socket, rate limits and slow clients.

use crate::support::admin_node::{AdminNode, Answer};
use crate::support::wait::{SOON, until};
use berth_admin::AdminServer;
use berth_http::{AdminAccess, NamedToken, RateLimits, Right, TokenSource};
use berth_http::{AdminError, Settings};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

fn sha256(text: &str) -> [u8; 32] {
    use sha2::Digest;
    sha2::Sha256::digest(text).into()
}

fn write_token(path: &Path, text: &str) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).unwrap();
}

fn with(node: &AdminNode, access: AdminAccess) -> Settings {
    Settings { access, ..node.settings() }
}

fn named(name: &str, right: Right, source: TokenSource) -> NamedToken {
    NamedToken { name: name.into(), right, source }
}

fn ask(node: &AdminNode, token: &str, method: &str, path: &str) -> Answer {
    let bearer = format!("Bearer {token}");
    node.ask_bare(method, path, &[("authorization", &bearer)], b"")
}

#[test]
fn a_read_token_changes_nothing_and_changes_record_the_tokens_name() {
    let mut node = AdminNode::new(1);
    let (reads, changes) = ("r".repeat(40), "c".repeat(40));
    let file = node.dir.path().join("grafana");
    write_token(&file, &reads);
    let tokens = vec![
        named("grafana", Right::Read, TokenSource::File(file.clone())),
        named("ci", Right::Change, TokenSource::Sha256(sha256(&changes))),
    ];
    node.start_again(with(&node, AdminAccess { tokens, ..AdminAccess::default() }));
    let cordon = "/api/v1/gpus/GPU-0/cordon";
    ask(&node, &reads, "GET", "/api/v1/gpus").expect(200);
    assert_eq!(ask(&node, &reads, "HEAD", "/api/v1/gpus").status, 200);
    for (method, path) in [
        ("PUT", cordon),
        ("DELETE", cordon),
        ("POST", "/api/v1/policies"),
        ("POST", "/api/v1/trials"),
        ("PATCH", "/api/v1/gpus"),
        ("POST", "/api/v1/nothing"),
    ] {
        let message = ask(&node, &reads, method, path).problem(403, "forbidden");
        assert!(message.contains("grafana") && message.contains("change"), "{message}");
    }
    let gpu = ask(&node, &changes, "PUT", cordon).expect(200);
    assert_eq!(gpu["drain"]["by"], "ci");
    assert_eq!(node.ask("PUT", "/api/v1/gpus/GPU-0/drain", &[], b"").expect(200)["drain"]["by"], "admin");
    for wrong in ["", "x", "grafana", "ci", &reads[1..], &format!("{changes}c")] {
        ask(&node, wrong, "GET", "/api/v1/gpus").problem(401, "unauthorized");
    }
    for scheme in ["Basic", "Token", "Digest"] {
        let header = format!("{scheme} {changes}");
        node.ask_bare("GET", "/api/v1/gpus", &[("authorization", &header)], b"").problem(401, "unauthorized");
    }
    // A token whose file has another one now opens with that one, and no more with the old one.
    let renewed = "n".repeat(40);
    write_token(&file, &renewed);
    ask(&node, &renewed, "GET", "/api/v1/gpus").expect(200);
    ask(&node, &reads, "GET", "/api/v1/gpus").problem(401, "unauthorized");
}

#[test]
fn a_named_token_without_its_file_stops_the_start() {
    let node = AdminNode::new(1);
    let gone = named("gone", Right::Read, TokenSource::File(node.dir.path().join("gone")));
    let settings = with(&node, AdminAccess { tokens: vec![gone], ..AdminAccess::default() });
    assert!(matches!(AdminServer::bind(settings), Err(AdminError::Token { .. })));
}

#[test]
fn a_client_above_its_rate_waits_and_no_other_does() {
    let mut node = AdminNode::new(1);
    let other = "o".repeat(40);
    let tokens = vec![named("other", Right::Change, TokenSource::Sha256(sha256(&other)))];
    let limits = RateLimits { reads_per_second: 5, changes_per_second: 1 };
    node.start_again(with(&node, AdminAccess { tokens, limits, ..AdminAccess::default() }));
    let refused = until_refused(|| node.get("/api/v1/gpus"));
    refused.problem(429, "too-many-requests");
    assert_eq!(refused.headers["retry-after"], "1");
    // Another name, and what needs no name, have permits of their own; so have changes.
    ask(&node, &other, "GET", "/api/v1/gpus").expect(200);
    node.ask_bare("GET", "/livez", &[], b"").expect(200);
    node.delete("/api/v1/gpus/GPU-0/cordon").expect(200);
    until_refused(|| node.delete("/api/v1/gpus/GPU-0/cordon")).problem(429, "too-many-requests");
    until_refused(|| node.ask_bare("GET", "/openapi.json", &[], b"")).problem(429, "too-many-requests");
    // A path that only resembles the API has no route, and is counted like any other.
    until_refused(|| node.ask_bare("GET", "/api/v1x", &[], b"")).problem(429, "too-many-requests");
    // Figures cost something without a token, too; probes are never too many.
    let health = node.api.as_ref().unwrap().health_address.unwrap();
    let of_health = |path: &str| crate::support::admin_node::ask(health, "GET", path, &[], b"");
    until_burst_refused(health, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n");
    of_health("/livez").expect(200);
    // Clients without a token are limited, and those with one are not.
    let wrong = "GET /api/v1/gpus HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong\r\n";
    until_burst_refused(node.address(), wrong);
    until("the permits come back", || ask(&node, &other, "GET", "/api/v1/gpus").status == 200);
}

/// Sends bursts of a request, each on one connection, until one is refused for its rate: with a connection
/// for each request, a busy machine may never exceed the rate. `head` ends with its last header.
pub(crate) fn until_burst_refused(address: SocketAddr, head: &str) {
    let requests = format!("{head}\r\n").repeat(300) + head + "Connection: close\r\n\r\n";
    until("a request is refused for its rate", || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let _ = stream.write_all(requests.as_bytes());
        let mut answers = Vec::new();
        let _ = stream.read_to_end(&mut answers);
        let answers = String::from_utf8_lossy(&answers);
        answers.contains("HTTP/1.1 429") && answers.contains("/problems/too-many-requests")
    });
}

fn until_refused(ask: impl Fn() -> Answer) -> Answer {
    let end = Instant::now() + SOON;
    loop {
        let answer = ask();
        if answer.status == 429 {
            return answer;
        }
        assert!(Instant::now() < end, "it was never refused");
    }
}

/// One request over a Unix socket, without a token.
fn over_socket(path: &Path, request: &str) -> String {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}

#[test]
fn over_the_unix_socket_the_daemons_user_needs_no_token_and_a_wrong_one_does_not_help() {
    let mut node = AdminNode::new(1);
    let path = node.dir.path().join("run/admin.sock");
    let socket = Some(path.clone());
    node.start_again(with(&node, AdminAccess { socket, ..AdminAccess::default() }));
    let head = "Host: anything\r\nConnection: close\r\n";
    let answer = over_socket(&path, &format!("GET /api/v1/node HTTP/1.1\r\n{head}\r\n"));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let answer = over_socket(&path, &format!("PUT /api/v1/gpus/GPU-0/cordon HTTP/1.1\r\n{head}\r\n"));
    let own = rustix::process::geteuid().as_raw();
    let name = if own == 0 { "root".to_owned() } else { format!("user-{own}") };
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(&format!("\"by\":\"{name}\"")), "{answer}");
    let wrong = format!("GET /api/v1/node HTTP/1.1\r\n{head}Authorization: Bearer wrong\r\n\r\n");
    assert!(over_socket(&path, &wrong).starts_with("HTTP/1.1 401"));
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // A second daemon does not take it away, and a stop takes it down.
    let socket = Some(path.clone());
    let second = with(&node, AdminAccess { socket, ..AdminAccess::default() });
    assert!(matches!(AdminServer::bind(second), Err(AdminError::Socket { .. })));
    node.api.take().unwrap().stop();
    assert!(!path.exists());
}

/// The user that the kernel names decides, not the mode of the file.
#[test]
fn over_the_unix_socket_another_user_needs_a_token() {
    let tools = ["/usr/bin/setpriv", "/usr/bin/perl"].iter().all(|tool| Path::new(tool).exists());
    if rustix::process::geteuid().as_raw() != 0 || !tools {
        // Only root can connect as another user; the rule itself has a unit test.
        return;
    }
    let mut node = AdminNode::new(1);
    let folder = node.dir.path().to_owned();
    let path = folder.join("admin.sock");
    let socket = Some(path.clone());
    node.start_again(with(&node, AdminAccess { socket, ..AdminAccess::default() }));
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).unwrap();
    let script = "my $s = IO::Socket::UNIX->new(Peer => $ARGV[0]) or do { print qq(cannot connect: $!); exit };\n\
        print $s qq(GET /api/v1/node HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n); print <$s>;";
    let as_the_user_nobody = || {
        let output = std::process::Command::new("/usr/bin/setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .args(["/usr/bin/perl", "-MIO::Socket::UNIX", "-e", script])
            .arg(&path)
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let closed = as_the_user_nobody();
    assert_eq!(closed, "cannot connect: Permission denied");
    // Even if the mode of the file permits all users.
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
    let open = as_the_user_nobody();
    assert!(open.starts_with("HTTP/1.1 401"), "{open}");
}

#[test]
fn slow_heads_and_heads_that_are_too_large_end_their_connection() {
    let node = AdminNode::new(1);
    // A client that sends single bytes of its head is disconnected, whether it continues or not.
    until("a slow head ends its connection in time", || {
        let began = Instant::now();
        let mut slow = TcpStream::connect(node.address()).unwrap();
        slow.set_read_timeout(Some(SOON)).unwrap();
        let mut drip = slow.try_clone().unwrap();
        let dripping = std::thread::spawn(move || {
            let slow = "x".repeat(400);
            let head = format!("GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Slow: {slow}\r\n\r\n");
            for byte in head.bytes() {
                if drip.write_all(&[byte]).is_err() {
                    return;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let mut answer = Vec::new();
        let _ = slow.read_to_end(&mut answer);
        let took = began.elapsed();
        assert!(!String::from_utf8_lossy(&answer).contains(" 200 "));
        let _ = slow.shutdown(Shutdown::Both);
        dripping.join().unwrap();
        took < Duration::from_secs(12)
    });

    for (name, value) in
        [("x-a", "b".repeat(200_000)), ("authorization", format!("Bearer {}", "x".repeat(200_000)))]
    {
        let mut stream = TcpStream::connect(node.address()).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let _ = stream.write_all(
            format!("GET /api/v1/node HTTP/1.1\r\nHost: localhost\r\n{name}: {value}\r\n\r\n").as_bytes(),
        );
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(!String::from_utf8_lossy(&answer).contains(" 200 "));
    }
    // A long token within the limits of a head is merely wrong.
    ask(&node, &"x".repeat(50_000), "GET", "/api/v1/node").problem(401, "unauthorized");
    node.get("/api/v1/node").expect(200);
}

#[test]
fn each_caller_has_a_mark_of_its_own_and_removes_another_by_its_owner() {
    let mut node = AdminNode::new(1);
    let secrets: Vec<String> = ('a'..='i').map(|letter| letter.to_string().repeat(40)).collect();
    let name = |i: usize| if i == 1 { "system:ci/é 50%+&'x".to_owned() } else { format!("caller-{i}") };
    let tokens = (0..secrets.len())
        .map(|i| named(&name(i), Right::Change, TokenSource::Sha256(sha256(&secrets[i]))))
        .collect();
    node.start_again(with(&node, AdminAccess { tokens, ..AdminAccess::default() }));
    let (cordon, drain) = ("/api/v1/gpus/GPU-0/cordon", "/api/v1/gpus/GPU-0/drain");
    let owners = |gpu: &serde_json::Value| -> Vec<String> {
        let marks = gpu["drain"]["marks"].as_array().unwrap();
        marks.iter().map(|mark| mark["owner"].as_str().unwrap().to_owned()).collect()
    };
    ask(&node, &secrets[0], "PUT", cordon).expect(200);
    let gpu = ask(&node, &secrets[1], "PUT", drain).expect(200);
    assert_eq!(owners(&gpu), ["api:caller-0".to_owned(), format!("api:{}", name(1))]);
    assert_eq!(gpu["drain"]["state"], "draining");
    // Its own drain alone is stopped, and its own mark alone is removed.
    assert_eq!(ask(&node, &secrets[0], "DELETE", drain).expect(200)["drain"]["state"], "draining");
    let gpu = ask(&node, &secrets[0], "DELETE", cordon).expect(200);
    assert_eq!((owners(&gpu).len(), &gpu["drain"]["state"]), (1, &"draining".into()));
    let of = |owner: &str| format!("{cordon}?owner={owner}");
    for malformed in ["", "%0A", &"x".repeat(161)] {
        ask(&node, &secrets[0], "DELETE", &of(malformed)).problem(400, "malformed-query");
    }
    assert_eq!(owners(&ask(&node, &secrets[0], "DELETE", &of("api:unknown")).expect(200)).len(), 1);
    let odd = "api%3Asystem%3Aci%2F%C3%A9%2050%25%2B%26%27x";
    assert_eq!(ask(&node, &secrets[0], "DELETE", &of(odd)).expect(200)["drain"]["state"], "active");

    // At once, each in a connection of its own.
    let address = node.address();
    std::thread::scope(|scope| {
        for secret in &secrets[..8] {
            let bearer = format!("Bearer {secret}");
            let cordoned = move || {
                crate::support::admin_node::ask(address, "PUT", cordon, &[("authorization", &bearer)], b"")
                    .expect(200)
            };
            scope.spawn(cordoned);
        }
    });
    assert_eq!(owners(&node.get("/api/v1/gpus/GPU-0").expect(200)).len(), 8);
    let refused = ask(&node, &secrets[8], "PUT", cordon).problem(409, "limit-reached");
    assert!(refused.contains("8 marks"), "{refused}");
    assert_eq!(ask(&node, &secrets[8], "DELETE", &of("all")).expect(200)["drain"]["state"], "active");
}
