//! The whole daemon as a process: the real binary with simulated GPUs, its real store and policies, and the stand-in
//! kubelet.

use crate::support::client::agent;
use crate::support::kept_compiler::{self, kept_compiler};
pub(crate) use crate::support::wait::SOON;
use kubelet_standin::{Kubelet, PodSpec};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub(crate) const WHOLE: &str = "nvidia.com/gpu";
pub(crate) const SHARED: &str = "nvidia.com/gpu.shared";

/// Rounds and waits of milliseconds instead of half minutes.
pub(crate) const BRISK: &str = "
rounds: { listEveryMs: 100, listEveryCordonedMs: 100, roundEveryMs: 200 }
timing: { roundsApartMs: 100, kubeletSettleMs: 100, replySettleMs: 200, retireMs: 500, namedMs: 200, bypassMs: 500 }
health: { pollSeconds: 0.2, quietSeconds: 1 }
";

pub(crate) struct House {
    pub(crate) folder: TempDir,
    pub(crate) kubelet: Kubelet,
    pub(crate) settings: String,
}

/// A daemon that runs; killed when dropped.
pub(crate) struct Serving {
    pub(crate) child: Child,
    pub(crate) base: String,
    pub(crate) token: String,
    /// What it has logged so far.
    log: Arc<Mutex<String>>,
}

impl House {
    pub(crate) async fn new(settings: &str) -> Self {
        Self::of(&format!("{BRISK}\n{settings}")).await
    }

    /// With these settings and no others.
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
    pub(crate) fn serve(&self) -> Serving {
        self.serve_with(&[])
    }

    /// The same with further arguments.
    pub(crate) fn serve_with(&self, args: &[&str]) -> Serving {
        self.serve_as(self.command().args(args))
    }

    /// The same by a command of the caller's.
    pub(crate) fn serve_as(&self, command: &mut Command) -> Serving {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        let base = loop {
            let mut line = String::new();
            assert!(log.read_line(&mut line).unwrap() > 0, "it ended before its API answered: {said}");
            said += &line;
            if let Some((_, rest)) = line.split_once("Swagger UI at ") {
                break rest.split("/swagger-ui").next().unwrap().to_owned() + "/api/v1";
            }
        };
        // The pipe must be read to its end, or the daemon would wait for room in it.
        let kept = Arc::new(Mutex::new(said));
        let into = Arc::clone(&kept);
        std::thread::spawn(move || {
            let mut line = String::new();
            while log.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
                *into.lock().unwrap() += &std::mem::take(&mut line);
            }
        });
        let token =
            std::fs::read_to_string(self.folder.path().join("state/token")).unwrap().trim().to_owned();
        Serving { child, base, token, log: kept }
    }

    pub(crate) fn sockets(&self) -> Vec<String> {
        let folder = self.folder.path().join("kubelet/device-plugins");
        let names = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|n| n.starts_with("berth-")).collect()
    }

    pub(crate) async fn start(&self, name: &str, resource: &str, count: usize) -> Result<String, String> {
        let uid = PodSpec::new("ns", name).uid;
        self.start_as(&uid, name, resource, count).await?;
        Ok(uid)
    }

    /// The same with a UID of the caller's.
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

impl Serving {
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

    /// What it has logged so far.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// The first line of the log that is of this kind, once it is there: the log comes through a pipe, and
    /// may come after the answer that it tells of.
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

    /// Ends it as a kubelet would, and waits.
    pub(crate) fn stop(mut self) {
        self.signal("-TERM");
        assert!(self.child.wait().unwrap().success());
    }

    pub(crate) fn live(&self) -> Vec<Value> {
        self.call("GET", "/allocations", &Value::Null)["items"].as_array().unwrap().clone()
    }

    /// Waits until the live allocations are as they should be.
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

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn berth() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    command
        .env_remove("RUST_LOG")
        .env(kept_compiler::VARIABLE, kept_compiler())
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command
}

/// Runs to its end and gives exit code and standard error.
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
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    (status.code(), said)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_gets_the_gpu_that_a_policy_chose_and_the_record_survives_a_kill() {
    let house = House::new("gpus: sim:2xt4\nstack: [{ policy: mixed, parameters: { replicas: 4 } }]").await;
    let mut serving = house.serve();
    house.kubelet.wait_allocatable(SHARED, 8, SOON).await.unwrap();
    house.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let uid = house.start("a", SHARED, 1).await.unwrap();
    // The share's GPU is no longer to be had whole.
    house.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    let known = |live: &[Value]| {
        live.len() == 1 && live[0]["holder"]["pod"] == "a" && live[0]["holder"]["podUid"].as_str().is_some()
    };
    serving.until("its holder", known);
    let before = serving.live();
    let view = house.kubelet.view(&uid, "main").unwrap();
    assert_eq!(view.envs["BERTH_ALLOCATION_ID_NVIDIA_COM_GPU_SHARED"], before[0]["id"].as_str().unwrap());

    serving.child.kill().unwrap();
    serving.child.wait().unwrap();
    let serving = house.serve();
    house.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    serving.until("the same holder", known);
    assert_eq!(serving.live()[0]["id"], before[0]["id"]);

    house.kubelet.delete(&uid);
    serving.until("its end", <[Value]>::is_empty);
    house.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(house.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_stack_changes_without_effect_on_running_pods() {
    let house = House::new("gpus: sim:2xt4\nstack: [{ policy: exclusive }]").await;
    let serving = house.serve();
    house.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    house.start("whole", WHOLE, 1).await.unwrap();
    let stack = json!({ "entries": [{ "policy": "timeslice", "parameters": { "replicas": 3 } }] });
    serving.call("PUT", "/stack", &stack);
    // The held GPU stays the pod's; the free one is cut into shares.
    house.kubelet.wait_allocatable(SHARED, 3, SOON).await.unwrap();
    for name in ["s1", "s2", "s3"] {
        house.start(name, SHARED, 1).await.unwrap();
    }
    house.start("s4", SHARED, 1).await.unwrap_err();
    serving.until("four holders", |live| live.iter().filter(|a| a["holder"]["pod"].is_string()).count() == 4);
    let bad = json!({ "entries": [{ "policy": "timeslice", "parameters": { "replicaz": 3 } }] });
    let problem = serving.call("PUT", "/stack", &bad);
    assert!(problem["detail"].as_str().unwrap().contains("replicaz"), "{problem}");
    assert_eq!(serving.call("GET", "/stack", &Value::Null)["entries"][0]["parameters"]["replicas"], 3);
    assert_eq!(house.kubelet.anomalies(), []);
}

/// One GPU of a node shared, the others whole.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/1786
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/628
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_latched_gpu_is_listed_in_one_mode_and_changes_when_it_is_idle() {
    let parameters = "{ advertise: latched, replicas: 4, settleSeconds: 1 }";
    let house =
        House::new(&format!("gpus: sim:3xt4\nstack: [{{ policy: mixed, parameters: {parameters} }}]")).await;
    let _serving = house.serve();
    house.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    house.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    let mut pods = Vec::new();
    for name in ["a", "b", "c", "d"] {
        pods.push(house.start(name, SHARED, 1).await.unwrap());
    }
    // No free share is left and one whole GPU is more than its reserve: it turns.
    house.kubelet.wait_allocatable(SHARED, 8, SOON).await.unwrap();
    house.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    for uid in &pods {
        house.kubelet.delete(uid);
    }
    // The last whole GPU goes, so an idle shared one turns back once it has settled.
    house.start("e", WHOLE, 1).await.unwrap();
    house.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    house.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(house.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_ends_it_within_a_second_and_removes_its_sockets() {
    let house = House::new("gpus: sim:2xt4").await;
    let mut serving = house.serve();
    house.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    house.start("a", WHOLE, 1).await.unwrap();
    assert_eq!(house.sockets().len(), 1);
    let began = Instant::now();
    serving.signal("-TERM");
    let status = serving.child.wait().unwrap();
    let took = began.elapsed();
    // Within a second as released; a test beside others on a busy machine gets more.
    assert!(status.success() && took < Duration::from_secs(5), "{status} after {took:?}");
    assert!(house.sockets().is_empty(), "{:?}", house.sockets());
    // What was granted is there again, and served within the kubelet's patience.
    let serving = house.serve();
    house.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    assert_eq!(serving.live().len(), 1);
    assert_eq!(house.kubelet.anomalies(), []);
}

/// The daemon starts before the driver is loaded.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/170
/// Report: https://github.com/NVIDIA/gpu-operator/issues/81
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_waits_for_gpus_and_for_the_kubelet_and_can_be_stopped_meanwhile() {
    let house = House::new("gpus: nvml\nnvmlLibrary: /nowhere/libnvidia-ml.so.1").await;
    let mut serving = house.serve();
    let end = Instant::now() + SOON;
    let named =
        || serving.call("GET", "/node", &Value::Null).to_string().contains("/nowhere/libnvidia-ml.so.1");
    while !named() {
        assert!(Instant::now() < end, "the API does not say what it waits for");
        std::thread::sleep(Duration::from_millis(20));
    }
    serving.signal("-TERM");
    assert!(serving.child.wait().unwrap().success());

    let house = House::new("gpus: sim:2xt4").await;
    house.kubelet.stop().await;
    let serving = house.serve();
    serving.until("the API to answer", <[Value]>::is_empty);
    house.kubelet.start().await.unwrap();
    house.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_at_the_start_are_reported_with_advice() {
    let house = House::new("gpus: sim:2xt4").await;
    let _first = house.serve();
    let (code, said) = ended(&mut house.command());
    assert!(code == Some(1) && said.contains("in use by another process"), "{code:?}: {said}");

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, said) = ended(
        berth()
            .args(["serve", "--gpus", "sim:2xt4", "--admin-listen", &address])
            .arg("--state-dir")
            .arg(house.folder.path().join("other")),
    );
    assert!(code == Some(1) && said.contains("--admin-listen"), "{code:?}: {said}");

    let file = house.folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let below = file.join("below");
    let (code, said) = ended(berth().args(["serve", "--gpus", "sim:2xt4", "--state-dir"]).arg(below));
    assert!(code == Some(1) && said.contains("--state-dir"), "{code:?}: {said}");

    for (settings, says) in [
        ("gpuss: nvml", "gpuss"),
        ("stack: [{ policy: tetris }]", "tetris"),
        ("stack: [{ policy: mixed, parameters: { replicas: 0 } }]", "replicas"),
    ] {
        let other = House::new(&format!("{settings}\ngpus: sim:2xt4")).await;
        let (code, said) = ended(&mut other.command());
        assert!(code == Some(1) && said.contains(says), "{settings}: {code:?}: {said}");
    }
    let (code, _) = ended(berth().args(["serve", "--no-such-flag"]));
    assert_eq!(code, Some(2));
    assert!(Path::new(env!("CARGO_BIN_EXE_berth")).exists());
}
