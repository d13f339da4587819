//! Simulates power cuts of a real store at sampled points of its writes, and checks what is left.
//!
//! A history: a [`SledStore`] takes random appends in a folder that [`recorder`] watches; then, step by
//! step through what was recorded, a power cut at sampled points ([`disk`] says what it may leave),
//! and the store is opened on what is left. It must hold exactly what it held after the last append
//! that was acknowledged, or, if one was under way, after that one. Some of what is left is where
//! the next history begins: so a cut while a store is being made good again is met, too.
//!
//! Counted as `lost`: an acknowledged append is missing, or the store does not open. `double`: half of an
//! append is there. `mismatch`: anything else that it should not hold.

mod disk;
mod history;
mod recorder;

use anyhow::Context;
use berth_kernel::node::ports::{Store, StoreError};
use berth_kernel::node::record::{Record, RecordKey};
use berth_store::SledStore;
use disk::{Disk, Loss};
use harness::kill::{Rng, Tally, Wrong};
use history::{History, State};
use recorder::Op;
use std::path::Path;

/// Power cuts of one history.
const CUTS: u64 = 250;
/// Every so often a store that was opened after a cut must take another append.
const GOES_ON_PERCENT: u64 = 10;
/// How often the next history begins where a cut left this one.
const CONTINUES_PERCENT: u64 = 60;

/// Runs so many power cuts. `progress` is called after each.
pub(crate) fn run(rounds: u64, seed: u64, progress: impl Fn(&Tally)) -> anyhow::Result<Tally> {
    let mut rng = Rng::new(seed);
    let mut tally = Tally::default();
    // In memory where there is such a folder: what is durable is the model's business.
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let folder = tempfile::Builder::new().prefix("berth-power-").tempdir_in(parent)?;
    let mut begin = None;
    while tally.rounds < rounds {
        let history =
            History::record(folder.path(), begin.take(), &mut rng).context("recording a history")?;
        let cuts = CUTS.min(rounds - tally.rounds);
        begin = cut_power(&history, folder.path(), cuts, &mut rng, &mut tally, &progress)?;
    }
    Ok(tally)
}

/// Cuts at so many points of one history. Gives a disk to begin the next one with.
fn cut_power(
    history: &History,
    folder: &Path,
    cuts: u64,
    rng: &mut Rng,
    tally: &mut Tally,
    progress: &impl Fn(&Tally),
) -> anyhow::Result<Option<(Disk, Vec<State>)>> {
    let steps = history.ops.len() as u64;
    let mut points: Vec<u64> = (0..cuts).map(|_| rng.below(steps + 1)).collect();
    points.sort_unstable();
    let (mut disk, mut acknowledged, mut done) = (history.begin.clone(), None, 0);
    let mut next = None;
    for point in points {
        for op in &history.ops[done..usize::try_from(point)?] {
            disk.apply(op);
            if let Op::Acknowledged(appends) = op {
                acknowledged = Some(*appends);
            }
        }
        done = usize::try_from(point)?;
        let loss =
            *rng.pick(&[Loss::Any, Loss::Any, Loss::Any, Loss::Latest, Loss::Everything, Loss::Nothing]);
        let left = disk.cut(loss, rng);
        let goes_on = rng.chance(GOES_ON_PERCENT);
        match look(&left, folder, history, acknowledged, goes_on)? {
            Ok(held) if rng.chance(CONTINUES_PERCENT) => {
                let may_hold = match loss {
                    Loss::Nothing => history.after_kill(held, acknowledged),
                    _ => vec![held],
                };
                next = Some((left, may_hold));
            }
            Ok(_) => {}
            Err(wrong) => {
                eprintln!("cut {} after step {point} of {steps}, {loss:?}: {wrong}", tally.rounds + 1);
                tally.count(&wrong);
            }
        }
        tally.rounds += 1;
        progress(tally);
    }
    Ok(next)
}

/// Opens the store on what a cut left.
fn look(
    left: &Disk,
    folder: &Path,
    history: &History,
    acknowledged: Option<usize>,
    goes_on: bool,
) -> anyhow::Result<Result<State, Wrong>> {
    let image = folder.join("image");
    std::fs::create_dir(&image)?;
    left.write(&image)?;
    let held = held(&image, goes_on);
    std::fs::remove_dir_all(&image)?;
    Ok(match held {
        Err(error) => Err(Wrong::Lost(format!("{acknowledged:?} appends were acknowledged: {error}"))),
        Ok(held) => history.judge(&held, acknowledged).map(|()| held),
    })
}

fn held(image: &Path, goes_on: bool) -> Result<State, StoreError> {
    let path = image.join("store");
    let mut store = SledStore::open(&path)?;
    let held = state(store.load()?);
    drop(store);
    // sled changes its log when it opens it, so the store is opened a second time.
    let mut store = SledStore::open(&path)?;
    if state(store.load()?) != held {
        let what = "it holds something else when it is opened again".into();
        return Err(StoreError::Damaged { path: path.display().to_string(), what });
    }
    if goes_on {
        let append = history::cordon(0, "after the cut");
        store.append(std::slice::from_ref(&append))?;
        drop(store);
        let mut wanted = held.clone();
        history::take(&mut wanted, &[append]);
        if state(SledStore::open(&path)?.load()?) != wanted {
            return Err(StoreError::Damaged {
                path: path.display().to_string(),
                what: "an append after the cut is not there".into(),
            });
        }
    }
    Ok(held)
}

fn state(records: Vec<Record>) -> State {
    records.into_iter().map(|r: Record| -> (RecordKey, Record) { (r.key(), r) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_power_cut_loses_what_was_acknowledged() {
        let tally = run(120, 3, |_| {}).unwrap();
        assert_eq!(tally, Tally { rounds: 120, ..Tally::default() });
    }
}
