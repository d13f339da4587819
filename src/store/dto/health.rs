//! How a GPU fares and fared, as written.

use berth_kernel::health::{HealthState, Turn};
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
    before: Vec<Before>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Before {
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
    pub(crate) fn of(health: &HealthRecord) -> Self {
        Self {
            state: State::of(health.state),
            reason: health.reason.clone(),
            since_ms: health.since_wall_ms,
            quiet_ms: health.quiet_ms,
            before: health
                .history
                .iter()
                .map(|turn| Before {
                    state: State::of(turn.state),
                    reason: turn.reason.clone(),
                    since_ms: turn.since_wall_ms,
                })
                .collect(),
        }
    }

    pub(crate) fn read(self, gpu: PartId) -> HealthRecord {
        let turn = |before: Before| Turn {
            state: before.state.read(),
            reason: before.reason,
            since_wall_ms: before.since_ms,
        };
        HealthRecord {
            gpu,
            state: self.state.read(),
            reason: self.reason,
            since_wall_ms: self.since_ms,
            quiet_ms: self.quiet_ms,
            history: self.before.into_iter().map(turn).collect(),
        }
    }
}

impl State {
    fn of(state: HealthState) -> Self {
        match state {
            HealthState::Healthy => Self::Healthy,
            HealthState::Degraded => Self::Degraded,
            HealthState::Unhealthy => Self::Unhealthy,
            HealthState::Vanished => Self::Vanished,
        }
    }

    fn read(self) -> HealthState {
        match self {
            Self::Healthy => HealthState::Healthy,
            Self::Degraded => HealthState::Degraded,
            Self::Unhealthy => HealthState::Unhealthy,
            Self::Vanished => HealthState::Vanished,
        }
    }
}
