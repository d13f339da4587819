//! The choice. What it makes best, one after the other:
//!
//! 1. as few devices as can be on GPUs that are cordoned, drained or unhealthy,
//! 2. as many GPUs as can be, the required devices' among them,
//! 3. the emptier GPUs: by how full each was when a device of it was taken, summed over the devices.
//!
//! The lowest indices win a tie. Taking the best device one after the other finds the best of all
//! by these, since a GPU only gets fuller with what is taken.

use berth_policy_sdk::placement::loads;
use berth_policy_sdk::{Node, PlaceRequest, Placement};

/// `None` if the request cannot be met from what is available.
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
        "the least-held GPUs, a device of each".to_owned()
    } else {
        format!("no more than {gpus} GPUs to be had for {size} devices: the least-held first")
    };
    Some(Placement { devices, reason })
}
