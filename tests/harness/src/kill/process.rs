//! `berth serve` and `berth guard` as processes that are killed, and what the daemon's API says.

use anyhow::{Context, bail};
use fakes::serving;
use serde::de::DeserializeOwned;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// The variable that names the step at which a daemon ends itself: `after-append:3` is the third passage
/// of that step.
pub const KILL_AT: &str = "BERTH_KILL_AT";

/// Lines of its log that are kept for the case that something is wrong.
const LOG_LINES: usize = 60;
/// One call of its API.
const CALL_LIMIT: Duration = Duration::from_secs(300);
/// From a process's closed sockets to its end.
const DEATH: Duration = Duration::from_secs(300);

/// How `berth serve` is started.
#[derive(Clone, Debug)]
pub struct Program {
    /// The binary; it takes the arguments of `berth`.
    pub exe: PathBuf,
    /// Set in its environment.
    pub environment: Vec<(String, String)>,
    /// Whether it knows the named steps of a turn.
    pub named_steps: bool,
    /// A small disk for its state folder, which another program fills.
    pub small_disk: Option<super::SmallDisk>,
}

impl Program {
    /// A command of `berth` on this folder, which has `config.yaml`. Its log goes to standard error.
    fn command(&self, name: &str, folder: &Path) -> Command {
        let mut command = Command::new(&self.exe);
        command
            .arg(name)
            .arg("--config")
            .arg(folder.join("config.yaml"))
            .env_remove("RUST_LOG")
            .env_remove(KILL_AT)
            .envs(self.environment.iter().map(|(k, v)| (k, v)))
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command
    }
}

/// The file of the folder with the guard's log.
const GUARD_LOG: &str = "guard.log";

/// A running daemon; killed when dropped.
#[derive(Debug)]
pub struct Serving {
    child: Child,
    base: watch::Receiver<Option<String>>,
    log: Arc<Mutex<VecDeque<String>>>,
    /// Fills `log`; it ends with the daemon's standard error.
    reader: Option<JoinHandle<()>>,
    token: PathBuf,
}

/// An allocation as the API shows it.
#[derive(Clone, Debug, serde::Deserialize)]
pub struct Listed {
    /// Its id.
    pub id: String,
    /// The requested resource.
    pub resource: String,
    /// Ids of its devices.
    pub devices: Vec<String>,
    /// Whether a newer allocation has one of its devices.
    pub overlapped: bool,
    /// The container, where it is known.
    pub holder: Option<Holder>,
    /// The claim whose request it answers; `None` for an Allocate.
    pub claim: Option<ListedClaim>,
}

/// The claim of an allocation.
#[derive(Clone, Debug, serde::Deserialize)]
pub struct ListedClaim {
    /// Its UID.
    pub uid: String,
}

/// Who holds it.
#[derive(Clone, Debug, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// The pod's name.
    pub pod: Option<String>,
    /// The pod's UID.
    pub pod_uid: Option<String>,
}

#[derive(serde::Deserialize)]
struct List<T> {
    items: Vec<T>,
    next: Option<String>,
}

#[derive(serde::Deserialize)]
struct ListedGpu {
    uuid: String,
}

impl Serving {
    /// Starts it on this folder, which has `config.yaml`; `kill_at` is a named step and its passage.
    ///
    /// # Errors
    /// If the process does not start.
    pub fn start(program: &Program, folder: &Path, kill_at: Option<&str>) -> anyhow::Result<Self> {
        let mut command = program.command("serve", folder);
        command
            .arg("--kubelet-dir")
            .arg(folder.join("kubelet"))
            .arg("--state-dir")
            .arg(folder.join("state"))
            .args(["--admin-listen", "127.0.0.1:0"])
            .stderr(Stdio::piped());
        if let Some(at) = kill_at {
            command.env(KILL_AT, at);
        }
        let mut child = command.spawn().with_context(|| format!("starting {}", program.exe.display()))?;
        let output = child.stderr.take().context("its standard error")?;
        let (found, base) = watch::channel(None);
        let log = Arc::new(Mutex::new(VecDeque::new()));
        let lines = Arc::clone(&log);
        // Read to its end, or the daemon would wait for room in the pipe.
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some(origin) = serving::origin(&line) {
                    found.send_replace(Some(format!("{origin}/api/v1")));
                }
                let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
                if lines.len() == LOG_LINES {
                    lines.pop_front();
                }
                lines.push_back(line);
            }
        });
        Ok(Self { child, base, log, reader: Some(reader), token: folder.join("state/token") })
    }

    /// Whether it is dead by now.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn is_dead(&mut self) -> anyhow::Result<bool> {
        let ended: Option<ExitStatus> = self.child.try_wait()?;
        if let Some(status) = ended
            && status.code().is_some()
        {
            // The last lines may still be in the pipe, and they say why it ended.
            if let Some(reader) = self.reader.take() {
                let _ = reader.join();
            }
            bail!("berth ended by itself, {status}:\n{}", self.log());
        }
        Ok(ended.is_some())
    }

    /// Ends it now.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// The last lines of its log.
    #[must_use]
    pub fn log(&self) -> String {
        let lines = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().map(|line| format!("    {line}\n")).collect()
    }

    /// Whether its API answers.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.base.borrow().is_some()
    }

    /// Every live allocation. `None` if it died meanwhile.
    ///
    /// # Errors
    /// If it answers something else.
    pub async fn live(&mut self) -> anyhow::Result<Option<Vec<Listed>>> {
        match self.list("allocations?limit=1000").await? {
            Ok(items) => Ok(Some(items)),
            // Its sockets go before it can be waited for.
            Err(_) if self.dies_within(DEATH).await? => Ok(None),
            Err(error) => Err(error.context(format!("its log:\n{}", self.log()))),
        }
    }

    /// UUIDs of its GPUs, by index.
    ///
    /// # Errors
    /// If it does not answer with them.
    pub async fn gpus(&self) -> anyhow::Result<Vec<String>> {
        let gpus = self.list::<ListedGpu>("gpus").await??;
        Ok(gpus.into_iter().map(|gpu| gpu.uuid).collect())
    }

    /// All items of a list of its API, by its path and parameters; the inner error is that of the call.
    async fn list<T>(&self, what: &'static str) -> anyhow::Result<anyhow::Result<Vec<T>>>
    where
        T: DeserializeOwned + Send + 'static,
    {
        let base = self.base.borrow().clone().context("its API is not up")?;
        let token = std::fs::read_to_string(&self.token).context("its token")?;
        Ok(tokio::task::spawn_blocking(move || call(&base, what, token.trim())).await?)
    }

    async fn dies_within(&mut self, limit: Duration) -> anyhow::Result<bool> {
        let end = Instant::now() + limit;
        while !self.is_dead()? {
            if Instant::now() > end {
                return Ok(false);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(true)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A running guard; killed when dropped.
#[derive(Debug)]
pub(crate) struct Guard {
    child: Child,
    folder: PathBuf,
}

impl Guard {
    /// Starts it on this folder, which has `config.yaml`.
    pub(crate) fn start(program: &Program, folder: &Path) -> anyhow::Result<Self> {
        let mut command = program.command("guard", folder);
        command.stderr(std::fs::File::create(folder.join(GUARD_LOG))?);
        let child = command.spawn().with_context(|| format!("starting {}", program.exe.display()))?;
        Ok(Self { child, folder: folder.to_owned() })
    }

    /// Checks that it runs.
    ///
    /// # Errors
    /// If it has ended by itself.
    pub(crate) fn check(&mut self) -> anyhow::Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("the guard ended by itself, {status}:\n{}", Self::log(&self.folder)),
        }
    }

    /// The log of the guard that was started last on this folder.
    pub(crate) fn log(folder: &Path) -> String {
        std::fs::read_to_string(folder.join(GUARD_LOG)).unwrap_or_default()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn call<T: DeserializeOwned>(base: &str, what: &str, token: &str) -> anyhow::Result<Vec<T>> {
    let agent: ureq::Agent = ureq::Agent::config_builder().timeout_global(Some(CALL_LIMIT)).build().into();
    let (mut items, mut after) = (Vec::new(), String::new());
    loop {
        let url = format!("{base}/{what}{after}");
        let mut answer = agent.get(&url).header("Authorization", format!("Bearer {token}")).call()?;
        let list: List<T> = serde_json::from_str(&answer.body_mut().read_to_string()?)?;
        items.extend(list.items);
        let Some(next) = list.next else {
            return Ok(items);
        };
        after = format!("&after={next}");
    }
}
