//! The GPU models that can be simulated, and their properties.

use berth_kernel::gpu::Path;

/// A GPU model. Names and memory as `nvidia-smi` shows them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Model {
    /// The key in a profile such as `sim:8xh100`.
    pub(super) key: &'static str,
    pub(super) name: &'static str,
    pub(super) memory_mib: u64,
    pub(super) compute_capability: &'static str,
    pub(super) architecture: &'static str,
    /// NVLinks of a GPU to the NVSwitches of its board; 0 for boards with PCIe only.
    pub(super) nvlinks: u32,
    /// Whether it can be split into MIG instances.
    pub(super) mig: bool,
    /// Size of a group of GPUs that are nearer to each other than their NUMA node.
    pub(super) neighbours: u32,
    /// The path between the GPUs of such a group.
    pub(super) neighbour_path: Path,
}

const H100: Model = Model {
    key: "h100",
    name: "NVIDIA H100 80GB HBM3",
    memory_mib: 81_559,
    compute_capability: "9.0",
    architecture: "hopper",
    nvlinks: 18,
    mig: true,
    neighbours: 1,
    neighbour_path: Path::SameNuma,
};

const L40S: Model = Model {
    key: "l40s",
    name: "NVIDIA L40S",
    memory_mib: 46_068,
    compute_capability: "8.9",
    architecture: "ada",
    nvlinks: 0,
    mig: false,
    neighbours: 2,
    neighbour_path: Path::SingleSwitch,
};

/// All models.
pub(super) const MODELS: [Model; 9] = [
    Model {
        key: "t4",
        name: "Tesla T4",
        memory_mib: 15_360,
        compute_capability: "7.5",
        architecture: "turing",
        neighbour_path: Path::HostBridge,
        ..L40S
    },
    Model {
        key: "a10",
        name: "NVIDIA A10",
        memory_mib: 23_028,
        compute_capability: "8.6",
        architecture: "ampere",
        ..L40S
    },
    Model { key: "l4", name: "NVIDIA L4", memory_mib: 23_034, ..L40S },
    L40S,
    Model { key: "a100-40gb", name: "NVIDIA A100-SXM4-40GB", memory_mib: 40_960, ..A100 },
    A100,
    H100,
    Model { key: "h200", name: "NVIDIA H200", memory_mib: 143_771, ..H100 },
    Model {
        key: "b200",
        name: "NVIDIA B200",
        memory_mib: 183_359,
        compute_capability: "10.0",
        architecture: "blackwell",
        ..H100
    },
];

/// HGX A100: pairs of GPUs behind common PCIe switches.
const A100: Model = Model {
    key: "a100",
    name: "NVIDIA A100-SXM4-80GB",
    memory_mib: 81_920,
    compute_capability: "8.0",
    architecture: "ampere",
    nvlinks: 12,
    mig: true,
    neighbours: 2,
    neighbour_path: Path::MultiSwitch,
};

impl Model {
    /// The model with this key.
    pub(super) fn find(key: &str) -> Option<&'static Self> {
        MODELS.iter().find(|model| model.key == key)
    }

    /// All keys, for error messages.
    pub(super) fn keys() -> String {
        MODELS.map(|model| model.key).join(", ")
    }

    /// Compute slices and memory in MiB of a MIG profile of this model, such as `1g.10gb`. Memory is divided into
    /// eighths, and compute into sevenths of the GPU.
    pub(super) fn profile(&self, name: &str) -> Option<(u32, u64)> {
        /// Slices and eighths of memory.
        const PROFILES: [(u32, u64); 5] = [(1, 1), (2, 2), (3, 4), (4, 4), (7, 8)];
        let gb = self.memory_mib.div_ceil(1024);
        PROFILES
            .into_iter()
            .filter(|_| self.mig)
            .find(|(slices, eighths)| name == format!("{slices}g.{}gb", (gb * eighths + 4) / 8))
            .map(|(slices, eighths)| (slices, self.memory_mib * eighths / 8))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_are_named_as_nvidia_names_them() {
        let named = |key: &str, profile: &str| Model::find(key).unwrap().profile(profile);
        assert_eq!(named("h100", "1g.10gb"), Some((1, 10_194)));
        assert_eq!(named("h200", "1g.18gb"), Some((1, 17_971)));
        assert_eq!(named("b200", "1g.23gb"), Some((1, 22_919)));
        assert_eq!(named("a100-40gb", "3g.20gb"), Some((3, 20_480)));
        assert_eq!(named("h100", "1g.18gb"), None);
        assert_eq!(named("t4", "1g.2gb"), None);
    }

    #[test]
    fn every_key_finds_its_model() {
        for model in &MODELS {
            assert_eq!(Model::find(model.key), Some(model));
        }
    }
}
