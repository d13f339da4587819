//! How full each GPU, or each part of the node, is that can serve a request.

use std::cmp::Reverse;

use crate::room::{device, is_leaving, takes_mib};
use crate::{DeviceState, Node, Part, PlaceRequest};

/// Fullness of a GPU that has nothing left.
const FULL: u64 = 1_000_000;

/// One GPU, its MIG instances counted with it, or one part by itself; and what a request may take of it.
#[derive(Clone, Debug)]
pub struct Load {
    /// The GPU's index on the node.
    pub gpu_index: u32,
    /// It is on its way out, cordoned, drained or unhealthy: what is listed there was freed a moment
    /// ago and not yet withdrawn, and a pod that is sent there fails.
    pub avoid: bool,
    /// Something on it is held, or was taken for this request.
    pub begun: bool,
    /// Devices taken for this request, the required ones among them.
    pub taken: usize,
    memory_mib: u64,
    held_mib: u64,
    devices: u64,
    held: u64,
    /// Device indices to take from and what each consumes, MiB; the lowest index last.
    free: Vec<(u32, u64)>,
}

impl Load {
    /// How much of the GPU is held or taken, in millionths: the larger share of its memory and of
    /// its devices. So slices of several sizes count by size, and slices that set nothing aside by
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

/// Every GPU that has a device of the request's resource, by index, with the required devices taken.
///
/// `None` if the request names what the node does not have, or more required devices than it asks
/// for.
#[must_use]
pub fn loads(node: &Node, request: &PlaceRequest) -> Option<Vec<Load>> {
    loads_by(node, request, |part| gpu_of(node, part))
}

/// The same for each part by itself: shares of two MIG instances are not shares of one thing.
#[must_use]
pub fn loads_of_parts(node: &Node, request: &PlaceRequest) -> Option<Vec<Load>> {
    loads_by(node, request, |part| usize::try_from(part).ok().filter(|part| *part < node.parts.len()))
}

/// By what `unit` says that a part counts as.
fn loads_by(node: &Node, request: &PlaceRequest, unit: impl Fn(u32) -> Option<usize>) -> Option<Vec<Load>> {
    let look = |index: u32| {
        let device = device(node, index)?;
        Some((unit(device.part)?, takes_mib(node, device)))
    };
    if request.required.len() > usize::try_from(request.size).ok()? {
        return None;
    }
    let mut loads: Vec<Load> = node.parts.iter().map(unused).collect();
    let mut asked = vec![false; loads.len()];
    for device in &node.devices {
        let of = unit(device.part)?;
        let ours = device.resource == request.request.resource;
        let held = device.state == DeviceState::Held;
        asked[of] |= ours;
        let load = &mut loads[of];
        load.devices += u64::from(ours || held);
        load.held += u64::from(held);
        load.begun |= held;
        load.held_mib += if held { takes_mib(node, device) } else { 0 };
    }
    for &index in &request.available {
        let (of, mib) = look(index)?;
        loads[of].free.push((index, mib));
    }
    for &index in &request.required {
        let (of, mib) = look(index)?;
        let load = &mut loads[of];
        load.free.retain(|&(other, _)| other != index);
        load.taken += 1;
        // What an init container held is required for the next one of its pod: the record counts it
        // already.
        if device(node, index)?.state != DeviceState::Held {
            load.count(mib);
        }
    }
    let mut found: Vec<Load> =
        loads.into_iter().zip(asked).filter(|(_, asked)| *asked).map(|(load, _)| load).collect();
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

/// The part that is the GPU of this one: its parent, or itself. `None` for an index out of range.
#[must_use]
pub fn gpu_of(node: &Node, part: u32) -> Option<usize> {
    let gpu = node.parts.get(usize::try_from(part).ok()?)?.parent.unwrap_or(part);
    usize::try_from(gpu).ok().filter(|gpu| *gpu < node.parts.len())
}
