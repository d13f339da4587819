//! Every possible answer to small random questions, for policies that say what they make best; and
//! what their measures are made of, written down by definition and not by way of `placement`.

use std::fmt::Debug;

use super::{assert_sound, random_questions};
use crate::placement::gpu_of;
use crate::room::takes_mib;
use crate::{Device, DeviceState, Node, PlaceRequest, Placement};

/// Questions that are asked.
const QUESTIONS: usize = 2_000;
/// Of these so many require a device that is held already, as an init container's are.
const HELD_AT_LEAST: usize = QUESTIONS / 10;
/// Devices in a question that all sets of are looked at: 4096 sets.
const DEVICES_MAX: usize = 12;

/// Asks 2,000 random questions and holds each answer against every other that there could be. Less
/// is better; a measure is shown the chosen devices, the required ones among them.
///
/// # Panics
/// If an answer is not among the best, or breaks a rule.
pub fn assert_best<M: Ord + Debug>(
    place: impl Fn(&Node, &PlaceRequest) -> Option<Placement>,
    measure: impl Fn(&Node, &PlaceRequest, &[u32]) -> M,
) {
    let small = |request: &PlaceRequest| request.available.len() <= DEVICES_MAX;
    let mut held = 0;
    for (node, request) in random_questions(1, 4).filter(|(_, request)| small(request)).take(QUESTIONS) {
        let node = &node.node;
        held += usize::from(request.required.iter().any(|device| is_held(&node.devices[*device as usize])));
        let placed = place(node, &request).expect("there are enough devices");
        assert_sound(&request, &placed);
        let best = sets(&request).map(|set| (measure(node, &request, &set), set)).min().expect("a set");
        let measured = measure(node, &request, &placed.devices);
        assert!(measured <= best.0, "{placed:?}: {measured:?}, not {best:?}, for {request:?} on {node:#?}");
    }
    assert!(held >= HELD_AT_LEAST, "only {held} questions require a device that is held");
}

/// Every set of the size among what is available that holds what is required.
fn sets(request: &PlaceRequest) -> impl Iterator<Item = Vec<u32>> {
    let available = &request.available;
    let sized = (0_u32..1 << available.len()).filter(|set| set.count_ones() == request.size);
    let listed = sized.map(|set| {
        let chosen = (0..available.len()).filter(|n| set >> n & 1 == 1);
        chosen.map(|n| available[n]).collect::<Vec<_>>()
    });
    listed.filter(|set| request.required.iter().all(|device| set.contains(device)))
}

/// The answer, which is the same whatever the order of what is available.
///
/// # Panics
/// If it is not.
pub fn steady(
    place: impl Fn(&Node, &PlaceRequest) -> Option<Placement>,
    node: &Node,
    request: &PlaceRequest,
) -> Option<Placement> {
    let placed = place(node, request);
    let mut turned = request.clone();
    turned.available.reverse();
    assert_eq!(place(node, &turned), placed, "{turned:?} on {node:#?}");
    placed
}

fn is_held(device: &Device) -> bool {
    device.state == DeviceState::Held
}

/// The devices that are held or `taken`, by index, each once.
pub fn in_use<'a>(node: &'a Node, taken: &'a [u32]) -> impl Iterator<Item = (u32, &'a Device)> {
    let used = |(index, device): &(u32, &Device)| is_held(device) || taken.contains(index);
    (0..).zip(&node.devices).filter(used)
}

/// How full the GPU of `device` is in millionths while `taken` are held as well: the larger share of
/// its memory and of its devices, where the devices are those of the same resource and those in use.
///
/// # Panics
/// If an index is wrong.
#[must_use]
pub fn fullness(node: &Node, device: u32, taken: &[u32]) -> u64 {
    let gpu = |device: &Device| gpu_of(node, device.part).expect("a part");
    let asked = &node.devices[device as usize];
    let here = gpu(asked);
    let used: Vec<_> = in_use(node, taken).filter(|(_, device)| gpu(device) == here).collect();
    let other = |device: &&Device| gpu(device) == here && device.resource == asked.resource;
    let of_resource = node.devices.iter().filter(other).count();
    let of_others = used.iter().filter(|(_, device)| device.resource != asked.resource).count();
    let mib: u64 = used.iter().map(|(_, device)| takes_mib(node, device)).sum();
    let by_memory = mib * 1_000_000 / node.parts[here].memory_mib;
    let by_count = used.len() * 1_000_000 / (of_resource + of_others);
    by_memory.max(by_count as u64)
}
