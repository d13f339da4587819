//! The calls that the kubelet waits for: Allocate and GetPreferredAllocation, one after another through one client.
//!
//! As on a node, an Allocate finds a program at rest: after each one the program is left alone for a moment, its
//! processor time is read, so that what it does after its answer counts, and the pod ends.

use crate::bench::disk::Bare;
use crate::bench::measure::{Series, turns};
use crate::bench_peer::figures::{Figures, Row};
use crate::bench_peer::floor::{Append, NothingCall};
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

/// Allocates of `size` devices each by all of these programs in turn, of their free devices in turn.
fn allocates<const N: usize>(
    bench: &Bench,
    mut programs: [(&mut Serving<'_, '_>, &[String]); N],
    size: usize,
    mut after_turn: impl FnMut() -> Result<()>,
) -> Result<[Allocates; N]> {
    let samples = bench.effort.samples(if size == 1 { SAMPLES } else { WHOLE_NODE });
    let mut sums = [(); N].map(|()| (Series::default(), Duration::ZERO));
    for sample in 0..samples {
        for ((serving, free), (series, processor)) in programs.iter_mut().zip(&mut sums) {
            let held = serving.pods();
            let at = sample * size % (free.len() / size * size);
            let before = serving.processor_time()?;
            series.push(serving.allocate(&free[at..at + size])?);
            std::thread::sleep(SETTLE);
            *processor += serving.processor_time()? - before;
            serving.end_pods(held)?;
            std::thread::sleep(SETTLE);
        }
        after_turn()?;
    }
    for (serving, _) in &mut programs {
        serving.check_allocations()?;
    }
    let samples = u32::try_from(samples)?;
    Ok(sums.map(|(series, processor)| Allocates { time: series.median(), processor: processor / samples }))
}

/// Whole GPUs, the store in memory and on the disk.
pub(crate) fn whole(bench: &Bench, round: usize, figures: &mut Figures) -> Result<()> {
    for at in turns(round, 2) {
        let place = [Place::Memory, Place::Disk][at];
        session(bench, round, place, figures).with_context(|| format!("store {place:?}"))?;
    }
    Ok(())
}

/// Allocates of one GPU, with the lower bounds of an Allocate, and of all GPUs, by both programs in turn: the machine
/// is as fast for the one as for the other.
fn session(bench: &Bench, round: usize, place: Place, figures: &mut Figures) -> Result<()> {
    let site = Site::new(bench)?;
    let folder = if place == Place::Disk { bench.on_disk()? } else { bench.in_memory()? };
    let state = folder.path().join("state");
    let [first, second] =
        if round.is_multiple_of(2) { Subject::BOTH } else { [Subject::Berth, Subject::Nvidia] };
    let (mut first, _) = site.serve(first, Setup::SideBySide, &state)?;
    let (mut second, _) = site.serve(second, Setup::SideBySide, &state)?;
    bench.rest(Duration::from_secs(2));
    let (mut bare, mut appends) = (Bare::new(folder.path(), bench.bytes)?, Series::default());
    let mut nothing = NothingCall::new(folder.path())?;
    let mut store = Append::new(&folder.path().join("store"))?;
    let mut lower_bounds = || {
        appends.push(bare.append()?);
        std::thread::sleep(SETTLE);
        nothing.sample(SETTLE)?;
        store.sample(SETTLE)
    };
    let ids = [first.ids(), second.ids()];
    let one = allocates(bench, [(&mut first, &ids[0]), (&mut second, &ids[1])], 1, &mut lower_bounds)?;
    let all = allocates(bench, [(&mut first, &ids[0]), (&mut second, &ids[1])], ids[0].len(), || Ok(()))?;
    let bare = appends.median();
    match place {
        Place::Memory => {
            figures.add(Row::NothingCall, Subject::Berth, nothing.samples.time());
            figures.add(Row::NothingCallProcessor, Subject::Berth, nothing.samples.processor());
            figures.add(Row::StoreAppend, Subject::Berth, store.samples.time());
            figures.add(Row::AppendProcessor, Subject::Berth, store.samples.processor());
        }
        Place::Disk => {
            figures.add(Row::Bare, Subject::Berth, bare.as_secs_f64());
            figures.add(Row::StoreAppendDurable, Subject::Berth, store.samples.time());
        }
    }
    for ((serving, ids), (one, all)) in
        [&mut first, &mut second].into_iter().zip(&ids).zip(one.iter().zip(&all))
    {
        let subject = serving.subject();
        match place {
            Place::Memory => {
                figures.add(Row::Allocate1, subject, one.time.as_secs_f64());
                figures.add(Row::Allocate8, subject, all.time.as_secs_f64());
                figures.add(Row::Processor, subject, one.processor.as_secs_f64());
                for (row, size) in [(Row::Preferred1, 1), (Row::Preferred4, 4), (Row::Preferred8, 8)] {
                    let mut series = Series::default();
                    for _ in 0..bench.effort.samples(PREFERS) {
                        series.push(serving.prefer(ids, size)?);
                    }
                    figures.add(row, subject, series.median().as_secs_f64());
                }
            }
            Place::Disk => {
                let written = if subject == Subject::Nvidia { bare } else { Duration::ZERO };
                figures.add(Row::Durable1, subject, (one.time + written).as_secs_f64());
                figures.add(Row::Durable8, subject, (all.time + written).as_secs_f64());
                if subject == Subject::Berth {
                    figures.add(Row::ProcessorDurable, subject, one.processor.as_secs_f64());
                }
            }
        }
    }
    second.stop()?;
    first.stop()?;
    Ok(())
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
            let [measured] = allocates(bench, [(&mut serving, &ids[live..])], 1, || Ok(()))
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
