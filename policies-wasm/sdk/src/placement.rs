//! Ways of choosing devices. Whole GPUs need none: a policy passes, and the daemon's baseline finds
//! the best set by links and NUMA nodes exactly.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use crate::room::is_leaving;
use crate::{DeviceState, Node, PlaceRequest, Placement};

/// How full one part is, in devices.
#[derive(Clone, Debug, Default)]
struct Load {
    held: u64,
    devices: u64,
    /// On a GPU that is on its way out: freed there a moment ago and not yet withdrawn.
    avoid: bool,
    gpu_index: u32,
    /// Device indices to take from, the lowest last.
    available: Vec<u32>,
}

impl Load {
    /// The emptier part first, as a share of what it has: one of two is fuller than one of ten.
    fn emptier(&self, other: &Self) -> Ordering {
        self.avoid
            .cmp(&other.avoid)
            .then_with(|| {
                let (mine, theirs) = (self.held * other.devices, other.held * self.devices);
                mine.cmp(&theirs)
            })
            .then_with(|| self.gpu_index.cmp(&other.gpu_index))
    }
}

/// Shares from the least-held GPU first, one after the other, so that several shares of one
/// container land on several GPUs. GPUs that are cordoned, draining or unhealthy come last.
///
/// `None` if the request cannot be met from what is available.
#[must_use]
pub fn spread(node: &Node, request: &PlaceRequest) -> Option<Placement> {
    let size = usize::try_from(request.size).ok()?;
    let mut loads = loads(node, request)?;
    let mut devices = request.required.clone();
    for &device in &request.required {
        let part = node.devices.get(usize::try_from(device).ok()?)?.part;
        let load = loads.get_mut(&part)?;
        load.held += 1;
        load.available.retain(|&other| other != device);
    }
    while devices.len() < size {
        let load =
            loads.values_mut().filter(|load| !load.available.is_empty()).min_by(|a, b| a.emptier(b))?;
        devices.push(load.available.pop()?);
        load.held += 1;
    }
    (devices.len() == size).then(|| Placement { devices, reason: "the least-held GPUs first".to_owned() })
}

/// The load of every part that has a device of the request's resource.
fn loads(node: &Node, request: &PlaceRequest) -> Option<BTreeMap<u32, Load>> {
    let mut loads = BTreeMap::<u32, Load>::new();
    for device in &node.devices {
        let load = loads.entry(device.part).or_default();
        let ours = device.resource == request.request.resource;
        let held = device.state == DeviceState::Held;
        load.held += u64::from(held);
        load.devices += u64::from(ours || held);
    }
    for (&part, load) in &mut loads {
        let part = node.parts.get(usize::try_from(part).ok()?)?;
        load.gpu_index = part.gpu_index;
        load.avoid = is_leaving(part);
    }
    for &device in request.available.iter().rev() {
        let part = node.devices.get(usize::try_from(device).ok()?)?.part;
        loads.get_mut(&part)?.available.push(device);
    }
    Some(loads)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::NodeBuilder;
    use crate::{Consumes, DrainState, Slice};

    const SHARED: &str = "example.com/shared";
    const SHARE: Consumes = Consumes::Slice(Slice { memory_mib: 1024, compute_percent: 25 });

    fn two_gpus() -> NodeBuilder {
        NodeBuilder::new().gpus(2, "Test GPU", 4096).devices(0, SHARED, 4, SHARE).devices(1, SHARED, 4, SHARE)
    }

    #[test]
    fn several_shares_land_on_several_gpus() {
        let node = two_gpus().build();
        let request = node.place_request(SHARED, 2);
        assert_eq!(spread(&node.node, &request).unwrap().devices, [0, 4]);
        let request = node.place_request(SHARED, 4);
        assert_eq!(spread(&node.node, &request).unwrap().devices, [0, 4, 1, 5]);
    }

    #[test]
    fn the_least_held_gpu_comes_first() {
        let node = two_gpus().hold(&[0]).build();
        let request = node.place_request(SHARED, 1);
        assert_eq!(spread(&node.node, &request).unwrap().devices, [4]);
    }

    #[test]
    fn fuller_is_meant_as_a_share_of_the_gpu() {
        let node = NodeBuilder::new()
            .gpus(2, "Test GPU", 4096)
            .devices(0, SHARED, 2, SHARE)
            .devices(1, SHARED, 10, SHARE)
            .hold(&[0, 2, 3])
            .build();
        let request = node.place_request(SHARED, 1);
        assert_eq!(spread(&node.node, &request).unwrap().devices, [4]);
    }

    #[test]
    fn required_devices_are_in_the_answer_and_count() {
        let node = two_gpus().build();
        let mut request = node.place_request(SHARED, 2);
        request.required = vec![2];
        assert_eq!(spread(&node.node, &request).unwrap().devices, [2, 4]);
    }

    #[test]
    fn a_draining_gpu_comes_last() {
        let node = two_gpus().part(0, |part| part.drain = DrainState::Draining).hold(&[4, 5]).build();
        let request = node.place_request(SHARED, 3);
        assert_eq!(spread(&node.node, &request).unwrap().devices, [6, 7, 0]);
    }

    #[test]
    fn what_cannot_be_met_is_passed_on() {
        let node = two_gpus().build();
        let mut request = node.place_request(SHARED, 9);
        assert_eq!(spread(&node.node, &request), None);
        request.size = 1;
        request.required = vec![0, 1];
        assert_eq!(spread(&node.node, &request), None);
        request.required = vec![99];
        assert_eq!(spread(&node.node, &request), None);
    }
}
