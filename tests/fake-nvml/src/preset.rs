//! Believable machines: a model's facts and its wiring.

use crate::gpu::{Ecc, Gpu, RemappedRows};
use crate::instance::{Instance, Mig, memory_eighths};
use crate::link::{Level, NvLink, Pair, Remote};
use crate::state::State;

/// The facts of one model. Names and memory as `nvidia-smi` shows them, device ids as in the PCI id list.
struct Model {
    name: &'static str,
    memory_mib: u64,
    pci_device_id: u32,
    compute_capability: (u32, u32),
    architecture: u32,
    /// NVLinks to the NVSwitches; 0 for PCIe boards.
    nvlinks: usize,
    mig: bool,
    power_limit_mw: u32,
    /// GPUs on one PCIe switch, and the level of such neighbours.
    neighbours: (usize, Level),
}

const H100: Model = Model {
    name: "NVIDIA H100 80GB HBM3",
    memory_mib: 81_559,
    pci_device_id: 0x2330_10DE,
    compute_capability: (9, 0),
    architecture: 9,
    nvlinks: 18,
    mig: true,
    power_limit_mw: 700_000,
    neighbours: (1, Level::Node),
};
const H200: Model = Model { name: "NVIDIA H200", memory_mib: 143_771, pci_device_id: 0x2335_10DE, ..H100 };
const B200: Model = Model {
    name: "NVIDIA B200",
    memory_mib: 183_359,
    pci_device_id: 0x2901_10DE,
    compute_capability: (10, 0),
    architecture: 10,
    power_limit_mw: 1_000_000,
    ..H100
};
const A100: Model = Model {
    name: "NVIDIA A100-SXM4-80GB",
    memory_mib: 81_920,
    pci_device_id: 0x20B2_10DE,
    compute_capability: (8, 0),
    architecture: 7,
    nvlinks: 12,
    mig: true,
    power_limit_mw: 400_000,
    neighbours: (2, Level::Multiple),
};
const L40S: Model = Model {
    name: "NVIDIA L40S",
    memory_mib: 46_068,
    pci_device_id: 0x26B9_10DE,
    compute_capability: (8, 9),
    architecture: 8,
    nvlinks: 0,
    mig: false,
    power_limit_mw: 350_000,
    neighbours: (2, Level::Single),
};
const L4: Model = Model {
    name: "NVIDIA L4",
    memory_mib: 23_034,
    pci_device_id: 0x27B8_10DE,
    power_limit_mw: 72_000,
    ..L40S
};
const T4: Model = Model {
    name: "Tesla T4",
    memory_mib: 15_360,
    pci_device_id: 0x1EB8_10DE,
    compute_capability: (7, 5),
    architecture: 6,
    nvlinks: 0,
    mig: false,
    power_limit_mw: 70_000,
    neighbours: (2, Level::Hostbridge),
};

/// NVSwitches of a board: links go round them.
const SWITCHES: usize = 4;

impl State {
    /// HGX H100: 18 NVLinks from every GPU to the switches, two NUMA nodes.
    pub fn h100(count: usize) -> Self {
        machine(&H100, count)
    }

    /// HGX H200.
    pub fn h200(count: usize) -> Self {
        machine(&H200, count)
    }

    /// HGX B200.
    pub fn b200(count: usize) -> Self {
        machine(&B200, count)
    }

    /// HGX A100 80 GB: 12 NVLinks, pairs behind common PCIe switches.
    pub fn a100(count: usize) -> Self {
        machine(&A100, count)
    }

    /// L40S boards on PCIe.
    pub fn l40s(count: usize) -> Self {
        machine(&L40S, count)
    }

    /// L4 boards on PCIe.
    pub fn l4(count: usize) -> Self {
        machine(&L4, count)
    }

    /// T4 boards on PCIe.
    pub fn t4(count: usize) -> Self {
        machine(&T4, count)
    }

    /// Splits the GPU at `index` into MIG devices of so many slices each, and answers their UUIDs.
    ///
    /// # Panics
    /// If there is no such GPU, its model has no MIG, or the slices are more than seven.
    #[allow(clippy::cast_possible_truncation, reason = "at most seven instances")]
    pub fn split(&mut self, index: usize, slices: &[u32]) -> Vec<String> {
        assert!(slices.iter().sum::<u32>() <= 7, "a GPU has seven slices");
        let gpu = &mut self.gpus[index];
        let total = gpu.memory_total_mib.unwrap_or(0);
        let Some(mig) = &mut gpu.mig else {
            panic!("{} has no MIG", gpu.name);
        };
        mig.enabled = true;
        mig.instances = slices
            .iter()
            .enumerate()
            .map(|(at, &slices)| Instance {
                uuid: format!("MIG-{}", hexadecimal(&format!("{}/{at}", gpu.uuid))),
                // As on real boards: 0 is the whole GPU, the small ones are counted from 7.
                gpu_instance: 7 + at as u32,
                compute_instance: 0,
                profile: profile_name(slices, total),
                memory_mib: total * memory_eighths(slices) / 8,
                memory_used_mib: 0,
                slices,
                multiprocessors: 14 * slices,
            })
            .collect();
        mig.instances.iter().map(|instance| instance.uuid.clone()).collect()
    }
}

/// `1g.10gb`: slices and memory, rounded as NVIDIA names its profiles.
pub(crate) fn profile_name(slices: u32, total_mib: u64) -> String {
    let whole_gb = total_mib.div_ceil(1024);
    let gb = (whole_gb * memory_eighths(slices) + 4) / 8;
    format!("{slices}g.{gb}gb")
}

/// A machine with `count` GPUs of a model: half of them on NUMA node 0 and half on node 1, if there are more than two.
#[allow(clippy::cast_possible_truncation, reason = "a machine has a few GPUs")]
fn machine(model: &Model, count: usize) -> State {
    let half = if count > 2 { count.div_ceil(2) } else { count };
    let gpus: Vec<Gpu> =
        (0..count).map(|index| board(model, index, (index / half.max(1)) as u32, count)).collect();
    let (group, level) = model.neighbours;
    let topology = pairs(count)
        .filter(|(a, b)| a / group == b / group && gpus[*a].numa_node == gpus[*b].numa_node)
        .map(|(a, b)| Pair { a: gpus[a].uuid.clone(), b: gpus[b].uuid.clone(), level })
        .collect();
    State { gpus, topology, ..State::default() }
}

fn pairs(count: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..count).flat_map(move |a| (a + 1..count).map(move |b| (a, b)))
}

fn board(model: &Model, index: usize, numa_node: u32, count: usize) -> Gpu {
    // Twelve bus numbers apart, sixteen GPUs stay below the switches' 0xd0.
    let bus_id = format!("{:08X}:{:02X}:00.0", index / 16, 0x07 + 0x0c * (index % 16));
    let uuid = format!("GPU-{}", hexadecimal(&format!("{}/{index}", model.name)));
    let links = if count > 1 { model.nvlinks } else { 0 };
    Gpu {
        pci_device_id: model.pci_device_id,
        numa_node: Some(numa_node),
        compute_capability: model.compute_capability,
        architecture: model.architecture,
        serial: Some(format!("16{:011}", 20_000 + index)),
        mig: model.mig.then(Mig::default),
        nvlinks: (0..links)
            .map(|link| {
                let remote = Remote::Switch(format!("00000000:D{:X}:00.0", link % SWITCHES));
                Some(NvLink { remote, active: true })
            })
            .collect(),
        ecc: Some(Ecc::default()),
        remapped_rows: (model.architecture >= 7).then(RemappedRows::default),
        power_mw: model.power_limit_mw / 10,
        power_limit_mw: model.power_limit_mw,
        ..Gpu::new(uuid, model.name, model.memory_mib, bus_id)
    }
}

/// A UUID's hexadecimal part, always the same for the same seed (FNV-1a, twice with different starts).
fn hexadecimal(seed: &str) -> String {
    let hash = |start: u64| {
        seed.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
    };
    let (a, b) = (hash(0xcbf2_9ce4_8422_2325), hash(0x9e37_79b9_7f4a_7c15));
    format!(
        "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        a >> 32,
        (a >> 16) & 0xffff,
        a & 0xffff,
        b >> 48,
        b & 0xffff_ffff_ffff
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn sixteen_gpus_have_names_and_addresses_of_their_own() {
        for state in [
            State::h100(16),
            State::h200(16),
            State::b200(16),
            State::a100(16),
            State::l40s(16),
            State::l4(16),
            State::t4(16),
        ] {
            let uuids: HashSet<_> = state.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
            let buses: HashSet<_> = state.gpus.iter().map(|gpu| gpu.pci_address().unwrap()).collect();
            assert_eq!((uuids.len(), buses.len()), (16, 16));
            assert!(state.gpus.iter().all(|gpu| gpu.uuid.len() == 40));
        }
        assert_eq!(State::h100(2), State::h100(2), "always the same machine");
    }

    #[test]
    fn links_are_those_of_the_model() {
        let h100 = State::h100(8);
        assert_eq!(h100.gpus[0].nvlinks.len(), 18);
        assert_eq!(h100.level(&h100.gpus[0], &h100.gpus[3]), Level::Node);
        assert_eq!(h100.level(&h100.gpus[0], &h100.gpus[4]), Level::System);
        let t4 = State::t4(2);
        assert!(t4.gpus[0].nvlinks.is_empty());
        assert_eq!(t4.level(&t4.gpus[0], &t4.gpus[1]), Level::Hostbridge);
        let a100 = State::a100(8);
        assert_eq!(a100.level(&a100.gpus[0], &a100.gpus[1]), Level::Multiple);
        assert_eq!(a100.level(&a100.gpus[1], &a100.gpus[2]), Level::Node);
    }

    #[test]
    fn profiles_are_named_as_nvidia_names_them() {
        let mut state = State::h100(1);
        assert_eq!(state.split(0, &[1, 2, 3]).len(), 3);
        let names: Vec<_> = state.gpus[0]
            .mig
            .iter()
            .flat_map(|mig| &mig.instances)
            .map(|instance| instance.profile.as_str())
            .collect();
        assert_eq!(names, ["1g.10gb", "2g.20gb", "3g.40gb"]);
        let mut state = State::h200(1);
        state.split(0, &[1, 2, 4]);
        let names: Vec<_> = state.gpus[0]
            .mig
            .iter()
            .flat_map(|mig| &mig.instances)
            .map(|instance| instance.profile.as_str())
            .collect();
        assert_eq!(names, ["1g.18gb", "2g.35gb", "4g.71gb"]);
    }
}
