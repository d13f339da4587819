//! The choice. What it makes best, one after the other:
//!
//! 1. as few devices as can be on GPUs that are cordoned, drained or unhealthy,
//! 2. as few idle GPUs begun as can be,
//! 3. all on one GPU, if one can hold them,
//! 4. the fuller GPUs, by how full each was before, summed over the devices.
//!
//! The lowest indices win a tie.

use std::cmp::Reverse;

use berth_policy_sdk::placement::Load;
use berth_policy_sdk::{PlaceRequest, Placement};

/// `None` if the request cannot be met from what is available.
pub(crate) fn pack(mut loads: Vec<Load>, request: &PlaceRequest) -> Option<Placement> {
    let size = usize::try_from(request.size).ok()?;
    let mut devices = request.required.clone();
    // Those to avoid serve only what the others cannot.
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

/// Adds to `devices` up to `size`.
fn fill(open: &mut [&mut Load], devices: &mut Vec<u32>, size: usize) {
    let missing = size - devices.len();
    let of_begun: usize = open.iter().filter(|load| load.begun).map(|load| load.left()).sum();
    // An idle GPU may hold all only where one has to be begun anyway.
    let fits = |load: &Load| load.left() >= missing && (load.begun || of_begun < missing);
    // Once something lies elsewhere they cannot all be on one.
    let alone = devices.is_empty();
    open.sort_by_key(|load| {
        let fits = alone && fits(load);
        // Idle ones are all equally full: the one with most room first, so that few are begun.
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
