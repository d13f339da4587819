//! A node for tests of this crate and of crates that show allocations. Its ledger results from scans and
//! grants alone.

use berth_kernel::grants::allocation::{Allocation, Decision, EndReason, GrantOrigin, Holder};
use berth_kernel::hardware::gpu::{Inventory, Mig, Part};
use berth_kernel::hardware::process::{Owner, PodProcess, Process, ProcessIdentity, ProcessVisibility, Uses};
use berth_kernel::ids::names::{AllocationId, DeviceId, GpuId, PartId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::change::{Change, Entry};
use berth_kernel::node::command::{Command, Verdict};
use berth_kernel::node::decide::decide;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::refusal::Refusal;
use berth_kernel::sharing::part_state::{Device, PartState};

pub(crate) fn part(name: &str) -> PartId {
    PartId::parse(name).unwrap()
}

pub(crate) fn gpu_id(name: &str) -> GpuId {
    GpuId::parse(name).unwrap()
}

pub(crate) fn shared() -> Resource {
    Resource::parse("nvidia.com/gpu.shared").unwrap()
}

fn facts(id: &str, parent: Option<&str>, mig_enabled: bool, memory_mib: u64) -> Part {
    Part {
        id: part(id),
        memory_mib,
        mig_enabled,
        mig: parent.map(|_| Mig { profile: "1g.10gb".into(), gpu_instance: 1, compute_instance: 0 }),
        ..Part::whole_gpu(gpu_id(parent.unwrap_or(id)), 0)
    }
}

/// A node with two GPUs.
pub(crate) struct Node {
    pub(crate) ledger: Ledger,
    pub(crate) now: Now,
    pub(crate) process_visibility: ProcessVisibility,
    next: u64,
}

impl Node {
    /// `GPU-0` is whole; `GPU-1` is split into `MIG-a` and `MIG-b`.
    pub(crate) fn new() -> Self {
        let mut node = Self {
            ledger: Ledger::default(),
            now: Now { wall_ms: 1_000_000, mono_ms: 1_000 },
            process_visibility: ProcessVisibility::Visible,
            next: 1,
        };
        node.look(&[]);
        node
    }

    pub(crate) fn look(&mut self, processes: &[(&str, Process)]) {
        let parts = vec![
            facts("GPU-0", None, false, 81_920),
            facts("GPU-1", None, true, 81_920),
            facts("MIG-a", Some("GPU-1"), false, 10_240),
            facts("MIG-b", Some("GPU-1"), false, 10_240),
        ];
        let mut inventory =
            Inventory { parts, process_visibility: self.process_visibility.clone(), ..Inventory::default() };
        for gpu in ["GPU-0", "GPU-1"] {
            let on = processes.iter().filter(|(on, _)| *on == gpu).map(|(_, process)| process.clone());
            inventory.processes.insert(gpu_id(gpu), on.collect());
        }
        self.decide(&Command::RecordScan(inventory)).unwrap();
    }

    /// Decides a command, and applies its changes as the keeper does.
    pub(crate) fn decide(&mut self, command: &Command) -> Result<Entry, Refusal> {
        let Verdict { entry, refusal } = decide(&self.ledger, command, self.now);
        if !entry.changes.is_empty() {
            self.ledger.apply(&entry);
        }
        refusal.map_or(Ok(entry), Err)
    }

    /// Grants one device without an offer, as adoption does.
    pub(crate) fn grant(&mut self, on: &str, share: Option<u32>, pod: &str, container: &str) -> AllocationId {
        let known = |text: &str| Some(text.to_owned()).filter(|t| !t.is_empty());
        let id = AllocationId { store: 7, number: self.next };
        self.next += 1;
        let device = DeviceId { part: part(on), share };
        let mut state = PartState::clone(self.ledger.part(&part(on)).unwrap());
        state.devices.entry((shared(), share)).or_insert_with(|| Device::adopted(share, self.now.mono_ms));
        let offered = Change::Offered {
            part: part(on),
            by: Some("test".into()),
            lines: Vec::new(),
            ranges: Vec::new(),
            devices: state.devices,
        };
        let granted = Change::Granted(Allocation {
            id,
            resource: shared(),
            devices: vec![device],
            granted_wall_ms: 0,
            origin: GrantOrigin::DevicePlugin,
            holder: Holder { pod_uid: known(pod), container: known(container), ..Holder::default() },
            overlapped: false,
            decision: Decision::default(),
            ended: None,
        });
        self.ledger.apply(&Entry { at: self.now, changes: vec![offered, granted] });
        id
    }

    pub(crate) fn end(&mut self, id: AllocationId) {
        let ended = Change::Ended { id, reason: EndReason::Released };
        self.ledger.apply(&Entry { at: self.now, changes: vec![ended] });
    }

    pub(crate) fn pass(&mut self, seconds: u64) {
        self.now.mono_ms += seconds * 1000;
        self.now.wall_ms += seconds * 1000;
    }
}

pub(crate) fn process(pid: u32, on: &str, owner: Owner) -> Process {
    Process {
        pid,
        part: part(on),
        uses: Uses { compute: true, ..Uses::default() },
        memory_mib: Some(100),
        identity: ProcessIdentity {
            name: Some("python3".into()),
            started_ticks: Some(1),
            owner,
            ignored: false,
        },
    }
}

pub(crate) fn of_pod(uid: &str, container: &str) -> Owner {
    Owner::Pod(PodProcess {
        uid: uid.into(),
        container_id: None,
        container: Some(container.to_owned()).filter(|c| !c.is_empty()),
    })
}
