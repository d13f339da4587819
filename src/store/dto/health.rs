//! The serialized form of a GPU's health and its history.

use berth_kernel::health::{HealthState, PastHealth};
use berth_kernel::names::PartId;
use berth_kernel::record::HealthRecord;
use serde::{Deserialize, Serialize};

/// See [`HealthRecord`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(crate) struct Health {
    state: State,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    reason: String,
    since_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    quiet_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    before: Vec<PastState>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct PastState {
    state: State,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    reason: String,
    since_ms: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum State {
    Healthy,
    Degraded,
    Unhealthy,
    Vanished,
}

impl Health {
    pub(crate) fn from_kernel(health: &HealthRecord) -> Self {
        Self {
            state: State::from_kernel(health.state),
            reason: health.reason.clone(),
            since_ms: health.since_wall_ms,
            quiet_ms: health.quiet_ms,
            before: health
                .history
                .iter()
                .map(|turn| PastState {
                    state: State::from_kernel(turn.state),
                    reason: turn.reason.clone(),
                    since_ms: turn.since_wall_ms,
                })
                .collect(),
        }
    }

    pub(crate) fn into_kernel(self, gpu: PartId) -> HealthRecord {
        let turn = |past: PastState| PastHealth {
            state: past.state.into_kernel(),
            reason: past.reason,
            since_wall_ms: past.since_ms,
        };
        HealthRecord {
            gpu,
            state: self.state.into_kernel(),
            reason: self.reason,
            since_wall_ms: self.since_ms,
            quiet_ms: self.quiet_ms,
            history: self.before.into_iter().map(turn).collect(),
        }
    }
}

impl State {
    fn from_kernel(state: HealthState) -> Self {
        match state {
            HealthState::Healthy => Self::Healthy,
            HealthState::Degraded => Self::Degraded,
            HealthState::Unhealthy => Self::Unhealthy,
            HealthState::Vanished => Self::Vanished,
        }
    }

    fn into_kernel(self) -> HealthState {
        match self {
            Self::Healthy => HealthState::Healthy,
            Self::Degraded => HealthState::Degraded,
            Self::Unhealthy => HealthState::Unhealthy,
            Self::Vanished => HealthState::Vanished,
        }
    }
}
