//! A node that is only a ledger, to call policies with.
// Clippy does not see that helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;

use berth_kernel::grants::allocation::{Allocation, Decision, GrantOrigin, Holder};
use berth_kernel::hardware::gpu::{Link, Links, Mig, Part, Path, Usage};
use berth_kernel::ids::names::{AllocationId, DeviceId, GpuId, PartId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::change::{Change, Entry};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::Call;
use berth_kernel::policy::hooks::{PlaceRequest, Question};
use berth_kernel::policy::version::PolicyVersion;
use berth_kernel::sharing::offer::{Consumes, OfferLine};
use berth_kernel::sharing::part_state::{Device, DeviceState};

use crate::support::gpus::{SHARED, part, resource};
use crate::support::guests::NOW;

/// Wall time of a call, milliseconds: so much that fuel decides, however busy the machine is.
pub(crate) const WALL_MS: u64 = 60_000;

/// Memory of each GPU, which four shares divide without a rest.
const MEMORY_MIB: u64 = 81_920;

/// A GPU whose name comes before those of the GPUs with lower indices: policies must not confuse the two orders.
pub(crate) fn reversed_gpu(index: u32) -> PartId {
    PartId::parse(&format!("GPU-{:08x}-0000", 0xff00 - index)).unwrap()
}

/// A ledger, built by one change after the other, as the keeper does.
#[derive(Clone)]
pub(crate) struct LedgerNode(pub(crate) Arc<Ledger>);

impl LedgerNode {
    pub(crate) fn new() -> Self {
        Self(Arc::default())
    }

    pub(crate) fn apply(&mut self, change: Change) {
        let entry = Entry {
            at: Now {
                // The monotonic clock begins at 0, an hour before `NOW`.
                mono_ms: 0,
                wall_ms: NOW.wall_ms - NOW.mono_ms,
            },
            changes: vec![change],
        };
        Arc::make_mut(&mut self.0).apply(&entry);
    }

    /// Adds this number of GPUs, with NVLinks between all of them.
    pub(crate) fn gpus(mut self, count: u32) -> Self {
        let mut links = Links::default();
        let mut usage = BTreeMap::new();
        for index in 0..count {
            self.apply(Change::PartFound(part_of(index)));
            usage.insert(reversed_gpu(index), Usage::default());
            for other in 0..index {
                let link = Link { path: Path::SameNuma, nvlinks: 18 };
                links.set(
                    &GpuId::of_whole(&reversed_gpu(index)),
                    &GpuId::of_whole(&reversed_gpu(other)),
                    link,
                );
            }
        }
        self.apply(Change::InventoryScanned {
            links: Arc::new(links),
            usage: Arc::new(usage),
            scan_errors: Arc::default(),
        });
        self
    }

    /// Replaces the links between all GPUs. The arguments of `link` are two indices, the greater one first.
    pub(crate) fn links(mut self, count: u32, link: impl Fn(u32, u32) -> Link) -> Self {
        let mut links = Links::default();
        for a in 0..count {
            for b in 0..a {
                links.set(&GpuId::of_whole(&reversed_gpu(a)), &GpuId::of_whole(&reversed_gpu(b)), link(a, b));
            }
        }
        let usage = self.0.usage.clone();
        self.apply(Change::InventoryScanned { links: Arc::new(links), usage, scan_errors: Arc::default() });
        self
    }

    /// Puts a GPU into MIG mode, with one instance.
    pub(crate) fn mig(mut self, index: u32) -> Self {
        let whole = part_of(index);
        let instance = Part {
            id: PartId::parse(&format!("MIG-{index:08x}")).unwrap(),
            gpu: whole.gpu.clone(),
            memory_mib: 9_728,
            mig: Some(Mig { profile: "1g.10gb+me".into(), gpu_instance: 7, compute_instance: 0 }),
            ..whole.clone()
        };
        self.apply(Change::PartFound(Part { mig_enabled: true, ..whole }));
        self.apply(Change::PartFound(instance));
        self
    }

    /// Offers one GPU. A line is a resource, its number of devices, and what each device takes.
    pub(crate) fn offer(mut self, index: u32, lines: &[(&str, u32, Consumes)]) -> Self {
        let mut devices = BTreeMap::new();
        let mut share = 0;
        for (name, count, consumes) in lines {
            for _ in 0..*count {
                let number = (*consumes != Consumes::Whole).then_some(share);
                share += u32::from(number.is_some());
                let device = Device {
                    consumes: *consumes,
                    state: DeviceState::Offered,
                    holders: Vec::new(),
                    last_allocate_mono_ms: None,
                };
                devices.insert((resource(name), number), device);
            }
        }
        let line = |(name, count, consumes): &(&str, u32, Consumes)| OfferLine {
            resource: resource(name),
            count: *count,
            consumes: *consumes,
        };
        self.apply(Change::Offered {
            part: reversed_gpu(index),
            by: Some("test".into()),
            lines: lines.iter().map(line).collect(),
            ranges: Vec::new(),
            devices,
        });
        self
    }

    /// Grants one device.
    pub(crate) fn grant(mut self, name: &str, device: DeviceId) -> Self {
        let number = self.0.next_number;
        self.apply(Change::Granted(Allocation {
            id: AllocationId { store: 1, number },
            resource: resource(name),
            devices: vec![device],
            granted_wall_ms: NOW.wall_ms - 5_000,
            origin: GrantOrigin::DevicePlugin,
            holder: Holder { pod_uid: Some(format!("uid-{number}")), ..Holder::default() },
            overlapped: false,
            decision: Decision::default(),
            ended: None,
        }));
        self
    }

    /// The ids of a resource's devices, in the kernel's order.
    pub(crate) fn devices(&self, name: &str) -> Vec<DeviceId> {
        let wanted = resource(name);
        let parts = self.0.parts.values();
        let ids = parts.flat_map(|part| {
            let keys = part.devices.keys().filter(|(resource, _)| *resource == wanted);
            let id =
                |(_, share): &(Resource, Option<u32>)| DeviceId { part: part.part.id.clone(), share: *share };
            keys.map(id).collect::<Vec<_>>()
        });
        ids.collect()
    }

    /// A request for a placement of `size` of the free devices.
    pub(crate) fn place(&self, name: &str, size: usize) -> PlaceRequest {
        let free = |id: &DeviceId| !self.0.device(&resource(name), id).unwrap().held();
        PlaceRequest {
            resource: resource(name),
            available: self.devices(name).into_iter().filter(free).collect(),
            required: Vec::new(),
            size,
        }
    }

    pub(crate) fn call<'a>(
        &'a self,
        version: &'a PolicyVersion,
        parameters: &'a str,
        question: Question<'a>,
    ) -> Call<'a> {
        Call { digest: &version.digest, parameters, node: &self.0, now: NOW, question, wall_ms_max: WALL_MS }
    }
}

/// What one of `count` equal shares of a GPU takes.
pub(crate) fn share(count: u32) -> Consumes {
    Consumes::Slice { memory_mib: MEMORY_MIB / u64::from(count), compute_percent: 100 / count }
}

/// A node with this number of GPUs, each offered as `count` shares.
pub(crate) fn shared_node(gpus: u32, count: u32) -> LedgerNode {
    let node = LedgerNode::new().gpus(gpus);
    (0..gpus).fold(node, |node, index| node.offer(index, &[(SHARED, count, share(count))]))
}

fn part_of(index: u32) -> Part {
    Part { memory_mib: MEMORY_MIB, numa_node: Some(index % 2), ..part(index, reversed_gpu(index)) }
}
