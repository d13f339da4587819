//! Events: changes of the node, as `GET /events` sends them.

use super::values::values;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A change of the node, or of the event stream itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// The kind of event; also the `event` field of the frame.
    pub kind: EventKind,
    /// The time at which the daemon noticed the change, at most 0.1 s after it.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub at: String,
    /// The generation of the node's state that includes the change.
    #[schema(example = 42)]
    pub generation: u64,
    /// The UUID of the GPU concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub gpu: Option<String>,
    /// The id of the allocation concerned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "5eed0001-17")]
    pub allocation: Option<String>,
    /// The policy concerned, as `name@` and the beginning of its digest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "timeslice@9f86d081884c")]
    pub policy: Option<String>,
    /// The event as a sentence.
    #[schema(example = "5eed0001-17 ended (released): 1 x nvidia.com/gpu of default/trainer-0/main")]
    pub words: String,
}

/// Past events that concern operators.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EventHistory {
    /// The events, newest first.
    pub items: Vec<Event>,
}

values! {
    /// The kinds of event. Later releases of `/api/v1` may add kinds: ignore unknown ones.
    EventKind {
        /// The first event of a stream, with the present generation.
        Here = "here",
        /// The events after the given id are no longer kept: read the state again.
        Missed = "missed",
        /// The last event of a stream that the daemon closes, with the reason.
        End = "end",
        /// A GPU or a MIG instance was found.
        GpuFound = "gpuFound",
        /// A vanished GPU was removed from the list.
        GpuForgotten = "gpuForgotten",
        /// A GPU's health changed, or the reason for it.
        GpuHealth = "gpuHealth",
        /// A GPU was cordoned, or its drain was stopped or given up.
        GpuCordoned = "gpuCordoned",
        /// A drain of a GPU started, or its order changed.
        GpuDraining = "gpuDraining",
        /// A drain of a GPU is complete.
        GpuDrained = "gpuDrained",
        /// A GPU may be granted again.
        GpuUncordoned = "gpuUncordoned",
        /// The move of a GPU to the kubelet's other API was ordered or cancelled, or is finished.
        GpuVia = "gpuVia",
        /// The eviction of a pod from a draining GPU was requested, or failed.
        Eviction = "eviction",
        /// The offer of a part of a GPU changed.
        OffersChanged = "offersChanged",
        /// Devices were granted to a container, or adopted when the daemon started.
        AllocationGranted = "allocationGranted",
        /// A source showed the holder of an allocation.
        AllocationHolder = "allocationHolder",
        /// An allocation ended.
        AllocationEnded = "allocationEnded",
        /// A device of an allocation is held by another pod, too: the kubelet gave it to both.
        AllocationContested = "allocationContested",
        /// The memory limit of a container could not be set, or does not stay.
        LimitNotSet = "limitNotSet",
        /// The memory limit of a container was changed by something other than the guard, which has set it again.
        LimitChanged = "limitChanged",
        /// A container names an allocation of another pod.
        GrantForged = "grantForged",
        /// The guard restricted or refused a container that could use GPUs that were not allocated to it, or could do neither.
        ContainerBypass = "containerBypass",
        /// The guard shows the containers of the node, or no longer does.
        Guard = "guard",
        /// A request of the kubelet for devices was refused: the pod fails. In a burst some of these events are
        /// left out; the next one says how many.
        RequestRefused = "requestRefused",
        /// Allocations no longer end automatically, or do so again.
        Hold = "hold",
        /// No device list strategy works on this node, so no device is offered; or one works again.
        NoDeviceStrategy = "noDeviceStrategy",
        /// Device nodes that containers need do not exist, or exist again.
        DeviceNodesMissing = "deviceNodesMissing",
        /// The free devices of a resource are withdrawn after repeated denials, or listed again.
        ResourceWithdrawn = "resourceWithdrawn",
        /// A process uses a GPU without an allocation.
        Bypass = "bypass",
        /// A process no longer uses a GPU without an allocation.
        BypassOver = "bypassOver",
        /// Another stack was activated.
        StackActivated = "stackActivated",
        /// A policy version was added.
        PolicyUploaded = "policyUploaded",
        /// A policy version was deleted.
        PolicyDeleted = "policyDeleted",
        /// A policy of the stack failed.
        PolicyFault = "policyFault",
        /// A policy was suspended after several faults in a row, and is no longer called.
        PolicySuspended = "policySuspended",
        /// A suspended policy is called again.
        PolicyAskedAgain = "policyAskedAgain",
    }
}

impl EventKind {
    /// Whether the daemon keeps past events of this kind for operators. Those of single allocations are too many, and the
    /// allocations themselves are kept.
    #[must_use]
    pub fn concerns_operators(&self) -> bool {
        match self {
            Self::GpuFound
            | Self::GpuForgotten
            | Self::GpuHealth
            | Self::GpuCordoned
            | Self::GpuDraining
            | Self::GpuDrained
            | Self::GpuUncordoned
            | Self::GpuVia
            | Self::Eviction
            | Self::AllocationContested
            | Self::LimitNotSet
            | Self::LimitChanged
            | Self::GrantForged
            | Self::ContainerBypass
            | Self::Guard
            | Self::RequestRefused
            | Self::Hold
            | Self::NoDeviceStrategy
            | Self::DeviceNodesMissing
            | Self::ResourceWithdrawn
            | Self::Bypass
            | Self::BypassOver
            | Self::StackActivated
            | Self::PolicyUploaded
            | Self::PolicyDeleted
            | Self::PolicyFault
            | Self::PolicySuspended
            | Self::PolicyAskedAgain => true,
            Self::Here
            | Self::Missed
            | Self::End
            | Self::OffersChanged
            | Self::AllocationGranted
            | Self::AllocationHolder
            | Self::AllocationEnded
            | Self::Other(_) => false,
        }
    }
}
