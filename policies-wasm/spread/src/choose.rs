//! Chooses the devices. It optimises, in this order:
//!
//! 1. the fewest devices on GPUs that are cordoned, drained or unhealthy,
//! 2. the most GPUs, including those of required devices,
//! 3. the emptier GPUs, by how full each was when a device of it was taken, summed over the devices.
//!
//! If sets are equal, the one with the lowest indices is chosen. Taking the best device step by step
//! finds the best set by these rules, since a GPU only gets fuller with each device that is taken.

use berth_policy_sdk::placement::loads;
use berth_policy_sdk::{Node, PlaceRequest, Placement};

/// `None` if the available devices do not suffice.
pub(crate) fn choose(node: &Node, request: &PlaceRequest) -> Option<Placement> {
    let size = usize::try_from(request.size).ok()?;
    let mut loads = loads(node, request)?;
    let mut devices = request.required.clone();
    while devices.len() < size {
        let open = loads.iter_mut().filter(|load| load.left() > 0);
        let best = open.min_by_key(|load| (load.avoid, load.taken > 0, load.fullness(), load.gpu_index))?;
        devices.push(best.take()?);
    }
    let gpus = loads.iter().filter(|load| load.taken > 0).count();
    let reason = if gpus == size {
        "the least-held GPUs, one device of each".to_owned()
    } else {
        format!("only {gpus} GPUs available for {size} devices: the least-held first")
    };
    Some(Placement { devices, reason })
}
