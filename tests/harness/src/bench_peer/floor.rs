//! What a program of these libraries cannot be faster than, measured as its calls are: with a pause before each. A call that
//! does nothing, an append to the store, and a hand-over from one thread to another and back.

use crate::bench::history;
use crate::bench::measure::Series;
use crate::bench_peer::figures::{Figures, Row};
use crate::bench_peer::node::Bench;
use crate::bench_peer::subject::Subject;
use anyhow::{Context as _, Result};
use berth_kernel::ports::Store as _;
use berth_kernel::record::{Record, Write};
use berth_store::SledStore;
use fakes::plugin;
use kubelet_standin::TinyPlugin;
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};
use tokio::runtime::Builder;

/// Samples of each.
const SAMPLES: usize = 120;
/// As between two Allocates.
const SETTLE: Duration = Duration::from_millis(40);

/// Adds all three to the figures.
pub(crate) fn measure(bench: &Bench, figures: &mut Figures) -> Result<()> {
    let memory = bench.in_memory()?;
    figures.add(Row::NothingCall, Subject::Berth, nothing(bench, memory.path())?);
    figures.add(Row::StoreAppend, Subject::Berth, append(bench, &memory.path().join("store"))?);
    figures.add(
        Row::StoreAppendDurable,
        Subject::Berth,
        append(bench, &bench.on_disk()?.path().join("store"))?,
    );
    figures.add(Row::HandOvers, Subject::Berth, hand_overs(bench)?);
    Ok(())
}

/// Seconds of an Allocate that a server of the same library answers at once, in another process's place: on threads of its
/// own.
fn nothing(bench: &Bench, folder: &Path) -> Result<f64> {
    const SOCKET: &str = "nothing.sock";
    let server = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let serving = server.block_on(async { TinyPlugin::serve(folder, SOCKET, "nvidia.com/gpu", &["a"]) })?;
    let client = Builder::new_current_thread().enable_all().build()?;
    let mut dialled = client.block_on(plugin::dial(&folder.join(SOCKET)))?;
    let mut series = Series::default();
    for _ in 0..bench.effort.samples(SAMPLES) {
        std::thread::sleep(SETTLE);
        series.push(client.block_on(plugin::allocate(&mut dialled, &["a".to_owned()]))?.0);
    }
    drop(serving);
    Ok(series.median().as_secs_f64())
}

/// Seconds of an append of one allocation's record, by the thread that measures.
fn append(bench: &Bench, folder: &Path) -> Result<f64> {
    let mut store = SledStore::open(folder)?;
    let held = store.load()?;
    let meta =
        held.iter().find_map(|record| if let Record::Meta(meta) = record { Some(*meta) } else { None });
    let meta = meta.context("a store without its counters")?;
    let mut series = Series::default();
    for number in (meta.next_number..).take(bench.effort.samples(SAMPLES)) {
        let allocation = history::ended(meta.store, number)?;
        let meta = Record::Meta(berth_kernel::record::Meta { next_number: number + 1, ..meta });
        let writes = [Write::Put(meta), Write::Put(Record::Allocation(allocation))];
        std::thread::sleep(SETTLE);
        let began = Instant::now();
        store.append(&writes)?;
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
