//! Many seeds, on all processors.

use crate::sim::log;
use crate::sim::simulation::event::Event;
use crate::sim::simulation::generate;
use crate::sim::simulation::run::run;
use crate::sim::simulation::shrink::shrink;
use crate::sim::simulation::violation::Violation;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Violating histories that are shortened and printed; the rest are counted.
const TOLD_MAX: usize = 5;
/// Interval of the progress lines.
const PROGRESS: Duration = Duration::from_secs(1);

/// A history that broke an invariant.
struct Broken {
    seed: u64,
    events: Vec<Event>,
    violation: Violation,
}

#[derive(Default)]
struct Tally {
    next: AtomicU64,
    done: AtomicU64,
    events: AtomicU64,
    grants: AtomicU64,
    violations: AtomicU64,
    stop: AtomicBool,
    broken: Mutex<Vec<Broken>>,
}

/// Runs `count` seeds from `from` on, or without an end until one breaks something. Answers whether
/// nothing broke.
pub(crate) fn all(from: u64, count: Option<u64>, logs: &Path) -> anyhow::Result<bool> {
    let tally = Tally { next: AtomicU64::new(from), ..Tally::default() };
    let end = count.map_or(u64::MAX, |count| from.saturating_add(count));
    let began = Instant::now();
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let working: Vec<_> =
            (0..workers).map(|_| scope.spawn(|| work(&tally, end, count.is_none()))).collect();
        let mut last_printed = Instant::now();
        while working.iter().any(|worker| !worker.is_finished()) {
            std::thread::sleep(Duration::from_millis(20));
            if last_printed.elapsed() >= PROGRESS {
                last_printed = Instant::now();
                eprintln!("{}", progress(&tally, began));
            }
        }
    });
    eprintln!("{}", progress(&tally, began));
    let mut broken = tally.broken.into_inner().unwrap_or_default();
    broken.sort_by_key(|b| b.seed);
    for broken in &broken {
        tell(broken, logs)?;
    }
    let violations = tally.violations.into_inner();
    println!("seeds={} violations={violations}", tally.done.into_inner());
    Ok(violations == 0)
}

fn work(tally: &Tally, end: u64, until_broken: bool) {
    while !tally.stop.load(Ordering::Relaxed) {
        let seed = tally.next.fetch_add(1, Ordering::Relaxed);
        if seed >= end {
            return;
        }
        let events = generate::events(seed);
        let outcome = run(seed, &events, |_, _, _| {});
        tally.events.fetch_add(events.len() as u64, Ordering::Relaxed);
        tally.grants.fetch_add(outcome.grants, Ordering::Relaxed);
        tally.done.fetch_add(1, Ordering::Relaxed);
        if let Some((violation, _)) = outcome.broken {
            tally.violations.fetch_add(1, Ordering::Relaxed);
            if until_broken {
                tally.stop.store(true, Ordering::Relaxed);
            }
            if let Ok(mut broken) = tally.broken.lock()
                && broken.len() < TOLD_MAX
            {
                broken.push(Broken { seed, events, violation });
            }
        }
    }
}

fn progress(tally: &Tally, began: Instant) -> String {
    let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
    let (done, events, grants) = (get(&tally.done), get(&tally.events), get(&tally.grants));
    let (violations, seconds) = (get(&tally.violations), began.elapsed().as_secs_f64());
    format!("{seconds:.1} s: {done} seeds, {events} events, {grants} grants, {violations} violations")
}

/// Makes a broken history shorter, prints it, and writes its log.
fn tell(broken: &Broken, logs: &Path) -> anyhow::Result<()> {
    let Broken { seed, events, violation } = broken;
    let short = shrink(*seed, events.clone(), violation.invariant);
    // The shorter history may have another message.
    let said = run(*seed, &short, |_, _, _| {}).broken.map_or_else(|| violation.clone(), |(v, _)| v);
    let path = log::write(logs, *seed, &short, &said)?;
    println!("seed {seed} breaks {said}");
    println!("{} of its {} events do it; `just sim --replay {}`:", short.len(), events.len(), path.display());
    for event in &short {
        println!("    {}", log::line(event));
    }
    Ok(())
}
