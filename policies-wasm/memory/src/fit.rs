//! Best fit: chooses the GPU with the least memory left on which the slices fit, so that other GPUs keep
//! room for large slices. It optimises, in this order:
//!
//! 1. the fewest devices on GPUs that are cordoned, draining or unhealthy,
//! 2. the fewest devices beyond the memory that is left, which the daemon's overcommit may allow,
//! 3. the fewest GPUs, including those of required devices, which come first,
//! 4. all devices on the GPU with the least memory left of those that have room for all; otherwise as many
//!    as possible on the GPU with the most room, and the remaining devices by the same rule.
//!
//! If sets are equal, the one with the lowest indices is chosen.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use berth_policy_sdk::{DeviceState, Node, PlaceRequest, Placement, room};

/// One GPU that has devices to choose from.
#[derive(Debug)]
struct Gpu {
    /// It is cordoned, draining or unhealthy: such GPUs come last.
    leaving: bool,
    /// It already has a device for this request; the devices of a request stay together if possible.
    in_use: bool,
    index: u32,
    left_mib: u64,
    /// Memory that one device consumes.
    takes_mib: u64,
    /// Devices to choose from, the lowest last.
    available: Vec<u32>,
}

impl Gpu {
    /// How many more devices fit on it. With `beyond`, the memory that is left does not count: all
    /// available devices fit, since the daemon's overcommit may allow them.
    fn room(&self, beyond: bool) -> usize {
        let by_memory = self.left_mib.checked_div(self.takes_mib).filter(|_| !beyond);
        self.available.len().min(by_memory.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX)))
    }

    fn take(&mut self, count: usize, into: &mut Vec<u32>) {
        for _ in 0..count {
            into.extend(self.available.pop());
            self.left_mib = self.left_mib.saturating_sub(self.takes_mib);
            self.in_use = true;
        }
    }
}

/// `None` if there are not enough devices.
pub(crate) fn best(node: &Node, request: &PlaceRequest) -> Option<Placement> {
    let size = usize::try_from(request.size).ok()?;
    let mut gpus = gpus(node, request)?;
    let mut devices = request.required.clone();
    let mut overcommitted = false;
    for (leaving, beyond) in [(false, false), (false, true), (true, false), (true, true)] {
        let before = devices.len();
        for in_use in [true, false] {
            let open = gpus.iter_mut().filter(|gpu| gpu.leaving == leaving && gpu.in_use == in_use);
            fill(&mut open.collect::<Vec<_>>(), beyond, &mut devices, size);
        }
        overcommitted |= beyond && devices.len() > before;
    }
    let reason = if overcommitted {
        "more memory than is left, which the daemon's overcommit may allow"
    } else {
        "the GPU with the least memory left on which they fit"
    };
    (devices.len() == size).then(|| Placement { devices, reason: reason.to_owned() })
}

/// Adds devices until there are `size`.
fn fill(open: &mut [&mut Gpu], beyond: bool, devices: &mut Vec<u32>, size: usize) {
    while devices.len() < size {
        let missing = size - devices.len();
        let useful = |gpu: &Gpu| gpu.room(beyond).min(missing);
        // The GPU with the least memory left on which all missing devices fit, or else the one on which the
        // most fit.
        let next = open.iter_mut().min_by_key(|gpu| (Reverse(useful(gpu)), gpu.left_mib, gpu.index));
        let Some(gpu) = next.filter(|gpu| useful(gpu) > 0) else { break };
        gpu.take(useful(gpu), devices);
    }
}

/// The GPUs of the devices to choose from, with the required devices already taken.
fn gpus(node: &Node, request: &PlaceRequest) -> Option<Vec<Gpu>> {
    let left = room::left_mib(node);
    let mut gpus = BTreeMap::<u32, Gpu>::new();
    let mut all: Vec<u32> = request.available.iter().chain(&request.required).copied().collect();
    all.sort_unstable();
    all.dedup();
    for index in all.into_iter().rev() {
        let device = room::device(node, index)?;
        let part = room::part_of(node, device)?;
        let left_mib = *left.get(usize::try_from(device.part).ok()?)?;
        let gpu = gpus.entry(device.part).or_insert_with(|| Gpu {
            leaving: room::is_leaving(part),
            in_use: false,
            index: part.gpu_index,
            left_mib,
            takes_mib: room::takes_mib(node, device),
            available: Vec::new(),
        });
        if request.required.contains(&index) {
            gpu.in_use = true;
            // A device that an init container of the pod holds is required for the next container; it is
            // already counted as held.
            if device.state != DeviceState::Held {
                gpu.left_mib = gpu.left_mib.saturating_sub(gpu.takes_mib);
            }
        } else {
            gpu.available.push(index);
        }
    }
    Some(gpus.into_values().collect())
}
