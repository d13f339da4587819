//! The client: one request, one answer, and errors that say what to do.

use crate::endpoint::{ClientArgs, Endpoint};
use crate::output::{Output, printable};
use crate::usage::BadUsage;
use anyhow::{Context, anyhow, bail};
use berth_api::{Action, Operation, Problem};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;
use ureq::http::request::Builder;
use ureq::http::{Method, Request, Response};
use ureq::{Agent, Body, SendBody};

/// Longest wait for an answer. The daemon answers within 8 s.
const ANSWER_MAX: Duration = Duration::from_secs(15);
/// Longest wait for an upload, 60 s to send and 300 s to compile, and for other requests that compile a policy: a trial
/// may take 90 s more.
const UPLOAD_MAX: Duration = Duration::from_secs(400);
/// Largest answer: 5120 allocations of at most 16 KiB, rarely a tenth of it.
const ANSWER_BYTES_MAX: u64 = 96 * 1024 * 1024;

/// A failure that a later attempt may not have: no connection, no answer in time, or a status of 500 and above. A
/// daemon that restarts causes all of these in turn.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Temporary(pub String);

/// A client of one daemon.
pub struct Client {
    reach: Endpoint,
    /// None if the daemon identifies the caller otherwise: by a client certificate or the user of a socket.
    token: Option<String>,
    token_file: PathBuf,
    /// Whether texts of answers are for a terminal, not for a program.
    is_for_people: bool,
}

/// Longest wait for a change of this path: a stack may name policies that were never compiled on that node, and so may
/// what is posted: a replay, a shadow, a trial.
fn answer_max(method: &Method, path: &str) -> Duration {
    if path.starts_with("/stack") || method == Method::POST { UPLOAD_MAX } else { ANSWER_MAX }
}

impl Client {
    /// A client of the daemon that these flags name.
    ///
    /// # Errors
    /// If they contradict each other, or a file that they name cannot be read.
    pub fn new(args: &ClientArgs) -> anyhow::Result<Self> {
        let reach = Endpoint::of(args)?;
        let token_file = args.token_file();
        let is_for_people = matches!(args.output, Output::Table | Output::Wide);
        if args.token_file.is_none() && reach.may_need_no_token() {
            return Ok(Self { reach, token: None, token_file, is_for_people });
        }
        if reach.shows_the_token() && !args.allow_plain_http {
            anyhow::bail!(BadUsage(format!(
                "--server (or BERTH_SERVER) {:?} is another machine, and over http:// the token can be read on the \
                 network: use https:// (admin.tls), or forward the port and use http://127.0.0.1:PORT; \
                 --allow-plain-http sends it anyway",
                args.server
            )));
        }
        let token = Some(read_token(args)?);
        Ok(Self { reach, token, token_file, is_for_people })
    }

    /// The answer to a GET of a path below `/api/v1`.
    ///
    /// # Errors
    /// If the daemon cannot be reached, refuses, or answers something else.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        self.get_within(path, ANSWER_MAX)
    }

    /// As [`Self::get`], with another longest wait.
    pub(crate) fn get_within<T: DeserializeOwned>(&self, path: &str, wait: Duration) -> anyhow::Result<T> {
        self.send(Method::GET, path, &[], None, wait).and_then(|response| self.read(response))
    }

    /// PUT that answers with the new state; with a revision, only if that is still the present one (`If-Match`).
    pub(crate) fn put<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl serde::Serialize,
        if_match: Option<u64>,
    ) -> anyhow::Result<T> {
        self.change(Method::PUT, path, Some(body), if_match)
    }

    /// As [`Self::put`], for POST.
    pub(crate) fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl serde::Serialize,
        if_match: Option<u64>,
    ) -> anyhow::Result<T> {
        self.change(Method::POST, path, Some(body), if_match)
    }

    /// As [`Self::put`], for DELETE.
    pub(crate) fn delete<T: DeserializeOwned>(&self, path: &str, if_match: Option<u64>) -> anyhow::Result<T> {
        self.change(Method::DELETE, path, None::<&()>, if_match)
    }

    /// DELETE that answers without a body.
    pub(crate) fn remove(&self, path: &str) -> anyhow::Result<()> {
        self.send(Method::DELETE, path, &[], None, ANSWER_MAX).map(drop)
    }

    /// POST without a body, that answers without one.
    pub(crate) fn call(&self, path: &str) -> anyhow::Result<()> {
        self.send(Method::POST, path, &[], None, ANSWER_MAX).map(drop)
    }

    fn change<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl serde::Serialize>,
        if_match: Option<u64>,
    ) -> anyhow::Result<T> {
        let wait = answer_max(&method, path);
        let body = body.map(|body| serde_json::to_vec(body)).transpose()?;
        let etag = if_match.map(|revision| format!("\"{revision}\""));
        let mut headers = Vec::new();
        headers.extend(body.is_some().then_some(("content-type", "application/json")));
        headers.extend(etag.as_deref().map(|etag| ("if-match", etag)));
        let response = self.send(method, path, &headers, body.as_deref(), wait)?;
        self.read(response)
    }

    /// Uploads a policy. Returns whether the node did not have it yet, and the answer.
    pub(crate) fn upload<T: DeserializeOwned>(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        module: &mut dyn Read,
    ) -> anyhow::Result<(bool, T)> {
        let run = |agent: Agent, request: Builder| agent.run(request.body(SendBody::from_reader(module))?);
        let response = self.exchange(Method::POST, path, headers, UPLOAD_MAX, run)?;
        Ok((response.status() == 201, self.read(response)?))
    }

    /// A body of no fixed end. Reading fails if nothing arrives for `silence_max`.
    pub(crate) fn stream(&self, path: &str, silence_max: Duration) -> anyhow::Result<impl Read + use<>> {
        let run = |_: Agent, request: Builder| {
            self.reach.stream_agent(ANSWER_MAX, silence_max).run(request.body(())?)
        };
        let response = self.exchange(Method::GET, path, &[], ANSWER_MAX, run)?;
        Ok(response.into_body().into_reader())
    }

    /// The body as bytes, at most `limit` of them.
    pub(crate) fn bytes(&self, path: &str, limit: u64) -> anyhow::Result<Vec<u8>> {
        let mut response = self.send(Method::GET, path, &[], None, UPLOAD_MAX)?;
        // Beyond its limit the reader fails, so one more than is taken may come.
        Ok(response.body_mut().with_config().limit(limit + 1).read_to_vec()?)
    }

    fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&[u8]>,
        wait: Duration,
    ) -> anyhow::Result<Response<Body>> {
        let run = |agent: Agent, request: Builder| match body {
            Some(body) => agent.run(request.body(body)?),
            None => agent.run(request.body(())?),
        };
        self.exchange(method, path, headers, wait, run)
    }

    fn exchange(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        wait: Duration,
        run: impl FnOnce(Agent, Builder) -> Result<Response<Body>, ureq::Error>,
    ) -> anyhow::Result<Response<Body>> {
        let mut request = Request::builder().method(method).uri(format!("{}/api/v1{path}", self.reach.base));
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut response = run(self.reach.agent(wait), request).map_err(|error| self.unreachable(error))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let text = text(response.body_mut()).ok();
        match text.and_then(|text| serde_json::from_str::<Problem>(&text).ok()) {
            Some(problem) if status.is_server_error() => Err(Temporary(message(&problem)).into()),
            Some(problem) => Err(self.refused(&problem)),
            // From a proxy on the way, if the daemon does not run.
            None if status.is_server_error() => {
                Err(Temporary(format!("{} answered {status}", self.reach.shown)).into())
            }
            None => Err(anyhow!("{} answered {status}, so it is not a berth daemon", self.reach.shown)),
        }
    }

    fn read<T: DeserializeOwned>(&self, mut response: Response<Body>) -> anyhow::Result<T> {
        let text = text(response.body_mut())?;
        let read = match self.is_for_people {
            true => serde_json::from_str(&text).map(shown).and_then(serde_json::from_value),
            false => serde_json::from_str(&text),
        };
        read.context("the daemon's answer has an unexpected form: is it of another release?")
    }

    fn refused(&self, problem: &Problem) -> anyhow::Error {
        let server = &self.reach.shown;
        if problem.status == 401 && self.token.is_none() {
            return anyhow!(
                "the daemon at {server} requires a token ({}): give a token file with --token-file or \
                 BERTH_TOKEN_FILE",
                problem.detail
            );
        }
        if problem.status == 401 {
            return anyhow!(
                "the daemon at {server} does not accept the token in {}; it may have been rotated: give this daemon's \
                 present token file with --token-file or BERTH_TOKEN_FILE",
                self.token_file.display()
            );
        }
        let message = message(problem);
        // Arguments become paths, queries and headers; bodies come from files or from this program.
        let typed = ["malformed-path", "malformed-query", "malformed-header"];
        if typed.iter().any(|kind| problem.kind.ends_with(kind)) {
            BadUsage(message).into()
        } else {
            anyhow!(message)
        }
    }

    fn unreachable(&self, error: ureq::Error) -> anyhow::Error {
        let server = &self.reach.shown;
        match error {
            ureq::Error::Timeout(_) => {
                Temporary(format!("the daemon at {server} did not answer in time: {error}")).into()
            }
            // The daemon answered, and the next attempt would fail in the same way.
            ureq::Error::Io(cause) if cause.kind() == std::io::ErrorKind::InvalidData => {
                anyhow!("no usable answer from {server} ({cause}): {}", self.reach.advice_on(&cause))
            }
            ureq::Error::Io(_) | ureq::Error::ConnectionFailed | ureq::Error::HostNotFound => {
                Temporary(format!("cannot reach the daemon at {server} ({error}): {}", self.reach.advice()))
                    .into()
            }
            other => anyhow!("no usable answer from {server} ({other}): {}", self.reach.advice_on(&other)),
        }
    }
}

/// An answer with all of its texts as [`printable`]: every table and sentence is made of them.
pub(crate) fn shown(answer: Value) -> Value {
    match answer {
        Value::String(text) => Value::String(printable(&text)),
        Value::Array(items) => items.into_iter().map(shown).collect(),
        Value::Object(map) => map.into_iter().map(|(key, value)| (printable(&key), shown(value))).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) => answer,
    }
}

fn text(body: &mut Body) -> Result<String, ureq::Error> {
    body.with_config().limit(ANSWER_BYTES_MAX).read_to_string()
}

/// Text as one segment of a path, or a value of a query.
pub(crate) fn escaped(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.~".contains(&b);
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

/// The query of a request with the values that are given; empty if none is.
pub(crate) fn query(pairs: &[(&str, Option<&str>)]) -> String {
    let given = pairs.iter().filter_map(|(key, value)| Some(format!("{key}={}", escaped((*value)?))));
    let given = given.collect::<Vec<_>>().join("&");
    if given.is_empty() { given } else { format!("?{given}") }
}

/// A problem's detail, with the hint and the command for its action in further lines.
fn message(problem: &Problem) -> String {
    let mut text = printable(&problem.detail);
    let command = problem.action.as_ref().map(|action| format!("`{}`", command(action)));
    let lines = [problem.hint.clone(), command];
    let advice = printable(&lines.into_iter().flatten().collect::<Vec<_>>().join(": "));
    if !advice.is_empty() {
        text += &format!("\n  {advice}");
    }
    text
}

fn command(action: &Action) -> String {
    let id = action.parameter("id").unwrap_or("ID");
    match action.operation {
        Operation::ListGpus => "berth gpu list".into(),
        Operation::GetGpu => format!("berth gpu show {}", action.parameter("uuid").unwrap_or("UUID")),
        Operation::ListAllocations => "berth allocation list".into(),
        Operation::EndAllocation => {
            let force = if action.parameter("force") == Some("true") { " --force" } else { "" };
            format!("berth allocation end {id}{force}")
        }
        Operation::ListPolicies => "berth policy list".into(),
        Operation::UploadPolicy => "berth policy push FILE".into(),
        Operation::GetStack => "berth policy stack".into(),
        Operation::ActivateStack => "berth policy activate FILE".into(),
        Operation::ListActivations => "berth policy history".into(),
        Operation::ListShadows => "berth policy shadow list".into(),
        Operation::EndShadow => format!("berth policy shadow stop {id}"),
    }
}

/// Most bytes that are read of a token file; a token has at most 512.
const TOKEN_BYTES_MAX: u64 = 4 * 1024;

/// The token in the file that is named.
///
/// # Errors
/// If it cannot be read, or its content cannot be a token; the message describes a token file.
pub fn read_token(args: &ClientArgs) -> anyhow::Result<String> {
    let path = args.token_file();
    let text = berth_files::read_text(&path, TOKEN_BYTES_MAX).with_context(|| {
        format!(
            "cannot read the token file {}, which the daemon creates when it first starts: run as root on the node, or name \
             another file or a copy with --token-file or BERTH_TOKEN_FILE",
            path.display()
        )
    })?;
    let token = text.trim();
    // The daemon checks the length.
    if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
        let what = if token.is_empty() { "is empty" } else { "holds no token" };
        bail!(
            "the token file {} {what}: a token is one line of visible characters, such as the 64 hex digits that the \
             daemon writes into its token file when it first starts",
            path.display()
        );
    }
    Ok(token.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_api::Kind;
    use std::io::{Read, Write};
    use std::time::{Duration, Instant};

    fn client(server: String) -> Client {
        let args = ClientArgs { server, ..ClientArgs::default() };
        let reach = Endpoint::of(&args).unwrap();
        Client { reach, token: Some("t".into()), token_file: "token".into(), is_for_people: true }
    }

    /// The error of a client whose daemon answers once with this status and body.
    fn error_of(status: &'static str, body: &'static str) -> anyhow::Error {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let serving = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]).unwrap();
            let length = body.len();
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
            stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
        });
        let client = client(server);
        let error = client.get::<serde_json::Value>("/gpus").unwrap_err();
        serving.join().unwrap();
        error
    }

    #[test]
    fn temporary_errors_are_distinguished_from_permanent_ones() {
        let problem = r#"{"type": "about:blank", "title": "t", "status": 503, "detail": "starting"}"#;
        for (status, body, passes) in [
            ("503 Service Unavailable", problem, true),
            ("502 Bad Gateway", "<html>", true),
            (
                "404 Not Found",
                r#"{"type": "about:blank", "title": "t", "status": 404, "detail": "none"}"#,
                false,
            ),
            ("404 Not Found", "<html>", false),
        ] {
            let error = error_of(status, body);
            assert_eq!(error.is::<Temporary>(), passes, "{status}: {error:#}");
        }
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let server = format!("http://{closed}");
        assert!(client(server).get::<serde_json::Value>("/gpus").unwrap_err().is::<Temporary>());
    }

    #[test]
    fn a_token_goes_over_plain_http_to_this_machine_alone() {
        let folder = tempfile::tempdir().unwrap();
        let token = folder.path().join("token");
        std::fs::write(&token, "t").unwrap();
        let client = |server: &str, allow_plain_http| {
            let token_file = Some(token.clone());
            Client::new(&ClientArgs {
                server: server.into(),
                token_file,
                allow_plain_http,
                ..ClientArgs::default()
            })
        };
        for here in [
            "127.0.0.1:9470",
            "127.8.8.8:1",
            "[::1]:9470",
            "localhost:9470",
            "LOCALHOST",
            "[::ffff:127.0.0.1]:1",
        ] {
            assert!(client(&format!("http://{here}"), false).is_ok(), "{here}");
        }
        for away in [
            "10.0.0.1:9470",
            "gpu-1:9470",
            "localhost.example:1",
            "[2001:db8::1]:9470",
            "127.0.0.1.example:1",
        ] {
            let error = client(&format!("http://{away}"), false).err().unwrap();
            assert!(error.to_string().contains("--allow-plain-http"), "{away}: {error}");
            assert!(client(&format!("http://{away}"), true).is_ok(), "{away}");
            assert!(client(&format!("https://{away}"), false).is_ok(), "{away}");
        }
    }

    #[test]
    fn a_silent_stream_times_out_and_one_with_comments_does_not() {
        let patience = Duration::from_secs(300);
        let since = Instant::now();
        loop {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let client = client(format!("http://{}", listener.local_addr().unwrap()));
            let (over, ends) = std::sync::mpsc::channel::<()>();
            let piece = Duration::from_millis(400);
            let serving = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 4096]).unwrap();
                stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").unwrap();
                for _ in 0..8 {
                    // The client may have ended the stream by now.
                    let _ = stream.write_all(b"2\r\n:\n\r\n");
                    std::thread::sleep(piece / 4);
                }
                // The connection stays, and nothing comes of it any more.
                ends.recv().ok();
            });
            let (read, reads) = std::sync::mpsc::channel();
            std::thread::spawn(move || {
                let mut text = String::new();
                let broken = client.stream("/events", piece).unwrap().read_to_string(&mut text).is_err();
                read.send((text, broken)).unwrap();
            });
            let (text, broken) = reads.recv_timeout(patience).expect("reading a dead stream does not end");
            drop(over);
            serving.join().unwrap();
            assert!(broken, "{text:?}");
            if text == ":\n".repeat(8) {
                break;
            }
            // On a busy machine the time between two comments may exceed the timeout, too, and the test repeats.
            assert!(since.elapsed() < patience, "{text:?}");
        }
    }

    #[test]
    fn arguments_are_escaped_within_their_path_segment() {
        assert_eq!(escaped("GPU-1_a.b~"), "GPU-1_a.b~");
        assert_eq!(escaped("a/../b?c=d&e#f g%"), "a%2F..%2Fb%3Fc%3Dd%26e%23f%20g%25");
    }

    #[test]
    fn a_problem_is_shown_with_the_command_for_its_action() {
        let mut problem = Problem::new(Kind::Running, "allocation 7-1 is still in use");
        assert_eq!(message(&problem), "allocation 7-1 is still in use");
        problem.hint = Some("delete the pod, or end it".into());
        problem.action = Some(Action::new(Operation::EndAllocation, &[("id", "7-1"), ("force", "true")]));
        let expected =
            "allocation 7-1 is still in use\n  delete the pod, or end it: `berth allocation end 7-1 --force`";
        assert_eq!(message(&problem), expected);
    }

    #[test]
    fn every_action_has_a_command() {
        for operation in Operation::ALL {
            assert!(command(&Action::from(*operation)).starts_with("berth "), "{operation:?}");
        }
    }
}
