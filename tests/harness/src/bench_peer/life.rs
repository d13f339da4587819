//! How long a program takes to start and to end, and what it takes of the machine meanwhile.

use crate::bench::history;
use crate::bench::measure::{Effort, Series, turns};
use crate::bench_peer::figures::{Figures, Row};
use crate::bench_peer::node::{Bench, Serving, Site};
use crate::bench_peer::subject::{Setup, Subject};
use anyhow::{Context as _, Result};
use std::time::{Duration, Instant};

/// Starts of each kind in a round.
const STARTS: usize = 8;
/// From the registration to SIGTERM: what a start leaves for later is done.
const UP: Duration = Duration::from_secs(1);
/// Until a program that was just started or used is at rest.
const SETTLE: Duration = Duration::from_secs(10);
/// How long a program at rest is watched.
const WATCH: Duration = Duration::from_secs(20);
/// Allocates of pods that come and go.
const LOAD: usize = 5_000;
const LOAD_GLANCE: usize = 80;

/// Starts and ends of both programs, in turn; Berth's state is on the disk.
pub(crate) fn starts(bench: &Bench, round: usize, figures: &mut Figures) -> Result<()> {
    let site = Site::new(bench)?;
    let kept = bench.on_disk()?;
    // What its state folder holds afterwards is what a restart finds.
    site.serve(Subject::Berth, Setup::Whole, &kept.path().join("state"))?.0.stop()?;
    let [mut theirs, mut again, mut fresh] = <[Series; 3]>::default();
    let [mut their_exit, mut our_exit] = <[Series; 2]>::default();
    for sample in 0..bench.effort.samples(STARTS) {
        for start in turns(round + sample, 3) {
            let new = bench.on_disk()?;
            let (subject, state, starts, exits) = match start {
                0 => (Subject::Nvidia, &kept, &mut theirs, &mut their_exit),
                1 => (Subject::Berth, &kept, &mut again, &mut our_exit),
                _ => (Subject::Berth, &new, &mut fresh, &mut our_exit),
            };
            let (serving, took) = site.serve(subject, Setup::Whole, &state.path().join("state"))?;
            starts.push(took);
            bench.rest(UP);
            exits.push(serving.stop()?);
        }
    }
    for (row, subject, series) in [
        (Row::StartKept, Subject::Nvidia, &theirs),
        (Row::StartKept, Subject::Berth, &again),
        (Row::StartFresh, Subject::Nvidia, &theirs),
        (Row::StartFresh, Subject::Berth, &fresh),
        (Row::Exit, Subject::Nvidia, &their_exit),
        (Row::Exit, Subject::Berth, &our_exit),
    ] {
        figures.add(row, subject, series.median().as_secs_f64());
    }
    Ok(())
}

/// Memory, threads, wake-ups and processor time of a program that is not called, without and with pods; Berth's state
/// is on the disk.
pub(crate) fn rest(bench: &Bench, round: usize, figures: &mut Figures) -> Result<()> {
    for at in turns(round, Subject::BOTH.len()) {
        let subject = Subject::BOTH[at];
        let site = Site::new(bench)?;
        let folder = bench.on_disk()?;
        let (mut serving, _) = site.serve(subject, Setup::Whole, &folder.path().join("state"))?;
        bench.rest(SETTLE);
        let memory = serving.memory()?;
        figures.add(Row::Share, subject, bytes(memory.share));
        figures.add(Row::Resident, subject, bytes(memory.resident));
        figures.add(Row::Threads, subject, serving.threads()?.count() as f64);
        watch(bench, &serving, [Row::Wakeups, Row::ProcessorAtRest], subject, figures)?;
        for id in serving.ids() {
            serving.allocate(&[id])?;
        }
        bench.rest(SETTLE);
        watch(bench, &serving, [Row::WakeupsWithPods, Row::ProcessorWithPods], subject, figures)?;
        serving.end_pods(0)?;
        serving.stop()?;
    }
    Ok(())
}

/// What it does while it is not called: wake-ups of all its threads, and processor time.
fn watch(
    bench: &Bench,
    serving: &Serving<'_, '_>,
    [wakeups, processor]: [Row; 2],
    subject: Subject,
    figures: &mut Figures,
) -> Result<()> {
    let (threads, time_before, began) = (serving.threads()?, serving.processor_time()?, Instant::now());
    bench.rest(WATCH);
    let (time_used, seconds) = (serving.processor_time()? - time_before, began.elapsed().as_secs_f64());
    figures.add(wakeups, subject, serving.threads()?.wakeups_since(&threads) as f64 / seconds);
    figures.add(processor, subject, time_used.as_secs_f64() / seconds);
    Ok(())
}

/// Resident memory before and after pods that come and go; Berth's state is on the disk.
pub(crate) fn load(bench: &Bench, round: usize, figures: &mut Figures) -> Result<()> {
    for at in turns(round, Subject::BOTH.len()) {
        let subject = Subject::BOTH[at];
        let site = Site::new(bench)?;
        let folder = bench.on_disk()?;
        let (mut serving, _) = site.serve(subject, Setup::Whole, &folder.path().join("state"))?;
        let ids = serving.ids();
        // Code and buffers of the first calls are not growth, nor is code that was needed for the start alone.
        bench.rest(SETTLE);
        pods(&mut serving, &ids, ids.len())?;
        bench.rest(SETTLE);
        let before = serving.memory()?.resident;
        let allocates = if bench.effort == Effort::Glance { LOAD_GLANCE } else { LOAD };
        pods(&mut serving, &ids, allocates).with_context(|| format!("{subject} under load"))?;
        bench.rest(SETTLE);
        let after = serving.memory()?.resident;
        figures.add(Row::ResidentAfterLoad, subject, bytes(after));
        figures.add(Row::GrowthByLoad, subject, bytes(after) - bytes(before));
        serving.check_allocations()?;
        serving.stop()?;
    }
    Ok(())
}

/// Pods with a GPU each, which end once all GPUs are held.
fn pods(serving: &mut Serving<'_, '_>, ids: &[String], allocates: usize) -> Result<()> {
    for _ in 0..allocates.div_ceil(ids.len()) {
        for id in ids {
            serving.allocate(std::slice::from_ref(id))?;
        }
        serving.end_pods(0)?;
    }
    Ok(())
}

/// Berth's memory at rest with the longest history that can be configured; NVIDIA's plugin has none.
pub(crate) fn history(bench: &Bench, figures: &mut Figures) -> Result<()> {
    let site = Site::new(bench)?;
    let folder = bench.on_disk()?;
    let state = folder.path().join("state");
    site.serve(Subject::Berth, Setup::History, &state)?.0.stop()?;
    history::fill(&state.join("store"))?;
    let (serving, _) = site.serve(Subject::Berth, Setup::History, &state)?;
    bench.rest(SETTLE);
    figures.add(Row::ShareWithHistory, Subject::Berth, bytes(serving.memory()?.share));
    serving.stop()?;
    Ok(())
}

/// Exact up to 2^53 bytes.
fn bytes(count: u64) -> f64 {
    count as f64
}
