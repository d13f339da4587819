//! Places whole GPUs and MIG instances.

use berth_policy_sdk::placement::gpu_of;
use berth_policy_sdk::room::is_leaving;
use berth_policy_sdk::{Node, PlaceRequest, Placement};

use crate::grow::grow;
use crate::pairs::Pairs;
use crate::search::{EXACT_PARTS_MAX, Search, bits};

/// `None` if the available devices do not suffice.
pub(crate) fn place(node: &Node, request: &PlaceRequest, leave_weight: u32) -> Option<Placement> {
    let size = usize::try_from(request.size).ok()?;
    let mut devices: Vec<u32> = request.available.iter().chain(&request.required).copied().collect();
    devices.sort_unstable();
    devices.dedup();
    if devices.len() < size || request.required.len() > size {
        return None;
    }
    let required = |device: &u32| request.required.contains(device);
    // Devices of cordoned, draining and unhealthy GPUs are used only if all others do not suffice.
    let (working, failing): (Vec<u32>, Vec<u32>) =
        devices.iter().partition(|device| required(device) || !is_failing(node, **device));
    let enough = working.len() >= size;
    let mut open = working.clone();
    if !enough {
        open.extend(failing);
        open.sort_unstable();
    }
    let is_must = |device: &u32| if enough { required(device) } else { working.contains(device) };
    let must: Vec<usize> = (0..open.len()).filter(|n| is_must(&open[*n])).collect();
    let chosen = best(node, &open, &must, size, leave_weight)?;
    let reason = match (enough, chosen.exact) {
        (false, _) => "too few usable GPUs: cordoned or unhealthy ones were chosen as well",
        (true, true) => "the best connected GPUs, chosen so that good sets remain for later requests",
        (true, false) => "well connected GPUs, chosen one by one: there are too many to compare all sets",
    };
    let devices = chosen.set.into_iter().map(|n| open[n]).collect();
    Some(Placement { devices, reason: reason.to_owned() })
}

struct Chosen {
    set: Vec<usize>,
    exact: bool,
}

fn best(node: &Node, open: &[u32], must: &[usize], size: usize, leave_weight: u32) -> Option<Chosen> {
    let part_of = |device: &u32| Some(node.devices.get(usize::try_from(*device).ok()?)?.part);
    if size == 0 || size == open.len() {
        return Some(Chosen { set: (0..size).collect(), exact: true });
    }
    let parts: Vec<u32> = open.iter().map(part_of).collect::<Option<_>>()?;
    let pairs = Pairs::of(node, &parts)?;
    if open.len() > EXACT_PARTS_MAX {
        return Some(Chosen { set: grow(&pairs, must, size), exact: false });
    }
    // What a set costs later requests apart from the best remaining set: its pairs with remaining parts.
    let costs: Vec<u32> = (0..open.len()).map(|part| pairs.sum_of(part)).collect();
    let must = must.iter().fold(0, |mask, part| mask | 1 << part);
    let search =
        Search { pairs: &pairs, must, size, leave_weight, costs: &costs, own_pairs_cost_nothing: true };
    Some(Chosen { set: bits(search.best()).collect(), exact: true })
}

fn is_failing(node: &Node, device: u32) -> bool {
    let device = usize::try_from(device).ok().and_then(|index| node.devices.get(index));
    let gpu = device.and_then(|device| gpu_of(node, device.part));
    gpu.is_some_and(|gpu| is_leaving(&node.parts[gpu]))
}
