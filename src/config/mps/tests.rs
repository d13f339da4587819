use super::*;
use crate::config::{FileConfig, ServeArgs};
use crate::kernel::allocation::{Decision, Holder};
use crate::kernel::change::{Change, Entry};
use crate::kernel::gpu::{Mig, Part};
use crate::kernel::names::{AllocationId, DeviceId, Resource};
use crate::kernel::part_state::{Device, Standing};
use crate::kernel::time::Now;

const SHARED: &str = "nvidia.com/gpu.shared";

fn resource(name: &str) -> Resource {
    Resource::parse(name).unwrap()
}

/// A GPU with four shares, one with two, and a MIG instance.
fn ledger() -> Ledger {
    let part = |id: &str, mig: bool| Part {
        id: PartId::parse(id).unwrap(),
        parent: mig.then(|| PartId::parse("GPU-c").unwrap()),
        vendor: "nvidia".into(),
        model: "test".into(),
        gpu_index: 0,
        minor: None,
        memory_mib: 8000,
        pci_bus: String::new(),
        numa_node: None,
        mig_enabled: false,
        mig: mig.then(|| Mig { profile: "1g.10gb".into(), gpu_instance: 7, compute_instance: 0 }),
        attributes: BTreeMap::new(),
    };
    let shares = |id: &str, count: u32| Change::Offered {
        part: PartId::parse(id).unwrap(),
        by: "test".into(),
        lines: Vec::new(),
        ranges: Vec::new(),
        devices: (0..count)
            .map(|n| {
                let consumes =
                    Consumes::Slice { memory_mib: u64::from(8000 / count), compute_percent: 100 / count };
                let device = Device {
                    consumes,
                    standing: Standing::Offered,
                    holders: Vec::new(),
                    named_mono_ms: None,
                };
                ((resource(SHARED), Some(n)), device)
            })
            .collect(),
    };
    let mut ledger = Ledger::default();
    let changes = vec![
        Change::PartFound(part("GPU-a", false)),
        Change::PartFound(part("GPU-b", false)),
        Change::PartFound(part("MIG-c", true)),
        shares("GPU-a", 4),
        shares("GPU-b", 2),
    ];
    ledger.apply(&Entry { at: Now::default(), changes });
    ledger
}

fn allocation(name: &str, devices: &[&str], limits: Limits) -> Allocation {
    Allocation {
        id: AllocationId { store: 1, number: 1 },
        resource: resource(name),
        devices: devices.iter().map(|id| DeviceId::parse(id).unwrap()).collect(),
        granted_wall_ms: 0,
        holder: Holder::default(),
        overlapped: false,
        decision: Decision { limits, ..Decision::default() },
        ended: None,
    }
}

fn edits(yaml: &str) -> Result<Edits, String> {
    let file = FileConfig::parse(&format!("containerEdits: {{resources: {{{SHARED}: {{mps: {yaml}}}}}}}"))?;
    crate::config::Config::merge(&ServeArgs::default(), file).map(|c| c.edits).map_err(|e| e.to_string())
}

const BOTH: Limits = Limits { memory_mib: Some(500), compute_percent: Some(10) };
const NONE: Limits = Limits { memory_mib: None, compute_percent: None };

#[test]
fn limits_are_the_policys_word_or_what_the_shares_set_aside() {
    let memory_only = Limits { compute_percent: None, ..BOTH };
    for (devices, said, memory_mib, compute_percent) in [
        (&["GPU-a::0"][..], NONE, Some(2000), Some(25)),
        (&["GPU-a::0", "GPU-a::2"], NONE, Some(4000), Some(50)),
        (&["GPU-a::0", "GPU-b::1"], NONE, Some(2000), Some(25)),
        (&["GPU-b::0", "GPU-b::1"], NONE, Some(8000), None),
        (&["GPU-a::0"], BOTH, Some(500), Some(10)),
        (&["GPU-a::0"], memory_only, Some(500), Some(25)),
    ] {
        let got = mps_limits(&ledger(), &allocation(SHARED, devices, said));
        assert_eq!(got, Limits { memory_mib, compute_percent }, "{devices:?} {said:?}");
    }
    assert_eq!(mps_limits(&ledger(), &allocation("nvidia.com/gpu", &["GPU-a"], NONE)), NONE);
}

#[test]
fn who_enforces_is_told_by_the_resource_and_the_parts() {
    let with = edits("{pipeDirectory: /run/mps}").unwrap();
    let (without, ledger) = (Edits::default(), ledger());
    let of = |edits: &Edits, name: &str, devices: &[&str], limits| {
        enforced_by(edits, &ledger, &allocation(name, devices, limits)).as_str()
    };
    assert_eq!(of(&without, SHARED, &["GPU-a::0"], BOTH), "none");
    assert_eq!(of(&with, SHARED, &["GPU-a::0"], NONE), "mps");
    assert_eq!(of(&with, "nvidia.com/gpu", &["GPU-a"], BOTH), "none", "another resource");
    assert_eq!(of(&with, "nvidia.com/mig-1g.10gb", &["MIG-c"], NONE), "mig");
    assert_eq!(of(&without, "nvidia.com/mig-1g.10gb", &["MIG-c"], BOTH), "none", "tighter than the instance");
    assert_eq!(of(&without, SHARED, &["MIG-c::0"], NONE), "none", "a share of an instance");
}

#[test]
fn the_configuration_names_the_daemons_folders() {
    let edits = edits("{pipeDirectory: /run/mps, containerPipeDirectory: /mps}").unwrap();
    let mps = edits.resources[&resource(SHARED)].mps.clone().unwrap();
    assert_eq!((mps.inner_pipe_directory(), mps.shm.as_str()), ("/mps", "/dev/shm"));
    let sockets = edits.mps_sockets();
    assert_eq!(sockets[&resource(SHARED)], Path::new("/run/mps/control"));
}

#[test]
fn a_wrong_configuration_is_refused() {
    for (yaml, says) in [
        ("{}", "pipeDirectory"),
        ("{pipeDirectory: run/mps}", "absolute"),
        ("{pipeDirectory: /run/mps, shm: /a/../b}", "absolute"),
        ("{pipeDirectory: /run/mps, pipes: /x}", "pipes"),
    ] {
        let said = edits(yaml).unwrap_err();
        assert!(said.contains(says), "{yaml}: {said}");
    }
}
