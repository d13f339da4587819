//! Disturbances of a running daemon: connections that do not speak HTTP, and a clock before 1970.

use crate::support::client::agent;
use crate::support::process_node::{DaemonProcess, ProcessNode, ended};
use crate::support::wait::{SOON, until};
use disk_faults::wrong_clock;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::Stdio;

/// Connections that send what is no HTTP.
const STRANGERS: usize = 300;

fn address(daemon: &DaemonProcess) -> String {
    daemon.base.trim_start_matches("http://").trim_end_matches("/api/v1").to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_http_is_counted_and_not_logged_line_by_line() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    // A filter that an operator has set does not let strangers write the log either.
    let daemon = node.serve_as(node.command().env("RUST_LOG", "info"));
    for _ in 0..STRANGERS {
        let mut stream = TcpStream::connect(address(&daemon)).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        stream.write_all(b"\x01\x02\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 400"), "{answer:?}");
    }
    let line = daemon.line(|line| line.contains("did not send HTTP"));
    assert!(line.contains("WARN") && line.contains("connections="), "{line}");
    let log = daemon.log();
    assert!(!log.contains("stream error"), "{log}");
    assert_eq!(log.matches("did not send HTTP").count(), 1, "{log}");
}

/// Whether the API answers each of some new connections, of which every worker gets some.
fn answers(daemon: &DaemonProcess) -> bool {
    let url = format!("{}/node", daemon.base);
    (0..8).all(|_| {
        let asked = agent(SOON).get(&url).header("Authorization", format!("Bearer {}", daemon.token)).call();
        asked.is_ok_and(|answer| answer.status() == 200)
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_was_before_1970_does_not_silence_the_api_for_good() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let wrong = node.folder.path().join("wrong-clock");
    let daemon = node.serve_as(node.command().envs(wrong_clock(&wrong).unwrap()));
    assert!(answers(&daemon));
    std::fs::write(&wrong, "").unwrap();
    let panics = |daemon: &DaemonProcess| daemon.log().matches("shows a time before 1970: set it").count();
    // One panic of each worker of the admin listener. A worker reads the clock only while it handles a request.
    until("the panics of both workers", || {
        let _ = answers(&daemon);
        panics(&daemon) >= 2
    });
    std::fs::remove_file(&wrong).unwrap();
    until("answers", || answers(&daemon));
    let gpus = || daemon.call("GET", "/gpus", &Value::Null)["items"].clone();
    until("the GPUs", || !gpus().as_array().unwrap().is_empty());
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_waits_for_the_clock_and_ends_by_a_signal() {
    let node = ProcessNode::new("gpus: sim:2xt4").await;
    let wrong = node.folder.path().join("wrong-clock");
    std::fs::write(&wrong, "").unwrap();
    let waiting = "before 1970: waiting until it is set";
    let mut command = node.command();
    command.envs(wrong_clock(&wrong).unwrap());
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains(waiting) {
        line.clear();
        assert!(log.read_line(&mut line).unwrap() > 0, "it ended");
    }
    let pid = child.id().to_string();
    let (code, output) = ended(std::process::Command::new("kill").args(["-TERM", &pid]));
    assert_eq!(code, Some(0), "{output}");
    assert!(child.wait().unwrap().success());

    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains(waiting)));
    std::fs::remove_file(&wrong).unwrap();
    assert!(lines.any(|line| line.contains("Swagger UI at ")));
    child.kill().unwrap();
    child.wait().unwrap();
}
