//! Random nodes and requests for comparisons with brute force. The same seed gives the same nodes.

use super::{Built, NodeBuilder, share};
use crate::room::{left_mib, takes_mib};
use crate::{Consumes, DeviceState, DrainState, Health, Path, PlaceRequest, Slice};

/// A small random number generator (`SplitMix64`), so that the crate of a policy needs no library for it.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    // Not an iterator: the sequence does not end.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^ (bits >> 31)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u32) -> u32 {
        u32::try_from(self.next() % u64::from(end)).expect("below a u32")
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: u32) -> bool {
        self.below(n) == 0
    }
}

/// A node of one to `gpus_max` GPUs: some in MIG mode, the others offered whole
/// (`nvidia.com/gpu`), as shares (`nvidia.com/gpu.shared`), as both, or as slices of two sizes
/// (`nvidia.com/gpu.mem-10g`, `nvidia.com/gpu.mem-20g`), with links, with some devices held and some
/// GPUs cordoned or unhealthy. On about half of the nodes memory is overcommitted: more devices are
/// free than fit into the memory that is left.
#[must_use]
pub fn random_node(random: &mut Random, gpus_max: u32) -> Built {
    const MEMORY_MIB: u64 = 40_960;
    let slice = |memory_mib| Consumes::Slice(Slice { memory_mib, compute_percent: 0 });
    let gpus = 1 + random.below(gpus_max);
    let mut node = NodeBuilder::new().gpus(gpus, "Test GPU", MEMORY_MIB);
    let (migs, style) = (random.once_in(3), random.below(4));
    for gpu in 0..gpus {
        if migs && random.once_in(2) {
            let first = u32::try_from(node.node.parts.len()).expect("few parts");
            let count = 1 + random.below(3);
            node = node.mig(gpu, "1g.5gb", count, 4_864);
            for instance in first..first + count {
                node = node.devices(instance, "nvidia.com/mig-1g.5gb", 1, Consumes::Whole);
            }
            continue;
        }
        if style == 3 {
            node = node
                .devices(gpu, "nvidia.com/gpu.mem-10g", 1 + random.below(4), slice(MEMORY_MIB / 4))
                .devices(gpu, "nvidia.com/gpu.mem-20g", 1 + random.below(2), slice(MEMORY_MIB / 2));
            continue;
        }
        if style != 0 {
            node = node.devices(gpu, "nvidia.com/gpu", 1, Consumes::Whole);
        }
        if style != 1 {
            let count = 1 + random.below(4);
            node = node.devices(gpu, "nvidia.com/gpu.shared", count, share(count, MEMORY_MIB));
        }
    }
    let node = link_all(random, node, gpus);
    add_holders_and_faults(random, node, gpus)
}

/// Adds links between most pairs of GPUs: in groups, as on real boards, or at random.
fn link_all(random: &mut Random, mut node: NodeBuilder, gpus: u32) -> NodeBuilder {
    const PATHS: [Path; 6] = [
        Path::SameBoard,
        Path::SingleSwitch,
        Path::MultiSwitch,
        Path::HostBridge,
        Path::SameNuma,
        Path::CrossNuma,
    ];
    let group = 1 + random.below(4);
    let any_link = random.once_in(2);
    for b in 0..gpus {
        for a in 0..b {
            let near = a / group == b / group;
            let (path, nvlinks) = match (any_link, near) {
                (true, _) if random.once_in(8) => continue,
                (true, _) => (PATHS[usize::try_from(random.below(6)).expect("small")], random.below(5)),
                (false, true) => (Path::SingleSwitch, 4),
                (false, false) => (Path::CrossNuma, 0),
            };
            node = node.link(a, b, path, nvlinks);
        }
    }
    node
}

/// Adds holders, drains and faults.
fn add_holders_and_faults(random: &mut Random, mut node: NodeBuilder, gpus: u32) -> Built {
    for device in 0..u32::try_from(node.node.devices.len()).expect("few devices") {
        let index = usize::try_from(device).expect("small");
        if node.node.devices[index].state == DeviceState::Free && random.once_in(3) {
            node = node.hold(&[device]);
        }
    }
    for gpu in 0..gpus {
        let (drain, health) = match random.below(12) {
            0 => (DrainState::Draining, Health::Healthy),
            1 => (DrainState::Active, Health::Unhealthy),
            2 => (DrainState::Active, Health::Degraded),
            _ => continue,
        };
        // Instances share the state of their GPU.
        for part in node.node.parts.iter_mut().filter(|part| part.gpu_index == gpu) {
            (part.drain, part.health) = (drain, health);
        }
    }
    let mut built = node.build();
    if random.once_in(2) {
        built.withdraw_what_does_not_fit();
    }
    built
}

/// An endless sequence of random requests on random nodes of up to `gpus_max` GPUs.
pub fn random_questions(seed: u64, gpus_max: u32) -> impl Iterator<Item = (Built, PlaceRequest)> {
    let mut random = Random(seed);
    std::iter::repeat_with(move || {
        let node = random_node(&mut random, gpus_max);
        let request = node.random_request(&mut random)?;
        Some((node, request))
    })
    .flatten()
}

impl Built {
    /// Withdraws each free device that does not fit beside the held ones, as the daemon does without
    /// memory overcommit.
    fn withdraw_what_does_not_fit(&mut self) {
        let left = left_mib(&self.node);
        let fits = |device| takes_mib(&self.node, device) <= left[device.part as usize];
        let states: Vec<_> = self.node.devices.iter().map(|device| (device.state, fits(device))).collect();
        for (device, (state, fits)) in self.node.devices.iter_mut().zip(states) {
            if state == DeviceState::Free && !fits {
                device.state = DeviceState::Withdrawn;
            }
        }
    }

    /// A request for a random resource of the node. Most of its free devices are available, some of them
    /// are required, and the request can always be met. Sometimes held devices are required as well, like
    /// those of an init container for the next container of its pod. `None` if no device is available.
    #[must_use]
    pub fn random_request(&self, random: &mut Random) -> Option<PlaceRequest> {
        let resource = usize::try_from(random.below(count(&self.node.resources))).expect("small");
        let mut request = self.place_request(&self.node.resources[resource], 0);
        request.available.retain(|_| !random.once_in(8));
        let mut free = request.available.clone();
        if random.once_in(3) {
            request.required = self.held(request.request.resource);
            keep(random, &mut request.required, 2);
        }
        let least = u32::from(request.required.is_empty());
        if least > count(&free) {
            return None;
        }
        let more = least + random.below(count(&free) + 1 - least);
        request.size = count(&request.required) + more;
        request.available.extend(&request.required);
        request.available.sort_unstable();
        if random.once_in(3) {
            keep(random, &mut free, more);
            request.required.extend(free);
        }
        Some(request)
    }

    fn held(&self, resource: u32) -> Vec<u32> {
        let devices = (0..).zip(&self.node.devices);
        let held = devices.filter(|(_, d)| d.resource == resource && d.state == DeviceState::Held);
        held.map(|(index, _)| index).collect()
    }
}

fn count<T>(items: &[T]) -> u32 {
    u32::try_from(items.len()).expect("few")
}

/// Keeps up to `max` of the devices, chosen at random.
fn keep(random: &mut Random, devices: &mut Vec<u32>, max: u32) {
    let wanted = random.below(max + 1);
    while count(devices) > wanted {
        let out = usize::try_from(random.below(count(devices))).expect("small");
        devices.swap_remove(out);
    }
}
