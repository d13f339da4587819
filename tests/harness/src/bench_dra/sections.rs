//! What a round measures: the calls of both drivers beside Berth's device plugin, and the memory of each program alone.

use super::cluster::Cluster;
use super::driver::Driver;
use super::figures::{Figures, Row};
use super::node::{Bench, Program, Site};
use super::subject::{CLAIMS, Setup, Subject};
use crate::bench::measure::{Series, turns};
use anyhow::{Context as _, Result, ensure};
use berth_proto::dra::Claim;
use std::time::{Duration, Instant};

/// Calls of each kind in a round.
const SAMPLES: usize = 120;
/// Bursts of each driver in a round.
const BURSTS: usize = 3;
/// After a call, until the programs are at rest.
const SETTLE: Duration = Duration::from_millis(20);
/// The least time between two claims of one driver: the client of NVIDIA's driver sends five requests a second after a
/// burst of ten, so that claims which come faster wait for it.
const PACE: Duration = Duration::from_millis(250);
/// Before a burst, until that client may send ten requests at once.
const BEFORE_BURST: Duration = Duration::from_millis(2_500);
/// Until a program that was just started is at rest.
const AT_REST: Duration = Duration::from_secs(10);
/// Until its memory is read: Berth returns what only its start needed five seconds after the registration, and the pages of
/// the program that it needs come back one by one.
const MEMORY_AT_REST: Duration = Duration::from_secs(20);

/// A driver that runs, and claims to which each of its devices is allocated.
struct Serving {
    program: Program,
    driver: Driver,
    claims: Vec<Claim>,
    prepares: Series,
    unprepares: Series,
}

impl Serving {
    fn new(bench: &Bench, site: &Site<'_>, program: Program, round: usize) -> Result<Self> {
        let (driver, devices) = site.driver(&program)?;
        let claims = bench.runtime.block_on(claims(&bench.cluster, program.subject(), &devices, round))?;
        let (prepares, unprepares) = Default::default();
        Ok(Self { program, driver, claims, prepares, unprepares })
    }

    fn prepare(&mut self, bench: &Bench, sample: usize) -> Result<()> {
        let claim = &self.claims[sample % self.claims.len()];
        self.prepares.push(bench.runtime.block_on(self.driver.prepare(claim))?);
        bench.pause(SETTLE);
        let unprepared = self.driver.unprepare(std::slice::from_ref(claim));
        self.unprepares.push(bench.runtime.block_on(unprepared)?);
        Ok(())
    }
}

async fn claims(cluster: &Cluster, subject: Subject, devices: &[String], round: usize) -> Result<Vec<Claim>> {
    let mut claims = Vec::new();
    for (index, device) in devices.iter().take(CLAIMS).enumerate() {
        let name = format!("{subject}-{round}-{index}").to_lowercase();
        claims.push(cluster.claim(&name, subject.driver(), device).await?);
    }
    ensure!(claims.len() == CLAIMS, "{subject} has published {} devices", devices.len());
    Ok(claims)
}

/// Calls of the drivers and of Berth's device plugin, in turn; bursts; the slices after their deletion.
pub(crate) fn calls(bench: &Bench, round: usize, figures: &mut Figures) -> Result<()> {
    let site = Site::new(bench)?;
    let mut serving = Vec::new();
    for subject in bench.programs.subjects() {
        let program = match subject {
            Subject::Berth => site.berth(Setup::Driver)?,
            Subject::Nvidia => site.nvidia()?,
        };
        serving.push(Serving::new(bench, &site, program, round)?);
    }
    let mut plugin = site.plugin(&serving[0].program)?;
    bench.rest(AT_REST);
    let [mut allocates, mut gets] = <[Series; 2]>::default();
    for sample in 0..bench.effort.samples(SAMPLES) {
        let began = Instant::now();
        for turn in turns(sample, 2 + serving.len()) {
            match turn {
                0 => allocates.push(plugin.allocate()?),
                1 => {
                    let claim = &serving[0].claims[sample % CLAIMS];
                    gets.push(bench.runtime.block_on(bench.cluster.read(claim))?);
                }
                other => {
                    let one = &mut serving[other - 2];
                    let subject = one.program.subject();
                    one.prepare(bench, sample).with_context(|| subject.to_string())?;
                }
            }
            bench.pause(SETTLE);
        }
        bench.pause(PACE.saturating_sub(began.elapsed()));
    }
    let live = plugin.live()?;
    ensure!(live == 0, "Berth holds {live} allocations, and all pods have ended");
    add_calls(&serving, &allocates, &gets, figures);
    bursts(bench, round, &serving, figures)?;
    slices(bench, &serving, figures)?;
    for one in &serving {
        figures.add(Row::MemoryAfterCalls, one.program.subject(), one.program.memory()?);
    }
    serving.into_iter().try_for_each(|one| one.program.stop())
}

fn add_calls(serving: &[Serving], allocates: &Series, gets: &Series, figures: &mut Figures) {
    let seconds = |time: Duration| time.as_secs_f64();
    let (allocate, get) = (seconds(allocates.median()), seconds(gets.median()));
    for one in serving {
        let subject = one.program.subject();
        figures.add(Row::Prepare, subject, seconds(one.prepares.median()));
        figures.add(Row::PrepareP99, subject, seconds(one.prepares.p99()));
        figures.add(Row::Unprepare, subject, seconds(one.unprepares.median()));
    }
    let prepare = seconds(serving[0].prepares.median());
    for (row, value) in [
        (Row::Allocate, allocate),
        (Row::AllocateP99, seconds(allocates.p99())),
        (Row::Get, get),
        (Row::GetP99, seconds(gets.p99())),
        (Row::OfAllocate, prepare / allocate),
        (Row::BeyondParts, prepare - allocate - get),
    ] {
        figures.add(row, Subject::Berth, value);
    }
}

/// All claims at once, by each driver in turn.
fn bursts(bench: &Bench, round: usize, serving: &[Serving], figures: &mut Figures) -> Result<()> {
    let mut all = vec![(Series::default(), 0); serving.len()];
    for burst in 0..bench.effort.samples(BURSTS) {
        for at in turns(round + burst, serving.len()) {
            let one = &serving[at];
            bench.pause(BEFORE_BURST);
            let (took, failed) = bench.runtime.block_on(one.driver.prepare_at_once(&one.claims));
            all[at].0.push(took);
            all[at].1 += failed;
            bench.pause(SETTLE);
            bench.runtime.block_on(one.driver.unprepare(&one.claims))?;
        }
    }
    for (one, (series, failed)) in serving.iter().zip(all) {
        let subject = one.program.subject();
        figures.add(Row::Burst, subject, series.median().as_secs_f64());
        figures.add(Row::BurstFailed, subject, failed as f64);
    }
    Ok(())
}

/// The slices of all drivers are deleted at once, as by the kubelet.
fn slices(bench: &Bench, serving: &[Serving], figures: &mut Figures) -> Result<()> {
    let subjects = || serving.iter().map(|one| one.program.subject());
    let drivers: Vec<_> = subjects().map(|subject| (subject.driver(), subject.published())).collect();
    bench.rest(AT_REST);
    let back = bench.runtime.block_on(bench.cluster.delete_slices(&drivers))?;
    for (subject, back) in subjects().zip(back) {
        figures.add(Row::Slices, subject, back.as_secs_f64());
    }
    Ok(())
}

/// Memory at rest of each program, which runs alone; of Berth, with its DRA driver and without.
pub(crate) fn memory(bench: &Bench, round: usize, figures: &mut Figures) -> Result<()> {
    let mut runs = vec![(Subject::Berth, Setup::Plugin), (Subject::Berth, Setup::Driver)];
    if bench.programs.subjects().contains(&Subject::Nvidia) {
        runs.push((Subject::Nvidia, Setup::Driver));
    }
    let mut of_berth = [0.0; 2];
    for at in turns(round, runs.len()) {
        let (subject, setup) = runs[at];
        let site = Site::new(bench)?;
        let program = if subject == Subject::Berth { site.berth(setup)? } else { site.nvidia()? };
        // Kept: the kubelet stays connected.
        let _driver = if setup == Setup::Driver { Some(site.driver(&program)?) } else { None };
        bench.rest(MEMORY_AT_REST);
        let memory = program.memory()?;
        let row = if setup == Setup::Driver { Row::Memory } else { Row::MemoryWithout };
        figures.add(row, subject, memory);
        if subject == Subject::Berth {
            of_berth[usize::from(setup == Setup::Driver)] = memory;
        }
        program.stop()?;
    }
    let [without, with] = of_berth;
    figures.add(Row::MemoryAdded, Subject::Berth, with - without);
    Ok(())
}
