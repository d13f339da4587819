//! A node whose daemon runs in this process, with a compiler that waits or fails when a test orders it.

use crate::support::admin_node::{Answer, ask_by};
use crate::support::client::agent;
use crate::support::kept_compiler::kept_compiler;
use crate::support::process_node::BRISK;
use crate::support::wait::{SOON, until};
use berth::daemon::{Options, Running, Starting};
use berth_config::{Config, FileConfig, ServeArgs};
use kubelet_standin::Kubelet;
use serde_json::Value;
use std::fmt::Debug;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use tokio::task::JoinHandle;

/// Longest wait for an answer, as long as `berth` waits for one that may have a policy compiled: how fast the
/// machine is must not decide a test.
const PATIENCE: Duration = Duration::from_secs(600);

/// Creates the folder `gate` with a `compiler` that waits or fails while the folder has a file `hold` or `fail`.
pub(crate) fn create_gate(folder: &Path) -> PathBuf {
    let gate = folder.join("gate");
    fs::create_dir(&gate).unwrap();
    // A link, and no copy: one that was written just now may still be open in another test's child.
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../..", "/tests/it/support/gated-compiler.sh");
    symlink(script, gate.join("compiler")).unwrap();
    symlink(kept_compiler(), gate.join("kept")).unwrap();
    gate
}

/// A node whose daemon comes and goes. Its state folder and its kubelet stay.
pub(crate) struct GatedNode {
    pub(crate) folder: TempDir,
    pub(crate) kubelet: Kubelet,
    pub(crate) settings: String,
    /// How long a start without its policies waits before it tries again.
    pub(crate) stack_retry_interval: Duration,
}

/// The admin API of a daemon.
#[derive(Clone)]
pub(crate) struct Api {
    address: SocketAddr,
    token_file: PathBuf,
}

impl GatedNode {
    pub(crate) async fn new(settings: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let kubelet = Kubelet::started(folder.path().join("kubelet")).await.unwrap();
        create_gate(folder.path());
        let settings = format!("{BRISK}\ngpus: sim:2xt4\n{settings}");
        Self { folder, kubelet, settings, stack_retry_interval: Duration::from_millis(100) }
    }

    /// Starts the daemon; returns it and its API.
    pub(crate) async fn up(&self) -> (Running, Api) {
        let starting = self.open("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let daemon = starting.bring_up_uninterrupted().await.unwrap();
        let api = self.api(daemon.admin_address());
        (daemon, api)
    }

    /// The API of the daemon that listens there.
    pub(crate) fn api(&self, address: SocketAddr) -> Api {
        Api { address, token_file: self.folder.path().join("state/token") }
    }

    /// Begins a start of the daemon.
    pub(crate) fn open(&self, listen: SocketAddr) -> impl Future<Output = anyhow::Result<Starting>> + use<> {
        let args = ServeArgs {
            kubelet_dir: Some(self.folder.path().join("kubelet")),
            state_dir: Some(self.folder.path().join("state")),
            admin_listen: Some(listen.to_string()),
            ..ServeArgs::default()
        };
        let config = Config::merge(&args, FileConfig::parse(&self.settings).unwrap()).unwrap();
        let compiler = self.gate("compiler");
        let stack_retry_interval = self.stack_retry_interval;
        // What a stop leaves behind ends with the process, and this one goes on: the next daemon needs the store.
        Starting::open(
            config,
            Options { compiler, stack_retry_interval, stop_max: SOON, ..Options::default() },
        )
    }

    fn gate(&self, name: &str) -> PathBuf {
        self.folder.path().join("gate").join(name)
    }

    /// Has the compiler `hold` or `fail`.
    pub(crate) fn set(&self, what: &str, on: bool) {
        if on { fs::write(self.gate(what), "").unwrap() } else { fs::remove_file(self.gate(what)).unwrap() }
    }

    /// The beginnings and results of all compilations so far, in order.
    pub(crate) fn log(&self) -> Vec<String> {
        fs::read_to_string(self.gate("log")).unwrap_or_default().lines().map(String::from).collect()
    }

    /// Compilations that began so far.
    pub(crate) fn began(&self) -> usize {
        self.log().iter().filter(|line| *line == "began").count()
    }

    /// Waits until so many began.
    pub(crate) fn until_began(&self, count: usize) {
        until("a compilation", || self.began() >= count);
    }

    /// Waits until so many began, while `work` goes on. `work` must not end before that.
    pub(crate) async fn until_began_by<T: Debug>(
        &self,
        count: usize,
        work: &mut (impl Future<Output = T> + Unpin),
    ) {
        let began = async {
            while self.began() < count {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! {
            // It may have begun and ended since the last poll.
            ended = work => assert!(self.began() >= count, "it ended without a compilation: {ended:?}"),
            waited = tokio::time::timeout(SOON, began) => waited.expect("waited in vain for a compilation"),
        }
    }

    pub(crate) fn policies(&self) -> PathBuf {
        self.folder.path().join("state/policies")
    }

    /// Names of files of policies that begin so.
    pub(crate) fn files(&self, start: &str) -> Vec<String> {
        let names = fs::read_dir(self.policies()).unwrap().map(|e| e.unwrap().file_name().into_string());
        names.map(Result::unwrap).filter(|name| name.starts_with(start)).collect()
    }

    /// Deletes a version's compiled code, so that its next use compiles it, unless the code is in memory.
    pub(crate) fn uncompile(&self, digest: &str) {
        let compiled = self.files(digest).into_iter().filter(|name| name.ends_with(".cwasm"));
        compiled.for_each(|name| fs::remove_file(self.policies().join(name)).unwrap());
    }
}

impl Drop for GatedNode {
    fn drop(&mut self) {
        // A compiler that still waits ends with the test.
        let _ = fs::remove_file(self.gate("hold"));
    }
}

impl Api {
    pub(crate) fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let bearer = format!("Bearer {}", fs::read_to_string(&self.token_file).unwrap().trim());
        let mut all = vec![("authorization", bearer.as_str())];
        all.extend(headers);
        let url = format!("http://{}/api/v1{path}", self.address);
        ask_by(&agent(PATIENCE), &url, method, &all, body).unwrap()
    }

    pub(crate) fn get(&self, path: &str) -> Value {
        self.ask("GET", path, &[], b"").expect(200)
    }

    pub(crate) fn push(&self, module: &[u8]) -> Answer {
        self.ask("POST", "/policies", &[("content-type", "application/wasm")], module)
    }

    /// Activates these entries; with `If-Match` where there is a revision.
    pub(crate) fn put(&self, entries: &Value, revision: Option<u64>) -> Answer {
        let revision = revision.map(|revision| format!("\"{revision}\""));
        let mut headers = vec![("content-type", "application/json")];
        headers.extend(revision.as_deref().map(|revision| ("if-match", revision)));
        let body = serde_json::json!({ "entries": entries }).to_string();
        self.ask("PUT", "/stack", &headers, body.as_bytes())
    }

    /// Activates these entries while the test continues.
    pub(crate) fn putting(&self, entries: Value, revision: Option<u64>) -> JoinHandle<Answer> {
        let api = self.clone();
        tokio::task::spawn_blocking(move || api.put(&entries, revision))
    }

    pub(crate) fn delete(&self, digest: &str) -> Answer {
        self.ask("DELETE", &format!("/policies/{digest}"), &[], b"")
    }

    pub(crate) fn revision(&self) -> u64 {
        self.get("/stack")["revision"].as_u64().unwrap()
    }

    /// Names of the active policies.
    pub(crate) fn active(&self) -> Vec<String> {
        let stack = self.get("/stack");
        let entries = stack["entries"].as_array().unwrap();
        entries.iter().map(|entry| entry["policy"].as_str().unwrap().to_owned()).collect()
    }

    /// Whether the node is ready, and the message of the check `policies`.
    pub(crate) fn ready(&self) -> (bool, Option<String>) {
        let url = format!("http://{}/readyz", self.address);
        let answer = ask_by(&agent(PATIENCE), &url, "GET", &[], b"").unwrap();
        let message = answer.value();
        let check = message["checks"].as_array().unwrap().iter().find(|check| check["name"] == "policies");
        let detail = check.unwrap_or_else(|| panic!("{message}"))["detail"].as_str().map(String::from);
        (answer.status == 200, detail)
    }
}
