//! How GPUs are wired: NVLinks and the nearest common ancestor on PCIe.

use serde::{Deserialize, Serialize};

/// One NVLink of a GPU; its number is its position in the GPU's list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvLink {
    /// What is at the other end.
    pub remote: Remote,
    /// Whether the link is up.
    #[serde(default = "yes")]
    pub active: bool,
}

fn yes() -> bool {
    true
}

/// The other end of an NVLink.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Remote {
    /// A GPU, by UUID.
    Gpu(String),
    /// An NVSwitch, by PCI bus id.
    Switch(String),
}

/// `nvmlGpuTopologyLevel_t`: the nearest common ancestor of two GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Two GPUs on one board.
    Internal = 0,
    /// One PCIe switch.
    Single = 10,
    /// Several PCIe switches, no host bridge.
    Multiple = 20,
    /// One host bridge.
    Hostbridge = 30,
    /// One NUMA node, several host bridges.
    Node = 40,
    /// Across NUMA nodes.
    System = 50,
}

/// The level of one pair that differs from the rule of [`crate::State::level`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pair {
    /// UUID of one GPU.
    pub a: String,
    /// UUID of the other.
    pub b: String,
    /// Their nearest common ancestor.
    pub level: Level,
}
