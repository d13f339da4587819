//! One health state per GPU, from readings and from what policies make of them.

use super::gpu::Reading;
use super::policy::{Severity, TriageAnswer};
use super::time::Now;

/// XIDs that an application causes and that say nothing of the GPU, as NVIDIA's device plugin
/// skips them by default.
pub const APPLICATION_XIDS: [u64; 6] = [13, 31, 43, 45, 68, 109];

/// How a GPU fares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HealthState {
    /// Granted.
    Healthy,
    /// Granted, but something is wrong with it.
    Degraded,
    /// Nothing new is granted, and its devices are listed Unhealthy.
    Unhealthy,
    /// It is no longer there.
    Vanished,
}

impl HealthState {
    /// As the API writes it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
            Self::Unhealthy => "unhealthy",
            Self::Vanished => "vanished",
        }
    }

    /// Whether containers on it can be expected to work.
    #[must_use]
    pub fn works(self) -> bool {
        matches!(self, Self::Healthy | Self::Degraded)
    }
}

/// A GPU's health, why, and since when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// The state.
    pub state: HealthState,
    /// Why; empty when healthy.
    pub reason: String,
    /// Since when, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// From when on a passed check makes it healthy again, monotonic milliseconds; `None`: only an
    /// operator's word does.
    pub again_mono_ms: Option<u64>,
}

impl Health {
    /// A GPU that answered.
    #[must_use]
    pub fn healthy(now: Now) -> Self {
        Self {
            state: HealthState::Healthy,
            reason: String::new(),
            since_wall_ms: now.wall_ms,
            again_mono_ms: Some(now.mono_ms),
        }
    }

    /// The health after one look at the GPU: `trouble` is what the backend found wrong with it.
    #[must_use]
    pub fn after_look(&self, present: bool, trouble: Option<&str>, quiet_ms: u64, now: Now) -> Self {
        if !present {
            return self.turned(HealthState::Vanished, "NVML no longer lists it", self.again_mono_ms, now);
        }
        if let Some(trouble) = trouble {
            let again = now.mono_ms.saturating_add(quiet_ms);
            return self.turned(HealthState::Unhealthy, trouble, self.later(Some(again)), now);
        }
        let quiet = self.again_mono_ms.is_some_and(|at| now.mono_ms >= at);
        match self.state {
            HealthState::Healthy => self.clone(),
            _ if quiet => Self::healthy(now),
            // It was unhealthy when it went, and going does not heal.
            HealthState::Vanished => self.turned(
                HealthState::Unhealthy,
                "it came back before its quiet time was over",
                self.again_mono_ms,
                now,
            ),
            HealthState::Degraded | HealthState::Unhealthy => self.clone(),
        }
    }

    /// The health after a reading was triaged. A worse state is never made better by a lesser
    /// reading.
    #[must_use]
    pub fn after_triage(&self, answer: &TriageAnswer, now: Now) -> Self {
        let state = match answer.severity {
            Severity::Ignore => return self.clone(),
            Severity::Degraded => HealthState::Degraded,
            Severity::Unhealthy => HealthState::Unhealthy,
        };
        if self.state > state {
            return self.clone();
        }
        let again = answer.again_after_s.map(|s| now.mono_ms.saturating_add(u64::from(s) * 1000));
        let again = if self.state == HealthState::Healthy { again } else { self.later(again) };
        self.turned(state, &answer.reason, again, now)
    }

    /// The later of two moments from which a passed look heals; never, if either says so. What a
    /// healthy GPU carries has passed.
    fn later(&self, again_mono_ms: Option<u64>) -> Option<u64> {
        Some(self.again_mono_ms?.max(again_mono_ms?))
    }

    fn turned(&self, state: HealthState, reason: &str, again_mono_ms: Option<u64>, now: Now) -> Self {
        let since_wall_ms = if self.state == state { self.since_wall_ms } else { now.wall_ms };
        Self { state, reason: reason.to_owned(), since_wall_ms, again_mono_ms }
    }
}

/// What a reading means if no policy says otherwise.
#[must_use]
pub fn baseline_triage(reading: &Reading, ignored_xids: &[u64], quiet_ms: u64) -> TriageAnswer {
    let ignored = reading.source == "xid" && ignored_xids.contains(&reading.code);
    let severity = if ignored { Severity::Ignore } else { Severity::Unhealthy };
    let reason = match reading.source.as_str() {
        "xid" => format!("XID {}: {}", reading.code, reading.detail),
        other => format!("{other}: {}", reading.detail),
    };
    let again_after_s = u32::try_from(quiet_ms / 1000).ok();
    TriageAnswer { severity, reason, again_after_s }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(mono_ms: u64) -> Now {
        Now { wall_ms: mono_ms, mono_ms }
    }

    fn unhealthy(again_after_s: Option<u32>) -> TriageAnswer {
        TriageAnswer { severity: Severity::Unhealthy, reason: "xid".into(), again_after_s }
    }

    #[test]
    fn a_quiet_time_and_a_passed_look_heal() {
        let sick = Health::healthy(at(0)).after_triage(&unhealthy(Some(10)), at(0));
        assert_eq!(sick.after_look(true, None, 0, at(9_999)).state, HealthState::Unhealthy);
        assert_eq!(sick.after_look(true, None, 0, at(10_000)).state, HealthState::Healthy);
    }

    #[test]
    fn only_an_operators_word_heals_where_the_policy_says_so() {
        let sick = Health::healthy(at(0)).after_triage(&unhealthy(None), at(0));
        let again = sick.after_triage(&unhealthy(Some(1)), at(1));
        let troubled = again.after_look(true, Some("lost"), 5, at(2));
        let gone = troubled.after_look(false, None, 5, at(3));
        assert_eq!(gone.state, HealthState::Vanished);
        assert_eq!(gone.after_look(true, None, 5, at(1_000_000)).state, HealthState::Unhealthy);
    }

    #[test]
    fn a_healthy_gpu_that_comes_back_is_healthy() {
        let gone = Health::healthy(at(0)).after_look(false, None, 5, at(3));
        assert_eq!(gone.after_look(true, None, 5, at(4)).state, HealthState::Healthy);
    }
}
