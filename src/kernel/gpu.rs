//! GPUs and their parts as a backend found them, and how near they sit to each other.

use super::names::PartId;
use super::process::{Process, Sight};
use std::collections::BTreeMap;

/// Most parts of one node: 16 GPUs in at most 7 MIG instances each, and room for four times that.
pub const PARTS_MAX: usize = 512;

/// The attribute that holds a MIG instance's index on its GPU.
pub const MIG_INDEX: &str = "mig.index";

/// What devices are made of: a whole GPU, or a MIG instance, which names its GPU in `parent`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its UUID.
    pub id: PartId,
    /// The GPU of a MIG instance; `None` for a whole GPU.
    pub parent: Option<PartId>,
    /// `nvidia`.
    pub vendor: String,
    /// NVML's product name, e.g. `NVIDIA H100 80GB HBM3`.
    pub model: String,
    /// NVML's index of the GPU (of the parent, for a MIG instance).
    pub gpu_index: u32,
    /// N of `/dev/nvidiaN`, where known.
    pub minor: Option<u32>,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// PCI bus id as NVML writes it, e.g. `00000000:65:00.0`.
    pub pci_bus: String,
    /// NUMA node; `None` where the node does not say (sysfs shows -1).
    pub numa_node: Option<u32>,
    /// A GPU in MIG mode is not granted itself; its instances are.
    pub mig_enabled: bool,
    /// Set for a MIG instance.
    pub mig: Option<Mig>,
    /// Further facts by key: `compute.capability`, `architecture`, `brand`, ...
    pub attributes: BTreeMap<String, String>,
}

impl Part {
    /// The index of a MIG instance on its GPU, where the backend tells it: the `M` of `G:M`, by which
    /// NVIDIA's runtime takes an instance.
    #[must_use]
    pub fn mig_index(&self) -> Option<u32> {
        self.attributes.get(MIG_INDEX)?.parse().ok()
    }

    /// The GPU that health, drain and processes belong to.
    #[must_use]
    pub fn gpu(&self) -> &PartId {
        self.parent.as_ref().unwrap_or(&self.id)
    }
}

/// What makes a MIG instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mig {
    /// `1g.10gb`, as in NVIDIA's resource name `nvidia.com/mig-1g.10gb`.
    pub profile: String,
    /// GPU instance id.
    pub gpu_instance: u32,
    /// Compute instance id.
    pub compute_instance: u32,
}

/// How a part fares at the moment of a reading.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Memory in use, MiB.
    pub memory_used_mib: u64,
    /// Processes that compute there, as the backend counts them. Who they are is in
    /// [`Inventory::processes`], where the backend tells.
    pub processes: u32,
}

/// How close two GPUs sit, nearest first. NVML's common ancestor levels.
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

/// Links between GPUs, both ways. Read once and kept; MIG instances use their parent's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Links {
    pairs: BTreeMap<(PartId, PartId), Link>,
}

/// The link between one pair of GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// The PCIe way.
    pub path: Path,
    /// Active NVLinks between the two (over NVSwitch: the smaller of both sides' count).
    pub nvlinks: u32,
}

impl Links {
    /// Sets the link between two GPUs, whichever way round.
    pub fn set(&mut self, a: &PartId, b: &PartId, link: Link) {
        self.pairs.insert(ordered(a, b), link);
    }

    /// The link between two GPUs; `None` where it is not known.
    #[must_use]
    pub fn between(&self, a: &PartId, b: &PartId) -> Option<Link> {
        self.pairs.get(&ordered(a, b)).copied()
    }

    /// All pairs, each once, in the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = (&PartId, &PartId, Link)> {
        self.pairs.iter().map(|((a, b), link)| (a, b, *link))
    }
}

fn ordered(a: &PartId, b: &PartId) -> (PartId, PartId) {
    if a <= b { (a.clone(), b.clone()) } else { (b.clone(), a.clone()) }
}

/// One look at the node's GPUs by a backend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// Whole GPUs and MIG instances that answered or are known to be there.
    pub parts: Vec<Part>,
    /// Links between the GPUs.
    pub links: Links,
    /// What parts do now, where it could be read.
    pub usage: BTreeMap<PartId, Usage>,
    /// The processes on each GPU (by UUID), those of its instances among them, where the backend tells
    /// them one by one.
    pub processes: BTreeMap<PartId, Vec<Process>>,
    /// Whether those are all, whatever the daemon may see: only who makes the GPUs up knows that.
    pub processes_complete: bool,
    /// How far it was told whose processes those are.
    pub sight: Sight,
    /// GPUs (by UUID) that are there but cannot be asked, and why: lost, a call that hangs or fails.
    pub troubles: BTreeMap<PartId, String>,
    /// What the hardware says of GPUs that answer, told anew at every look as long as it lasts. What it
    /// means is for the policies, as with events.
    pub signs: Vec<Reading>,
    /// Driver version, where the backend has one.
    pub driver_version: Option<String>,
    /// CUDA version of the driver, where the backend has one.
    pub cuda_version: Option<String>,
}

/// Source of an event: NVIDIA's driver reports an error; the code is its number.
pub const XID: &str = "xid";
/// Source of a sign: the GPU asks for an action; the code is NVML's number of it.
pub const RECOVERY: &str = "recovery";
/// Source of a sign: rows of the GPU's memory; the code is [`ROWS_PENDING`] or [`ROWS_FAILED`].
pub const ROWS: &str = "rows";
/// A row is replaced at the next reset; until then the GPU goes on without it.
pub const ROWS_PENDING: u64 = 1;
/// A row could not be replaced: there are no spare ones left.
pub const ROWS_FAILED: u64 = 2;

/// An NVML event or a health reading of one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The part that it names. Where NVML names none, the backend sends one reading per GPU.
    pub part: PartId,
    /// `xid`, `ecc`, `lost`, or a sign: [`RECOVERY`], [`ROWS`].
    pub source: String,
    /// The XID or another number of the source; 0 where there is none.
    pub code: u64,
    /// In words.
    pub detail: String,
}

impl Reading {
    /// Whether it is told anew at every look as long as it lasts.
    #[must_use]
    pub fn is_sign(&self) -> bool {
        [RECOVERY, ROWS].contains(&self.source.as_str())
    }
}
