//! What the kubelet sees change: a health state, a fault, and its own socket created again.

use crate::bench::calls::memory;
use crate::bench::measure::{Effort, Series};
use crate::bench::node::{Client, GPU, House, Node, PATIENCE, Recipe, SHARED};
use crate::bench::table::{Budget, Row, Table};
use anyhow::{Context as _, Result, anyhow, ensure};
use berth_core::{GpuWatch, InventoryScanner};
use berth_gpus::procfs::ProcFs;
use berth_gpus::sim::SimGpus;
use berth_kernel::node::ports::Gpus;
use kubelet_standin::proto::v1beta1::{Empty, ListAndWatchResponse};
use kubelet_standin::{HEALTHY, Kubelet, Rpc};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tonic::Streaming;

const SAMPLES: usize = 40;
/// Devices of the largest node: 16 GPUs of 128 shares.
const DEVICES: usize = 16 * 128;
/// "Xid 79: GPU has fallen off the bus."
const XID: u64 = 79;
/// How long the kubelet is away: long enough to be noticed, and to be waited for.
const AWAY: Duration = Duration::from_millis(300);

/// One ListAndWatch stream.
struct Stream<'h> {
    house: &'h House,
    stream: Streaming<ListAndWatchResponse>,
    devices: usize,
}

impl<'h> Stream<'h> {
    fn open(house: &'h House, client: &mut Client, devices: usize) -> Result<Self> {
        let opened = house.client.block_on(client.0.list_and_watch(Empty {}))?;
        let mut this = Self { house, stream: opened.into_inner(), devices };
        ensure!(this.healthy()? == devices, "not all devices are healthy at first");
        Ok(this)
    }

    /// How many devices of the next list are healthy.
    fn healthy(&mut self) -> Result<usize> {
        let next = async { tokio::time::timeout(PATIENCE, self.stream.message()).await };
        let list = self.house.client.block_on(next).context("the list does not come")??;
        let list = list.context("the stream ended")?;
        ensure!(list.devices.len() == self.devices, "{} devices listed", list.devices.len());
        Ok(list.devices.iter().filter(|d| d.health == HEALTHY).count())
    }

    fn until(&mut self, healthy: usize) -> Result<()> {
        while self.healthy()? != healthy {}
        Ok(())
    }
}

pub(crate) fn measure(effort: Effort, house: &House, table: &mut Table) -> Result<()> {
    health(effort, house, table)?;
    fault(effort, house, table)?;
    socket(effort, house, table)
}

/// From a scan that finds a GPU failed to the list that shows it.
fn health(effort: Effort, house: &House, table: &mut Table) -> Result<()> {
    let policy = Some(("timeslice", "{\"replicas\": 128}"));
    let recipe = Recipe { gpus: "16xh100", store: memory()?, policy, resource: SHARED };
    let mut node = Node::start(house, recipe)?;
    let mut troubled = node.inventory.clone();
    let gpu = troubled.parts.first().context("no GPU")?.gpu.clone();
    troubled.scan_errors.insert(gpu, "fell off the bus".into());
    let mut series = Series::default();
    let mut stream = Stream::open(house, &mut node.client, DEVICES)?;
    for _ in 0..effort.runs() {
        series.begin();
        for _ in 0..effort.samples(SAMPLES) {
            let began = Instant::now();
            node.kernel.record_scan(troubled.clone())?;
            stream.until(DEVICES - 128)?;
            series.push(began.elapsed());
            node.kernel.record_scan(node.inventory.clone())?;
            stream.until(DEVICES)?;
        }
    }
    let name = "health change to the stream, 16 GPUs x 128 shares";
    table.add(Row::new(name, &series, Budget::p99(10_000)));
    Ok(())
}

/// From an XID to the list that says so: the thread that waits for events, the policy thread, the
/// keeper, the stream. A simulated machine's file would add the 20 ms in which it is looked at; here
/// the machine changes in memory, as NVML reports it.
fn fault(effort: Effort, house: &House, table: &mut Table) -> Result<()> {
    let recipe = Recipe { gpus: "8xh100", store: memory()?, policy: None, resource: GPU };
    let mut node = Node::start(house, recipe)?;
    let sim = Arc::new(SimGpus::open("8xh100")?);
    let gpus: Arc<dyn Gpus> = Arc::clone(&sim) as _;
    let looker = InventoryScanner::new(gpus, Arc::new(ProcFs::new("/proc".into(), &[])));
    let watch = GpuWatch::start(&looker, &node.kernel, PATIENCE)?;
    let mut stream = Stream::open(house, &mut node.client, 8)?;
    let mut series = Series::default();
    for _ in 0..effort.runs() {
        series.begin();
        for _ in 0..effort.samples(SAMPLES) {
            let began = Instant::now();
            sim.change(|machine| machine.push_xid(0, XID)).map_err(|why| anyhow!(why))?;
            stream.until(7)?;
            series.push(began.elapsed());
            node.kernel.record_scan(node.inventory.clone())?;
            stream.until(8)?;
        }
    }
    drop(watch);
    table.add(Row::new("fault to Unhealthy on the stream, 8 GPUs", &series, Budget::p99(1000)));
    Ok(())
}

/// A kubelet that starts again: from before it makes its socket to a stream that it reads. While
/// the old stream is open no registration is sent, since that would end it.
fn socket(effort: Effort, house: &House, table: &mut Table) -> Result<()> {
    let node = Node::start(house, Recipe { gpus: "8xh100", store: memory()?, policy: None, resource: GPU })?;
    let served = |k: &Kubelet| k.is_served(GPU);
    let mut series = Series::default();
    for _ in 0..effort.runs() {
        series.begin();
        for _ in 0..effort.samples(SAMPLES / 4) {
            house.kubelet.block_on(node.kubelet.stop());
            std::thread::sleep(AWAY);
            let began = Instant::now();
            house.kubelet.block_on(async {
                node.kubelet.start().await?;
                node.kubelet.wait_for("the registration", PATIENCE, served).await?;
                anyhow::Ok(())
            })?;
            series.push(began.elapsed());
        }
    }
    let failed = node.kubelet.calls(Rpc::Register, GPU).errors;
    ensure!(failed == 0, "{failed} registrations failed");
    table.add(Row::new("kubelet.sock created again to registered", &series, Budget::p99(10_000)));
    Ok(())
}
