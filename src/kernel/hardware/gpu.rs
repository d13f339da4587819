//! GPUs and their parts as found by a backend, and the links between them.

use crate::hardware::process::{Process, ProcessVisibility};
use crate::ids::names::{GpuId, PartId};
use crate::ids::pci::PciBusId;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Most parts of one node: four times 16 GPUs with 7 MIG instances each.
pub const PARTS_MAX: usize = 512;

/// The vendor of all GPUs of NVML.
pub const NVIDIA: &str = "nvidia";

/// The attribute that holds a MIG instance's index on its GPU.
pub const MIG_INDEX: &str = "mig.index";

/// A unit that devices are made of: a whole GPU, or a MIG instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its UUID.
    pub id: PartId,
    /// The GPU that it is, or that it is an instance of: health, drain and processes belong to it.
    pub gpu: GpuId,
    /// The vendor: `nvidia`.
    pub vendor: String,
    /// NVML's product name, e.g. `NVIDIA H100 80GB HBM3`.
    pub model: String,
    /// NVML's index of the GPU (of its GPU, for a MIG instance).
    pub gpu_index: u32,
    /// N of `/dev/nvidiaN`, if known.
    pub minor: Option<u32>,
    /// Memory in MiB; 0 if it is unknown.
    pub memory_mib: u64,
    /// PCI bus id; `None` if it is unknown.
    pub pci_bus: Option<PciBusId>,
    /// NUMA node; `None` if it is unknown (sysfs shows -1).
    pub numa_node: Option<u32>,
    /// Whether the GPU is in MIG mode: then only its instances are granted.
    pub mig_enabled: bool,
    /// The instance's profile and ids; `None` for a whole GPU.
    pub mig: Option<Mig>,
    /// Further facts by key: `compute.capability`, `architecture`, `brand`, ...
    pub attributes: BTreeMap<String, String>,
}

impl Part {
    /// A GPU of NVIDIA of which nothing else is known.
    #[must_use]
    pub fn whole_gpu(gpu: GpuId, gpu_index: u32) -> Self {
        Self {
            id: gpu.as_part().clone(),
            gpu,
            vendor: NVIDIA.to_owned(),
            model: String::new(),
            gpu_index,
            minor: None,
            memory_mib: 0,
            pci_bus: None,
            numa_node: None,
            mig_enabled: false,
            mig: None,
            attributes: BTreeMap::new(),
        }
    }

    /// The index of a MIG instance on its GPU, if the backend has it: the `M` of `G:M` in the device names of
    /// NVIDIA's container runtime.
    #[must_use]
    pub fn mig_index(&self) -> Option<u32> {
        self.attributes.get(MIG_INDEX)?.parse().ok()
    }

    /// Whether it is a whole GPU, and not a MIG instance.
    #[must_use]
    pub fn is_whole_gpu(&self) -> bool {
        self.id == *self.gpu.as_part()
    }
}

/// The identity of a MIG instance on its GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mig {
    /// The profile, such as `1g.10gb`, as in NVIDIA's resource name `nvidia.com/mig-1g.10gb`.
    pub profile: String,
    /// GPU instance id.
    pub gpu_instance: u32,
    /// Compute instance id.
    pub compute_instance: u32,
}

/// The usage of a part at the time of a scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Memory in use, MiB; `None` if it could not be read.
    pub memory_used_mib: Option<u64>,
    /// Number of compute processes, as counted by the backend. [`Inventory::processes`] lists them if the
    /// backend can.
    pub processes: u32,
}

/// How busy and how hot a GPU is at the time of a scan. It changes with each scan and is no part of the ledger, so that
/// it causes no new snapshot and wakes no reader. A value that the model, the driver or the daemon's rights do not give
/// is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Percent of the last sample period, up to a second, in which a kernel ran (nvml.h, `nvmlUtilization_t.gpu`).
    pub utilization_percent: Option<u8>,
    /// Temperature of the GPU's die, degrees Celsius (nvml.h, `NVML_TEMPERATURE_GPU`).
    pub temperature_celsius: Option<u32>,
    /// Power draw, watts (nvml.h, `nvmlDeviceGetPowerUsage`: of the board, within 5 %).
    pub power_watts: Option<u32>,
    /// Percent of the GPU's time that each process used, by process id; `None` if the GPU does not report it. A process
    /// that is not listed used nothing.
    pub processes_percent: Option<BTreeMap<u32, u8>>,
}

/// The distance between two GPUs, nearest first; NVML's common ancestor levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Path {
    /// Two GPUs on one board.
    SameBoard,
    /// One PCIe switch between them.
    SingleSwitch,
    /// Several PCIe switches.
    MultiSwitch,
    /// A PCIe host bridge.
    HostBridge,
    /// Different host bridges of one NUMA node.
    SameNuma,
    /// Different NUMA nodes.
    CrossNuma,
}

/// Links between GPUs, in both directions. MIG instances use those of their GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Links {
    pairs: BTreeMap<(GpuId, GpuId), Link>,
}

/// The link between one pair of GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// The PCIe path.
    pub path: Path,
    /// Active NVLinks between the two GPUs (over NVSwitch: the smaller count of the two).
    pub nvlinks: u32,
}

impl Links {
    /// Sets the link between two GPUs, in both directions.
    pub fn set(&mut self, a: &GpuId, b: &GpuId, link: Link) {
        self.pairs.insert(ordered(a, b), link);
    }

    /// The link between two GPUs; `None` if it is unknown.
    #[must_use]
    pub fn between(&self, a: &GpuId, b: &GpuId) -> Option<Link> {
        self.pairs.get(&ordered(a, b)).copied()
    }

    /// All links, each once, sorted by the GPUs' ids.
    pub fn iter(&self) -> impl Iterator<Item = (&GpuId, &GpuId, Link)> {
        self.pairs.iter().map(|((a, b), link)| (a, b, *link))
    }
}

fn ordered(a: &GpuId, b: &GpuId) -> (GpuId, GpuId) {
    if a <= b { (a.clone(), b.clone()) } else { (b.clone(), a.clone()) }
}

/// The result of one scan of the node's GPUs by a backend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Whole GPUs and MIG instances that answered or are known to be present.
    pub parts: Vec<Part>,
    /// Links between the GPUs.
    pub links: Links,
    /// Current usage of the parts, where it could be read.
    pub usage: BTreeMap<PartId, Usage>,
    /// The load of the whole GPUs (by UUID) that answered.
    pub loads: BTreeMap<GpuId, Load>,
    /// The processes on each GPU (by UUID), including its instances', if the backend can list them.
    pub processes: BTreeMap<GpuId, Vec<Process>>,
    /// Whether these are all processes, whatever the daemon may see. Only simulated GPUs can set this.
    pub processes_complete: bool,
    /// Whether the owners of the processes could be determined.
    pub process_visibility: ProcessVisibility,
    /// Errors of GPUs (by UUID) that are present but cannot be used: lost, a call hangs or fails, not ready.
    pub scan_errors: BTreeMap<GpuId, ScanError>,
    /// GPUs that the driver has, and that have no part here since their UUID is not known.
    pub unidentified: Vec<UnidentifiedGpu>,
    /// GPUs in `parts` that were never read completely: only some of their facts are known.
    pub incomplete: BTreeSet<GpuId>,
    /// GPUs that the configuration excludes (`gpus.exclude`).
    pub excluded: BTreeSet<GpuId>,
    /// Health conditions of GPUs that answer, repeated in every scan while they last. As with events, the
    /// policies decide on their severity.
    pub signs: Vec<Reading>,
    /// Driver version, if the backend has one.
    pub driver_version: Option<String>,
    /// CUDA version of the driver, if the backend has one.
    pub cuda_version: Option<String>,
}

/// A GPU that the driver has and whose UUID is not known, so that it can be counted and named, but not offered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnidentifiedGpu {
    /// NVML's index; `None` if NVML does not list the GPU.
    pub index: Option<u32>,
    /// PCI bus id, if it is known.
    pub pci_bus: Option<PciBusId>,
    /// Why it is not identified, such as the NVML call that failed and its error.
    pub reason: String,
}

impl UnidentifiedGpu {
    /// Whether it is in the slot of this GPU: by bus id, or by index where one of the bus ids is unknown.
    #[must_use]
    pub fn is_in_slot_of(&self, gpu: &Part) -> bool {
        match (gpu.pci_bus, self.pci_bus) {
            (Some(was), Some(is)) => was == is,
            _ => self.index == Some(gpu.gpu_index),
        }
    }
}

impl fmt::Display for UnidentifiedGpu {
    /// `GPU 7 (00000000:DB:00.0)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.index, self.pci_bus) {
            (Some(index), Some(bus)) => write!(f, "GPU {index} ({bus})"),
            (Some(index), None) => write!(f, "GPU {index}"),
            (None, Some(bus)) => write!(f, "the GPU at {bus}"),
            (None, None) => f.write_str("a GPU"),
        }
    }
}

/// Why a GPU that is present cannot be used, as of one scan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScanError {
    /// The reason, for people.
    pub reason: String,
    /// Whether the first scan without an error makes the GPU healthy again, since nothing is wrong with the GPU: a
    /// call hung, or the driver is not ready. After other errors a quiet time passes first.
    pub heals_at_once: bool,
}

impl ScanError {
    /// A GPU that does not answer yet, or is not ready.
    #[must_use]
    pub fn not_ready(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), heals_at_once: true }
    }
}

impl fmt::Display for ScanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl<T: Into<String>> From<T> for ScanError {
    /// An error of the GPU itself.
    fn from(reason: T) -> Self {
        Self { reason: reason.into(), heals_at_once: false }
    }
}

/// Source of an event: an error of NVIDIA's driver; the code is the XID.
pub const XID: &str = "xid";
/// Source of an event or a sign: an uncorrectable ECC error; the code is their number, 0 for an event.
pub const ECC: &str = "ecc";
/// The recovery action of the IMEX domain (NVML: `nvmlDeviceGpuRecoveryAction_t`).
pub const RECOVERY_IMEX: u64 = 5;
/// Source of a sign: the GPU needs a recovery action; the code is NVML's number of the action.
pub const RECOVERY: &str = "recovery";
/// Source of a sign: retired pages of the GPU's memory, on models before Ampere; the code is [`PAGES_PENDING`].
pub const PAGES: &str = "pages";
/// A page is retired at the next reset.
pub const PAGES_PENDING: u64 = 1;
/// Code of a [`RECOVERY`] event: the GPU was reset, or otherwise recovered, since it needed that.
pub const RECOVERED: u64 = 0;
/// Source of a sign: row remapping of the GPU's memory; the code is [`ROWS_PENDING`] or [`ROWS_FAILED`].
pub const ROWS: &str = "rows";
/// A row will be remapped at the next reset; until then the GPU works without it.
pub const ROWS_PENDING: u64 = 1;
/// A row could not be remapped, because no spare rows are left.
pub const ROWS_FAILED: u64 = 2;

/// An NVML event or a health reading of one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The part that it is about. If NVML names none, the backend sends one reading per GPU.
    pub part: PartId,
    /// `xid`, `ecc`, `lost`, or a sign: [`RECOVERY`], [`ROWS`], [`PAGES`].
    pub source: String,
    /// The XID or another number of the source; 0 if there is none.
    pub code: u64,
    /// A description for people.
    pub detail: String,
}

impl Reading {
    /// Whether every scan repeats it while it lasts.
    #[must_use]
    pub fn is_sign(&self) -> bool {
        [RECOVERY, ROWS, PAGES].contains(&self.source.as_str())
    }
}
