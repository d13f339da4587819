//! A node for one step: the real daemon on this machine's GPUs, a stand-in kubelet, and a folder for both.

use crate::check::Check;
use crate::child;
use anyhow::{Context as _, bail, ensure};
use kubelet_standin::Kubelet;
use serde_json::Value;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// The resource of whole GPUs.
pub(crate) const GPU: &str = "nvidia.com/gpu";
/// How GPUs are passed, for steps in which it does not matter: no container runtime has to know of it.
pub(crate) const ENVVAR: &str = "containerEdits: { deviceListStrategy: [envvar] }\n";
/// Interval of polls while something is waited for.
const INTERVAL: Duration = Duration::from_millis(20);
/// How long the daemon may take to answer: as long as NVML may take to open.
const START_MAX: Duration = Duration::from_secs(60);
/// How long one request may take.
const REQUEST_MAX: Duration = Duration::from_secs(10);
/// How long the daemon may take to end.
const STOP_MAX: Duration = Duration::from_secs(10);
/// Shorter intervals than by default, so that a step lasts seconds. The times that protect running pods do not matter
/// here: the pods are entries of the stand-in kubelet.
const INTERVALS: &str = "\
health: { pollSeconds: 0.5 }
rounds: { listEveryMs: 250, listEveryCordonedMs: 250, roundEveryMs: 500 }
timing: { roundsApartMs: 250, kubeletSettleMs: 250, replySettleMs: 500, bypassMs: 2000 }
";

/// A running node; its daemon is killed when it is dropped.
pub(crate) struct Node {
    pub(crate) kubelet: Kubelet,
    runtime: Runtime,
    child: Child,
    origin: String,
    agent: ureq::Agent,
    check: Check,
    folder: TempDir,
}

impl Node {
    /// Starts a node with these keys of the configuration, and waits until its API answers.
    ///
    /// # Errors
    /// If the daemon does not start; with its log.
    pub(crate) fn start(check: &Check, settings: &str) -> anyhow::Result<Self> {
        check.record.at("starting the daemon");
        let folder =
            tempfile::Builder::new().prefix("berth-gpu-").tempdir().context("cannot make a folder")?;
        let path = |name: &str| folder.path().join(name);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let kubelet =
            runtime.block_on(Kubelet::started(path("kubelet"))).context("cannot start the kubelet")?;
        // A berth that makes CDI specifications would write one into a folder of this machine.
        let cdi = check.has_command("cdi") && !settings.contains("cdi:");
        let cdi = if cdi { "cdi: { generate: never }\n" } else { "" };
        fs::write(path("berth.yaml"), format!("{INTERVALS}{settings}{cdi}"))?;
        let mut command = check.berth("serve");
        command.arg("--config").arg(path("berth.yaml")).args(["--admin-listen", "127.0.0.1:0"]);
        command.arg("--kubelet-dir").arg(path("kubelet")).arg("--state-dir").arg(path("state"));
        command.stdout(Stdio::null()).stderr(File::create(path("log"))?);
        child::ends_with_this_thread(&mut command);
        let child = command.spawn().with_context(|| format!("starting {}", check.options.berth.display()))?;
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(REQUEST_MAX))
            .http_status_as_error(false)
            .proxy(None)
            .build();
        let (agent, check) = (agent.into(), check.clone());
        let mut node = Self { kubelet, runtime, child, origin: String::new(), agent, check, folder };
        node.origin = node.wait_for_api()?;
        Ok(node)
    }

    fn wait_for_api(&mut self) -> anyhow::Result<String> {
        let end = Instant::now() + START_MAX;
        loop {
            let log = self.log();
            if let Some((_, rest)) = log.split_once("Swagger UI at ")
                && let Some((origin, _)) = rest.split_once("/swagger-ui")
            {
                return Ok(origin.to_owned());
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("the daemon ended with {status}: {log}");
            }
            ensure!(Instant::now() < end, "the daemon's API does not answer after {START_MAX:?}: {log}");
            std::thread::sleep(INTERVAL);
        }
    }

    /// Waits until the kubelet lists a healthy device of each GPU, and returns how long it took.
    ///
    /// # Errors
    /// If it does not happen within `limit`; with the daemon's log.
    pub(crate) fn wait_registered(&self, gpus: usize, limit: Duration) -> anyhow::Result<Duration> {
        self.check.record.at("waiting for the registration");
        let began = Instant::now();
        let registered = self.kubelet.wait_allocatable(GPU, gpus, limit);
        self.runtime.block_on(registered).with_context(|| self.log_end())?;
        Ok(began.elapsed())
    }

    /// Waits until the kubelet's view is as `holds` says.
    ///
    /// # Errors
    /// If it is not within `limit`; with the daemon's log.
    pub(crate) fn wait_kubelet(
        &self,
        what: &str,
        limit: Duration,
        holds: impl Fn(&Kubelet) -> bool,
    ) -> anyhow::Result<()> {
        self.check.record.at(what);
        self.runtime.block_on(self.kubelet.wait_for(what, limit, holds)).with_context(|| self.log_end())
    }

    pub(crate) fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.block_on(future)
    }

    pub(crate) fn kubelet_dir(&self) -> PathBuf {
        self.folder.path().join("kubelet")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// `GET` of a path below `/api/v1`.
    ///
    /// # Errors
    /// If the API does not answer, or answers with a problem.
    pub(crate) fn get(&self, path: &str) -> anyhow::Result<Value> {
        Ok(serde_json::from_str(&self.text(&format!("/api/v1{path}"))?)?)
    }

    /// `GET` of any path, as text.
    ///
    /// # Errors
    /// If the daemon does not answer, or answers with an error.
    pub(crate) fn text(&self, path: &str) -> anyhow::Result<String> {
        let token = fs::read_to_string(self.token_file()).context("cannot read the token")?;
        let url = format!("{}{path}", self.origin);
        let request = self.agent.get(&url).header("Authorization", format!("Bearer {}", token.trim()));
        let mut response = request.call().with_context(|| url.clone())?;
        let text = response.body_mut().read_to_string()?;
        ensure!(response.status().is_success(), "{url} answered {}: {text}", response.status());
        Ok(text)
    }

    /// Waits until `find` finds something in what the API answers for `path`.
    ///
    /// # Errors
    /// If it does not within `limit`; with the last answer.
    pub(crate) fn wait_api<T>(
        &self,
        what: &str,
        path: &str,
        limit: Duration,
        find: impl Fn(&Value) -> Option<T>,
    ) -> anyhow::Result<T> {
        self.check.record.at(what);
        let end = Instant::now() + limit;
        loop {
            let answer = self.get(path)?;
            if let Some(found) = find(&answer) {
                return Ok(found);
            }
            ensure!(Instant::now() < end, "{what}: not within {limit:?}; {path} answers {answer}");
            std::thread::sleep(INTERVAL);
        }
    }

    /// The sum of a metric's samples whose labels contain these texts.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub(crate) fn metric(&self, name: &str, labels: &[&str]) -> anyhow::Result<f64> {
        Ok(sum_of_samples(&self.text("/metrics")?, name, labels))
    }

    /// The GPUs as the API lists them.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub(crate) fn gpus(&self) -> anyhow::Result<Vec<Value>> {
        let list = self.get("/gpus")?;
        Ok(list["items"].as_array().cloned().unwrap_or_default())
    }

    /// The health of each GPU, with how often it has changed.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub(crate) fn health(&self) -> anyhow::Result<Vec<String>> {
        let line = |gpu: &Value| {
            let health = &gpu["health"];
            let changes = health["history"].as_array().map_or(0, Vec::len);
            format!("{} {} {} after {changes} changes", gpu["uuid"], health["state"], health["reason"])
        };
        Ok(self.gpus()?.iter().map(line).collect())
    }

    /// Runs a command of `berth` against the daemon.
    ///
    /// # Errors
    /// If the program cannot be started.
    pub(crate) fn command(&self, arguments: &[&str]) -> anyhow::Result<Output> {
        self.check.record.at(&format!("berth {}", arguments.join(" ")));
        let mut command = Command::new(&self.check.options.berth);
        command.args(arguments).args(["--server", &self.origin]).arg("--token-file").arg(self.token_file());
        command.env_remove("RUST_LOG").stdin(Stdio::null());
        child::ends_with_this_thread(&mut command);
        command.output().with_context(|| format!("berth {}", arguments.join(" ")))
    }

    /// Ends the daemon as a service manager does.
    ///
    /// # Errors
    /// If it does not end, or its log has a panic.
    pub(crate) fn stop(mut self) -> anyhow::Result<()> {
        self.check.record.at("stopping the daemon");
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let end = Instant::now() + STOP_MAX;
        while self.child.try_wait()?.is_none() {
            ensure!(Instant::now() < end, "the daemon does not end: {}", self.log_end());
            std::thread::sleep(INTERVAL);
        }
        ensure!(!self.log().contains("panicked"), "the daemon panicked: {}", self.log_end());
        Ok(())
    }

    fn token_file(&self) -> PathBuf {
        self.folder.path().join("state/token")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// The last lines of the log.
    fn log_end(&self) -> String {
        const LINES: usize = 12;
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        format!("the daemon's log ends: {}", lines[lines.len().saturating_sub(LINES)..].join(" | "))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.check.add_log(&self.log());
    }
}

/// The sum of the samples of a metric in the text format of Prometheus.
fn sum_of_samples(text: &str, name: &str, labels: &[&str]) -> f64 {
    let sample = |line: &str| {
        let rest = line.strip_prefix(name)?;
        let (found, value) = rest.rsplit_once(' ')?;
        let is_named = found.is_empty() || found.starts_with('{');
        (is_named && labels.iter().all(|label| found.contains(label))).then(|| value.parse::<f64>().ok())?
    };
    text.lines().filter_map(sample).fold(0.0, |sum, value| sum + value)
}

#[cfg(test)]
mod tests {
    use super::sum_of_samples;

    #[test]
    fn samples_are_summed_by_name_and_labels() {
        let text = "# TYPE berth_gpu_xids_total counter\nberth_gpu_xids_total{gpu=\"0\",code=\"31\"} 1\n\
                    berth_gpu_xids_total{gpu=\"0\",code=\"13\"} 2\nberth_gpu_xids_total_created{code=\"31\"} 9\nberth_ready 1\n";
        let sum = |name, labels: &[&str]| sum_of_samples(text, name, labels).to_string();
        assert_eq!(sum("berth_gpu_xids_total", &[]), "3");
        assert_eq!(sum("berth_gpu_xids_total", &["code=\"31\""]), "1");
        assert_eq!(sum("berth_ready", &[]), "1");
        assert_eq!(sum("absent", &[]), "0");
    }
}
