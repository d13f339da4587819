//! One store and what it was given.

use super::disk::Disk;
use super::recorder::{self, Op};
use super::state;
use anyhow::Context;
use berth_kernel::drain::marks::Mark;
use berth_kernel::ids::names::GpuId;
use berth_kernel::node::ports::Store;
use berth_kernel::node::record::{Record, RecordKey, Write};
use berth_store::SledStore;
use harness::kill::{Rng, Wrong};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// What a store holds.
pub(crate) type State = BTreeMap<RecordKey, Record>;

/// Records come and go under so many names.
const NAMES: u64 = 48;
/// Appends of one history, at most.
const APPENDS_MAX: u64 = 90;
/// The longest text in a history of long ones: several 2 MiB segments of log, at 16 KiB a record at most.
const LONG: u64 = 12_000;
/// And in one of short ones, the usual size of an allocation's record.
const SHORT: u64 = 400;
/// The copy that the store opens first: its creation is not recorded, and its remains are not read.
const COPY: &str = "data.check";

/// One store and what it was given.
pub(crate) struct History {
    /// The disk before the first step.
    pub(crate) begin: Disk,
    /// Every step.
    pub(crate) ops: Vec<Op>,
    /// What it may hold when it is opened; empty if it need not exist.
    before: Vec<State>,
    /// What it holds after each append; first, after it was opened.
    states: Vec<State>,
}

impl History {
    /// Makes one, in `folder/live`, on an empty disk or what a cut left.
    pub(crate) fn record(
        folder: &Path,
        begin: Option<(Disk, Vec<State>)>,
        rng: &mut Rng,
    ) -> anyhow::Result<Self> {
        let (begin, before) = begin.unwrap_or_else(|| (Disk::new(), Vec::new()));
        let live = folder.join("live");
        fs::create_dir(&live)?;
        let known = begin.write(&live)?;
        recorder::start(&live, &known);
        let gone = given(&live.join("store"), rng);
        let ops = recorder::stop();
        let states = gone.context("the store failed on a good disk")?;
        let history = Self { begin, ops, before, states };
        history.prove(&live)?;
        fs::remove_dir_all(&live)?;
        Ok(history)
    }

    /// What was noted gives what is there, so nothing slipped past the recorder.
    fn prove(&self, live: &Path) -> anyhow::Result<()> {
        let mut disk = self.begin.clone();
        self.ops.iter().for_each(|op| disk.apply(op));
        let noted = disk.seen();
        let mut there = BTreeMap::new();
        read(live, Path::new(""), &mut there)?;
        for path in noted.keys().chain(there.keys()) {
            let (noted, there) = (noted.get(path), there.get(path));
            anyhow::ensure!(
                noted == there,
                "the recorder missed something: {} is {:?} bytes by the notes and {:?} on the disk",
                path.display(),
                noted.map(|n| n.as_ref().map(Vec::len)),
                there.map(|t| t.as_ref().map(Vec::len)),
            );
        }
        Ok(())
    }

    /// What a store that held this after the process was killed may hold after a later power cut: an append that was
    /// not acknowledged may be lost until the store has been opened again.
    pub(crate) fn after_kill(&self, held: State, acknowledged: Option<usize>) -> Vec<State> {
        acknowledged.map_or_else(|| self.before.clone(), |n| vec![self.states[n].clone(), held])
    }

    /// Whether a store may hold this after a cut, when so many appends were acknowledged; `None`
    /// before it was open for the first time.
    pub(crate) fn judge(&self, held: &State, acknowledged: Option<usize>) -> Result<(), Wrong> {
        let Some(acknowledged) = acknowledged else {
            return match self.before.as_slice() {
                // Its id is drawn at random each time that it is created.
                [] if held.len() == 1 => Ok(()),
                [] => Err(Wrong::Mismatch(format!("a new store holds {held:?}"))),
                before if before.contains(held) => Ok(()),
                _ => Err(Wrong::Lost("it holds nothing that it may hold before it is opened".into())),
            };
        };
        let (now, next) = (&self.states[acknowledged], self.states.get(acknowledged + 1));
        if held == now || Some(held) == next {
            return Ok(());
        }
        if let Some(older) = self.states[..acknowledged].iter().rposition(|s| s == held) {
            return Err(Wrong::Lost(format!(
                "{acknowledged} appends were acknowledged, and it holds {older}"
            )));
        }
        let of_both = |key: &RecordKey| {
            held.get(key) == now.get(key) || next.is_some_and(|n| held.get(key) == n.get(key))
        };
        let keys = || held.keys().chain(now.keys()).chain(next.into_iter().flat_map(BTreeMap::keys));
        if keys().all(of_both) {
            return Err(Wrong::Double(format!("half of append {}", acknowledged + 1)));
        }
        let other: Vec<_> = keys().filter(|key| !of_both(key)).collect();
        Err(Wrong::Mismatch(format!("after append {acknowledged}: {other:?}")))
    }
}

/// Opens a store and gives it appends, closing and opening it in between.
fn given(path: &Path, rng: &mut Rng) -> anyhow::Result<Vec<State>> {
    let mut store = SledStore::open(path)?;
    let mut now = state(store.load()?);
    let mut states = vec![now.clone()];
    recorder::acknowledged(0);
    let longest = if rng.chance(30) { LONG } else { SHORT };
    for append in 1..=1 + rng.below(APPENDS_MAX) {
        if rng.chance(4) {
            drop(store);
            store = SledStore::open(path)?;
            anyhow::ensure!(state(store.load()?) == now, "closed and opened, it holds something else");
        }
        let writes: Vec<Write> = (0..1 + rng.below(5)).map(|_| any_write(rng, longest, append)).collect();
        store.append(&writes)?;
        take(&mut now, &writes);
        states.push(now.clone());
        recorder::acknowledged(states.len() - 1);
    }
    Ok(states)
}

fn any_write(rng: &mut Rng, longest: u64, append: u64) -> Write {
    let name = rng.below(NAMES);
    if rng.chance(30) {
        return Write::Delete(cordoned(name, "").key());
    }
    let len = usize::try_from(rng.below(longest)).unwrap_or(0);
    let text: String =
        format!("{append}:").chars().chain("0123456789abcdef".chars().cycle().take(len)).collect();
    Write::Put(cordoned(name, &text))
}

/// A record that any text fits into.
pub(crate) fn cordon(name: u64, text: &str) -> Write {
    Write::Put(cordoned(name, text))
}

fn cordoned(name: u64, text: &str) -> Record {
    let gpu = GpuId::parse(&format!("GPU-{name}")).expect("a short name");
    Record::Marks(gpu, Mark::cordon("crash", text, name).into())
}

/// What writes make of a state. Where two name the same record, the later counts.
pub(crate) fn take(state: &mut State, writes: &[Write]) {
    for write in writes {
        match write {
            Write::Put(record) => state.insert(record.key(), record.clone()),
            Write::Delete(key) => state.remove(key),
        };
    }
}

fn read(root: &Path, below: &Path, found: &mut BTreeMap<PathBuf, Option<Vec<u8>>>) -> anyhow::Result<()> {
    for entry in fs::read_dir(root.join(below))? {
        let entry = entry?;
        let path = below.join(entry.file_name());
        anyhow::ensure!(!path.ends_with(COPY), "the store left its copy behind");
        if entry.file_type()?.is_dir() {
            found.insert(path.clone(), None);
            read(root, &path, found)?;
        } else {
            found.insert(path.clone(), Some(fs::read(root.join(&path))?));
        }
    }
    Ok(())
}
