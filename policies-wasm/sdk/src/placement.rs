//! Functions for policies that choose devices. A policy without a preference passes: the daemon's
//! baseline finds the exact best set of whole GPUs by links and NUMA nodes.

mod load;
mod resources;

pub use load::{Load, gpu_of, loads, loads_of_parts};
pub use resources::{Kind, Resources};

use crate::{Node, PlaceRequest, Placement};

/// Chooses shares one by one, each from the GPU or MIG instance with the smallest fraction held; of two
/// with equal fractions, from the one with fewer shares for this container. So several shares of one
/// container are on several GPUs. GPUs that are cordoned, draining or unhealthy come last.
///
/// `None` if the available devices do not suffice.
#[must_use]
pub fn spread(node: &Node, request: &PlaceRequest) -> Option<Placement> {
    let size = usize::try_from(request.size).ok()?;
    let mut loads = loads_of_parts(node, request)?;
    let mut devices = request.required.clone();
    while devices.len() < size {
        let open = loads.iter_mut().filter(|load| load.left() > 0);
        let emptiest = open.min_by_key(|load| (load.avoid, load.fullness(), load.taken, load.gpu_index))?;
        devices.push(emptiest.take()?);
    }
    Some(Placement { devices, reason: "the least-held GPUs first".to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{NodeBuilder, share};
    use crate::{Consumes, DrainState};

    const SHARED: &str = "example.com/shared";

    fn two_gpus() -> NodeBuilder {
        let quarter = share(4, 4096);
        NodeBuilder::new()
            .gpus(2, "Test GPU", 4096)
            .devices(0, SHARED, 4, quarter)
            .devices(1, SHARED, 4, quarter)
    }

    #[test]
    fn several_shares_land_on_several_gpus() {
        let node = two_gpus().build();
        let request = node.place_request(SHARED, 2);
        assert_eq!(spread(&node.node, &request).unwrap().devices, [0, 4]);
        let request = node.place_request(SHARED, 4);
        assert_eq!(spread(&node.node, &request).unwrap().devices, [0, 4, 1, 5]);
    }

    #[test]
    fn the_least_held_gpu_comes_first() {
        let node = two_gpus().hold(&[0]).build();
        let request = node.place_request(SHARED, 1);
        assert_eq!(spread(&node.node, &request).unwrap().devices, [4]);
    }

    #[test]
    fn of_equally_held_gpus_the_one_that_gave_less_to_this_container_comes_first() {
        // Another container holds one share of the second GPU: a request for two gets one of each GPU.
        let node = two_gpus().hold(&[4]).build();
        let request = node.place_request(SHARED, 2);
        assert_eq!(spread(&node.node, &request).unwrap().devices, [0, 5]);
        let request = node.place_request(SHARED, 4);
        assert_eq!(spread(&node.node, &request).unwrap().devices, [0, 5, 1, 6]);
    }

    #[test]
    fn instances_of_one_gpu_are_held_each_by_itself() {
        let half = share(2, 4_864);
        let node = NodeBuilder::new()
            .gpus(1, "Test GPU", 40_960)
            .mig(0, "1g.5gb", 2, 4_864)
            .devices(1, SHARED, 2, half)
            .devices(2, SHARED, 2, half)
            .hold(&[0])
            .build();
        assert_eq!(spread(&node.node, &node.place_request(SHARED, 1)).unwrap().devices, [2]);
        assert_eq!(spread(&node.node, &node.place_request(SHARED, 2)).unwrap().devices, [2, 1]);
    }

    #[test]
    fn fullness_is_a_fraction_of_the_gpu() {
        let node = NodeBuilder::new()
            .gpus(2, "Test GPU", 4096)
            .devices(0, SHARED, 2, share(2, 4096))
            .devices(1, SHARED, 10, share(10, 4096))
            .hold(&[0, 2, 3])
            .build();
        let request = node.place_request(SHARED, 1);
        assert_eq!(spread(&node.node, &request).unwrap().devices, [4]);
    }

    #[test]
    fn slices_of_several_sizes_count_by_size() {
        // One half of the first GPU is fuller than two eighths of the second.
        let node = NodeBuilder::new()
            .gpus(2, "Test GPU", 4096)
            .devices(0, "example.com/half", 1, share(2, 4096))
            .devices(0, SHARED, 4, share(8, 4096))
            .devices(1, SHARED, 8, share(8, 4096))
            .hold(&[0, 5, 6])
            .build();
        assert_eq!(spread(&node.node, &node.place_request(SHARED, 1)).unwrap().devices, [7]);
    }

    #[test]
    fn slices_without_memory_count_by_number() {
        let nothing = Consumes::Slice(crate::Slice { memory_mib: 0, compute_percent: 0 });
        let node = NodeBuilder::new()
            .gpus(2, "Test GPU", 4096)
            .devices(0, SHARED, 4, nothing)
            .devices(1, SHARED, 4, nothing)
            .hold(&[0])
            .build();
        assert_eq!(spread(&node.node, &node.place_request(SHARED, 1)).unwrap().devices, [4]);
    }

    #[test]
    fn required_devices_are_in_the_answer_and_count() {
        let node = two_gpus().build();
        let mut request = node.place_request(SHARED, 2);
        request.required = vec![2];
        assert_eq!(spread(&node.node, &request).unwrap().devices, [2, 4]);
    }

    #[test]
    fn a_required_device_that_is_held_already_counts_once() {
        // Device 0 was held by an init container of the same pod; 4 and 5 are held by another pod.
        let node = two_gpus().hold(&[0]).hold(&[4, 5]).build();
        let mut request = node.place_request(SHARED, 3);
        request.available.insert(0, 0);
        request.required = vec![0];
        let loads = loads(&node.node, &request).unwrap();
        let seen: Vec<_> = loads.iter().map(|load| (load.taken, load.left(), load.fullness())).collect();
        assert_eq!(seen, [(1, 3, 250_000), (0, 2, 500_000)]);
        assert_eq!(spread(&node.node, &request).unwrap().devices, [0, 1, 6]);
    }

    #[test]
    fn a_draining_gpu_comes_last() {
        let node = two_gpus().part(0, |part| part.drain = DrainState::Draining).hold(&[4, 5]).build();
        let request = node.place_request(SHARED, 3);
        assert_eq!(spread(&node.node, &request).unwrap().devices, [6, 7, 0]);
    }

    #[test]
    fn requests_that_cannot_be_met_are_passed_on() {
        let node = two_gpus().build();
        let mut request = node.place_request(SHARED, 9);
        assert_eq!(spread(&node.node, &request), None);
        request.size = 1;
        request.required = vec![0, 1];
        assert_eq!(spread(&node.node, &request), None);
        request.required = vec![99];
        assert_eq!(spread(&node.node, &request), None);
    }
}
