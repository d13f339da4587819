//! Best fit: the GPU with the least memory left that still fits, so that large slices stay possible.

use std::collections::BTreeMap;

use berth_policy_sdk::{Node, PlaceRequest, Placement, room};

/// One GPU that has devices to choose from.
#[derive(Debug)]
struct Gpu {
    /// On its way out: such GPUs come last.
    leaving: bool,
    /// Not one that a required device is on: several devices stay together where they can.
    apart: bool,
    index: u32,
    left_mib: u64,
    /// What one device takes.
    takes_mib: u64,
    /// Devices to choose from, the lowest last.
    available: Vec<u32>,
}

impl Gpu {
    /// How many more devices it has room for. With memory overcommit the daemon may have more room
    /// than that: it lists them, and [`best`] takes them in the end.
    fn fits(&self) -> usize {
        let by_room = self.left_mib.checked_div(self.takes_mib).unwrap_or(u64::MAX);
        self.available.len().min(usize::try_from(by_room).unwrap_or(usize::MAX))
    }

    fn take(&mut self, count: usize, into: &mut Vec<u32>) {
        for _ in 0..count {
            into.extend(self.available.pop());
            self.left_mib = self.left_mib.saturating_sub(self.takes_mib);
        }
    }
}

/// The required devices, and the others from as few GPUs as possible: all from the one that has the
/// least memory left among those that fit them all, else the one that fits most first.
///
/// `None` if there are not enough.
pub(crate) fn best(node: &Node, request: &PlaceRequest) -> Option<Placement> {
    let size = usize::try_from(request.size).ok()?;
    let mut gpus = gpus(node, request)?;
    let mut devices = request.required.clone();
    let mut crowded = false;
    while devices.len() < size {
        let missing = size - devices.len();
        let key = |gpu: &&mut Gpu| (gpu.apart, gpu.left_mib, gpu.index);
        let whole = gpus.iter_mut().filter(|gpu| !gpu.leaving && gpu.fits() >= missing).min_by_key(key);
        if let Some(gpu) = whole {
            gpu.take(missing, &mut devices);
            break;
        }
        // Not on one: the one that fits most, so that the rest is small.
        let most = |gpu: &&mut Gpu| (gpu.leaving, usize::MAX - gpu.fits(), gpu.left_mib, gpu.index);
        if let Some(gpu) = gpus.iter_mut().filter(|gpu| gpu.fits() > 0).min_by_key(most) {
            let count = gpu.fits().min(missing);
            gpu.take(count, &mut devices);
            continue;
        }
        crowded = true;
        let any = gpus.iter_mut().filter(|gpu| !gpu.available.is_empty()).min_by_key(|gpu| gpu.index)?;
        any.take(1, &mut devices);
    }
    let reason = if crowded {
        "more than the memory that is left, as the daemon's overcommit may allow"
    } else {
        "the GPU with the least memory left that still fits"
    };
    (devices.len() == size).then(|| Placement { devices, reason: reason.to_owned() })
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
            apart: true,
            index: part.gpu_index,
            left_mib,
            takes_mib: room::takes_mib(node, device),
            available: Vec::new(),
        });
        if request.required.contains(&index) {
            gpu.apart = false;
            gpu.left_mib = gpu.left_mib.saturating_sub(gpu.takes_mib);
        } else {
            gpu.available.push(index);
        }
    }
    Some(gpus.into_values().collect())
}
