//! The node that is read: the built daemon, several resources, some hundreds of pods.

use crate::resources;
use anyhow::{Context as _, ensure};
use fakes::serving::Serving;
use kubelet_standin::{Kubelet, PodSpec};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::runtime::Runtime;

/// The resource of Allocates and of most pods.
pub(crate) const SHARED: &str = "nvidia.com/gpu.shared";
const SLICE: &str = "nvidia.com/gpu.mem-8g";
const WHOLE: &str = "nvidia.com/gpu";
/// Six of eight GPUs in 64 shares, one cut by memory, one whole.
const SHARES: usize = 6 * 64;
/// Pods with a share, so that some are left for the Allocates that are timed.
const PODS: usize = 300;
/// Pods with a slice of memory.
const SLICED: usize = 8;
/// Whose pods they are, in turn.
pub(crate) const NAMESPACES: usize = 8;
/// Who reads: a token each.
pub(crate) const TOOLS: usize = 4;
/// Longest wait for any step of the start.
const WAIT: Duration = Duration::from_secs(60);

const CONFIGURATION: &str = "
gpus: sim:8xh100
stack:
  - policy: timeslice
    parameters: { replicas: 64, only: [{index: 0}, {index: 1}, {index: 2}, {index: 3}, {index: 4}, {index: 5}] }
  - policy: memory
    parameters: { only: [{index: 6}] }
    permissions: { resources: [nvidia.com/gpu.mem-4g, nvidia.com/gpu.mem-8g] }
admin:
";

/// A daemon that runs, and its kubelet.
pub(crate) struct Node {
    pub(crate) serving: Serving,
    pub(crate) kubelet: Kubelet,
    pub(crate) runtime: Runtime,
    /// Of the operator who ends what was allocated.
    pub(crate) token: String,
    /// Of those who read.
    pub(crate) tools: Vec<String>,
    /// PEM of the CA that signed the daemon's certificate, with TLS.
    pub(crate) ca: Option<String>,
    folder: TempDir,
    of_kubelet: TempDir,
}

impl Node {
    /// Starts it, and lets its pods in.
    pub(crate) fn start(berth: &Path, tls: bool) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        // Its store is on the disk; what the stand-in kubelet writes is in memory where there is such a
        // place, so that it does not take from the disk what Allocates are measured with.
        let folder = tempfile::Builder::new().prefix("berth-load-").tempdir()?;
        let of_kubelet = in_memory()?;
        let kubelet = runtime.block_on(Kubelet::started(of_kubelet.path().join("kubelet")))?;
        let tools: Vec<String> = (0..TOOLS).map(|tool| token_of(folder.path(), tool)).collect();
        let mut file = CONFIGURATION.to_owned();
        let ca = tls.then(|| certificates(folder.path())).transpose()?;
        if ca.is_some() {
            let at = folder.path().display();
            file += &format!("  tls: {{ certFile: {at}/tls.crt, keyFile: {at}/tls.key }}\n");
        }
        file += "  tokens:\n";
        for (tool, token) in tools.iter().enumerate() {
            file += &format!("    - {{ name: tool-{tool}, sha256: \"{}\", right: read }}\n", hash(token));
        }
        let config = folder.path().join("config.yaml");
        std::fs::write(&config, file)?;
        let mut command = Command::new(berth);
        command.arg("serve").arg("--config").arg(config);
        command.arg("--kubelet-dir").arg(of_kubelet.path().join("kubelet"));
        command.arg("--state-dir").arg(folder.path().join("state"));
        // The heap as it is deployed.
        command.args(["--admin-listen", "127.0.0.1:0"]).env("MALLOC_ARENA_MAX", "2");
        let serving = Serving::start(command)?;
        let token = std::fs::read_to_string(folder.path().join("state/token"))?.trim().to_owned();
        let node = Self { serving, kubelet, runtime, token, tools, ca, folder, of_kubelet };
        node.populate()?;
        Ok(node)
    }

    fn populate(&self) -> anyhow::Result<()> {
        self.runtime.block_on(async {
            self.kubelet.wait_allocatable(SHARED, SHARES, WAIT).await?;
            for number in 0..PODS {
                self.admit(&format!("trainer-{number}"), number, SHARED).await?;
            }
            for number in 0..SLICED {
                self.admit(&format!("notebook-{number}"), number, SLICE).await?;
            }
            self.admit("whole-0", 0, WHOLE).await
        })?;
        // The daemon learns the holders from the kubelet, in its next reconcile pass.
        let agent = self.agent()?;
        // On a busy machine a call is repeated here or late there: a few more or less make no difference.
        let (enough, until) = ((PODS + SLICED) * 95 / 100, Instant::now() + WAIT);
        loop {
            let list = self.get(&agent, "/api/v1/allocations?limit=1000")?;
            let items = list["items"].as_array().context("no list")?;
            let known = items.iter().filter(|item| !item["holder"]["pod"].is_null()).count();
            if known >= enough {
                return Ok(());
            }
            let count = items.len();
            ensure!(
                Instant::now() < until,
                "of {count} allocations {known} show who holds them, not {enough}"
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    async fn admit(&self, name: &str, number: usize, resource: &str) -> anyhow::Result<()> {
        let namespace = format!("team-{}", number % NAMESPACES);
        let pod = PodSpec::new(&namespace, name).container("main", &[(resource, 1)]);
        let uid = pod.uid.clone();
        self.kubelet.admit(pod).await?;
        Ok(self.kubelet.run(&uid).await?)
    }

    /// A client for single requests.
    pub(crate) fn agent(&self) -> anyhow::Result<ureq::Agent> {
        use ureq::tls::{Certificate, RootCerts, TlsConfig};
        berth_cli::endpoint::use_ring();
        let config = ureq::Agent::config_builder().timeout_global(Some(WAIT)).proxy(None);
        let config = match &self.ca {
            None => config.build(),
            Some(pem) => {
                let roots = RootCerts::new_with_certs(&[Certificate::from_pem(pem.as_bytes())?]);
                config.tls_config(TlsConfig::builder().root_certs(roots).build()).build()
            }
        };
        Ok(config.into())
    }

    /// The JSON at this path.
    pub(crate) fn get(&self, agent: &ureq::Agent, path: &str) -> anyhow::Result<Value> {
        let called = agent.get(format!("{}{path}", self.serving.origin));
        let mut answer = called.header("Authorization", format!("Bearer {}", self.token)).call()?;
        Ok(serde_json::from_str(&answer.body_mut().read_to_string()?)?)
    }

    /// Where its API listens.
    pub(crate) fn address(&self) -> anyhow::Result<SocketAddr> {
        let (_, address) = self.serving.origin.split_once("://").context("no URL")?;
        Ok(address.parse()?)
    }

    pub(crate) fn kubelet_dir(&self) -> PathBuf {
        self.of_kubelet.path().join("kubelet")
    }

    /// What the daemon has used of the processors so far, all its threads together.
    pub(crate) fn processor_time(&self) -> anyhow::Result<Duration> {
        resources::processor_time(self.serving.child.id())
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.ca.is_some() { "TLS" } else { "plain HTTP" };
        let (allocations, state) = (PODS + SLICED + 1, self.folder.path().display());
        write!(f, "8 GPUs, 4 resources, {allocations} allocations; {scheme}; state in {state}")
    }
}

fn in_memory() -> std::io::Result<TempDir> {
    let mut builder = tempfile::Builder::new();
    builder.prefix("berth-load-");
    builder.tempdir_in("/dev/shm").or_else(|_| builder.tempdir())
}

/// Not used by another process, since the folder's name is random.
fn token_of(folder: &Path, tool: usize) -> String {
    hash(&format!("{}/{tool}", folder.display()))
}

fn hash(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a certificate and its key there; returns the CA's certificate.
fn certificates(folder: &Path) -> anyhow::Result<String> {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    let mut params = CertificateParams::new(Vec::<String>::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate()?;
    let ca = params.self_signed(&key)?.pem();
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate()?;
    let server = CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()])?;
    std::fs::write(folder.join("tls.crt"), server.signed_by(&key, &issuer)?.pem())?;
    std::fs::write(folder.join("tls.key"), key.serialize_pem())?;
    Ok(ca)
}
