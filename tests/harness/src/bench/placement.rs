//! The kernel's placement, beside brute force.

use crate::bench::brute;
use crate::bench::measure::{Effort, Series, ratio, turns};
use crate::bench::table::{Budget, Row, Table, time};
use anyhow::{Context as _, Result, ensure};
use berth_gpus::sim::SimGpus;
use berth_kernel::hardware::gpu::{Inventory, Usage};
use berth_kernel::ids::names::{DeviceId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::change::{Change, Entry};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::Gpus as _;
use berth_kernel::policy::hooks::PlaceRequest;
use berth_kernel::sharing::offer::{Consumes, OfferLine};
use berth_kernel::sharing::part_state::{Device, DeviceState};
use berth_kernel::sharing::placement::{Pairs, baseline, best_set};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Samples of one run and size. At 0.2 ms each, all sizes of 16 GPUs are 5 x 200 x 15 x 0.2 = 3 s.
const SAMPLES: usize = 200;
/// Brute force takes up to a second for one choice.
const BRUTE_SAMPLES: usize = 1;

pub(crate) fn measure(effort: Effort, table: &mut Table) -> Result<()> {
    for gpus in [8, 16] {
        sizes(effort, gpus, table)?;
    }
    shared(effort, table)
}

/// A wiring in which every pair is different: nothing to gain from symmetry, and one best set.
fn uneven(n: usize) -> Pairs {
    Pairs::new(n, |a, b| u32::try_from((a * 7919 + b * 104_729) % 1861).unwrap_or(0))
}

/// Every size from 1 to all but one. The slowest makes the row.
fn sizes(effort: Effort, n: usize, table: &mut Table) -> Result<()> {
    let pairs = uneven(n);
    println!("placement of {n} GPUs     ours       p99     brute force   ratio");
    let mut worst: Option<(usize, Series, f64)> = None;
    for size in 1..n {
        let (mut ours, mut theirs) = (Series::default(), Series::default());
        for run in 0..effort.runs() {
            for subject in turns(run, 2) {
                if subject == 0 {
                    ours.run(effort.samples(SAMPLES), || best_set(std::hint::black_box(&pairs), &[], size));
                } else {
                    theirs.run(BRUTE_SAMPLES, || brute::best(&brute::scores(&pairs, n, size)));
                }
            }
        }
        let chosen = best_set(&pairs, &[], size).iter().fold(0u32, |set, i| set | 1 << i);
        let scores = brute::scores(&pairs, n, size);
        let (best, _) = brute::best(&scores).context("no set at all")?;
        ensure!(best == chosen, "{size} of {n}: the kernel chose {chosen:b}, brute force {best:b}");
        let share = ratio(ours.median(), theirs.median());
        let (median, p99, brute) = (time(ours.median()), time(ours.p99()), time(theirs.median()));
        println!("  choose {size:2}  {median:>15} {p99:>10}  {brute:>12}  {share:.6}");
        if worst.as_ref().is_none_or(|(_, slowest, _)| ours.median() > slowest.median()) {
            worst = Some((size, ours, share));
        }
    }
    if let Some((size, ours, share)) = worst {
        let name = format!("kernel: best set of {n} GPUs, slowest size ({size})");
        // The socket's share of the budget is measured with the call.
        table.add(Row::new(name, &ours, Budget::p99(1000)).beside(share, "brute force"));
    }
    Ok(())
}

/// 8 GPUs in 10 shares each, some held; choose 40. And the largest node there is.
fn shared(effort: Effort, table: &mut Table) -> Result<()> {
    for (gpus, shares, size, budget) in [(8, 10, 40, Budget::p99(1000)), (16, 128, 1024, Budget::NONE)] {
        let (ledger, request) = shared_node(gpus, shares, size)?;
        let mut series = Series::default();
        for _ in 0..effort.runs() {
            series.run(effort.samples(SAMPLES), || baseline(&ledger, std::hint::black_box(&request)));
        }
        ensure!(baseline(&ledger, &request).devices.len() == size, "{size} devices were to be chosen");
        let name = format!("kernel: {size} of {} shares on {gpus} GPUs", gpus * shares);
        table.add(Row::new(name, &series, budget));
    }
    Ok(())
}

fn shared_node(gpus: u32, shares: u32, size: usize) -> Result<(Ledger, PlaceRequest)> {
    let resource = Resource::parse("nvidia.com/gpu.shared")?;
    let inventory: Inventory = SimGpus::open(&format!("{gpus}xh100"))?.scan()?;
    let mut changes: Vec<Change> = inventory.parts.iter().cloned().map(Change::PartFound).collect();
    let usage: BTreeMap<_, _> = inventory.parts.iter().map(|p| (p.id.clone(), Usage::default())).collect();
    changes.push(Change::InventoryScanned {
        links: Arc::new(inventory.links),
        usage: Arc::new(usage),
        scan_errors: Arc::default(),
    });
    let consumes = Consumes::Slice { memory_mib: 600, compute_percent: 0 };
    let device =
        Device { consumes, state: DeviceState::Offered, holders: Vec::new(), last_allocate_mono_ms: None };
    changes.extend(inventory.parts.iter().map(|part| Change::Offered {
        part: part.id.clone(),
        by: Some("bench".into()),
        lines: vec![OfferLine { resource: resource.clone(), count: shares, consumes }],
        ranges: Vec::new(),
        devices: (0..shares).map(|n| ((resource.clone(), Some(n)), device.clone())).collect(),
    }));
    let mut ledger = Ledger::default();
    ledger.apply(&Entry { at: Now { wall_ms: 0, mono_ms: 0 }, changes });
    let parts = inventory.parts.iter();
    let available: Vec<DeviceId> =
        parts.flat_map(|part| (0..shares).map(|n| DeviceId::share(&part.id, n))).collect();
    // Half of what is wanted is required, as after an init container.
    let required = available.iter().step_by(available.len() * 2 / size).cloned().collect();
    Ok((ledger, PlaceRequest { resource, available, required, size }))
}
