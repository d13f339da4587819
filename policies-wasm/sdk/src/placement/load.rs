//! How full each GPU is that has devices for a request, or each part of the node.

use std::cmp::Reverse;

use crate::room::{device, is_leaving, takes_mib};
use crate::{DeviceState, Node, Part, PlaceRequest};

/// Fullness of a GPU of which everything is held.
const FULL: u64 = 1_000_000;

/// One GPU including its MIG instances, or one part on its own, with the devices that a request can get
/// from it.
#[derive(Clone, Debug)]
pub struct Load {
    /// The GPU's index on the node.
    pub gpu_index: u32,
    /// It is cordoned, draining, drained or unhealthy. A device that was freed a moment ago may still be
    /// listed as available there, but a pod that gets it fails.
    pub avoid: bool,
    /// At least one of its devices is held, or was taken for this request.
    pub begun: bool,
    /// Devices taken for this request, including the required ones.
    pub taken: usize,
    memory_mib: u64,
    held_mib: u64,
    devices: u64,
    held: u64,
    /// Available devices: index, and what each consumes, MiB; the lowest index last.
    free: Vec<(u32, u64)>,
}

impl Load {
    /// The fraction of the GPU that is held or taken, in millionths: the larger of the fractions of its
    /// memory and of its devices. So slices of several sizes count by size, and slices without memory by
    /// number.
    #[must_use]
    pub fn fullness(&self) -> u64 {
        let share = |held: u64, of: u64| held.saturating_mul(FULL).checked_div(of).unwrap_or(0);
        share(self.held_mib, self.memory_mib).max(share(self.held, self.devices))
    }

    /// Devices that can still be taken.
    #[must_use]
    pub fn left(&self) -> usize {
        self.free.len()
    }

    /// Takes the device with the lowest index.
    pub fn take(&mut self) -> Option<u32> {
        let (device, mib) = self.free.pop()?;
        self.taken += 1;
        self.count(mib);
        Some(device)
    }

    fn count(&mut self, mib: u64) {
        self.held += 1;
        self.held_mib += mib;
        self.begun = true;
    }
}

/// Every GPU that has a device of the request's resource, sorted by index, with the required devices
/// taken.
///
/// `None` if the request has indices that the node does not have, or more required devices than its
/// size.
#[must_use]
pub fn loads(node: &Node, request: &PlaceRequest) -> Option<Vec<Load>> {
    loads_by(node, request, |part| gpu_of(node, part))
}

/// Like [`loads`], for each part on its own: two MIG instances of one GPU are counted separately.
#[must_use]
pub fn loads_of_parts(node: &Node, request: &PlaceRequest) -> Option<Vec<Load>> {
    loads_by(node, request, |part| usize::try_from(part).ok().filter(|part| *part < node.parts.len()))
}

/// Like [`loads`]; parts for which `unit` returns the same index are counted together.
fn loads_by(node: &Node, request: &PlaceRequest, unit: impl Fn(u32) -> Option<usize>) -> Option<Vec<Load>> {
    let unit_and_mib = |index: u32| {
        let device = device(node, index)?;
        Some((unit(device.part)?, takes_mib(node, device)))
    };
    if request.required.len() > usize::try_from(request.size).ok()? {
        return None;
    }
    let mut loads: Vec<Load> = node.parts.iter().map(unused).collect();
    let mut has_resource = vec![false; loads.len()];
    for device in &node.devices {
        let unit = unit(device.part)?;
        let of_resource = device.resource == request.request.resource;
        let held = device.state == DeviceState::Held;
        has_resource[unit] |= of_resource;
        let load = &mut loads[unit];
        load.devices += u64::from(of_resource || held);
        load.held += u64::from(held);
        load.begun |= held;
        load.held_mib += if held { takes_mib(node, device) } else { 0 };
    }
    for &index in &request.available {
        let (unit, mib) = unit_and_mib(index)?;
        loads[unit].free.push((index, mib));
    }
    for &index in &request.required {
        let (unit, mib) = unit_and_mib(index)?;
        let load = &mut loads[unit];
        load.free.retain(|&(other, _)| other != index);
        load.taken += 1;
        // A device that an init container of the pod holds is required for the next container; it is
        // already counted as held.
        if device(node, index)?.state != DeviceState::Held {
            load.count(mib);
        }
    }
    let mut found: Vec<Load> =
        loads.into_iter().zip(has_resource).filter(|(_, has)| *has).map(|(load, _)| load).collect();
    for load in &mut found {
        load.free.sort_unstable_by_key(|&(device, _)| Reverse(device));
        load.free.dedup();
    }
    Some(found)
}

fn unused(part: &Part) -> Load {
    Load {
        gpu_index: part.gpu_index,
        avoid: is_leaving(part),
        begun: false,
        taken: 0,
        memory_mib: part.memory_mib,
        held_mib: 0,
        devices: 0,
        held: 0,
        free: Vec::new(),
    }
}

/// The GPU of a part: its parent, or the part itself. `None` for an index out of range.
#[must_use]
pub fn gpu_of(node: &Node, part: u32) -> Option<usize> {
    let gpu = node.parts.get(usize::try_from(part).ok()?)?.parent.unwrap_or(part);
    usize::try_from(gpu).ok().filter(|gpu| *gpu < node.parts.len())
}
