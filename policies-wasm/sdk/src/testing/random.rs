//! Nodes drawn by a seed, for tests against brute force: the same seed, the same node.

use super::{Built, NodeBuilder, share};
use crate::{Consumes, DeviceState, DrainState, Health, Path, PlaceRequest};

/// A small generator (`SplitMix64`): tests need no more, and a policy's crate no library for it.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    // Not an iterator: it has no end.
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
/// (`nvidia.com/gpu`), as shares (`nvidia.com/gpu.shared`) or as both, with links, with some
/// devices held and some GPUs cordoned or unhealthy.
#[must_use]
pub fn random_node(random: &mut Random, gpus_max: u32) -> Built {
    const MEMORY_MIB: u64 = 40_960;
    let gpus = 1 + random.below(gpus_max);
    let mut node = NodeBuilder::new().gpus(gpus, "Test GPU", MEMORY_MIB);
    let (migs, style) = (random.once_in(3), random.below(3));
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
        if style != 0 {
            node = node.devices(gpu, "nvidia.com/gpu", 1, Consumes::Whole);
        }
        if style != 1 {
            let count = 1 + random.below(4);
            node = node.devices(gpu, "nvidia.com/gpu.shared", count, share(count, MEMORY_MIB));
        }
    }
    let node = link_all(random, node, gpus);
    unsettle(random, node, gpus)
}

/// Links between most pairs: groups as boards have them, or any.
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
    let wild = random.once_in(2);
    for b in 0..gpus {
        for a in 0..b {
            let near = a / group == b / group;
            let (path, nvlinks) = match (wild, near) {
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

/// Holders, drains and faults.
fn unsettle(random: &mut Random, mut node: NodeBuilder, gpus: u32) -> Built {
    for device in 0..u32::try_from(node.node.devices.len()).expect("few devices") {
        let index = usize::try_from(device).expect("small");
        if node.node.devices[index].state == DeviceState::Free && random.once_in(3) {
            node = node.hold(&[device]);
        }
    }
    for gpu in 0..gpus {
        node = match random.below(12) {
            0 => node.part(gpu, |part| part.drain = DrainState::Draining),
            1 => node.part(gpu, |part| part.health = Health::Unhealthy),
            2 => node.part(gpu, |part| part.health = Health::Degraded),
            _ => node,
        };
    }
    node.build()
}

impl Built {
    /// A question about a random resource of the node: most of its free devices available, some of
    /// them required, and never more asked for than there are. `None` where nothing is free.
    #[must_use]
    pub fn random_request(&self, random: &mut Random) -> Option<PlaceRequest> {
        let resources = u32::try_from(self.node.resources.len()).expect("few resources");
        let resource = usize::try_from(random.below(resources)).expect("small");
        let mut request = self.place_request(&self.node.resources[resource], 0);
        request.available.retain(|_| !random.once_in(8));
        let count = u32::try_from(request.available.len()).expect("few devices");
        if count == 0 {
            return None;
        }
        request.size = 1 + random.below(count);
        if random.once_in(3) {
            let mut required = request.available.clone();
            while required.len() > usize::try_from(random.below(request.size + 1)).expect("small") {
                required.swap_remove(
                    usize::try_from(random.below(u32::try_from(required.len()).expect("few")))
                        .expect("small"),
                );
            }
            request.required = required;
        }
        Some(request)
    }
}
