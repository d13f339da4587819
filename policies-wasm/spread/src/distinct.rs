//! The rule that devices of one container are on distinct GPUs.

use berth_policy_sdk::placement::gpu_of;
use berth_policy_sdk::{AdmitRequest, Node};

/// The message for the pod's owner if the requested devices break the rule, else `None`. Unknown devices
/// are ignored: the daemon refuses them itself.
pub(crate) fn violation(node: &Node, request: &AdmitRequest) -> Option<String> {
    let devices = request.devices.iter().filter_map(|&index| node.devices.get(usize::try_from(index).ok()?));
    let mut on_gpu = vec![0_usize; node.parts.len()];
    for device in devices {
        if let Some(gpu) = gpu_of(node, device.part) {
            on_gpu[gpu] += 1;
        }
    }
    // Of several GPUs with the most devices the first one, so that the message is deterministic.
    let (gpu, count) = on_gpu.iter().enumerate().rev().max_by_key(|(_, count)| **count)?;
    if *count < 2 {
        return None;
    }
    let requested = request.devices.len();
    let name = node.resources.get(usize::try_from(request.request.resource).ok()?)?;
    let gpus = gpus_with(node, request.request.resource);
    let index = node.parts[gpu].gpu_index;
    let advice = if requested > gpus {
        let gpus_text = if gpus == 1 { "1 GPU".to_owned() } else { format!("{gpus} GPUs") };
        format!("this node has {gpus_text} with this resource: request at most {gpus}")
    } else {
        "too few GPUs had a free one, or the kubelet chose the devices itself: try again when more are free"
            .to_owned()
    };
    Some(format!(
        "the {requested} devices of {name} must be on distinct GPUs, but {count} of them are on GPU {index}; {advice}"
    ))
}

/// The number of GPUs that have devices of a resource.
fn gpus_with(node: &Node, resource: u32) -> usize {
    let devices = node.devices.iter().filter(|device| device.resource == resource);
    let mut gpus: Vec<_> = devices.filter_map(|device| gpu_of(node, device.part)).collect();
    gpus.sort_unstable();
    gpus.dedup();
    gpus.len()
}
