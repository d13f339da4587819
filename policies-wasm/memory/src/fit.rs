//! Best fit: the GPU with the least memory left that still fits, so that large slices stay possible.
//! What it makes best, one after the other:
//!
//! 1. as few devices as can be on GPUs that are cordoned, draining or unhealthy,
//! 2. as few as can be beyond the memory that is left, as the daemon's overcommit may allow,
//! 3. as few GPUs as can be, those of required devices among them, and these first,
//! 4. all on the GPU with the least memory left of those that fit them all; else as many as fit on the
//!    one that fits most, and so on with the rest.
//!
//! The lowest indices win a tie.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use berth_policy_sdk::{DeviceState, Node, PlaceRequest, Placement, room};

/// One GPU that has devices to choose from.
#[derive(Debug)]
struct Gpu {
    /// On its way out: such GPUs come last.
    leaving: bool,
    /// Something for this request is on it: several devices stay together where they can.
    begun: bool,
    index: u32,
    left_mib: u64,
    /// What one device takes.
    takes_mib: u64,
    /// Devices to choose from, the lowest last.
    available: Vec<u32>,
}

impl Gpu {
    /// How many more devices it has room for; `beyond` the memory that is left all that are listed,
    /// since the daemon may have more room than a policy is shown.
    fn room(&self, beyond: bool) -> usize {
        let by_memory = self.left_mib.checked_div(self.takes_mib).filter(|_| !beyond);
        self.available.len().min(by_memory.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX)))
    }

    fn take(&mut self, count: usize, into: &mut Vec<u32>) {
        for _ in 0..count {
            into.extend(self.available.pop());
            self.left_mib = self.left_mib.saturating_sub(self.takes_mib);
            self.begun = true;
        }
    }
}

/// `None` if there are not enough devices.
pub(crate) fn best(node: &Node, request: &PlaceRequest) -> Option<Placement> {
    let size = usize::try_from(request.size).ok()?;
    let mut gpus = gpus(node, request)?;
    let mut devices = request.required.clone();
    let mut crowded = false;
    for (leaving, beyond) in [(false, false), (false, true), (true, false), (true, true)] {
        let before = devices.len();
        for begun in [true, false] {
            let open = gpus.iter_mut().filter(|gpu| gpu.leaving == leaving && gpu.begun == begun);
            fill(&mut open.collect::<Vec<_>>(), beyond, &mut devices, size);
        }
        crowded |= beyond && devices.len() > before;
    }
    let reason = if crowded {
        "more than the memory that is left, as the daemon's overcommit may allow"
    } else {
        "the GPU with the least memory left that still fits"
    };
    (devices.len() == size).then(|| Placement { devices, reason: reason.to_owned() })
}

/// Adds to `devices` up to `size`.
fn fill(open: &mut [&mut Gpu], beyond: bool, devices: &mut Vec<u32>, size: usize) {
    while devices.len() < size {
        let missing = size - devices.len();
        let useful = |gpu: &Gpu| gpu.room(beyond).min(missing);
        // Of those that fit all that is missing the one with the least left; else the one that fits most.
        let next = open.iter_mut().min_by_key(|gpu| (Reverse(useful(gpu)), gpu.left_mib, gpu.index));
        let Some(gpu) = next.filter(|gpu| useful(gpu) > 0) else { break };
        gpu.take(useful(gpu), devices);
    }
}

/// The GPUs of the devices to choose from, the required ones taken already.
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
            begun: false,
            index: part.gpu_index,
            left_mib,
            takes_mib: room::takes_mib(node, device),
            available: Vec::new(),
        });
        if request.required.contains(&index) {
            gpu.begun = true;
            // What an init container held is required for the next one of its pod: the record counts
            // it already.
            if device.state != DeviceState::Held {
                gpu.left_mib = gpu.left_mib.saturating_sub(gpu.takes_mib);
            }
        } else {
            gpu.available.push(index);
        }
    }
    Some(gpus.into_values().collect())
}
