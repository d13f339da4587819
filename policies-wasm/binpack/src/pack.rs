//! Chooses the devices. It optimises, in this order:
//!
//! 1. the fewest devices on GPUs that are cordoned, drained or unhealthy,
//! 2. the fewest idle GPUs used,
//! 3. all devices on one GPU, if one has enough,
//! 4. the fuller GPUs, by how full each was before, summed over the devices.
//!
//! If sets are equal, the one with the lowest indices is chosen.

use std::cmp::Reverse;

use berth_policy_sdk::placement::Load;
use berth_policy_sdk::{PlaceRequest, Placement};

/// `None` if the available devices do not suffice.
pub(crate) fn pack(mut loads: Vec<Load>, request: &PlaceRequest) -> Option<Placement> {
    let size = usize::try_from(request.size).ok()?;
    let mut devices = request.required.clone();
    // GPUs to avoid are used only if the others do not suffice.
    for avoid in [false, true] {
        let mut open: Vec<&mut Load> =
            loads.iter_mut().filter(|load| load.avoid == avoid && load.left() > 0).collect();
        fill(&mut open, &mut devices, size);
    }
    let gpus = loads.iter().filter(|load| load.taken > 0).count();
    let reason = match gpus {
        1 => "the fullest GPU that fits",
        _ => "no GPU fits all: the fullest GPUs first",
    };
    (devices.len() == size).then(|| Placement { devices, reason: reason.to_owned() })
}

/// Adds devices until there are `size`.
fn fill(open: &mut [&mut Load], devices: &mut Vec<u32>, size: usize) {
    let missing = size - devices.len();
    let left_on_begun: usize = open.iter().filter(|load| load.begun).map(|load| load.left()).sum();
    // An idle GPU may get all devices only if an idle one has to be used anyway.
    let fits = |load: &Load| load.left() >= missing && (load.begun || left_on_begun < missing);
    // If a device has been chosen already, not all devices come from the same GPU.
    let none_chosen = devices.is_empty();
    open.sort_by_key(|load| {
        let fits = none_chosen && fits(load);
        // Idle GPUs are all equally full: the one with the most devices first, so that few are used.
        let room = if load.begun { 0 } else { load.left() };
        (Reverse(fits), Reverse(load.begun), Reverse(load.fullness()), Reverse(room), load.gpu_index)
    });
    for load in open {
        while devices.len() < size {
            let Some(device) = load.take() else { break };
            devices.push(device);
        }
    }
}
