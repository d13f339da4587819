//! Kills `berth serve` with SIGKILL, again and again, under load, and looks after each restart
//! whether it tells the truth.
//!
//! A round: start it; some rounds kill it right then, while it is starting, and start it again;
//! hold its list of allocations against what the stand-in kubelet believes (`check`); let pods come
//! and go; kill it at a random moment, or let it kill itself at a named step
//! ([`berth_kernel::node::steps`]). Every `SETTLE_EVERY` rounds the load rests until list and kubelet are
//! equal to the last allocation, with those that no kubelet was sent ended, too.
//!
//! [`Beside::Guard`]: a guard runs beside it, on a stand-in for the container runtime. It outlives most of the daemons, and is
//! killed in some rounds, too. [`Beside::Claims`]: some GPUs are granted through DRA, and claims of them are prepared and
//! unprepared at the same time. A run has only one of them: claims need an API server, and where one is configured the guard
//! waits until that shows the node's pods.
//!
//! On a small disk ([`SmallDisk`]) another program fills it in some rounds, and takes every byte that is given back:
//! the daemon must start all the same.

pub mod believed;
mod check;
mod claim_server;
mod claims;
mod load;
pub mod process;
mod rng;
mod runtime;
mod small_disk;
mod tally;

pub use process::{KILL_AT, Program};
pub use rng::Rng;
pub use small_disk::{Filler, Mounted, SmallDisk};
pub use tally::{Tally, Wrong};

use anyhow::{Context, bail};
use berth_kernel::node::steps::Step;
use claim_server::ClaimServer;
use claims::{ClaimLoad, DRIVER};
use kubelet_standin::{Kubelet, Options};
use load::{Load, SHARED, WHOLE};
use process::{Guard, Serving};
use runtime::Runtime;
use serde_json::json;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// GPUs that are granted through the device plugin.
const PLUGIN_GPUS: usize = 8;
/// GPUs that are granted through DRA: those of the first start, whose configuration grants new GPUs through DRA.
const DRA_GPUS: usize = 4;
/// Whole GPUs and quarters, and rounds of milliseconds instead of half minutes.
const CONFIGURATION: &str = "
nodeName: node-1
stack: [{ policy: mixed, parameters: { replicas: 4 } }]
rounds: { listEveryMs: 100, listEveryCordonedMs: 100, roundEveryMs: 200 }
timing: { roundsApartMs: 100, kubeletSettleMs: 100, replySettleMs: 200, retireMs: 500, namedMs: 200 }
";
/// The percentage of rounds in which the guard is killed.
const GUARD_PERCENT: u64 = 15;
/// So often the load rests until everything is equal.
const SETTLE_EVERY: u64 = 25;
/// The longest that anything may take: a first start compiles the policies, unoptimised in tests.
const SOON: Duration = Duration::from_secs(300);
/// How often the other program begins to fill a small disk, or gives it back.
const FILLER_PERCENT: u64 = 40;
/// Largest number of rounds without a granted allocation.
const IDLE_ROUNDS_MAX: u64 = 200;
/// How often a process is checked.
const LOOK: Duration = Duration::from_millis(1);
/// The load's longest time in one round, milliseconds. A named step that did not come by then does not come.
const LOAD_MS: u64 = 40;
/// A start takes some 20 to 60 ms here; a kill within it comes at most so late, milliseconds.
const STARTING_MS: u64 = 50;
/// The kubelet's own gap between a closed connection and its manager's knowledge, short.
const DISCONNECT_GAP: Duration = Duration::from_millis(5);

/// What a run has besides Allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    /// A guard.
    Guard,
    /// Claims.
    Claims,
}

/// A node: a kubelet that stays, and daemons that do not.
struct Node<'a> {
    program: &'a Program,
    folder: &'a Path,
    kubelet: Kubelet,
    load: Load,
    /// `None`: a guard runs.
    claims: Option<ClaimLoad>,
    guard: Option<Guard>,
    guard_kills: u64,
    tally: Tally,
    /// The other program, while it fills the disk.
    filler: Option<Filler>,
    /// Starts while it did.
    starts_on_full_disk: u64,
}

/// Runs so many rounds in this empty folder, and further ones until an allocation has been granted. `progress` is
/// called after each.
///
/// # Errors
/// If the daemon or the stand-in kubelet cannot be run.
pub async fn run(
    program: &Program,
    beside: Beside,
    folder: &Path,
    rounds: u64,
    seed: u64,
    progress: impl Fn(&Tally),
) -> anyhow::Result<Tally> {
    let nri = folder.join("nri.sock");
    let options = Options { disconnect_gap: DISCONNECT_GAP, seed, ..Options::new(folder.join("kubelet")) };
    let kubelet = Kubelet::new(options);
    kubelet.start().await.context("the stand-in kubelet")?;
    let load = Load::new(&kubelet, Runtime::start(&nri)?, Rng::new(seed));
    let _mounted = program.small_disk.map(|disk| disk.mount(folder)).transpose()?;
    let claims = match beside {
        Beside::Claims => Some(with_claims(program, folder, seed).await?),
        Beside::Guard => {
            let paths = [folder.join("guard.sock"), nri, folder.to_owned()];
            let [socket, nri, cgroups] = &paths;
            let own = format!(
                "gpus: sim:{PLUGIN_GPUS}xh100\n\
                 guard: {{ socket: {socket:?}, nriSocket: {nri:?}, cgroupRoot: {cgroups:?} }}\n"
            );
            std::fs::write(folder.join("config.yaml"), [CONFIGURATION, &own].concat())?;
            // The first start makes the state folder and compiles the policies: unhurried.
            drop(start(program, folder, None).await?.context("the first start")?);
            None
        }
    };
    let mut node = Node {
        program,
        folder,
        kubelet,
        load,
        claims,
        guard: None,
        guard_kills: 0,
        tally: Tally::default(),
        filler: None,
        starts_on_full_disk: 0,
    };
    let is_idle = |node: &Node| {
        let is_used = match &node.claims {
            Some(claims) => claims.prepared > 0,
            None => node.load.runtime.counts().0 > 0,
        };
        (node.load.memory.granted == 0 || !is_used) && node.tally.rounds < IDLE_ROUNDS_MAX
    };
    while node.tally.rounds < rounds || is_idle(&node) {
        node.round().await.with_context(|| format!("round {} of seed {seed}", node.tally.rounds + 1))?;
        node.tally.rounds += 1;
        progress(&node.tally);
    }
    node.settle().await?;
    let (granted, unheard) = (node.load.memory.granted, node.load.memory.unheard());
    eprintln!(
        "seed {seed}: {granted} grants, {} refused, {unheard} recorded and never answered",
        node.load.refused
    );
    match &node.claims {
        Some(ClaimLoad { prepared, refused, .. }) => {
            eprintln!("seed {seed}: {prepared} claims prepared, {refused} calls refused");
            anyhow::ensure!(*prepared > 0, "no claim was prepared in {} rounds", node.tally.rounds);
        }
        None => {
            let (registered, answered) = node.load.runtime.counts();
            eprintln!(
                "seed {seed}: {registered} registrations of the guard, which answered {answered} calls"
            );
            anyhow::ensure!(registered > 0, "no guard registered in {} rounds", node.tally.rounds);
        }
    }
    if program.small_disk.is_some() {
        let starts = node.starts_on_full_disk;
        eprintln!("seed {seed}: {starts} starts while another program filled the disk");
        anyhow::ensure!(starts > 0, "the disk was never full in {rounds} rounds");
    }
    anyhow::ensure!(granted > 0, "nothing was granted in {} rounds: that is no load", node.tally.rounds);
    node.kubelet.stop().await;
    Ok(node.tally)
}

/// The load of claims on a daemon that was started twice: the first start makes the state folder and compiles the
/// policies, and the second one adds the GPUs that are granted through the device plugin.
async fn with_claims(program: &Program, folder: &Path, seed: u64) -> anyhow::Result<ClaimLoad> {
    let server = ClaimServer::start()?;
    server.write_kubeconfig(&folder.join("kubeconfig"))?;
    std::fs::create_dir(folder.join("cdi"))?;
    write_configuration(folder, DRA_GPUS, "dra")?;
    let first = start(program, folder, None).await?.context("the first start")?;
    drop(gpus_of(first, DRA_GPUS).await?);
    write_configuration(folder, DRA_GPUS + PLUGIN_GPUS, "devicePlugin")?;
    let second = start(program, folder, None).await?.context("the second start")?;
    let gpus = gpus_of(second, DRA_GPUS + PLUGIN_GPUS).await?;
    // What NVIDIA's toolkit writes, without device nodes.
    let device = |uuid: &String| json!({"name": uuid, "containerEdits": {"env": [format!("GPU={uuid}")]}});
    let devices: Vec<_> = gpus.iter().map(device).collect();
    let specification = json!({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices});
    std::fs::write(folder.join("cdi/nvidia.json"), specification.to_string())?;
    let (of_claims, rng) = (gpus[..DRA_GPUS].to_vec(), Rng::new(!seed));
    let mut claims = ClaimLoad::new(server, &folder.join("kubelet"), &folder.join("cdi"), of_claims, rng);
    if program.small_disk.is_some() {
        claims.on_small_disk();
    }
    Ok(claims)
}

/// The UUIDs of a daemon's GPUs, by index, once it has so many.
async fn gpus_of(serving: Serving, count: usize) -> anyhow::Result<Vec<String>> {
    let end = Instant::now() + SOON;
    loop {
        let gpus = serving.gpus().await?;
        if gpus.len() == count {
            return Ok(gpus);
        }
        if Instant::now() > end {
            bail!("the daemon has {} GPUs, not {count}:\n{}", gpus.len(), serving.log());
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// `via`: the API of GPUs that the ledger does not know yet.
fn write_configuration(folder: &Path, gpus: usize, via: &str) -> anyhow::Result<()> {
    let (kubeconfig, cdi) = (folder.join("kubeconfig"), folder.join("cdi"));
    let own = format!(
        "gpus: sim:{gpus}xh100\nkubeconfig: {kubeconfig:?}\n\
         dra: {{ enabled: true, driver: {DRIVER}, via: {via} }}\n\
         cdi: {{ folders: [{cdi:?}], generate: never }}\n\
         containerEdits: {{ deviceListStrategy: [cdi-cri] }}\n"
    );
    Ok(std::fs::write(folder.join("config.yaml"), [CONFIGURATION, &own].concat())?)
}

/// Starts it and waits until its API answers. `None` if its named step came first.
async fn start(program: &Program, folder: &Path, kill_at: Option<&str>) -> anyhow::Result<Option<Serving>> {
    let mut serving = Serving::start(program, folder, kill_at)?;
    let end = Instant::now() + SOON;
    while !serving.is_up() {
        if serving.is_dead()? {
            return Ok(None);
        }
        if Instant::now() > end {
            bail!("its API does not come up:\n{}", serving.log());
        }
        tokio::time::sleep(LOOK).await;
    }
    Ok(Some(serving))
}

impl Node<'_> {
    /// The other program begins to fill the disk, or gives it back.
    fn turn_filler(&mut self) -> anyhow::Result<()> {
        let fills = self.filler.take().is_none();
        self.filler = fills.then(|| Filler::start(&self.folder.join("state"))).transpose()?;
        Ok(())
    }

    async fn round(&mut self) -> anyhow::Result<()> {
        if self.program.small_disk.is_some() && self.load.rng.chance(FILLER_PERCENT) {
            self.turn_filler()?;
        }
        self.starts_on_full_disk += u64::from(self.filler.is_some());
        let rng = &mut self.load.rng;
        let starting = rng.chance(20).then(|| Duration::from_millis(rng.below(STARTING_MS)));
        let named = (self.program.named_steps && rng.chance(60)).then(|| {
            let point = *rng.pick(&Step::ALL);
            // The steps of opening are passed once.
            let opening = matches!(point, Step::StoreChecked | Step::StoreOpened);
            let passage = if opening { 1 } else { 1 + rng.below(8) };
            format!("{}:{passage}", point.as_str())
        });
        let guard_dies = rng.chance(GUARD_PERCENT).then(|| Duration::from_millis(rng.below(LOAD_MS)));
        self.start_guard()?;
        if let Some(after) = starting {
            let mut serving = Serving::start(self.program, self.folder, None)?;
            tokio::time::sleep(after).await;
            serving.kill();
        }
        let serving = match self.start(named.as_deref()).await? {
            Some(serving) => Some(serving),
            // Its named step is one of the start.
            None => self.start(None).await?,
        };
        let mut serving = serving.context("it died without being killed")?;
        let Some(list) = serving.live().await? else { return self.again().await };
        self.check(&list, &serving);
        let (died, dead) = watch::channel(false);
        let load_ms = 1 + self.load.rng.below(LOAD_MS);
        let mut longest = Duration::from_millis(if named.is_some() { LOAD_MS } else { load_ms });
        if self.load.memory.granted == 0 {
            // On a busy machine each kill may come before the first grant: the load goes on for longer from round to
            // round.
            longest *= 1 + u32::try_from(self.tally.rounds).unwrap_or(u32::MAX - 1);
        }
        let kubelet = self.kubelet.clone();
        let death = async {
            let ended = die(&mut serving, &kubelet, longest).await;
            died.send_replace(true);
            ended
        };
        let (guard, guard_kills) = (&mut self.guard, &mut self.guard_kills);
        let guard_death = async {
            if let Some(after) = guard_dies {
                tokio::time::sleep(after).await;
                *guard = None;
                *guard_kills += 1;
            }
        };
        let claims = async {
            match &mut self.claims {
                Some(claims) => claims.run(&dead).await,
                None => Vec::new(),
            }
        };
        let loads = async { tokio::join!(self.load.run(&dead), claims) };
        let (ended, (mut wrong, of_claims), ()) = tokio::join!(death, loads, guard_death);
        ended?;
        wrong.extend(of_claims);
        self.note(&wrong, "");
        if self.tally.rounds % SETTLE_EVERY == SETTLE_EVERY - 1 {
            self.settle().await?;
        }
        Ok(())
    }

    /// It was killed during the check: the next start is checked without a kill.
    async fn again(&mut self) -> anyhow::Result<()> {
        let mut serving = self.start(None).await?.context("it died without being killed")?;
        let list = serving.live().await?.context("it died without being killed")?;
        self.check(&list, &serving);
        Ok(())
    }

    /// Starts the guard if it was killed, and counts what it has done wrong since the last call.
    fn start_guard(&mut self) -> anyhow::Result<()> {
        if self.claims.is_some() {
            return Ok(());
        }
        let wrong = self.load.runtime.take_wrong(self.guard_kills);
        let wrong: Vec<_> = wrong.into_iter().map(Wrong::Mismatch).collect();
        let log = Guard::log(self.folder);
        self.note(&wrong, &log);
        match &mut self.guard {
            Some(guard) => guard.check(),
            None => {
                self.guard = Some(Guard::start(self.program, self.folder)?);
                Ok(())
            }
        }
    }

    async fn start(&self, kill_at: Option<&str>) -> anyhow::Result<Option<Serving>> {
        start(self.program, self.folder, kill_at).await
    }

    fn check(&mut self, list: &[process::Listed], serving: &Serving) {
        let mut wrong = self.claims.as_mut().map(|claims| claims.check(list)).unwrap_or_default();
        let of_plugin: Vec<_> = list.iter().filter(|a| a.claim.is_none()).cloned().collect();
        wrong.extend(self.load.memory.check(&believed::grants(&self.kubelet), &of_plugin));
        self.note(&wrong, &serving.log());
    }

    fn note(&mut self, wrong: &[Wrong], log: &str) {
        for wrong in wrong {
            eprintln!("round {}: {wrong}", self.tally.rounds + 1);
            self.tally.count(wrong);
        }
        if !wrong.is_empty() {
            eprint!("{log}");
        }
    }

    /// Nothing comes or goes until the list is what the kubelet believes, to the last allocation.
    async fn settle(&mut self) -> anyhow::Result<()> {
        self.filler = None;
        self.start_guard()?;
        let mut serving = self.start(None).await?.context("it died without being killed")?;
        let list = serving.live().await?.context("it died without being killed")?;
        self.check(&list, &serving);
        if let Some(claims) = &mut self.claims {
            claims.settle().await.with_context(|| serving.log())?;
        }
        let end = Instant::now() + SOON;
        loop {
            let list = serving.live().await?.context("it died without being killed")?;
            self.check(&list, &serving);
            let grants = believed::grants(&self.kubelet);
            let is_explained =
                |a: &process::Listed| self.claims.as_ref().is_some_and(|claims| claims.explains(a));
            let is_extra = |a: &&process::Listed| !grants.contains_key(&a.id) && !is_explained(a);
            let extra: Vec<_> = list.iter().filter(is_extra).collect();
            if extra.is_empty() {
                return Ok(());
            }
            if Instant::now() > end {
                let why = format!("of no living pod, and not ended: {extra:#?}; living: {grants:#?}");
                self.note(&[Wrong::Mismatch(why)], &serving.log());
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Waits for the end of a process: its own at a named step, or ours at the latest `longest` after
/// it began to serve.
async fn die(serving: &mut Serving, kubelet: &Kubelet, longest: Duration) -> anyhow::Result<()> {
    let give_up = Instant::now() + SOON;
    let mut kill_at = None;
    loop {
        if serving.is_dead()? {
            return Ok(());
        }
        let now = Instant::now();
        if kill_at.is_none() && kubelet.is_served(WHOLE) && kubelet.is_served(SHARED) {
            kill_at = Some(now + longest);
        }
        if kill_at.is_some_and(|at| now >= at) {
            serving.kill();
            return Ok(());
        }
        if now > give_up {
            bail!("it does not register: {:?}\n{}", kubelet.anomalies(), serving.log());
        }
        tokio::time::sleep(LOOK).await;
    }
}
