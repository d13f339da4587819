//! How much memory of their parts devices consume, and how much is left.

use crate::{Consumes, Device, DeviceState, DrainState, Health, Node, Part};

/// Memory of its part that a device consumes while it is held, MiB. A whole device consumes all of it.
#[must_use]
pub fn takes_mib(node: &Node, device: &Device) -> u64 {
    match device.consumes {
        Consumes::Slice(slice) => slice.memory_mib,
        Consumes::Whole => part_of(node, device).map_or(0, |part| part.memory_mib),
    }
}

/// Memory of each part that no held device consumes, MiB, in the order of `node.parts`. The daemon's
/// memory overcommit is not considered: policies do not know it.
#[must_use]
pub fn left_mib(node: &Node) -> Vec<u64> {
    let mut left: Vec<u64> = node.parts.iter().map(|part| part.memory_mib).collect();
    for device in node.devices.iter().filter(|device| device.state == DeviceState::Held) {
        if let Some(of_part) = usize::try_from(device.part).ok().and_then(|at| left.get_mut(at)) {
            *of_part = of_part.saturating_sub(takes_mib(node, device));
        }
    }
    left
}

/// Whether a part should be avoided: its GPU is cordoned, draining, drained, unhealthy or gone. A
/// device that was freed there a moment ago can still be listed as available; it should be chosen last.
#[must_use]
pub fn is_leaving(part: &Part) -> bool {
    part.drain != DrainState::Active || matches!(part.health, Health::Unhealthy | Health::Vanished)
}

/// The part of a device; `None` if its index is out of range, which does not happen in the daemon's input.
#[must_use]
pub fn part_of<'a>(node: &'a Node, device: &Device) -> Option<&'a Part> {
    node.parts.get(usize::try_from(device.part).ok()?)
}

/// The device of an index; `None` if it is out of range, which does not happen in the daemon's input.
#[must_use]
pub fn device(node: &Node, index: u32) -> Option<&Device> {
    node.devices.get(usize::try_from(index).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Slice;
    use crate::testing::NodeBuilder;

    #[test]
    fn memory_of_held_devices_is_not_left() {
        let share = |memory_mib| Consumes::Slice(Slice { memory_mib, compute_percent: 0 });
        let node = NodeBuilder::new()
            .gpus(3, "Test GPU", 16_000)
            .devices(0, "a.b/small", 2, share(1_000))
            .devices(0, "a.b/large", 2, share(6_000))
            .devices(1, "a.b/whole", 1, Consumes::Whole)
            .devices(2, "a.b/small", 2, share(1_000))
            .hold(&[0, 1])
            .hold(&[2])
            .hold(&[4])
            .build()
            .node;
        assert_eq!(left_mib(&node), [8_000, 0, 16_000]);
        assert_eq!(takes_mib(&node, &node.devices[4]), 16_000);
    }
}
