//! Compares a policy's answers to small random requests with all possible answers, for policies that
//! define a best one. The helpers for such definitions do not use `placement`, which they verify.

use std::fmt::Debug;

use super::{assert_sound, random_questions};
use crate::placement::gpu_of;
use crate::room::takes_mib;
use crate::{Device, DeviceState, Node, PlaceRequest, Placement};

/// Random requests per test.
const REQUESTS: usize = 2_000;
/// Of these, at least this many require a device that is already held, like those of an init container.
const HELD_MIN: usize = REQUESTS / 10;
/// Available devices of a request at most, since all of their sets are tried: 4096 sets.
const DEVICES_MAX: usize = 12;

/// Compares the answers to 2,000 random requests with all other possible answers. A smaller measure is
/// better; it is computed from the chosen devices, including the required ones.
///
/// # Panics
/// If an answer is not among the best, or breaks a rule.
pub fn assert_best<M: Ord + Debug>(
    place: impl Fn(&Node, &PlaceRequest) -> Option<Placement>,
    measure: impl Fn(&Node, &PlaceRequest, &[u32]) -> M,
) {
    let small = |request: &PlaceRequest| request.available.len() <= DEVICES_MAX;
    let mut held = 0;
    for (node, request) in random_questions(1, 4).filter(|(_, request)| small(request)).take(REQUESTS) {
        let node = &node.node;
        held += usize::from(request.required.iter().any(|device| is_held(&node.devices[*device as usize])));
        let placed = place(node, &request).expect("there are enough devices");
        assert_sound(&request, &placed);
        let best = sets(&request).map(|set| (measure(node, &request, &set), set)).min().expect("a set");
        let measured = measure(node, &request, &placed.devices);
        assert!(measured <= best.0, "{placed:?}: {measured:?}, not {best:?}, for {request:?} on {node:#?}");
    }
    assert!(held >= HELD_MIN, "only {held} requests require a device that is held");
}

/// Every set of `size` available devices that contains the required ones.
fn sets(request: &PlaceRequest) -> impl Iterator<Item = Vec<u32>> {
    let available = &request.available;
    let sized = (0_u32..1 << available.len()).filter(|set| set.count_ones() == request.size);
    let listed = sized.map(|set| {
        let chosen = (0..available.len()).filter(|n| set >> n & 1 == 1);
        chosen.map(|n| available[n]).collect::<Vec<_>>()
    });
    listed.filter(|set| request.required.iter().all(|device| set.contains(device)))
}

/// The answer to a request. It must not depend on the order of the available devices.
///
/// # Panics
/// If it does.
pub fn steady(
    place: impl Fn(&Node, &PlaceRequest) -> Option<Placement>,
    node: &Node,
    request: &PlaceRequest,
) -> Option<Placement> {
    let placed = place(node, request);
    let mut reversed = request.clone();
    reversed.available.reverse();
    assert_eq!(place(node, &reversed), placed, "{reversed:?} on {node:#?}");
    placed
}

fn is_held(device: &Device) -> bool {
    device.state == DeviceState::Held
}

/// The devices that are held or in `taken`, each once, with their indices.
pub fn in_use<'a>(node: &'a Node, taken: &'a [u32]) -> impl Iterator<Item = (u32, &'a Device)> {
    let used = |(index, device): &(u32, &Device)| is_held(device) || taken.contains(index);
    (0..).zip(&node.devices).filter(used)
}

/// How full the GPU of `device` is, in millionths, if `taken` are held as well: the larger of the
/// fractions of its memory and of its devices. The devices are those of the same resource and those in
/// use.
///
/// # Panics
/// If an index is wrong.
#[must_use]
pub fn fullness(node: &Node, device: u32, taken: &[u32]) -> u64 {
    let gpu = |device: &Device| gpu_of(node, device.part).expect("a part");
    let device = &node.devices[device as usize];
    let here = gpu(device);
    let used: Vec<_> = in_use(node, taken).filter(|(_, device)| gpu(device) == here).collect();
    let same_resource = |other: &&Device| gpu(other) == here && other.resource == device.resource;
    let of_resource = node.devices.iter().filter(same_resource).count();
    let of_others = used.iter().filter(|(_, other)| other.resource != device.resource).count();
    let mib: u64 = used.iter().map(|(_, device)| takes_mib(node, device)).sum();
    let by_memory = mib * 1_000_000 / node.parts[here].memory_mib;
    let by_count = used.len() * 1_000_000 / (of_resource + of_others);
    by_memory.max(by_count as u64)
}
