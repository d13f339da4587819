//! MIG: instances of a GPU, and the profiles they come in.

use serde::{Deserialize, Serialize};

/// MIG of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mig {
    /// MIG mode now.
    #[serde(default)]
    pub enabled: bool,
    /// MIG mode after the next reset; by default as now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<bool>,
    /// Whether the caller may see all of a GPU in MIG mode; else its memory, its processes and its GPU instances answer
    /// `NO_PERMISSION` (nvml.h), and those of its MIG devices do not.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub privileged: bool,
    /// How many MIG devices the model allows.
    #[serde(default = "seven")]
    pub max_devices: u32,
    /// The MIG devices; an instance's index is its position.
    #[serde(default)]
    pub instances: Vec<Instance>,
}

fn yes() -> bool {
    true
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_true(value: &bool) -> bool {
    *value
}

fn seven() -> u32 {
    7
}

impl Default for Mig {
    fn default() -> Self {
        Self { enabled: false, pending: None, privileged: true, max_devices: seven(), instances: Vec::new() }
    }
}

/// One MIG device: a GPU instance with one compute instance that fills it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Instance {
    /// `MIG-` and a UUID.
    pub uuid: String,
    /// GPU instance id, unique on its GPU.
    pub gpu_instance: u32,
    /// Compute instance id within the GPU instance.
    #[serde(default)]
    pub compute_instance: u32,
    /// Profile name such as `1g.10gb` or `1g.10gb+me`.
    pub profile: String,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Memory in use in MiB.
    #[serde(default)]
    pub memory_used_mib: u64,
    /// Compute slices: 1, 2, 3, 4 or 7.
    pub slices: u32,
    /// Multiprocessors.
    #[serde(default)]
    pub multiprocessors: u32,
}

impl Instance {
    /// The profile's name in two: slices and memory, and what comes beyond.
    pub(crate) fn named(&self) -> (&str, &str) {
        self.profile.split_at(self.profile.find(['+', '-']).unwrap_or(self.profile.len()))
    }
}

/// `NVML_GPU_INSTANCE_PROFILE_*`: (index, compute slices, profile id on NVIDIA's boards, what its name ends in).
/// The ids are those that `nvidia-smi mig -lgip` shows.
const PROFILES: [(u32, u32, u32, &str); 14] = [
    (0, 1, 19, ""),
    (1, 2, 14, ""),
    (2, 3, 9, ""),
    (3, 4, 5, ""),
    (4, 7, 0, ""),
    (7, 1, 20, "+me"),
    (8, 2, 21, "+me"),
    (10, 1, 47, "+gfx"),
    (11, 2, 35, "+gfx"),
    (12, 4, 32, "+gfx"),
    (13, 1, 67, "-me"),
    (14, 2, 66, "-me"),
    (15, 1, 65, "+me.all"),
    (16, 2, 64, "+me.all"),
];

/// `NVML_GPU_INSTANCE_PROFILE_COUNT` is above this in every header; a larger index is a mistake of the caller.
pub(crate) const PROFILE_INDEX_LIMIT: u32 = 32;

/// One row of the profile table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Profile {
    /// `NVML_GPU_INSTANCE_PROFILE_*`; the compute instance profile has the same index.
    pub(crate) index: u32,
    /// Compute slices.
    pub(crate) slices: u32,
    /// GPU instance profile id.
    pub(crate) id: u32,
    /// What its name has beyond slices and memory.
    pub(crate) extras: &'static str,
}

impl Profile {
    /// The profile at an index of the header.
    pub(crate) fn at(index: u32) -> Option<Self> {
        Self::find(|profile| profile.index == index)
    }

    /// The plain profile with so many slices.
    pub(crate) fn of_slices(slices: u32) -> Option<Self> {
        Self::find(|profile| profile.slices == slices && profile.extras.is_empty())
    }

    /// The profile of an instance, by its slices and the end of its profile's name.
    pub(crate) fn of(instance: &Instance) -> Option<Self> {
        let (_, extras) = instance.named();
        Self::find(|profile| profile.slices == instance.slices && profile.extras == extras)
    }

    /// Compute instance profile id: NVIDIA numbers them as the indices.
    pub(crate) fn compute_id(self) -> u32 {
        self.index
    }

    /// How many of it fit on a GPU of seven slices.
    pub(crate) fn instances(self) -> u32 {
        // Three slices take half of the memory, four too.
        match self.slices {
            3 => 2,
            4 => 1,
            slices => 7 / slices,
        }
    }

    fn find(wanted: impl Fn(&Self) -> bool) -> Option<Self> {
        PROFILES.iter().map(|&(index, slices, id, extras)| Self { index, slices, id, extras }).find(wanted)
    }
}

/// Eighths of a GPU's memory that so many slices get: memory comes in eight parts, compute in seven.
pub(crate) fn memory_eighths(slices: u32) -> u64 {
    match slices {
        3 | 4 => 4,
        7 => 8,
        slices => u64::from(slices),
    }
}
