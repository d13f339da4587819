//! What a program of these libraries cannot be faster than. Of an Allocate: a call that does nothing and an append to
//! the store, measured in turn with the programs' calls (`calls.rs`), and a hand-over from one thread to another and
//! back. Of a start: the loading of the program, and the opening of a store.

use crate::bench::history;
use crate::bench::measure::Series;
use crate::bench_peer::figures::{Figures, Row};
use crate::bench_peer::node::Bench;
use crate::bench_peer::subject::Subject;
use crate::resources;
use anyhow::{Context as _, Result, ensure};
use berth_kernel::node::ports::Store as _;
use berth_kernel::node::record::{Meta, Record, Write};
use berth_store::SledStore;
use fakes::plugin;
use kubelet_standin::TinyPlugin;
use kubelet_standin::proto::v1beta1::device_plugin_client::DevicePluginClient;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};
use tonic::transport::Channel;

/// Samples of each.
const SAMPLES: usize = 120;
/// Samples of each step that a start performs once.
const STARTS: usize = 24;
/// As between two Allocates.
const SETTLE: Duration = Duration::from_millis(40);

/// Measures the lower bounds that are no calls, and adds them to the figures.
pub(crate) fn measure(bench: &Bench, figures: &mut Figures) -> Result<()> {
    figures.add(Row::HandOvers, Subject::Berth, hand_overs(bench)?);
    figures.add(Row::PrintVersion, Subject::Berth, version(bench)?);
    figures.add(Row::StoreOpen, Subject::Berth, open(bench, &bench.on_disk()?.path().join("store"))?);
    Ok(())
}

/// Times of a lower bound, and the processor time of all of them.
#[derive(Default)]
pub(crate) struct Samples {
    times: Series,
    processor: Duration,
    count: u32,
}

impl Samples {
    fn push(&mut self, time: Duration, processor: Duration) {
        self.times.push(time);
        self.processor += processor;
        self.count += 1;
    }

    /// The median time, in seconds.
    pub(crate) fn time(&self) -> f64 {
        self.times.median().as_secs_f64()
    }

    /// The mean processor time, in seconds.
    pub(crate) fn processor(&self) -> f64 {
        self.processor.as_secs_f64() / f64::from(self.count.max(1))
    }
}

/// An Allocate that a server of the same gRPC library answers without any work. The server runs in this process, on
/// threads of its own; the processor time is theirs.
pub(crate) struct NothingCall {
    _server: Runtime,
    _plugin: TinyPlugin,
    client: Runtime,
    dialled: DevicePluginClient<Channel>,
    pub(crate) samples: Samples,
}

impl NothingCall {
    pub(crate) fn new(folder: &Path) -> Result<Self> {
        const SOCKET: &str = "nothing.sock";
        let server = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let plugin =
            server.block_on(async { TinyPlugin::serve(folder, SOCKET, "nvidia.com/gpu", &["a"]) })?;
        let client = Builder::new_current_thread().enable_all().build()?;
        let dialled = client.block_on(plugin::dial(&folder.join(SOCKET)))?;
        Ok(Self { _server: server, _plugin: plugin, client, dialled, samples: Samples::default() })
    }

    /// One call, and a pause.
    pub(crate) fn sample(&mut self, pause: Duration) -> Result<()> {
        let server_time = || -> Result<Duration> {
            Ok(resources::processor_time(std::process::id())? - resources::processor_time_of_this_thread()?)
        };
        let before = server_time()?;
        let (time, _) = self.client.block_on(plugin::allocate(&mut self.dialled, &["a".to_owned()]))?;
        std::thread::sleep(pause);
        self.samples.push(time, server_time()?.saturating_sub(before));
        Ok(())
    }
}

/// An append of one allocation's record to a store, by the thread that measures; the processor time is that of this
/// process until the append returns.
pub(crate) struct Append {
    store: SledStore,
    meta: Meta,
    pub(crate) samples: Samples,
}

impl Append {
    pub(crate) fn new(folder: &Path) -> Result<Self> {
        let mut store = SledStore::open(folder)?;
        let held = store.load()?;
        let meta = held.iter().find_map(|record| match record {
            Record::Meta(meta) => Some(*meta),
            _ => None,
        });
        Ok(Self { store, meta: meta.context("a store without its counters")?, samples: Samples::default() })
    }

    /// One append, and a pause.
    pub(crate) fn sample(&mut self, pause: Duration) -> Result<()> {
        let allocation = history::ended(self.meta.store, self.meta.next_number)?;
        self.meta.next_number += 1;
        let writes = [Write::Put(Record::Meta(self.meta)), Write::Put(Record::Allocation(allocation))];
        let (before, began) = (resources::processor_time(std::process::id())?, Instant::now());
        self.store.append(&writes)?;
        let (time, after) = (began.elapsed(), resources::processor_time(std::process::id())?);
        self.samples.push(time, after.saturating_sub(before));
        std::thread::sleep(pause);
        Ok(())
    }
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

/// The median time in which sled opens and reads a new store that was closed before, in seconds. sled's threads run
/// already. The settings are those of `src/store/handle.rs` and `src/store/folder.rs`.
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
