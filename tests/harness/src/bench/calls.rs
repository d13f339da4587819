//! The calls that the kubelet waits for, over the socket: Allocate and GetPreferredAllocation.

use crate::bench::disk::{Bare, Scales};
use crate::bench::history;
use crate::bench::measure::{Effort, Series, ratio, turns};
use crate::bench::node::{Client, GPU, House, Node, Recipe, SHARED, SHARES};
use crate::bench::table::{Budget, Row, Table, time};
use anyhow::{Context as _, Result, ensure};
use berth_kernel::node::ports::Store;
use berth_store::{MemoryDisk, SledStore};
use kubelet_standin::TinyPlugin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Samples of one run.
const SAMPLES: usize = 300;
/// Samples of one run and placement size.
const SIZE_SAMPLES: usize = 60;

/// A store in memory.
pub(crate) fn memory() -> Result<Box<dyn Store>> {
    Ok(Box::new(MemoryDisk::new(1).open()?))
}

/// A store on the disk, as the daemon opens it.
fn durable(house: &House, name: &str) -> Result<Box<dyn Store>> {
    Ok(Box::new(SledStore::open(&house.folder(name)?)?))
}

fn whole_gpus(gpus: &str, store: Box<dyn Store>) -> Recipe<'_> {
    Recipe { gpus, store, policy: None, resource: GPU }
}

/// The shipped policies, each as the whole stack, and the resource of its calls.
fn policies() -> [(&'static str, String, &'static str); 3] {
    let replicas = format!("{{\"replicas\": {SHARES}}}");
    [("exclusive", "{}".into(), GPU), ("timeslice", replicas.clone(), SHARED), ("mixed", replicas, SHARED)]
}

pub(crate) fn allocate(effort: Effort, house: &House, table: &mut Table) -> Result<()> {
    durability(effort, house, table)?;
    by_policy(effort, house, table)
}

/// In memory, durable, the disk alone, and a call that does nothing, in turn.
fn durability(effort: Effort, house: &House, table: &mut Table) -> Result<()> {
    let bytes = weigh(house)?;
    println!("Allocate writes {bytes} bytes of records");
    let mut bare = Bare::new(&house.folder("bare")?, bytes)?;
    let sockets = tempfile::tempdir()?;
    let serving = async { TinyPlugin::serve(sockets.path(), "nothing.sock", GPU, &[]) };
    let nothing = house.client.block_on(serving)?;
    let mut nothing_client = Client::dial(house, &sockets.path().join("nothing.sock"))?;
    let mut in_memory = Node::start(house, whole_gpus("8xh100", memory()?))?;
    let mut on_disk = Node::start(house, whole_gpus("8xh100", durable(house, "durable")?))?;
    history::fill(&house.folder("history")?)?;
    let mut with_history = Node::start(house, whole_gpus("8xh100", durable(house, "history")?))?;
    let ids = in_memory.ids();
    ensure!(
        ids == on_disk.ids() && ids == with_history.ids() && ids.len() == 8,
        "the same 8 GPUs on all nodes"
    );
    let (mut empty, mut memory, mut disk, mut appends, mut full) =
        <(Series, Series, Series, Series, Series)>::default();
    for _ in 0..effort.runs() {
        [&mut empty, &mut memory, &mut disk, &mut appends, &mut full].into_iter().for_each(Series::begin);
        for (sample, id) in ids.iter().cycle().take(effort.samples(SAMPLES)).enumerate() {
            let id = std::slice::from_ref(id);
            for subject in turns(sample, 5) {
                match subject {
                    0 => empty.push(nothing_client.allocate(house, id)?),
                    // Neither of those with a disk follows the other, whose writes it would wait for.
                    1 => {
                        full.push(with_history.client.allocate(house, id)?);
                        with_history.end_newest()?;
                    }
                    2 => {
                        memory.push(in_memory.client.allocate(house, id)?);
                        in_memory.end_newest()?;
                    }
                    3 => {
                        disk.push(on_disk.client.allocate(house, id)?);
                        on_disk.end_newest()?;
                    }
                    _ => appends.push(bare.append()?),
                }
            }
        }
    }
    drop(nothing);
    let kept = with_history.kernel.snapshot().ended.len();
    ensure!(kept == history::RECORDS, "{kept} records of history");
    let over_empty = ratio(memory.median(), empty.median());
    let over_sum = ratio(disk.median(), memory.median() + appends.median());
    table.add(Row::new("socket: a call that does nothing", &empty, Budget::NONE));
    // NVIDIA's plugin v0.20 takes 180 to 220 us for it, and 300 us at its 99th percentile.
    let in_memory = Budget { median: Some(std::time::Duration::from_micros(220)), ..Budget::NONE };
    table.add(
        Row::new("Allocate, store in memory", &memory, in_memory).beside(over_empty, "a call of nothing"),
    );
    table.add(Row::new(format!("bare append of {bytes} B and fdatasync"), &appends, Budget::NONE));
    table
        .add(Row::new("Allocate, durable", &disk, Budget::ratio(1.6)).beside(over_sum, "(in memory + bare)"));
    let over_sum = ratio(full.median(), memory.median() + appends.median());
    let name = format!("Allocate, durable with {kept} records of history");
    table.add(Row::new(name, &full, Budget::ratio(1.6)).beside(over_sum, "(in memory + bare)"));
    Ok(())
}

/// How many bytes of records an Allocate of one GPU writes.
pub(crate) fn weigh(house: &House) -> Result<usize> {
    let last = Arc::new(AtomicUsize::new(0));
    let store = Scales { store: MemoryDisk::new(1).open()?, last: Arc::clone(&last) };
    let mut node = Node::start(house, whole_gpus("8xh100", Box::new(store)))?;
    let ids = node.ids();
    node.client.allocate(house, &ids[..1])?;
    let bytes = last.load(Ordering::Relaxed);
    ensure!(bytes > 0, "an Allocate wrote nothing");
    Ok(bytes)
}

/// Without a policy, and with each shipped one as the stack; store in memory.
fn by_policy(effort: Effort, house: &House, table: &mut Table) -> Result<()> {
    let mut nodes = vec![("no policy", Node::start(house, whole_gpus("8xh100", memory()?))?)];
    let policies = policies();
    for (name, parameters, resource) in &policies {
        let policy = Some((*name, parameters.as_str()));
        let recipe = Recipe { gpus: "8xh100", store: memory()?, policy, resource };
        nodes.push((name, Node::start(house, recipe).context(*name)?));
    }
    let mut allocates = vec![Series::default(); nodes.len()];
    let mut prefers = allocates.clone();
    let ids: Vec<Vec<String>> = nodes.iter().map(|(_, node)| node.ids()).collect();
    for _ in 0..effort.runs() {
        allocates.iter_mut().chain(&mut prefers).for_each(Series::begin);
        for sample in 0..effort.samples(SAMPLES) {
            for at in turns(sample, nodes.len()) {
                let node = &mut nodes[at].1;
                let id = &ids[at][sample % ids[at].len()];
                allocates[at].push(node.client.allocate(house, std::slice::from_ref(id))?);
                node.end_newest()?;
                prefers[at].push(node.client.prefer(house, &ids[at], 4)?);
            }
        }
    }
    for (call, series) in [("Allocate", &allocates), ("GetPreferredAllocation of 4", &prefers)] {
        for (at, (name, _)) in nodes.iter().enumerate() {
            let row = Row::new(format!("{call}, {name}"), &series[at], Budget::NONE);
            let over = ratio(series[at].median(), series[0].median());
            table.add(if at == 0 { row } else { row.beside(over, "no policy") });
        }
    }
    Ok(())
}

/// Placement of whole GPUs over the socket, every size, and of shares.
pub(crate) fn prefer(effort: Effort, house: &House, table: &mut Table) -> Result<()> {
    for (gpus, count) in [("8xh100", 8), ("16xh100", 16)] {
        let mut node = Node::start(house, whole_gpus(gpus, memory()?))?;
        let ids = node.ids();
        ensure!(ids.len() == count, "{} devices instead of {count}", ids.len());
        println!("GetPreferredAllocation, {count} GPUs     median      p99");
        let mut sizes = vec![Series::default(); count];
        for _ in 0..effort.runs() {
            for (size, series) in sizes.iter_mut().enumerate().skip(1) {
                series.begin();
                for _ in 0..effort.samples(SIZE_SAMPLES) {
                    series.push(node.client.prefer(house, &ids, size)?);
                }
            }
        }
        for (size, series) in sizes.iter().enumerate().skip(1) {
            println!("  choose {size:2}  {:>27} {:>8}", time(series.median()), time(series.p99()));
        }
        let slowest = (1..count).max_by_key(|size| sizes[*size].median()).unwrap_or(1);
        let name = format!("GetPreferredAllocation, {count} GPUs, slowest size ({slowest})");
        let budget = if count == 8 { Budget::median(350) } else { Budget::p99(1000) };
        table.add(Row::new(name, &sizes[slowest], budget));
    }
    shares(effort, house, table)
}

fn shares(effort: Effort, house: &House, table: &mut Table) -> Result<()> {
    let parameters = format!("{{\"replicas\": {SHARES}}}");
    let policy = Some(("timeslice", parameters.as_str()));
    let recipe = Recipe { gpus: "8xh100", store: memory()?, policy, resource: SHARED };
    let mut node = Node::start(house, recipe)?;
    let ids = node.ids();
    ensure!(ids.len() == 80, "{} shares instead of 80", ids.len());
    let mut series = Series::default();
    for _ in 0..effort.runs() {
        series.begin();
        for _ in 0..effort.samples(SAMPLES) {
            series.push(node.client.prefer(house, &ids, 40)?);
        }
    }
    table.add(Row::new("GetPreferredAllocation, 40 of 80 shares (timeslice)", &series, Budget::p99(1000)));
    Ok(())
}
