//! The daemon under attack: the real binary with simulated GPUs, beside the stand-in kubelet.

use crate::resources::Memory;
use fakes::serving::Serving;
use kubelet_standin::{Kubelet, PodSpec};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// The resource that pods request.
pub(crate) const GPU: &str = "nvidia.com/gpu";
/// GPUs of the node.
pub(crate) const GPUS: usize = 8;
/// Longest wait for anything: an upload compiles for at most 300 s.
const WAIT: Duration = Duration::from_secs(330);

/// Rounds of milliseconds instead of half minutes, and as many requests a second as one client can send.
const SETTINGS: &str = "
gpus: sim:8xh100
rounds: { listEveryMs: 100, listEveryCordonedMs: 100, roundEveryMs: 200 }
timing: { roundsApartMs: 100, kubeletSettleMs: 100, replySettleMs: 200, retireMs: 500, namedMs: 200, bypassMs: 500 }
health: { pollSeconds: 0.2, quietSeconds: 1 }
admin: { limits: { readsPerSecond: 1000000, changesPerSecond: 1000000 } }
";

/// A daemon that runs, and its kubelet; ended when dropped.
pub(crate) struct Node {
    serving: Serving,
    pub(crate) kubelet: Kubelet,
    agent: ureq::Agent,
    base: String,
    authorization: String,
    folder: TempDir,
    pods: u32,
}

/// What the API answered.
pub(crate) struct Answered {
    pub(crate) status: u16,
    pub(crate) body: Value,
}

impl Node {
    pub(crate) async fn start(berth: &Path) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let kubelet = Kubelet::started(folder.path().join("kubelet")).await?;
        let config = folder.path().join("config.yaml");
        std::fs::write(&config, SETTINGS)?;
        let mut command = Command::new(berth);
        command.arg("serve").arg("--config").arg(config);
        command.arg("--kubelet-dir").arg(folder.path().join("kubelet"));
        command.arg("--state-dir").arg(folder.path().join("state"));
        // The heap as it is deployed.
        command.args(["--admin-listen", "127.0.0.1:0"]).env("MALLOC_ARENA_MAX", "2");
        let serving = Serving::start(command)?;
        let base = format!("{}/api/v1", serving.origin);
        let token = std::fs::read_to_string(folder.path().join("state/token"))?;
        let agent = ureq::Agent::config_builder();
        let agent = agent.http_status_as_error(false).proxy(None).timeout_global(Some(WAIT)).build();
        let authorization = format!("Bearer {}", token.trim());
        let node = Self { serving, kubelet, agent: agent.into(), base, authorization, folder, pods: 0 };
        node.kubelet.wait_allocatable(GPU, GPUS, WAIT).await?;
        Ok(node)
    }

    /// Memory that is the daemon's own (PSS without pages of files), KiB: how much of the program file
    /// counts depends on who else runs it, the compiler for one.
    pub(crate) fn memory_kib(&self) -> anyhow::Result<u64> {
        let memory = Memory::of(self.serving.child.id())?;
        Ok(memory.share.saturating_sub(memory.share_of_files) / 1024)
    }

    /// Files of policies.
    pub(crate) fn files(&self) -> anyhow::Result<usize> {
        Ok(std::fs::read_dir(self.folder.path().join("state/policies"))?.count())
    }

    pub(crate) fn upload(&self, module: &[u8]) -> anyhow::Result<Answered> {
        let request = self.agent.post(format!("{}/policies", self.base));
        let request = request.header("Authorization", &self.authorization);
        answered(request.header("Content-Type", "application/wasm").send(module))
    }

    pub(crate) fn get(&self, path: &str) -> anyhow::Result<Answered> {
        let request = self.agent.get(format!("{}{path}", self.base));
        answered(request.header("Authorization", &self.authorization).call())
    }

    pub(crate) fn delete(&self, path: &str) -> anyhow::Result<Answered> {
        let request = self.agent.delete(format!("{}{path}", self.base));
        answered(request.header("Authorization", &self.authorization).call())
    }

    /// A stack of one policy, by its digest where it was uploaded.
    pub(crate) fn activate(&self, policy: &str, digest: Option<&str>) -> anyhow::Result<Answered> {
        let entry = match digest {
            Some(digest) => json!({ "policy": policy, "digest": digest }),
            None => json!({ "policy": policy }),
        };
        let request = self.agent.put(format!("{}/stack", self.base));
        let request = request.header("Authorization", &self.authorization);
        let body = json!({ "entries": [entry] }).to_string();
        answered(request.header("Content-Type", "application/json").send(body))
    }

    /// Starts a pod that requests one GPU; returns its UID.
    pub(crate) async fn admit(&mut self) -> anyhow::Result<String> {
        self.pods += 1;
        let pod = PodSpec::new("default", &format!("p{}", self.pods)).container("main", &[(GPU, 1)]);
        let uid = pod.uid.clone();
        self.kubelet.admit(pod).await?;
        Ok(uid)
    }
}

fn answered(called: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> anyhow::Result<Answered> {
    let mut response = called?;
    let text = response.body_mut().read_to_string()?;
    let body = if text.is_empty() { Value::Null } else { serde_json::from_str(&text)? };
    Ok(Answered { status: response.status().as_u16(), body })
}
