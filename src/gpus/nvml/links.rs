//! Links between the GPUs: read once for every GPU and pair, and kept.

use super::facts::{Failed, ask, ask_if_known};
use super::fence::{Fence, Lane, Pending, Steps};
use super::map::{self, LinksOut};
use super::raw;
use berth_kernel::gpu::{Link, Links, Part, Path};
use berth_kernel::names::PartId;
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// `NVML_NVLINK_MAX_LINKS` of the newest header; models have 6 to 18.
const NVLINKS_MAX: u32 = 36;

/// How long reading one GPU's links may take: 36 links of three calls, and the ways to 15 others,
/// which on slow systems take some milliseconds each. Read once, so the wait is paid once.
const READ_MAX: Duration = Duration::from_secs(10);

/// Links as far as they were read.
#[derive(Default)]
pub(super) struct LinkCache {
    out: BTreeMap<PartId, LinksOut>,
    links: Links,
}

impl LinkCache {
    /// Reads what is not known yet between GPUs that answer: all of them at the same time, so that
    /// hanging ones hold a look up once. What fails is tried again next time.
    pub(super) fn read_missing(&mut self, nvml: &Arc<Nvml>, fence: &Fence, gpus: &[&Part]) {
        let buses = gpus.iter().map(|gpu| map::bus_key(&gpu.pci_bus));
        let buses: Arc<BTreeSet<String>> = Arc::new(buses.collect());
        let unread = gpus.iter().filter(|gpu| !self.out.contains_key(&gpu.id));
        let reads: Vec<_> = unread
            .map(|gpu| {
                let (nvml, buses, index) = (Arc::clone(nvml), Arc::clone(&buses), gpu.gpu_index);
                let read = fence
                    .start(Lane::Gpu(index), READ_MAX, move |steps| links_out(&nvml, index, &buses, steps));
                (gpu.id.clone(), read)
            })
            .collect();
        for (id, read) in reads {
            if let Ok(Ok(out)) = read.and_then(Pending::wait) {
                self.out.insert(id, out);
            }
        }
        self.read_ways(nvml, fence, gpus);
    }

    /// The ways between pairs that are not known.
    fn read_ways(&mut self, nvml: &Arc<Nvml>, fence: &Fence, gpus: &[&Part]) {
        let mut reads = Vec::new();
        for (at, &a) in gpus.iter().enumerate() {
            let others = gpus[at + 1..].iter().copied();
            let missing: Vec<&Part> = others.filter(|b| self.links.between(&a.id, &b.id).is_none()).collect();
            if missing.is_empty() {
                continue;
            }
            let indices: Vec<u32> = missing.iter().map(|b| b.gpu_index).collect();
            let (nvml, index) = (Arc::clone(nvml), a.gpu_index);
            let read = fence.start(Lane::Gpu(index), READ_MAX, move |steps| {
                let to = |other| way(&nvml, index, other, steps);
                indices.into_iter().map(to).collect::<Vec<_>>()
            });
            reads.push((a, missing, read));
        }
        for (a, missing, read) in reads {
            let ways = read.and_then(Pending::wait).into_iter().flatten();
            for (b, way) in missing.into_iter().zip(ways) {
                if let Ok(way) = way {
                    let by_numa = || map::path_by_numa(a.numa_node, b.numa_node);
                    self.join(a, b, way.unwrap_or_else(by_numa));
                }
            }
        }
    }

    fn join(&mut self, a: &Part, b: &Part, path: Path) {
        // Where the links of one could not be read, the pair stays unknown and is asked for again.
        let (Some(from_a), Some(from_b)) = (self.out.get(&a.id), self.out.get(&b.id)) else {
            return;
        };
        let nvlinks = map::nvlinks_between((&a.pci_bus, from_a), (&b.pci_bus, from_b));
        self.links.set(&a.id, &b.id, Link { path, nvlinks });
    }

    /// The links between GPUs that are still there.
    pub(super) fn among(&self, present: &BTreeSet<&PartId>) -> Links {
        let mut links = Links::default();
        for (a, b, link) in self.links.iter() {
            if present.contains(a) && present.contains(b) {
                links.set(a, b, link);
            }
        }
        links
    }
}

fn way(nvml: &Nvml, a: u32, b: u32, steps: &Steps) -> Result<Option<Path>, Failed> {
    let call = "nvmlDeviceGetHandleByIndex_v2";
    let device = ask(steps, call, || nvml.device_by_index(a))?;
    let other = ask(steps, call, || nvml.device_by_index(b))?;
    let level = ask_if_known(steps, "nvmlDeviceGetTopologyCommonAncestor", || {
        device.topology_common_ancestor(other)
    })?;
    Ok(level.as_ref().map(map::path))
}

fn links_out(
    nvml: &Nvml,
    index: u32,
    gpu_buses: &BTreeSet<String>,
    steps: &Steps,
) -> Result<LinksOut, Failed> {
    let device = ask(steps, "nvmlDeviceGetHandleByIndex_v2", || nvml.device_by_index(index))?;
    let mut out = LinksOut::default();
    for number in 0..NVLINKS_MAX {
        let link = device.link_wrapper_for(number);
        let active = match ask_if_known(steps, "nvmlDeviceGetNvLinkState", || link.is_active()) {
            Ok(Some(active)) => active,
            // Beyond the links that the model has.
            Ok(None) => break,
            Err(failed) if matches!(failed.error, NvmlError::InvalidArg) => break,
            Err(failed) => return Err(failed),
        };
        if !active {
            continue;
        }
        let kind = ask_if_known(steps, "nvmlDeviceGetNvLinkRemoteDeviceType", || {
            raw::remote_device_type(&device, number)
        })?;
        if kind == Some(raw::REMOTE_SWITCH) {
            out.switched += 1;
            continue;
        }
        let remote = ask_if_known(steps, "nvmlDeviceGetNvLinkRemotePciInfo_v2", || link.remote_pci_info())?;
        let Some(bus) = remote.map(|pci| map::bus_key(&pci.bus_id)) else {
            continue;
        };
        match kind {
            Some(raw::REMOTE_GPU) => *out.direct.entry(bus).or_default() += 1,
            Some(_) => {}
            // Drivers before 460 do not say what it is: then a GPU of this node, or a switch.
            None if gpu_buses.contains(&bus) => *out.direct.entry(bus).or_default() += 1,
            None => out.switched += 1,
        }
    }
    Ok(out)
}
