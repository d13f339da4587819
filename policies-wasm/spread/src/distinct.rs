//! The rule that devices of one container are on distinct GPUs.

use berth_policy_sdk::placement::gpu_of;
use berth_policy_sdk::{AdmitRequest, Node};

/// Why the devices asked for break the rule, in words for the pod's owner; `None` if they do not.
/// Devices that the node does not know break nothing: the daemon refuses them itself.
pub(crate) fn broken(node: &Node, request: &AdmitRequest) -> Option<String> {
    let devices = request.devices.iter().filter_map(|&index| node.devices.get(usize::try_from(index).ok()?));
    let mut on_gpu = vec![0_usize; node.parts.len()];
    for device in devices {
        if let Some(gpu) = gpu_of(node, device.part) {
            on_gpu[gpu] += 1;
        }
    }
    // The first of the fullest, so that the sentence is the same every time.
    let (gpu, count) = on_gpu.iter().enumerate().rev().max_by_key(|(_, count)| **count)?;
    if *count < 2 {
        return None;
    }
    let asked = request.devices.len();
    let name = node.resources.get(usize::try_from(request.request.resource).ok()?)?;
    let gpus = gpus_with(node, request.request.resource);
    let index = node.parts[gpu].gpu_index;
    let advice = if asked > gpus {
        let most = if gpus == 1 { "1 GPU".to_owned() } else { format!("{gpus} GPUs") };
        format!("this node has {most} of it: ask for at most {gpus}")
    } else {
        "too few GPUs had one free, or the kubelet chose by itself: try again when more are free".to_owned()
    };
    Some(format!(
        "the {asked} devices of {name} must be on distinct GPUs, but {count} of them are on GPU {index}; {advice}"
    ))
}

/// GPUs that have devices of a resource.
fn gpus_with(node: &Node, resource: u32) -> usize {
    let devices = node.devices.iter().filter(|device| device.resource == resource);
    let mut gpus: Vec<_> = devices.filter_map(|device| gpu_of(node, device.part)).collect();
    gpus.sort_unstable();
    gpus.dedup();
    gpus.len()
}
