//! The contract of the port `Gpus`: one set of checks, run on simulated GPUs and on NVML over the fake library.

use crate::support::wait::SOON;
use berth_gpus::nvml::{NvmlGpus, NvmlOptions};
use berth_gpus::sim::{Machine, SimGpus, SimKind, SimProcess};
use berth_kernel::hardware::gpu::{Inventory, Load, Part, Path, RECOVERED, RECOVERY, Reading};
use berth_kernel::hardware::process::ProcessIdentity;
use berth_kernel::ids::names::GpuId;
use berth_kernel::node::ports::Gpus;
use fake_nvml::{Installed, Process, RecoveryAction, State};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// What a process does on a GPU.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Compute,
    Mps,
    Graphics,
}

/// A backend over H100s, and the changes that the checks make to them.
trait Backend {
    fn gpus(&self) -> &dyn Gpus;
    fn lost(&self, gpu: u32, lost: bool);
    /// The GPU answers, and reports a lasting error.
    fn ails(&self, gpu: u32, ails: bool);
    fn xid(&self, gpu: u32, xid: u64);
    fn runs(&self, gpu: u32, processes: u32, memory_mib: u64);
    /// Starts a process; on a MIG instance, by its place.
    fn runs_one(&self, gpu: u32, pid: u32, memory_mib: u64, kind: Kind, instance: Option<usize>);
    /// Takes the GPUs from this index on away.
    fn keep(&self, count: u32);
    /// Splits the GPU into MIG instances: `1g.10gb` and `2g.20gb`.
    fn split(&self, gpu: u32);
}

struct Simulated(SimGpus);

impl Simulated {
    fn new(count: u32) -> Self {
        Self(SimGpus::open(&format!("{count}xh100")).expect("a profile"))
    }
}

impl Backend for Simulated {
    fn gpus(&self) -> &dyn Gpus {
        &self.0
    }
    fn lost(&self, gpu: u32, lost: bool) {
        self.0.change(|m| m.gpu(gpu).lost = lost).expect("a change");
    }
    fn ails(&self, gpu: u32, ails: bool) {
        let trouble = ails.then(|| "asks for a reset".to_owned());
        let change = |m: &mut Machine| m.gpu(gpu).trouble = trouble;
        self.0.change(change).expect("a change");
    }
    fn xid(&self, gpu: u32, xid: u64) {
        self.0.change(|m| m.push_xid(gpu, xid)).expect("a change");
    }
    fn runs(&self, gpu: u32, processes: u32, memory_mib: u64) {
        let change = |m: &mut Machine| {
            m.gpu(gpu).processes = processes;
            m.gpu(gpu).memory_used_mib = memory_mib;
        };
        self.0.change(change).expect("a change");
    }
    fn runs_one(&self, gpu: u32, pid: u32, memory_mib: u64, kind: Kind, instance: Option<usize>) {
        let kind = match kind {
            Kind::Compute => SimKind::Compute,
            Kind::Mps => SimKind::Mps,
            Kind::Graphics => SimKind::Graphics,
        };
        let one = SimProcess { pid, memory_mib, kind, instance };
        self.0.change(|m| m.gpu(gpu).running.push(one)).expect("a change");
    }
    fn keep(&self, count: u32) {
        let change = |m: &mut Machine| {
            for gone in count..m.count {
                m.gpu(gone).absent = true;
            }
        };
        self.0.change(change).expect("a change");
    }
    fn split(&self, gpu: u32) {
        let mig = vec!["1g.10gb".to_owned(), "2g.20gb".to_owned()];
        self.0.change(|m| m.gpu(gpu).mig = mig).expect("a change");
    }
}

struct OverNvml {
    gpus: NvmlGpus,
    installed: Installed,
    _folder: TempDir,
}

impl OverNvml {
    fn new(count: u32) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let state = State::h100(count as usize);
        let installed = Installed::new(folder.path(), &state).expect("the fake is built");
        let options = NvmlOptions {
            library: Some(installed.library().to_owned()),
            // No sysfs: this machine's own PCI slots are not those of the GPUs shown.
            sysfs: folder.path().to_owned(),
            deadline: SOON,
            ..NvmlOptions::default()
        };
        Self { gpus: NvmlGpus::open(options).expect("it opens"), installed, _folder: folder }
    }
    fn change(&self, change: impl FnOnce(&mut State)) {
        self.installed.change(change).expect("a change");
    }
}

impl Backend for OverNvml {
    fn gpus(&self) -> &dyn Gpus {
        &self.gpus
    }
    fn lost(&self, gpu: u32, lost: bool) {
        self.change(|state| state.gpus[gpu as usize].lost = lost);
    }
    fn ails(&self, gpu: u32, ails: bool) {
        let action = if ails { RecoveryAction::GpuReset } else { RecoveryAction::None };
        self.change(|state| state.gpus[gpu as usize].recovery_action = action);
    }
    fn xid(&self, gpu: u32, xid: u64) {
        self.change(|state| {
            let uuid = state.gpus[gpu as usize].uuid.clone();
            state.push_xid(&uuid, xid);
        });
    }
    fn runs(&self, gpu: u32, processes: u32, memory_mib: u64) {
        self.change(|state| {
            let gpu = &mut state.gpus[gpu as usize];
            gpu.processes.clear();
            gpu.memory_used_mib = 0;
            for pid in 0..processes {
                let all = if pid == 0 { memory_mib } else { 0 };
                gpu.run(1000 + pid, all);
            }
        });
    }
    fn runs_one(&self, gpu: u32, pid: u32, memory_mib: u64, kind: Kind, instance: Option<usize>) {
        self.change(|state| {
            let gpu = &mut state.gpus[gpu as usize];
            let on = instance.map(|at| &mut gpu.mig.as_mut().expect("MIG").instances[at]);
            let (gpu_instance, compute_instance) = match on {
                Some(on) => {
                    on.memory_used_mib += memory_mib;
                    (Some(on.gpu_instance), Some(on.compute_instance))
                }
                None => (None, None),
            };
            gpu.memory_used_mib += memory_mib;
            gpu.processes.push(Process {
                mps: kind == Kind::Mps,
                graphics: kind == Kind::Graphics,
                gpu_instance,
                compute_instance,
                ..Process::new(pid, memory_mib)
            });
        });
    }
    fn keep(&self, count: u32) {
        self.change(|state| state.gpus.truncate(count as usize));
    }
    fn split(&self, gpu: u32) {
        self.change(|state| drop(state.split(gpu as usize, &[1, 2])));
    }
}

/// A scan without the loads, which move from scan to scan.
fn scan(backend: &dyn Backend) -> Inventory {
    Inventory { loads: BTreeMap::new(), ..backend.gpus().scan().expect("a scan") }
}

fn gpu_id(inventory: &Inventory, index: u32) -> GpuId {
    let whole = |part: &&Part| part.is_whole_gpu() && part.gpu_index == index;
    inventory.parts.iter().find(whole).expect("the GPU is there").gpu.clone()
}

/// The next reading from this source, others being passed over.
fn next_of(backend: &dyn Backend, source: &str) -> Reading {
    let began = Instant::now();
    while began.elapsed() < SOON {
        let reading = backend.gpus().next_reading(Duration::from_millis(200));
        if let Ok(Some(reading)) = reading
            && reading.source == source
        {
            return reading;
        }
    }
    panic!("no reading from {source}");
}

fn reads_the_load_of_each_gpu_that_answers(backend: &dyn Backend) {
    // The first scan starts the GPUs.
    let inventory = scan(backend);
    backend.split(1);
    backend.lost(2, true);
    backend.gpus().scan().expect("a scan");
    // A busy machine may be too slow for the loads of one scan, or for all values of one load.
    let idle_gpu = gpu_id(&inventory, 0);
    let complete = |loads: &BTreeMap<GpuId, Load>| {
        loads.len() == 7
            && loads.values().all(|load| load.power_watts.is_some())
            && loads.get(&idle_gpu).is_some_and(|load| load.processes_percent.is_some())
    };
    let began = Instant::now();
    let loads = loop {
        let loads = backend.gpus().scan().expect("a scan").loads;
        if complete(&loads) || began.elapsed() > SOON {
            break loads;
        }
    };
    let load = |index| loads.get(&gpu_id(&inventory, index));
    let idle = load(0).expect("a load");
    assert_eq!(
        (idle.utilization_percent, idle.processes_percent.as_ref().map(BTreeMap::len)),
        (Some(0), Some(0))
    );
    assert!(idle.temperature_celsius.is_some() && idle.power_watts.is_some(), "{idle:?}");
    let split = load(1).expect("a load");
    assert_eq!((split.utilization_percent, &split.processes_percent), (None, &None), "in MIG mode");
    assert_eq!((loads.len(), load(2)), (7, None), "a lost GPU");
}

fn shows_every_gpu_and_always_the_same(backend: &dyn Backend) {
    let inventory = scan(backend);
    assert_eq!(inventory.parts.len(), 8);
    let ids: BTreeSet<_> = inventory.parts.iter().map(|part| &part.id).collect();
    let buses: BTreeSet<_> = inventory.parts.iter().map(|part| &part.pci_bus).collect();
    assert_eq!((ids.len(), buses.len()), (8, 8));
    for (index, part) in (0..).zip(&inventory.parts) {
        assert_eq!(part.gpu_index, index, "in the order of NVML");
        assert_eq!(part.model, "NVIDIA H100 80GB HBM3");
        assert_eq!(part.vendor, "nvidia");
        assert_eq!(part.memory_mib, 81_559);
        assert_eq!(part.minor, Some(index));
        assert_eq!(part.numa_node, Some(index / 4));
        assert_eq!((part.is_whole_gpu(), &part.mig, part.mig_enabled), (true, &None, false));
        assert_eq!(part.attributes["compute.capability"], "9.0");
        assert_eq!(part.attributes["architecture"], "hopper");
        assert_eq!(part.attributes["brand"], "nvidia");
        let usage = &inventory.usage[&part.id];
        assert_eq!((usage.memory_used_mib, usage.processes), (Some(0), 0));
    }
    assert!(inventory.scan_errors.is_empty(), "{:?}", inventory.scan_errors);
    assert_eq!(scan(backend), inventory);
    assert!(!backend.gpus().describe().is_empty());
}

fn knows_the_link_of_every_pair(backend: &dyn Backend) {
    let inventory = scan(backend);
    assert_eq!(inventory.links.iter().count(), 8 * 7 / 2);
    for a in &inventory.parts {
        for b in inventory.parts.iter().filter(|b| b.id != a.id) {
            let link = inventory.links.between(&a.gpu, &b.gpu).expect("a link");
            assert_eq!(link.nvlinks, 18);
            let same_node = a.gpu_index / 4 == b.gpu_index / 4;
            let path = if same_node { Path::SameNuma } else { Path::CrossNuma };
            assert_eq!(link.path, path);
        }
    }
}

fn a_lost_gpu_has_an_error_and_keeps_its_facts(backend: &dyn Backend) {
    let before = scan(backend);
    let gone = gpu_id(&before, 2);
    backend.lost(2, true);
    let lost = scan(backend);
    assert_eq!(lost.parts, before.parts, "its last known facts stay");
    assert_eq!(lost.links, before.links);
    assert_eq!(lost.scan_errors.keys().collect::<Vec<_>>(), [&gone]);
    assert!(lost.scan_errors[&gone].reason.contains("fell off the bus"), "{:?}", lost.scan_errors);
    assert!(!lost.usage.contains_key(gone.as_part()));
    assert_eq!(next_of(backend, "lost").part, *gone.as_part());
    backend.lost(2, false);
    assert_eq!(scan(backend), before, "back as it was");
}

fn a_gpu_with_a_lasting_error_reports_it_at_every_scan_and_answers(backend: &dyn Backend) {
    let before = scan(backend);
    backend.ails(5, true);
    let id = gpu_id(&before, 5);
    for _ in 0..2 {
        let ailing = scan(backend);
        assert!(ailing.scan_errors.is_empty(), "{:?}", ailing.scan_errors);
        let [sign] = ailing.signs.as_slice() else { panic!("{:?}", ailing.signs) };
        assert_eq!((&sign.part, sign.source.as_str(), sign.code), (id.as_part(), RECOVERY, 1));
        assert!(sign.is_sign() && sign.detail.contains("reset"), "{sign:?}");
        assert!(ailing.usage.contains_key(id.as_part()));
    }
    backend.ails(5, false);
    // The end of what it required is a reading, once: of the scan, or an event.
    let after = scan(backend);
    assert!(after.signs.iter().all(|sign| (sign.source.as_str(), sign.code) == (RECOVERY, RECOVERED)));
    assert_eq!(Inventory { signs: Vec::new(), ..after }, before);
    assert_eq!(scan(backend), before);
}

fn an_xid_is_read_once_and_in_order(backend: &dyn Backend) {
    let inventory = scan(backend);
    backend.xid(1, 48);
    backend.xid(6, 94);
    backend.xid(1, 48);
    for gpu in [1, 6, 1] {
        let reading = next_of(backend, "xid");
        assert_eq!(reading.part, *gpu_id(&inventory, gpu).as_part());
        assert_eq!(reading.code, if gpu == 6 { 94 } else { 48 });
        assert!(!reading.detail.is_empty());
    }
    let none = backend.gpus().next_reading(Duration::from_millis(100));
    assert_eq!(none.expect("events work"), None);
}

fn a_wait_without_events_takes_its_time(backend: &dyn Backend) {
    scan(backend);
    for wait_ms in [0, 50] {
        let (began, wait) = (Instant::now(), Duration::from_millis(wait_ms));
        assert_eq!(backend.gpus().next_reading(wait).expect("events work"), None);
        assert!(began.elapsed() >= wait);
        assert!(began.elapsed() < SOON);
    }
}

fn processes_and_memory_in_use_are_seen(backend: &dyn Backend) {
    let id = gpu_id(&scan(backend), 3);
    backend.runs(3, 4, 2048);
    let usage = &scan(backend).usage[id.as_part()];
    assert_eq!((usage.processes, usage.memory_used_mib), (4, Some(2048)));
    backend.runs(3, 0, 0);
    let usage = &scan(backend).usage[id.as_part()];
    assert_eq!((usage.processes, usage.memory_used_mib), (0, Some(0)));
}

fn processes_are_listed_one_by_one_with_their_kind(backend: &dyn Backend) {
    let inventory = scan(backend);
    let id = gpu_id(&inventory, 3);
    assert_eq!(inventory.processes[&id], [], "an idle GPU tells that it is");
    backend.runs_one(3, 71, 512, Kind::Compute, None);
    backend.runs_one(3, 72, 256, Kind::Mps, None);
    backend.runs_one(3, 73, 64, Kind::Graphics, None);
    let inventory = scan(backend);
    let listed: Vec<_> = inventory.processes[&id]
        .iter()
        .map(|p| (p.pid, p.memory_mib, p.uses.compute, p.uses.mps, p.uses.graphics))
        .collect();
    assert_eq!(
        listed,
        [
            (71, Some(512), true, false, false),
            (72, Some(256), false, true, false),
            (73, Some(64), false, false, true),
        ]
    );
    assert!(
        inventory.processes[&id]
            .iter()
            .all(|p| p.part == *id.as_part() && p.identity == ProcessIdentity::default())
    );
    let usage = &inventory.usage[id.as_part()];
    assert_eq!((usage.processes, usage.memory_used_mib), (2, Some(832)), "who only draws is not counted");
}

fn a_process_is_on_its_mig_instance(backend: &dyn Backend) {
    backend.split(4);
    backend.runs_one(4, 81, 128, Kind::Compute, Some(1));
    backend.runs_one(4, 82, 32, Kind::Compute, Some(0));
    let inventory = scan(backend);
    let (gpu, first, second) = (&inventory.parts[4].id, &inventory.parts[5].id, &inventory.parts[6].id);
    let mut listed: Vec<_> =
        inventory.processes[&inventory.parts[4].gpu].iter().map(|p| (p.pid, &p.part, p.memory_mib)).collect();
    listed.sort_unstable();
    assert_eq!(listed, [(81, second, Some(128)), (82, first, Some(32))]);
    assert_eq!(
        inventory.processes.keys().filter(|id| id.as_part() == first).count(),
        0,
        "they are listed by GPU"
    );
    let usage = |part| (inventory.usage[part].processes, inventory.usage[part].memory_used_mib);
    assert_eq!((usage(gpu), usage(first), usage(second)), ((2, Some(160)), (1, Some(32)), (1, Some(128))));
}

fn a_gpu_that_is_taken_away_leaves_the_inventory(backend: &dyn Backend) {
    let before = scan(backend);
    backend.keep(6);
    let after = scan(backend);
    assert_eq!(after.parts, before.parts[..6]);
    assert_eq!(after.links.iter().count(), 6 * 5 / 2);
    assert!(after.scan_errors.is_empty());
}

fn mig_instances_are_parts_with_a_parent(backend: &dyn Backend) {
    let before = scan(backend);
    backend.split(4);
    let inventory = scan(backend);
    assert_eq!(inventory.parts.len(), 10);
    let parent = &inventory.parts[4];
    assert!(parent.mig_enabled);
    assert_eq!(parent.id, before.parts[4].id);
    let profiles = ["1g.10gb", "2g.20gb"];
    for (index, (instance, profile)) in (0..).zip(inventory.parts[5..7].iter().zip(profiles)) {
        assert_eq!((instance.mig_index(), parent.mig_index()), (Some(index), None));
        assert_eq!(instance.gpu, parent.gpu);
        assert!(instance.id.as_str().starts_with("MIG-"));
        let mig = instance.mig.as_ref().expect("a MIG instance");
        assert_eq!(mig.profile, profile);
        assert!(instance.memory_mib > 0 && instance.memory_mib < parent.memory_mib / 2);
        assert_eq!(instance.gpu_index, 4);
        assert_eq!(instance.pci_bus, parent.pci_bus);
        assert_eq!(instance.numa_node, parent.numa_node);
        assert!(!instance.mig_enabled);
        assert!(inventory.usage.contains_key(&instance.id));
    }
    assert_eq!(inventory.links, before.links, "links belong to GPUs");
    backend.lost(4, true);
    assert_eq!(scan(backend).parts, inventory.parts, "instances go on with their GPU");
}

macro_rules! contract {
    ($($check:ident),* $(,)?) => {
        mod sim {
            $(#[test]
            fn $check() {
                super::$check(&super::Simulated::new(8));
            })*
        }
        mod nvml {
            $(#[test]
            fn $check() {
                super::$check(&super::OverNvml::new(8));
            })*
        }
    };
}

contract!(
    reads_the_load_of_each_gpu_that_answers,
    shows_every_gpu_and_always_the_same,
    knows_the_link_of_every_pair,
    a_lost_gpu_has_an_error_and_keeps_its_facts,
    a_gpu_with_a_lasting_error_reports_it_at_every_scan_and_answers,
    an_xid_is_read_once_and_in_order,
    a_wait_without_events_takes_its_time,
    processes_and_memory_in_use_are_seen,
    processes_are_listed_one_by_one_with_their_kind,
    a_process_is_on_its_mig_instance,
    a_gpu_that_is_taken_away_leaves_the_inventory,
    mig_instances_are_parts_with_a_parent,
);
