//! A node whose daemon is a process: the built binary with simulated GPUs, its store and its policies, and the stand-in
//! kubelet.

use crate::support::client::agent;
use crate::support::kept_compiler::{self, kept_compiler};
use crate::support::wait::SOON;
use kubelet_standin::{Kubelet, PodSpec};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Settings with passes and waits of milliseconds instead of half minutes.
pub(crate) const BRISK: &str = "
rounds: { listEveryMs: 100, listEveryCordonedMs: 100, roundEveryMs: 200 }
timing: { roundsApartMs: 100, kubeletSettleMs: 100, replySettleMs: 200, retireMs: 500, namedMs: 200, bypassMs: 500 }
health: { pollSeconds: 0.2, quietSeconds: 1 }
";

/// A node whose daemon comes and goes. Its state folder and its kubelet stay.
pub(crate) struct ProcessNode {
    pub(crate) folder: TempDir,
    pub(crate) kubelet: Kubelet,
    pub(crate) settings: String,
}

/// A running daemon. It is killed when dropped.
pub(crate) struct DaemonProcess {
    pub(crate) child: Child,
    pub(crate) base: String,
    pub(crate) token: String,
    token_file: PathBuf,
    /// The log so far.
    log: Arc<Mutex<String>>,
}

impl ProcessNode {
    /// A node with these settings and [`BRISK`].
    pub(crate) async fn new(settings: &str) -> Self {
        Self::of(&format!("{BRISK}\n{settings}")).await
    }

    /// A node with these settings and no others.
    pub(crate) async fn of(settings: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let kubelet = Kubelet::started(folder.path().join("kubelet")).await.unwrap();
        Self { folder, kubelet, settings: settings.to_owned() }
    }

    pub(crate) fn command(&self) -> Command {
        let config = self.folder.path().join("config.yaml");
        std::fs::write(&config, &self.settings).unwrap();
        let mut command = berth();
        command
            .arg("serve")
            .arg("--config")
            .arg(config)
            .arg("--kubelet-dir")
            .arg(self.folder.path().join("kubelet"))
            .arg("--state-dir")
            .arg(self.folder.path().join("state"))
            .args(["--admin-listen", "127.0.0.1:0"]);
        command
    }

    /// Starts the daemon and waits until its API answers.
    pub(crate) fn serve(&self) -> DaemonProcess {
        self.serve_with(&[])
    }

    /// Starts the daemon with further arguments and waits until its API answers.
    pub(crate) fn serve_with(&self, args: &[&str]) -> DaemonProcess {
        self.serve_as(self.command().args(args))
    }

    /// Runs this command, which starts the daemon, and waits until its API answers.
    pub(crate) fn serve_as(&self, command: &mut Command) -> DaemonProcess {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut lines = String::new();
        let base = loop {
            let mut line = String::new();
            assert!(log.read_line(&mut line).unwrap() > 0, "it ended before its API answered: {lines}");
            lines += &line;
            if let Some((_, rest)) = line.split_once("Swagger UI at ") {
                break rest.split("/swagger-ui").next().unwrap().to_owned() + "/api/v1";
            }
        };
        // The pipe must be read to its end, or the daemon would wait for room in it.
        let kept = Arc::new(Mutex::new(lines));
        let into = Arc::clone(&kept);
        std::thread::spawn(move || {
            let mut line = String::new();
            while log.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
                *into.lock().unwrap() += &std::mem::take(&mut line);
            }
        });
        let token_file = self.folder.path().join("state/token");
        let token = std::fs::read_to_string(&token_file).unwrap().trim().to_owned();
        DaemonProcess { child, base, token, token_file, log: kept }
    }

    /// The sockets of the daemon's device plugins.
    pub(crate) fn sockets(&self) -> Vec<String> {
        let folder = self.folder.path().join("kubelet/device-plugins");
        let names = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|n| n.starts_with("berth-")).collect()
    }

    /// Runs a pod with this number of devices and returns its UID, or why the kubelet does not admit it.
    pub(crate) async fn start(&self, name: &str, resource: &str, count: usize) -> Result<String, String> {
        let uid = PodSpec::new("ns", name).uid;
        self.start_as(&uid, name, resource, count).await?;
        Ok(uid)
    }

    /// Runs a pod with this UID.
    pub(crate) async fn start_as(
        &self,
        uid: &str,
        name: &str,
        resource: &str,
        count: usize,
    ) -> Result<(), String> {
        let pod = PodSpec::new("ns", name).uid(uid).container("main", &[(resource, count)]);
        self.kubelet.admit(pod).await.map_err(|e| e.to_string())?;
        self.kubelet.run(uid).await.map_err(|e| e.to_string())
    }
}

impl DaemonProcess {
    pub(crate) fn get(&self, path: &str) -> Value {
        self.call("GET", path, &Value::Null)
    }

    /// Sends a request and returns the body of the response, `null` if there is none.
    pub(crate) fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        let agent = agent(SOON);
        let url = format!("{}{path}", self.base);
        let authorization = format!("Bearer {}", self.token);
        let answered = match method {
            "GET" => agent.get(&url).header("Authorization", authorization).call(),
            "PUT" => agent
                .put(&url)
                .header("Authorization", authorization)
                .header("Content-Type", "application/json")
                .send(body.to_string()),
            "POST" => agent
                .post(&url)
                .header("Authorization", authorization)
                .header("Content-Type", "application/json")
                .send(body.to_string()),
            "DELETE" => agent.delete(&url).header("Authorization", authorization).call(),
            other => panic!("{other}"),
        };
        let text = answered.unwrap().body_mut().read_to_string().unwrap();
        if text.is_empty() {
            return Value::Null;
        }
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{url}: {e}: {text}"))
    }

    /// Reads a path until the response is as expected: decisions, for example, are recorded just after they are made.
    pub(crate) fn get_until(&self, path: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + SOON;
        loop {
            let response = self.get(path);
            if holds(&response) {
                return response;
            }
            assert!(Instant::now() < end, "{path}: {response}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// `berth` with these arguments, as a client of this daemon.
    pub(crate) fn client(&self, args: &[&str]) -> Command {
        let mut command = berth();
        command
            .args(args)
            .env("BERTH_SERVER", self.base.trim_end_matches("/api/v1"))
            .env("BERTH_TOKEN_FILE", &self.token_file)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs `berth` as a client of this daemon. Returns its exit code, and its standard output and error together.
    pub(crate) fn run_client(&self, args: &[&str]) -> (Option<i32>, String) {
        let output = self.client(args).output().unwrap();
        let printed = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
        (output.status.code(), printed)
    }

    /// Runs `berth` as a client of this daemon, which must succeed, and returns its standard output.
    pub(crate) fn printed(&self, args: &[&str]) -> String {
        let output = self.client(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Uploads a policy.
    pub(crate) fn push(&self, module: &[u8]) -> Value {
        let agent: ureq::Agent =
            ureq::Agent::config_builder().proxy(None).timeout_global(Some(SOON)).build().into();
        let request = agent
            .post(format!("{}/policies", self.base))
            .header("Authorization", format!("Bearer {}", self.token))
            .header("Content-Type", "application/wasm");
        let text = request.send(module).unwrap().body_mut().read_to_string().unwrap();
        serde_json::from_str(&text).unwrap()
    }

    /// The log so far.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// Waits for a line of the log for which `of` is true, and returns the first one. The log comes through a pipe, and
    /// may come later than the response to the request that it is about.
    pub(crate) fn line(&self, of: impl Fn(&str) -> bool) -> String {
        let end = Instant::now() + SOON;
        loop {
            let log = self.log();
            if let Some(line) = log.lines().find(|line| of(line)) {
                return line.to_owned();
            }
            assert!(Instant::now() < end, "no such line came:\n{log}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends the daemon by the signal that the kubelet sends, and waits for its end.
    pub(crate) fn stop(mut self) {
        self.signal("-TERM");
        assert!(self.child.wait().unwrap().success());
    }

    /// The live allocations.
    pub(crate) fn live(&self) -> Vec<Value> {
        self.get("/allocations")["items"].as_array().unwrap().clone()
    }

    /// Waits until `holds` is true of the live allocations.
    pub(crate) fn until(&self, what: &str, holds: impl Fn(&[Value]) -> bool) {
        let end = Instant::now() + SOON;
        loop {
            let live = self.live();
            if holds(&live) {
                return;
            }
            assert!(Instant::now() < end, "waited in vain for {what}: {live:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }
}

impl Drop for DaemonProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The built `berth`, with a compiler that stores its replies.
pub(crate) fn berth() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    command
        .env_remove("RUST_LOG")
        .env(kept_compiler::VARIABLE, kept_compiler())
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

/// Runs a command to its end and returns its exit code and its standard error.
pub(crate) fn ended(command: &mut Command) -> (Option<i32>, String) {
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let end = Instant::now() + SOON;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("it did not end by itself");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let mut error = String::new();
    child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
    (status.code(), error)
}

/// Runs `work`. The programs that it starts have no right to use files whose mode denies it, not even as root.
pub(crate) fn without_override<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            use rustix::thread::{CapabilitySet, remove_capability_from_bounding_set};
            // A user who may not drop the right does not have it.
            let _ = remove_capability_from_bounding_set(CapabilitySet::DAC_OVERRIDE);
            work()
        });
        worker.join().unwrap()
    })
}
