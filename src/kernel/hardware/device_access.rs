//! Whether devices can be passed to containers. The daemon reports it, and the ledger withholds devices while it is not
//! possible.

use crate::ids::names::PartId;
use crate::sharing::part_state::PartState;
use crate::sharing::via::KubeletApi;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Why containers cannot get devices, or not all device nodes. Observed again after each start, so it is not stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceAccess {
    /// Why no device list strategy can work on this node, with the remedy; `None` if one can. While it is set, every
    /// device is listed Unhealthy and nothing is granted.
    pub no_strategy: Option<Arc<str>>,
    /// Whether containers get their devices by CDI, without which no claim can have one.
    pub by_cdi: bool,
    /// Device nodes that containers need and that do not exist, with the remedy. Devices are granted all the same.
    pub missing_nodes: Option<Arc<str>>,
    /// The parts that the CDI specification in use names; `None` if containers get their devices without one. Nothing
    /// new is granted on the other parts, since a container runtime cannot start a container with a name that it does
    /// not find.
    pub named_parts: Option<Arc<BTreeMap<PartId, NamedPart>>>,
}

impl DeviceAccess {
    /// Whether containers can be given this part through this API.
    #[must_use]
    pub fn gives(&self, api: KubeletApi, part: &PartState) -> bool {
        self.is_named(part) && (api == KubeletApi::DevicePlugin || self.by_cdi)
    }

    fn is_named(&self, part: &PartState) -> bool {
        let named = |parts: &Arc<BTreeMap<_, _>>| parts.get(&part.part.id) == Some(&NamedPart::of(part));
        self.named_parts.as_ref().is_none_or(named)
    }
}

/// A part as it was when the specification was checked. A part that left since, or whose device node is another one, is
/// not what the specification names, even if it is back under the same id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPart {
    minor: Option<u32>,
    gpu_index: u32,
    present_changed_mono_ms: u64,
}

impl NamedPart {
    /// The part as it is.
    #[must_use]
    pub fn of(part: &PartState) -> Self {
        Self {
            minor: part.part.minor,
            gpu_index: part.part.gpu_index,
            present_changed_mono_ms: part.present_changed_mono_ms,
        }
    }
}
