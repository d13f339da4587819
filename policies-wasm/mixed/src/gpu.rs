//! The state of a GPU that `mixed` needs.

use berth_policy_sdk::{Consumes, DeviceState, DrainState, Health, Node, Part};

use crate::Parameters;
use crate::latched::Mode;

/// A GPU that may be shared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gpu<'a> {
    /// Index into the node's parts.
    pub(crate) index: u32,
    pub(crate) part: &'a Part,
    /// The mode of its held devices, or else of its present offer; `None` before the first offer, or if it
    /// is offered in both modes.
    pub(crate) mode: Option<Mode>,
    /// At least one of its devices is held.
    pub(crate) held: bool,
    /// At least one more device of its mode can be granted beside the held ones.
    pub(crate) room: bool,
    /// Its devices may be granted: it is neither cordoned nor unhealthy.
    pub(crate) usable: bool,
}

impl<'a> Gpu<'a> {
    /// The GPUs in the node's order, without those in MIG mode.
    pub(crate) fn all(node: &'a Node, parameters: &Parameters) -> Vec<Self> {
        let mut gpus: Vec<_> = (0..)
            .zip(&node.parts)
            .filter(|(_, part)| part.parent.is_none() && !part.mig_enabled)
            .map(|(index, part)| Self::idle(index, part, parameters))
            .collect();
        for device in &node.devices {
            let Ok(gpu) = gpus.binary_search_by_key(&device.part, |gpu| gpu.index) else {
                continue;
            };
            let gpu = &mut gpus[gpu];
            if device.state == DeviceState::Held {
                gpu.mode = Some(match device.consumes {
                    Consumes::Whole => Mode::Whole,
                    Consumes::Slice(_) => Mode::Shared,
                });
                gpu.held = true;
            }
        }
        let free = |gpu: &Self| {
            let mut devices = node.devices.iter();
            devices.any(|device| device.part == gpu.index && device.state == DeviceState::Free)
        };
        for gpu in &mut gpus {
            gpu.room = !gpu.held || (gpu.mode == Some(Mode::Shared) && free(gpu));
        }
        gpus
    }

    fn idle(index: u32, part: &'a Part, parameters: &Parameters) -> Self {
        let listed = |resource: &String| part.offered.iter().any(|line| line.resource == *resource);
        let mode = match (listed(&parameters.resource), listed(&parameters.shared_resource)) {
            (true, false) => Some(Mode::Whole),
            (false, true) => Some(Mode::Shared),
            (true, true) | (false, false) => None,
        };
        let working = matches!(part.health, Health::Healthy | Health::Degraded);
        Self {
            index,
            part,
            mode,
            held: false,
            room: true,
            usable: working && part.drain == DrainState::Active,
        }
    }
}
