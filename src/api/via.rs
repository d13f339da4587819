//! The API of the kubelet through which a GPU is granted.

use super::values::values;
use berth_kernel::ids::names::GpuId;
use berth_kernel::ids::time::{Now, rfc3339};
use berth_kernel::node::ledger::{GpuState, Ledger};
use berth_kernel::sharing::via as kernel;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

values! {
    /// An API of the kubelet that grants devices.
    KubeletApi from kernel::KubeletApi {
        /// The device plugin API: containers request a resource.
        DevicePlugin = "devicePlugin",
        /// Dynamic resource allocation: pods request devices by ResourceClaims.
        Dra = "dra",
    }
}

values! {
    /// Through which API of the kubelet a GPU is granted, and whether it is to be moved to the other one.
    ViaState {
        /// Through the device plugin API.
        DevicePlugin = "devicePlugin",
        /// Through the device plugin API until its pods have ended, then through DRA. Nothing new is granted on it.
        ToDra = "toDra",
        /// Through DRA.
        Dra = "dra",
        /// Through DRA until its claims are released, then through the device plugin API. The scheduler gives it to no
        /// further claim.
        ToDevicePlugin = "toDevicePlugin",
    }
}

/// The API of the kubelet through which a GPU and its MIG instances are granted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Via {
    /// The API.
    pub api: KubeletApi,
    /// The API, or the change to the other one.
    pub state: ViaState,
    /// The name of the caller who gave the last order; absent if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "admin")]
    pub by: Option<String>,
    /// The reason that the caller gave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "new jobs use claims")]
    pub why: Option<String>,
    /// When the last order was given or the GPU was moved, whichever was last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub since: Option<String>,
    /// What the GPU still waits for, if it is to be moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "allocation 5eed0001-17 has not ended (see `berth allocation show 5eed0001-17`)")]
    pub waits_for: Option<String>,
}

impl Via {
    /// Whether the GPU is granted through the device plugin API, and is not to be moved.
    #[must_use]
    pub fn is_device_plugin(&self) -> bool {
        self.state == ViaState::DevicePlugin
    }

    /// That of a GPU of the ledger.
    #[must_use]
    pub fn of(ledger: &Ledger, gpu: &GpuId, state: &GpuState, now: Now) -> Self {
        let via = &state.via;
        let api_server = || match via.api {
            kernel::KubeletApi::DevicePlugin => {
                "the node's status may still count the GPU's devices (see `kubectl describe node`)".into()
            }
            kernel::KubeletApi::Dra => {
                "a claim may still be allocated a device of the GPU (see `kubectl get resourceclaims -A`)"
                    .into()
            }
        };
        let waits_for = kernel::waits_for(ledger, gpu, now).map(|waits_for| waits_for.to_string());
        Self {
            api: (&via.api).into(),
            state: via.as_str().to_owned().into(),
            by: super::non_empty(&via.by),
            why: super::non_empty(&via.why),
            since: (via.since_wall_ms > 0).then(|| rfc3339(via.since_wall_ms)),
            waits_for: via.moving.then(|| waits_for.unwrap_or_else(api_server)),
        }
    }
}

/// An order to grant a GPU through an API of the kubelet.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ViaOrder {
    /// The API. The one through which the GPU is granted at present cancels a move to the other one.
    pub api: KubeletApi,
    /// The reason, at most 1024 bytes without control characters.
    #[serde(default)]
    #[schema(example = "tried from Swagger UI")]
    pub reason: String,
}
