//! Builds the inventory of a simulated machine. Deterministic: equal machines have equal inventories at the same scan.

use super::load::load;
use super::machine::{Machine, Model, SimGpu, SimKind, SimProcess};
use berth_kernel::hardware::gpu::{
    Inventory, Link, Links, MIG_INDEX, Mig, NVIDIA, Part, Path, RECOVERY, Reading, Usage,
};
use berth_kernel::hardware::process::{Process, ProcessIdentity, Uses};
use berth_kernel::ids::names::{GpuId, PartId};
use berth_kernel::ids::pci::PciBusId;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};

/// The result of the scan with this number of the machine. `None` only for an unknown model, which [`Machine::check`]
/// rejects.
pub(super) fn inventory(machine: &Machine, scan: u64) -> Option<Inventory> {
    let mut inventory = Inventory { processes_complete: true, ..Inventory::default() };
    let mut gpus = Vec::new();
    for index in 0..machine.total() {
        let model = machine.model_of(index)?;
        let default = SimGpu { index, ..SimGpu::default() };
        let differs = machine.gpus.iter().find(|gpu| gpu.index == index);
        let state = differs.unwrap_or(&default);
        if state.absent {
            continue;
        }
        let gpu = whole(model, machine.total(), index, !state.mig.is_empty())?;
        let instances = instances(model, &gpu, &state.mig)?;
        if state.lost {
            let text = "the GPU fell off the bus (simulated)".to_owned();
            inventory.scan_errors.insert(gpu.gpu.clone(), text.into());
        } else {
            add_usage(&mut inventory, &gpu, &instances, state);
            inventory.loads.insert(gpu.gpu.clone(), load(model, state, scan));
            inventory.signs.extend(state.trouble.iter().map(|text| Reading {
                part: gpu.id.clone(),
                source: RECOVERY.to_owned(),
                // NVML's recovery action for a reset.
                code: 1,
                detail: text.clone(),
            }));
        }
        gpus.push((model, gpu.clone()));
        inventory.parts.push(gpu);
        inventory.parts.extend(instances);
    }
    inventory.links = links(&gpus);
    Some(inventory)
}

/// Adds the usage and the processes of the GPU and of its instances. Processes given only by their number count for the
/// whole GPU.
fn add_usage(inventory: &mut Inventory, gpu: &Part, instances: &[Part], state: &SimGpu) {
    let part = |running: &SimProcess| running.instance.and_then(|at| instances.get(at)).unwrap_or(gpu);
    let usage = |is_counted: &dyn Fn(&SimProcess) -> bool| {
        let running = || state.running.iter().filter(|r| is_counted(r));
        let pids: BTreeSet<u32> = running().filter(|r| r.kind != SimKind::Graphics).map(|r| r.pid).collect();
        Usage {
            memory_used_mib: Some(running().map(|r| r.memory_mib).sum()),
            processes: u32::try_from(pids.len()).unwrap_or(u32::MAX),
        }
    };
    let mut whole = usage(&|_| true);
    whole.memory_used_mib = whole.memory_used_mib.map(|mib| mib.saturating_add(state.memory_used_mib));
    whole.processes = whole.processes.saturating_add(state.processes);
    inventory.usage.insert(gpu.id.clone(), whole);
    for instance in instances {
        inventory.usage.insert(instance.id.clone(), usage(&|running| part(running).id == instance.id));
    }
    if state.processes == 0 {
        let processes = state.running.iter().map(|running| Process {
            pid: running.pid,
            part: part(running).id.clone(),
            uses: Uses {
                compute: running.kind == SimKind::Compute,
                mps: running.kind == SimKind::Mps,
                graphics: running.kind == SimKind::Graphics,
            },
            memory_mib: Some(running.memory_mib),
            identity: ProcessIdentity::default(),
        });
        inventory.processes.insert(gpu.gpu.clone(), processes.collect());
    }
}

/// The id of the GPU with this index.
pub(super) fn gpu_id(machine: &Machine, index: u32) -> Option<GpuId> {
    part_id("GPU", &format!("{}/{index}", machine.model_of(index)?.key)).map(|part| GpuId::of_whole(&part))
}

fn whole(model: &Model, count: u32, index: u32, mig_enabled: bool) -> Option<Part> {
    // Two NUMA nodes if there are more than two GPUs.
    let per_node = if count > 2 { count.div_ceil(2) } else { count };
    let facts = [
        ("compute.capability", model.compute_capability),
        ("architecture", model.architecture),
        ("brand", "nvidia"),
        ("mig.capable", if model.mig { "true" } else { "false" }),
        // Boards without a display.
        ("pci.class", "0x030200"),
        ("simulated", "true"),
    ];
    let id = part_id("GPU", &format!("{}/{index}", model.key))?;
    Some(Part {
        gpu: GpuId::of_whole(&id),
        id,
        vendor: NVIDIA.to_owned(),
        model: model.name.to_owned(),
        gpu_index: index,
        minor: Some(index),
        memory_mib: model.memory_mib,
        pci_bus: PciBusId::parse(&format!("{:02x}:00.0", 0x07 + 0x0c * index)).ok(),
        numa_node: Some(index / per_node),
        mig_enabled,
        mig: None,
        attributes: BTreeMap::from(facts.map(|(k, v)| (k.to_owned(), v.to_owned()))),
    })
}

fn instances(model: &Model, gpu: &Part, profiles: &[String]) -> Option<Vec<Part>> {
    let instance = |(number, profile): (u32, &String)| {
        let (slices, memory_mib) = model.profile(profile)?;
        let mut attributes = gpu.attributes.clone();
        attributes.insert(MIG_INDEX.to_owned(), number.to_string());
        attributes.extend(["gi", "ci"].map(|of| (format!("mig.slices.{of}"), slices.to_string())));
        Some(Part {
            id: part_id("MIG", &format!("{}/{number}", gpu.id))?,
            gpu: gpu.gpu.clone(),
            model: format!("{} MIG {profile}", model.name),
            memory_mib,
            attributes,
            mig_enabled: false,
            mig: Some(Mig {
                profile: profile.clone(),
                // Small instances are numbered from 7 on real boards.
                gpu_instance: 7 + number,
                compute_instance: 0,
            }),
            ..gpu.clone()
        })
    };
    (0..).zip(profiles).map(instance).collect()
}

/// Boards of different models have neither NVLinks nor PCIe switches in common.
fn links(gpus: &[(&Model, Part)]) -> Links {
    let mut links = Links::default();
    for (at, (model, a)) in gpus.iter().enumerate() {
        for (other, b) in &gpus[at + 1..] {
            let same_model = model.key == other.key;
            let near = same_model && a.gpu_index / model.neighbours == b.gpu_index / model.neighbours;
            let path = match a.numa_node == b.numa_node {
                true if near => model.neighbour_path,
                true => Path::SameNuma,
                false => Path::CrossNuma,
            };
            let nvlinks = if same_model { model.nvlinks } else { 0 };
            links.set(&a.gpu, &b.gpu, Link { path, nvlinks });
        }
    }
    links
}

/// The id of a part, with a UUID derived from a seed (version 8: the custom format).
fn part_id(kind: &str, seed: &str) -> Option<PartId> {
    let digest = Sha256::digest(format!("berth simulated GPU {seed}").as_bytes());
    let hex: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    let uuid = format!("{}-{}-8{}-a{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[17..20], &hex[20..]);
    PartId::parse(&format!("{kind}-{uuid}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scan(profile: &str) -> Inventory {
        inventory(&Machine::from_profile(profile).unwrap(), 0).unwrap()
    }

    fn between(inventory: &Inventory, a: usize, b: usize) -> (Path, u32) {
        let ids = (&inventory.parts[a].gpu, &inventory.parts[b].gpu);
        let link = inventory.links.between(ids.0, ids.1).unwrap();
        (link.path, link.nvlinks)
    }

    #[test]
    fn links_and_numa_nodes_are_those_of_the_model() {
        let h100 = scan("8xh100");
        assert_eq!(between(&h100, 0, 3), (Path::SameNuma, 18));
        assert_eq!(between(&h100, 0, 4), (Path::CrossNuma, 18));
        assert_eq!(h100.parts[7].numa_node, Some(1));
        let a100 = scan("8xa100");
        assert_eq!(between(&a100, 2, 3), (Path::MultiSwitch, 12));
        assert_eq!(between(&a100, 1, 2), (Path::SameNuma, 12));
        let t4 = scan("2xt4");
        assert_eq!(between(&t4, 0, 1), (Path::HostBridge, 0));
        assert_eq!(scan("16xh200").links.iter().count(), 120);
        let both = scan("2xa100+2xl4");
        assert_eq!(between(&both, 0, 1), (Path::MultiSwitch, 12));
        assert_eq!(between(&both, 1, 2), (Path::CrossNuma, 0));
        assert_eq!(between(&both, 2, 3), (Path::SingleSwitch, 0));
        assert_eq!((both.parts[1].memory_mib, both.parts[2].memory_mib), (81_920, 23_034));
    }

    #[test]
    fn idle_gpus_have_an_empty_list_of_processes() {
        let mut machine = Machine::from_profile("2xh100").unwrap();
        machine.gpus = vec![SimGpu { index: 1, mig: vec!["1g.10gb".into()], ..SimGpu::default() }];
        let idle = inventory(&machine, 0).unwrap();
        assert!(idle.processes_complete);
        for gpu in idle.parts.iter().filter(|part| part.is_whole_gpu()) {
            assert_eq!(idle.processes.get(&gpu.gpu).map(Vec::len), Some(0), "{}", gpu.id);
            assert_eq!(idle.usage.get(&gpu.id).map(|usage| usage.processes), Some(0), "{}", gpu.id);
        }
    }

    #[test]
    fn ids_are_uuids_and_deterministic() {
        let machine = scan("16xb200");
        assert_eq!(machine, scan("16xb200"));
        for (index, part) in (0..).zip(&machine.parts) {
            let text = part.id.as_str();
            assert_eq!(text.len(), 40, "{text}");
            let lengths: Vec<_> = text[4..].split('-').map(str::len).collect();
            assert_eq!(lengths, [8, 4, 4, 4, 12]);
            let id = gpu_id(&Machine::from_profile("16xb200").unwrap(), index);
            assert_eq!(id.as_ref(), Some(&part.gpu));
        }
    }
}
