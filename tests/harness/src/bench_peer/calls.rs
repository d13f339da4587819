//! The calls that the kubelet waits for: Allocate and GetPreferredAllocation, one after another through one client.
//!
//! As on a node, an Allocate finds a program at rest: after each one the program is left alone for a moment, its
//! processor time is read, so that what it does after its answer counts, and the pod ends.

use crate::bench::disk::Bare;
use crate::bench::measure::{Series, turns};
use crate::bench_peer::figures::{Figures, Row};
use crate::bench_peer::node::{Bench, Serving, Site};
use crate::bench_peer::subject::{Setup, Subject};
use anyhow::{Context as _, Result};
use std::time::Duration;

/// Allocates of one device in a row of the table.
const SAMPLES: usize = 120;
/// Allocates of all GPUs.
const WHOLE_NODE: usize = 60;
/// Calls of GetPreferredAllocation of each size.
const PREFERS: usize = 100;
/// After an Allocate and after its pod's end, until the program is at rest.
const SETTLE: Duration = Duration::from_millis(20);
/// After so many pods started, until their holders are known: Berth reads them every two seconds.
const HOLDERS: Duration = Duration::from_secs(6);

/// Where the store is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Memory,
    Disk,
}

/// Medians of one subject in one round.
struct Allocates {
    time: Duration,
    /// Of a call.
    processor: Duration,
}

/// Allocates of `size` devices each, of `free` in turn.
fn allocates(
    bench: &Bench,
    serving: &mut Serving<'_, '_>,
    free: &[String],
    size: usize,
    mut after_call: impl FnMut() -> Result<()>,
) -> Result<Allocates> {
    let samples = bench.effort.samples(if size == 1 { SAMPLES } else { WHOLE_NODE });
    let held = serving.pods();
    let (mut series, mut processor) = (Series::default(), Duration::ZERO);
    for ids in free.chunks_exact(size).cycle().take(samples) {
        let before = serving.processor_time()?;
        series.push(serving.allocate(ids)?);
        std::thread::sleep(SETTLE);
        processor += serving.processor_time()? - before;
        after_call()?;
        serving.end_pods(held)?;
        std::thread::sleep(SETTLE);
    }
    serving.check_allocations()?;
    Ok(Allocates { time: series.median(), processor: processor / u32::try_from(samples)? })
}

/// Whole GPUs, the store in memory and on the disk.
pub(crate) fn whole(bench: &Bench, round: usize, figures: &mut Figures) -> Result<()> {
    let sessions =
        [(Subject::Nvidia, Place::Memory), (Subject::Berth, Place::Memory), (Subject::Berth, Place::Disk)];
    let mut measured = [None, None, None];
    let mut bare = Series::default();
    for at in turns(round, sessions.len()) {
        let (subject, place) = sessions[at];
        let bare = (place == Place::Disk).then_some(&mut bare);
        measured[at] =
            Some(session(bench, subject, place, bare, figures).with_context(|| subject.to_string())?);
    }
    let [Some(theirs), Some(_), Some(durable)] = measured else { return Ok(()) };
    let bare = bare.median();
    figures.add(Row::Bare, Subject::Berth, bare.as_secs_f64());
    for (row, theirs, durable) in
        [(Row::Durable1, &theirs[0], &durable[0]), (Row::Durable8, &theirs[1], &durable[1])]
    {
        figures.add(row, Subject::Nvidia, (theirs.time + bare).as_secs_f64());
        figures.add(row, Subject::Berth, durable.time.as_secs_f64());
    }
    figures.add(Row::ProcessorDurable, Subject::Berth, durable[0].processor.as_secs_f64());
    Ok(())
}

/// Allocates of one GPU, and of all. What does not concern the disk is added to the figures here.
fn session(
    bench: &Bench,
    subject: Subject,
    place: Place,
    mut appends: Option<&mut Series>,
    figures: &mut Figures,
) -> Result<[Allocates; 2]> {
    let site = Site::new(bench)?;
    let folder = if place == Place::Disk { bench.on_disk()? } else { bench.in_memory()? };
    let mut bare = Bare::new(folder.path(), bench.bytes)?;
    let (mut serving, _) = site.serve(subject, Setup::Whole, &folder.path().join("state"))?;
    bench.rest(Duration::from_secs(2));
    let ids = serving.ids();
    let mut append = || {
        if let Some(series) = &mut appends {
            series.push(bare.append()?);
        }
        Ok(())
    };
    let one = allocates(bench, &mut serving, &ids, 1, &mut append)?;
    let all = allocates(bench, &mut serving, &ids, ids.len(), append)?;
    if place == Place::Memory {
        figures.add(Row::Allocate1, subject, one.time.as_secs_f64());
        figures.add(Row::Allocate8, subject, all.time.as_secs_f64());
        figures.add(Row::Processor, subject, one.processor.as_secs_f64());
        for (row, size) in [(Row::Preferred1, 1), (Row::Preferred4, 4), (Row::Preferred8, 8)] {
            let mut series = Series::default();
            for _ in 0..bench.effort.samples(PREFERS) {
                series.push(serving.prefer(&ids, size)?);
            }
            figures.add(row, subject, series.median().as_secs_f64());
        }
    }
    serving.stop()?;
    Ok([one, all])
}

/// Shares, with none, 80 and 1,000 of them held by pods; the store in memory.
pub(crate) fn live(bench: &Bench, round: usize, figures: &mut Figures) -> Result<()> {
    for at in turns(round, Subject::BOTH.len()) {
        let subject = Subject::BOTH[at];
        let site = Site::new(bench)?;
        let folder = bench.in_memory()?;
        let (mut serving, _) = site.serve(subject, Setup::Shares, &folder.path().join("state"))?;
        let ids = serving.ids();
        let mut times = Vec::new();
        for (live, time, processor) in [
            (0, Row::Live0, Some(Row::ProcessorLive0)),
            (80, Row::Live80, None),
            (1_000, Row::Live1000, Some(Row::ProcessorLive1000)),
        ] {
            for id in &ids[serving.pods()..live] {
                serving.allocate(std::slice::from_ref(id))?;
            }
            bench.rest(HOLDERS);
            let measured = allocates(bench, &mut serving, &ids[live..], 1, || Ok(()))
                .with_context(|| format!("{subject}, {live} live"))?;
            figures.add(time, subject, measured.time.as_secs_f64());
            if let Some(row) = processor {
                figures.add(row, subject, measured.processor.as_secs_f64());
            }
            times.push(measured.time.as_secs_f64());
        }
        if let [none, _, most] = times[..] {
            figures.add(Row::LiveGrowth, subject, most / none);
        }
        serving.stop()?;
    }
    Ok(())
}
