//! What a program of these libraries cannot be faster than, measured as its calls are: with a pause before each. A call that
//! does nothing, an append to the store, and a hand-over from one thread to another and back. For a start: the loading of the
//! program, and the opening of a store.

use crate::bench::history;
use crate::bench::measure::Series;
use crate::bench_peer::figures::{Figures, Row};
use crate::bench_peer::node::Bench;
use crate::bench_peer::subject::Subject;
use crate::resources;
use anyhow::{Context as _, Result, ensure};
use berth_kernel::ports::Store as _;
use berth_kernel::record::{Record, Write};
use berth_store::SledStore;
use fakes::plugin;
use kubelet_standin::TinyPlugin;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};
use tokio::runtime::Builder;

/// Samples of each.
const SAMPLES: usize = 120;
/// Samples of each step that a start performs once.
const STARTS: usize = 24;
/// As between two Allocates.
const SETTLE: Duration = Duration::from_millis(40);

/// Measures all lower bounds, and adds them to the figures.
pub(crate) fn measure(bench: &Bench, figures: &mut Figures) -> Result<()> {
    let (memory, disk) = (bench.in_memory()?, bench.on_disk()?);
    let (time, processor) = nothing(bench, memory.path())?;
    figures.add(Row::NothingCall, Subject::Berth, time);
    figures.add(Row::NothingCallProcessor, Subject::Berth, processor);
    let (time, processor) = append(bench, &memory.path().join("store"))?;
    figures.add(Row::StoreAppend, Subject::Berth, time);
    figures.add(Row::AppendProcessor, Subject::Berth, processor);
    figures.add(Row::StoreAppendDurable, Subject::Berth, append(bench, &disk.path().join("store"))?.0);
    figures.add(Row::HandOvers, Subject::Berth, hand_overs(bench)?);
    figures.add(Row::PrintVersion, Subject::Berth, version(bench)?);
    figures.add(Row::StoreOpen, Subject::Berth, open(bench, &disk.path().join("kept"))?);
    Ok(())
}

/// The median time of an Allocate that a server of the same gRPC library answers without any work, and the mean processor time
/// of the server's threads for one call, in seconds. The server runs in this process, on threads of its own.
fn nothing(bench: &Bench, folder: &Path) -> Result<(f64, f64)> {
    const SOCKET: &str = "nothing.sock";
    let server = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let serving = server.block_on(async { TinyPlugin::serve(folder, SOCKET, "nvidia.com/gpu", &["a"]) })?;
    let client = Builder::new_current_thread().enable_all().build()?;
    let mut dialled = client.block_on(plugin::dial(&folder.join(SOCKET)))?;
    let server_time = || -> Result<Duration> {
        Ok(resources::processor_time(std::process::id())? - resources::processor_time_of_this_thread()?)
    };
    let (before, samples) = (server_time()?, bench.effort.samples(SAMPLES));
    let mut series = Series::default();
    for _ in 0..samples {
        std::thread::sleep(SETTLE);
        series.push(client.block_on(plugin::allocate(&mut dialled, &["a".to_owned()]))?.0);
    }
    std::thread::sleep(SETTLE);
    let processor = server_time()? - before;
    drop(serving);
    Ok((series.median().as_secs_f64(), processor.as_secs_f64() / samples as f64))
}

/// The median time of an append of one allocation's record, and the mean processor time of this process until the append
/// returns, in seconds.
fn append(bench: &Bench, folder: &Path) -> Result<(f64, f64)> {
    let mut store = SledStore::open(folder)?;
    let held = store.load()?;
    let meta =
        held.iter().find_map(|record| if let Record::Meta(meta) = record { Some(*meta) } else { None });
    let meta = meta.context("a store without its counters")?;
    let (mut series, mut processor) = (Series::default(), Duration::ZERO);
    let samples = bench.effort.samples(SAMPLES);
    for number in (meta.next_number..).take(samples) {
        let allocation = history::ended(meta.store, number)?;
        let meta = Record::Meta(berth_kernel::record::Meta { next_number: number + 1, ..meta });
        let writes = [Write::Put(meta), Write::Put(Record::Allocation(allocation))];
        std::thread::sleep(SETTLE);
        let (before, began) = (resources::processor_time(std::process::id())?, Instant::now());
        store.append(&writes)?;
        series.push(began.elapsed());
        processor += resources::processor_time(std::process::id())? - before;
    }
    Ok((series.median().as_secs_f64(), processor.as_secs_f64() / samples as f64))
}

/// The median time in which the program starts, parses its arguments, prints its version and exits, in seconds.
fn version(bench: &Bench) -> Result<f64> {
    let mut series = Series::default();
    for _ in 0..bench.effort.samples(STARTS) {
        let began = Instant::now();
        let output = Command::new(bench.programs.berth()).arg("--version").output()?;
        series.push(began.elapsed());
        ensure!(output.status.success(), "`berth --version` ended with {}", output.status);
    }
    Ok(series.median().as_secs_f64())
}

/// The median time in which sled opens and reads a new store that was closed before, in seconds. sled's threads run already.
/// The settings are those of `src/store/handle.rs`.
fn open(bench: &Bench, folder: &Path) -> Result<f64> {
    drop(SledStore::open(folder)?);
    let config = sled::Config::new().path(folder.join("data")).segment_size(2 << 20);
    let config = config.cache_capacity(8 << 20).flush_every_ms(None);
    let mut series = Series::default();
    for _ in 0..bench.effort.samples(STARTS) {
        std::thread::sleep(SETTLE);
        let began = Instant::now();
        let db = config.open()?;
        for pair in db.iter() {
            pair?;
        }
        series.push(began.elapsed());
    }
    Ok(series.median().as_secs_f64())
}

/// Seconds of one message to a thread that waits, and its answer.
fn hand_overs(bench: &Bench) -> Result<f64> {
    let (ask, asked) = sync_channel::<()>(1);
    let (answer, answered) = sync_channel::<()>(1);
    let other = std::thread::spawn(move || while asked.recv().is_ok() && answer.send(()).is_ok() {});
    let mut series = Series::default();
    for _ in 0..bench.effort.samples(SAMPLES) {
        std::thread::sleep(SETTLE);
        let began = Instant::now();
        ask.send(())?;
        answered.recv()?;
        series.push(began.elapsed());
    }
    drop(ask);
    let _ = other.join();
    Ok(series.median().as_secs_f64())
}
