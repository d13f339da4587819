//! Links between the GPUs: paths are read once, NVLinks again at times.

use super::fence::{Fence, Lane, Pending, Steps};
use super::invoke::{ReadError, invoke, invoke_optional};
use super::library::OpenNvml;
use super::map::{self, OutgoingLinks};
use super::raw;
use berth_kernel::hardware::gpu::{Link, Links, Part, Path};
use berth_kernel::ids::names::GpuId;
use berth_kernel::ids::pci::PciBusId;
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// `NVML_NVLINK_MAX_LINKS` of the newest header; models have 6 to 18.
const NVLINKS_MAX: u32 = 36;

/// Deadline for reading the links of one GPU: 36 links with three calls each, and the paths to 15 other GPUs, of some
/// milliseconds each on slow systems.
const READ_MAX: Duration = Duration::from_secs(10);

/// The links that were read so far.
pub(super) struct LinkCache {
    /// The NVLinks of each GPU.
    outgoing: BTreeMap<GpuId, Outgoing>,
    /// The paths between two GPUs, which do not change.
    paths: Paths,
    /// How long NVLinks that were read are used.
    reread_interval: Duration,
}

type Paths = BTreeMap<(GpuId, GpuId), Path>;

/// The NVLinks of one GPU.
struct Outgoing {
    read_at: Instant,
    pci_bus: Option<PciBusId>,
    links: OutgoingLinks,
}

impl LinkCache {
    pub(super) fn new(reread_interval: Duration) -> Self {
        Self { outgoing: BTreeMap::new(), paths: Paths::new(), reread_interval }
    }

    /// Reads a GPU's NVLinks again at the next scan.
    pub(super) fn forget(&mut self, gpu: &GpuId) {
        self.outgoing.remove(gpu);
    }

    /// Reads the missing links between GPUs that answer: those of all GPUs at the same time, so that a scan waits for
    /// GPUs that hang only once. Failed reads are retried with the next scan. NVLinks are read again at times: they
    /// come up only after the fabric, some time after the driver, and may go down (nvml.h, `nvmlDeviceGetNvLinkState`).
    pub(super) fn read_missing(&mut self, nvml: &Arc<OpenNvml>, fence: &Fence, gpus: &[Part]) {
        let buses: Arc<BTreeSet<PciBusId>> = Arc::new(gpus.iter().filter_map(|gpu| gpu.pci_bus).collect());
        let is_recent = |known: &Outgoing| known.read_at.elapsed() < self.reread_interval;
        let mut reads = Vec::new();
        for (at, gpu) in gpus.iter().enumerate() {
            let are_links_recent = self.outgoing.get(&gpu.gpu).is_some_and(is_recent);
            let others = gpus[at + 1..].iter();
            let missing: Vec<&Part> =
                others.filter(|other| !self.paths.contains_key(&pair(gpu, other))).collect();
            if are_links_recent && missing.is_empty() {
                continue;
            }
            let indices: Vec<u32> = missing.iter().map(|other| other.gpu_index).collect();
            let (nvml, buses, index) = (Arc::clone(nvml), Arc::clone(&buses), gpu.gpu_index);
            let read = fence.start(Lane::Gpu(index), READ_MAX, move |steps| {
                let links = (!are_links_recent).then(|| read_outgoing(&nvml, index, &buses, steps));
                let to = |other| read_path(&nvml, index, other, steps);
                (links, indices.into_iter().map(to).collect::<Vec<_>>())
            });
            reads.push((gpu, missing, read));
        }
        for (gpu, missing, read) in reads {
            let Ok((links, paths)) = read.and_then(Pending::wait) else { continue };
            if let Some(Ok(links)) = links {
                let known = Outgoing { read_at: Instant::now(), pci_bus: gpu.pci_bus, links };
                self.outgoing.insert(gpu.gpu.clone(), known);
            }
            for (other, path) in missing.into_iter().zip(paths) {
                if let Ok(path) = path {
                    let by_numa = || map::path_by_numa(gpu.numa_node, other.numa_node);
                    self.paths.insert(pair(gpu, other), path.unwrap_or_else(by_numa));
                }
            }
        }
    }

    /// The links between GPUs that are present. A pair of which one side could not be read yet is left out.
    pub(super) fn between_present(&self, present: &BTreeSet<&GpuId>) -> Links {
        let mut links = Links::default();
        for ((a, b), path) in &self.paths {
            if let (Some(from_a), Some(from_b)) = (self.outgoing.get(a), self.outgoing.get(b))
                && present.contains(a)
                && present.contains(b)
            {
                let nvlinks =
                    map::nvlinks_between((from_a.pci_bus, &from_a.links), (from_b.pci_bus, &from_b.links));
                links.set(a, b, Link { path: *path, nvlinks });
            }
        }
        links
    }
}

/// The key of two GPUs, whatever their order.
fn pair(a: &Part, b: &Part) -> (GpuId, GpuId) {
    let (first, second) = if a.id <= b.id { (a, b) } else { (b, a) };
    (first.gpu.clone(), second.gpu.clone())
}

fn read_path(nvml: &Nvml, a: u32, b: u32, steps: &Steps) -> Result<Option<Path>, ReadError> {
    let call = "nvmlDeviceGetHandleByIndex_v2";
    let device = invoke(steps, call, || nvml.device_by_index(a))?;
    let other = invoke(steps, call, || nvml.device_by_index(b))?;
    let level = invoke_optional(steps, "nvmlDeviceGetTopologyCommonAncestor", || {
        device.topology_common_ancestor(other)
    })?;
    Ok(level.as_ref().map(map::path))
}

fn read_outgoing(
    nvml: &Nvml,
    index: u32,
    gpu_buses: &BTreeSet<PciBusId>,
    steps: &Steps,
) -> Result<OutgoingLinks, ReadError> {
    let device = invoke(steps, "nvmlDeviceGetHandleByIndex_v2", || nvml.device_by_index(index))?;
    let mut outgoing = OutgoingLinks::default();
    for number in 0..NVLINKS_MAX {
        let link = device.link_wrapper_for(number);
        let active = match invoke_optional(steps, "nvmlDeviceGetNvLinkState", || link.is_active()) {
            Ok(Some(active)) => active,
            // This link is not supported, but later ones may be (as in NVIDIA's go-gpuallocator, `device.go`).
            Ok(None) => continue,
            // The model has no more links.
            Err(ReadError::Call(_, NvmlError::InvalidArg)) => break,
            Err(failed) => return Err(failed),
        };
        if !active {
            continue;
        }
        let kind = invoke_optional(steps, "nvmlDeviceGetNvLinkRemoteDeviceType", || {
            raw::remote_device_type(&device, number)
        })?;
        if kind == Some(raw::REMOTE_SWITCH) {
            outgoing.switched += 1;
            continue;
        }
        let remote =
            invoke_optional(steps, "nvmlDeviceGetNvLinkRemotePciInfo_v2", || link.remote_pci_info())?;
        let Some(bus) = remote.and_then(|pci| PciBusId::parse(&pci.bus_id).ok()) else {
            continue;
        };
        match kind {
            Some(raw::REMOTE_GPU) => *outgoing.direct.entry(bus).or_default() += 1,
            Some(_) => {}
            // Drivers before 460 do not report the type: then it is a GPU of this node, or a switch.
            None if gpu_buses.contains(&bus) => *outgoing.direct.entry(bus).or_default() += 1,
            None => outgoing.switched += 1,
        }
    }
    Ok(outgoing)
}
