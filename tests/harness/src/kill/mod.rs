//! Kills `berth serve` with SIGKILL, again and again, under load, and looks after each restart
//! whether it tells the truth.
//!
//! A round: start it; some rounds kill it right then, while it is starting, and start it again;
//! hold its list of allocations against what the stand-in kubelet believes (`check`); let pods come
//! and go; kill it at a random moment, or let it kill itself at a named step
//! ([`berth_kernel::node::steps`]). Every `SETTLE_EVERY` rounds the load rests until list and kubelet are
//! equal to the last allocation, with those that no kubelet was sent ended, too.
//!
//! A guard runs beside it, on a stand-in for the container runtime. It outlives most of the daemons, and is killed
//! in some rounds, too.
//!
//! On a small disk ([`SmallDisk`]) another program fills it in some rounds, and takes every byte that is given back:
//! the daemon must start all the same.

pub mod believed;
mod check;
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
use kubelet_standin::{Kubelet, Options};
use load::{Load, SHARED, WHOLE};
use process::{Guard, Serving};
use runtime::Runtime;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Eight GPUs, whole and in quarters, and rounds of milliseconds instead of half minutes.
const CONFIGURATION: &str = "
gpus: sim:8xh100
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

/// A node: a kubelet that stays, and daemons that do not.
struct Node<'a> {
    program: &'a Program,
    folder: &'a Path,
    kubelet: Kubelet,
    load: Load,
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
    folder: &Path,
    rounds: u64,
    seed: u64,
    progress: impl Fn(&Tally),
) -> anyhow::Result<Tally> {
    let (nri, guard) = (folder.join("nri.sock"), folder.join("guard.sock"));
    let paths = format!("guard: {{ socket: {guard:?}, nriSocket: {nri:?}, cgroupRoot: {folder:?} }}\n");
    std::fs::write(folder.join("config.yaml"), [CONFIGURATION, &paths].concat())?;
    let options = Options { disconnect_gap: DISCONNECT_GAP, seed, ..Options::new(folder.join("kubelet")) };
    let kubelet = Kubelet::new(options);
    kubelet.start().await.context("the stand-in kubelet")?;
    let load = Load::new(&kubelet, Runtime::start(&nri)?, Rng::new(seed));
    let mut node = Node {
        program,
        folder,
        kubelet,
        load,
        guard: None,
        guard_kills: 0,
        tally: Tally::default(),
        filler: None,
        starts_on_full_disk: 0,
    };
    let _mounted = program.small_disk.map(|disk| disk.mount(folder)).transpose()?;
    // The first start makes the state folder and compiles the policies: unhurried.
    drop(node.start(None).await?.context("the first start")?);
    let is_idle = |node: &Node| {
        let (registered, _) = node.load.runtime.counts();
        (node.load.memory.granted == 0 || registered == 0) && node.tally.rounds < IDLE_ROUNDS_MAX
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
    let (registered, answered) = node.load.runtime.counts();
    eprintln!("seed {seed}: {registered} registrations of the guard, which answered {answered} calls");
    if program.small_disk.is_some() {
        let starts = node.starts_on_full_disk;
        eprintln!("seed {seed}: {starts} starts while another program filled the disk");
        anyhow::ensure!(starts > 0, "the disk was never full in {rounds} rounds");
    }
    anyhow::ensure!(granted > 0, "nothing was granted in {} rounds: that is no load", node.tally.rounds);
    anyhow::ensure!(registered > 0, "no guard registered in {} rounds", node.tally.rounds);
    node.kubelet.stop().await;
    Ok(node.tally)
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
        let (ended, wrong, ()) = tokio::join!(death, self.load.run(&dead), guard_death);
        ended?;
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

    /// Starts it and waits until its API answers. `None` if its named step came first.
    async fn start(&self, kill_at: Option<&str>) -> anyhow::Result<Option<Serving>> {
        let mut serving = Serving::start(self.program, self.folder, kill_at)?;
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

    fn check(&mut self, list: &[process::Listed], serving: &Serving) {
        let wrong = self.load.memory.check(&believed::grants(&self.kubelet), list);
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
        let end = Instant::now() + SOON;
        loop {
            let list = serving.live().await?.context("it died without being killed")?;
            self.check(&list, &serving);
            let grants = believed::grants(&self.kubelet);
            let extra: Vec<_> = list.iter().filter(|a| !grants.contains_key(&a.id)).collect();
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
