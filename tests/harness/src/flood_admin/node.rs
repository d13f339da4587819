//! The node under test: the daemon as a child of its own, and the stand-in kubelet.

use crate::flood_admin::tls::Authority;
use anyhow::{Context, bail, ensure};
use kubelet_standin::Kubelet;
use std::fmt;
use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The resource that pods request.
pub(crate) const SHARED: &str = "nvidia.com/gpu.shared";
const SHARES: usize = 64;
const STARTED_WITHIN: Duration = Duration::from_secs(30);
/// Who floods with a token, and the good client: two, so that the rate of the one is not the other's.
const TOKENS: [&str; 2] = ["flooder", "operator"];
/// Ends are found within a second, so that there is always a free share.
const CONFIGURATION: &str = "
stack: [{ policy: timeslice, parameters: { replicas: 8 } }]
rounds: { listEveryMs: 250, listEveryCordonedMs: 250, roundEveryMs: 500 }
timing: { roundsApartMs: 250, kubeletSettleMs: 250, replySettleMs: 500 }
";

/// Where the daemon is, and what opens it.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) admin: SocketAddr,
    pub(crate) health: SocketAddr,
    pub(crate) socket: PathBuf,
    /// Of the flooder, who may change.
    pub(crate) token: String,
    /// Of the good client.
    pub(crate) good: String,
    pub(crate) authority: Option<Arc<Authority>>,
    pub(crate) gpu: String,
}

pub(crate) struct Node {
    pub(crate) target: Target,
    pub(crate) kubelet: Arc<Kubelet>,
    child: Child,
    folder: TempDir,
}

/// What the daemon takes.
#[derive(Clone, Copy, Default)]
pub(crate) struct Size {
    pub(crate) resident_kib: u64,
    pub(crate) descriptors: usize,
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.resident_kib as f64 / 1024.0;
        write!(f, "{mib:.1} MiB resident, {} descriptors", self.descriptors)
    }
}

impl Node {
    pub(crate) async fn start(berth: &Path, over_tls: bool) -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("berth-flood-").tempdir().context("a folder")?;
        let path = |name: &str| folder.path().join(name);
        let kubelet = Kubelet::started(path("kubelet")).await.context("the stand-in kubelet")?;
        let (admin, health) = (free_port()?, free_port()?);
        let mut admin_settings = format!("  socket: {}\n  tokens:\n", path("admin.sock").display());
        let mut tokens = Vec::new();
        for name in TOKENS {
            let token = name.repeat(40 / name.len() + 1);
            fs::write(path(name), &token)?;
            fs::set_permissions(path(name), PermissionsExt::from_mode(0o600))?;
            let line = format!("  - {{ name: {name}, right: change, file: {} }}\n", path(name).display());
            admin_settings += &line;
            tokens.push(token);
        }
        let authority = over_tls.then(|| Authority::new(folder.path())).transpose()?.map(Arc::new);
        if let Some(authority) = &authority {
            admin_settings += &authority.settings();
        }
        fs::write(path("berth.yaml"), format!("{CONFIGURATION}admin:\n{admin_settings}"))?;
        let log = File::create(path("log"))?;
        let child = Command::new(berth)
            .args(["serve", "--gpus", "sim:8xh100", "--node-name", "flood", "--api-server", "off"])
            .args(["--admin-listen", &admin.to_string(), "--health-listen", &health.to_string()])
            .arg("--config")
            .arg(path("berth.yaml"))
            .arg("--kubelet-dir")
            .arg(path("kubelet"))
            .arg("--state-dir")
            .arg(path("state"))
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .with_context(|| format!("starting {}", berth.display()))?;
        let target = Target {
            admin,
            health,
            socket: path("admin.sock"),
            token: tokens[0].clone(),
            good: tokens[1].clone(),
            authority,
            gpu: String::new(),
        };
        let mut node = Self { target, kubelet: Arc::new(kubelet), child, folder };
        let up = node.kubelet.wait_allocatable(SHARED, SHARES, STARTED_WITHIN).await;
        up.with_context(|| node.log()).context("the daemon did not come up")?;
        let list = node.target.get("/api/v1/gpus").await?;
        let uuid = list["items"][0]["uuid"].as_str().context("no GPU is listed")?;
        node.target.gpu = uuid.to_owned();
        Ok(node)
    }

    /// What the system says that the daemon takes.
    pub(crate) fn size(&self) -> anyhow::Result<Size> {
        size(self.child.id())
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the daemon has let go of the flood's connections.
    pub(crate) async fn closed(&self, before: usize, within: Duration) -> anyhow::Result<()> {
        // Pods and the good client have some at a time.
        const OTHERS: usize = 24;
        let end = Instant::now() + within;
        loop {
            let now = self.size()?.descriptors;
            if now <= before + OTHERS {
                return Ok(());
            }
            ensure!(Instant::now() < end, "{now} descriptors are still open, {before} were before");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Ends it, which must take it no longer than it takes an idle one.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.child),
            rustix::process::Signal::TERM,
        )?;
        let end = Instant::now() + STARTED_WITHIN;
        while self.child.try_wait()?.is_none() {
            ensure!(Instant::now() < end, "the daemon does not end");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let log = self.log();
        if log.contains("panicked") {
            bail!("the daemon panicked: {log}");
        }
        self.kubelet.stop().await;
        Ok(())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn size(pid: u32) -> anyhow::Result<Size> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).context("the daemon has ended")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let resident_kib = line.trim().trim_end_matches(" kB").parse()?;
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))?.count();
    Ok(Size { resident_kib, descriptors })
}

/// A port without a listener.
fn free_port() -> anyhow::Result<SocketAddr> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}
