//! Hostile guests against the real daemon: each must be stopped where and as the table says, within
//! its time, without the daemon growing, and with the next pod served as if nothing had been.

mod cases;
pub mod guests;
mod node;

use anyhow::{Context, bail, ensure};
use cases::{CASES, Case, Meets};
use node::Node;
use serde_json::Value;
use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How much larger the daemon may be after a guest than before the first, KiB. Four calls at once keep
/// 8 memories of 256 KiB each, a compiled guest some 200 KiB; a guest that was let in with its 128 MiB,
/// or an answer of a megabyte kept a few times over, is far beyond.
pub(crate) const GROWTH_KIB_MAX: u64 = 10 * 1024;
/// The same after many uploads: of each version its description stays, some KiB, up to 256 of them.
pub(crate) const UPLOADS_GROWTH_KIB_MAX: u64 = 16 * 1024;
/// Longest time until a hook that fails has failed and its pod is served: a call has 500 ms, a walk over
/// the stack 1 s, and one pod is two walks.
const HOOK: Duration = Duration::from_secs(3);
/// Longest time until an upload is refused: compiling a small module, and 180 ms of fuel.
const UPLOAD: Duration = Duration::from_secs(5);
/// The same for a bomb, which meets the compiler's 768 MiB after some seconds. (180 s of processor time
/// and 300 s by the clock would end it, too.)
const BOMB: Duration = Duration::from_secs(20);
/// Files of policies at most: two of each of 256 versions, and two of each shipped one.
const FILES_MAX: usize = 2 * (256 + 16);

/// What is attacked, and how hard.
pub struct Attack {
    /// The daemon's program.
    pub berth: PathBuf,
    /// Uploads in a row.
    pub uploads: u32,
    /// How many times slower than an idle machine this one may be.
    pub patience: u32,
}

/// What became of one guest.
pub struct Line {
    name: String,
    stopped_at: &'static str,
    error: String,
    took: Duration,
    memory_kib: u64,
    /// What is not as the table says.
    wrong: Vec<String>,
    stopped: bool,
    survived: bool,
}

/// All of them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Guests that were tried.
    pub guests: u32,
    /// Stopped where, when and as it should be.
    pub stopped: u32,
    /// After which the daemon was not larger than it may be, and served the next pod.
    pub survived: u32,
}

impl Tally {
    /// Whether all were stopped and the daemon survived each.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.guests > 0 && self.stopped == self.guests && self.survived == self.guests
    }

    fn add(&mut self, line: &Line) {
        self.guests += 1;
        self.stopped += u32::from(line.stopped);
        self.survived += u32::from(line.survived);
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "guests={} stopped={} survived={}", self.guests, self.stopped, self.survived)
    }
}

impl Line {
    /// Whether all is as the table says.
    // The tests print only errors.
    #[allow(dead_code)]
    pub fn is_right(&self) -> bool {
        self.stopped && self.survived
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ms, mib) = (self.took.as_millis(), self.memory_kib as f64 / 1024.0);
        write!(f, "{:<23} {:<10} {ms:>6} ms {mib:>5.1} MiB  {}", self.name, self.stopped_at, self.error)?;
        self.wrong.iter().try_for_each(|wrong| write!(f, "\n    WRONG: {wrong}"))
    }
}

/// Runs the whole table.
///
/// # Errors
/// If the daemon does not start, or ends.
pub async fn run(attack: &Attack, mut each: impl FnMut(&Line)) -> anyhow::Result<Tally> {
    let mut siege = Siege { node: Node::start(&attack.berth).await?, before_kib: 0, attack };
    // Whatever is made once only is there before anything is measured.
    siege.warm().await?;
    siege.before_kib = siege.node.memory_kib()?;
    let mut tally = Tally::default();
    for case in CASES {
        let line = siege.meet(case).await.with_context(|| case.name.to_owned())?;
        tally.add(&line);
        each(&line);
    }
    let line = siege.uploads().await.context("many uploads")?;
    tally.add(&line);
    each(&line);
    Ok(tally)
}

struct Siege<'a> {
    node: Node,
    before_kib: u64,
    attack: &'a Attack,
}

/// The result of one guest: where it was stopped, with which message, and after what time.
struct Found {
    at: &'static str,
    error: String,
    took: Duration,
}

impl Siege<'_> {
    async fn warm(&mut self) -> anyhow::Result<()> {
        for n in 0..4 {
            let taken = self.node.upload(&guests::numbered(n))?;
            ensure!(taken.status == 201, "a harmless policy was not taken: {}", taken.body);
            self.forget(&taken.body).await?;
        }
        self.next_works().await
    }

    async fn meet(&mut self, case: &Case) -> anyhow::Result<Line> {
        let bytes = (case.bytes)(case.name);
        let found = match case.meets {
            Meets::Upload => self.refused(&bytes)?,
            _ => self.active(case, &bytes).await?,
        };
        let most = match case.meets {
            Meets::Upload if case.bomb => BOMB,
            Meets::Upload => UPLOAD,
            _ => HOOK,
        };
        let mut wrong = Vec::new();
        let expected = case.errors.contains(&found.error.as_str())
            || case.meets == Meets::Harmless && found.error.is_empty();
        if !expected {
            wrong.push(format!("expected {:?}", case.errors));
        }
        if found.took > most * self.attack.patience {
            wrong.push(format!("it was to be stopped within {most:?}"));
        }
        let stopped = wrong.is_empty();
        self.line(case.name.to_owned(), found, wrong, stopped, GROWTH_KIB_MAX).await
    }

    /// Checks the daemon after a guest.
    async fn line(
        &mut self,
        name: String,
        found: Found,
        mut wrong: Vec<String>,
        stopped: bool,
        growth_kib_max: u64,
    ) -> anyhow::Result<Line> {
        let before = wrong.len();
        if let Err(error) = self.next_works().await {
            wrong.push(format!("the next pod is not served: {error:#}"));
        }
        let memory_kib = self.node.memory_kib()?;
        if memory_kib > self.before_kib + growth_kib_max {
            let more = memory_kib - self.before_kib;
            wrong.push(format!("the daemon is {more} KiB larger than before; at most {growth_kib_max}"));
        }
        let Found { at, error, took } = found;
        let survived = wrong.len() == before;
        Ok(Line { name, stopped_at: at, error, took, memory_kib, wrong, stopped, survived })
    }

    /// An upload that must be refused.
    fn refused(&self, bytes: &[u8]) -> anyhow::Result<Found> {
        let began = Instant::now();
        let answered = self.node.upload(bytes)?;
        let took = began.elapsed();
        ensure!(answered.status == 422, "the upload was answered {}: {}", answered.status, answered.body);
        let detail = detail(&answered.body);
        let error = detail.strip_prefix("this is not a policy of the world berth:policy@0.1.0: ");
        Ok(Found { at: "upload", error: error.unwrap_or(&detail).to_owned(), took })
    }

    /// A guest that is accepted, and fails when it is called.
    async fn active(&mut self, case: &Case, bytes: &[u8]) -> anyhow::Result<Found> {
        let taken = self.node.upload(bytes)?;
        ensure!(taken.status == 201, "the upload was answered {}: {}", taken.status, taken.body);
        let name = taken.body["name"].as_str().context("its name")?.to_owned();
        let digest = taken.body["digest"].as_str().context("its digest")?.to_owned();
        let began = Instant::now();
        let activated = self.node.activate(&name, Some(&digest))?;
        let found = if case.meets == Meets::Activation {
            ensure!(activated.status != 200, "its stack was activated");
            let detail = detail(&activated.body);
            let error = detail.split_once("so the stack was not activated: ").map(|(_, error)| error);
            let error = error.unwrap_or(&detail).to_owned();
            Found { at: "activation", error, took: began.elapsed() }
        } else {
            ensure!(activated.status == 200, "its stack was not activated: {}", activated.body);
            self.hook(case.meets).await?
        };
        self.forget(&taken.body).await?;
        Ok(found)
    }

    /// A pod while a guest's stack is active.
    async fn hook(&mut self, meets: Meets) -> anyhow::Result<Found> {
        let earlier = if meets == Meets::PlaceTwice { Some(self.node.admit().await?) } else { None };
        let began = Instant::now();
        // Its fault costs the pod nothing: `onFault: skip`.
        let uid = self.node.admit().await.context("the pod is refused for a policy's fault")?;
        let took = began.elapsed();
        self.node.kubelet.delete(&uid);
        earlier.iter().for_each(|uid| self.node.kubelet.delete(uid));
        let stack = self.node.get("/stack")?.body;
        let record = &stack["entries"][0]["record"];
        let error = record["faults"]["last"].as_str().unwrap_or_default().to_owned();
        let at = match meets {
            Meets::Harmless => "nowhere",
            Meets::Admit => "admit",
            _ => "place",
        };
        Ok(Found { at, error, took })
    }

    /// What every node needs: its stack is activated, and a pod gets a GPU by it.
    async fn next_works(&mut self) -> anyhow::Result<()> {
        let activated = self.node.activate("exclusive", None)?;
        ensure!(activated.status == 200, "`exclusive` is not activated: {}", activated.body);
        let uid = self.node.admit().await?;
        self.node.kubelet.delete(&uid);
        let stack = self.node.get("/stack")?.body;
        let entry = &stack["entries"][0];
        ensure!(entry["record"]["faults"]["last"].is_null(), "`exclusive` fails: {entry}");
        ensure!(entry["version"] != "99.0.0", "the guest's `exclusive` took the place of the shipped one");
        Ok(())
    }

    /// Deletes a version that no stack names any more.
    async fn forget(&mut self, policy: &Value) -> anyhow::Result<()> {
        self.next_works().await?;
        let digest = policy["digest"].as_str().context("its digest")?;
        let deleted = self.node.delete(&format!("/policies/{digest}"))?;
        ensure!(deleted.status < 300, "it was not deleted: {}", deleted.body);
        Ok(())
    }

    /// So many versions in a row, of which the node keeps what it may and refuses the rest.
    async fn uploads(&mut self) -> anyhow::Result<Line> {
        let began = Instant::now();
        let (mut taken, mut refused, mut last) = (0_u32, 0_u32, String::new());
        let mut digests = Vec::new();
        for n in 0..self.attack.uploads {
            let answered = self.node.upload(&guests::numbered(1_000 + n))?;
            match answered.status {
                201 => {
                    taken += 1;
                    digests.push(answered.body);
                }
                409 => {
                    refused += 1;
                    last = detail(&answered.body);
                }
                other => bail!("upload {n} was answered {other}: {}", answered.body),
            }
        }
        let mut wrong = Vec::new();
        let shipped = shipped(&self.node.get("/policies")?.body);
        let kept = taken as usize + shipped;
        if refused > 0
            && (kept != 256 || last != "the node has 256 policy versions, the maximum: delete one first")
        {
            wrong.push(format!("{kept} versions are kept, and then: {last}"));
        }
        let files = self.node.files()?;
        if files > FILES_MAX {
            wrong.push(format!("{files} files of policies; at most {FILES_MAX}"));
        }
        let stopped = wrong.is_empty() && (refused > 0 || self.attack.uploads <= 200);
        let error = format!("{taken} taken, {refused} refused, {files} files; {last}");
        let found = Found { at: "upload", error, took: began.elapsed() };
        let name = format!("{}-uploads", self.attack.uploads);
        let line = self.line(name, found, wrong, stopped, UPLOADS_GROWTH_KIB_MAX).await?;
        for policy in &digests {
            let digest = policy["digest"].as_str().context("its digest")?;
            let deleted = self.node.delete(&format!("/policies/{digest}"))?;
            ensure!(deleted.status < 300, "{digest} was not deleted: {}", deleted.body);
        }
        Ok(line)
    }
}

fn shipped(list: &Value) -> usize {
    let items = list["items"].as_array().map(Vec::as_slice).unwrap_or_default();
    items.iter().filter(|policy| policy["shipped"] == true).count()
}

fn detail(problem: &Value) -> String {
    problem["detail"].as_str().unwrap_or_default().to_owned()
}
