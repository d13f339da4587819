//! Events: what changed on the node, as `GET /events` tells it.

use super::values::values;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What happened, or how a stream stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// What kind of thing; the `event` of the frame, too.
    pub kind: EventKind,
    /// When the daemon saw it, at most a tenth of a second after it was so.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub at: String,
    /// The ledger's generation by then.
    #[schema(example = 42)]
    pub generation: u64,
    /// The GPU that it is about, by UUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub gpu: Option<String>,
    /// The allocation that it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "5eed0001-17")]
    pub allocation: Option<String>,
    /// The policy that it is about, as `name@` and the beginning of its digest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "timeslice@9f86d081884c")]
    pub policy: Option<String>,
    /// In words, for people.
    #[schema(example = "5eed0001-17 ended (released): 1 x nvidia.com/gpu of default/trainer-0/main")]
    pub words: String,
}

values! {
    /// The kinds of event. More may come within `/api/v1`: pass over what you do not know.
    EventKind {
        /// The first event of a stream: where one stands.
        Here = "here",
        /// The events after the given id are no longer kept: read the state again.
        Missed = "missed",
        /// The last event of a stream that the daemon ends, with the reason.
        End = "end",
        /// A GPU or a MIG instance is there that was not.
        GpuFound = "gpuFound",
        /// A vanished GPU was removed from the list.
        GpuForgotten = "gpuForgotten",
        /// A GPU's health turned, or the reason for it.
        GpuHealth = "gpuHealth",
        /// A GPU was cordoned, or a drain of it was called off.
        GpuCordoned = "gpuCordoned",
        /// A GPU is being drained, or by another order.
        GpuDraining = "gpuDraining",
        /// A GPU is drained.
        GpuDrained = "gpuDrained",
        /// A GPU may be granted again.
        GpuUncordoned = "gpuUncordoned",
        /// A pod was asked to leave a GPU that is drained, or could not be.
        Eviction = "eviction",
        /// A part of a GPU is offered otherwise.
        OffersChanged = "offersChanged",
        /// Devices were granted to a container, or taken over from another plugin.
        AllocationGranted = "allocationGranted",
        /// A source showed who holds an allocation.
        AllocationHolder = "allocationHolder",
        /// An allocation ended.
        AllocationEnded = "allocationEnded",
        /// Allocations no longer end by themselves, or do again.
        Hold = "hold",
        /// A process uses a GPU without an allocation.
        Bypass = "bypass",
        /// It does so no more.
        BypassOver = "bypassOver",
        /// Another stack is active.
        StackActivated = "stackActivated",
        /// A policy version is known that was not.
        PolicyUploaded = "policyUploaded",
        /// A policy version was deleted.
        PolicyDeleted = "policyDeleted",
        /// A policy of the stack failed.
        PolicyFault = "policyFault",
        /// A policy failed so often in a row that it is no longer asked.
        PolicySuspended = "policySuspended",
        /// A suspended policy is asked again.
        PolicyAskedAgain = "policyAskedAgain",
    }
}
