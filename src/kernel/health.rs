//! One health state per GPU, from readings and from what policies make of them.

use super::gpu::{ROWS, ROWS_PENDING, Reading, XID};
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

/// Most earlier states that are kept of one GPU.
pub const HEALTH_HISTORY_MAX: usize = 16;
/// Longest reason that is kept of a state, bytes; the history must fit into a record of 16 KiB.
const REASON_BYTES_MAX: usize = 256;

/// A GPU's health, why, and since when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// The state.
    pub state: HealthState,
    /// Why; empty where there is nothing to say.
    pub reason: String,
    /// Since when, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// How long it must be quiet after the last bad sign before a passed look makes it healthy
    /// again, milliseconds; `None`: only an operator's word does.
    pub quiet_ms: Option<u64>,
    /// When that time is over, monotonic milliseconds. Begins anew with the process.
    pub again_mono_ms: u64,
    /// What it was before, oldest first; at most [`HEALTH_HISTORY_MAX`].
    pub history: Vec<Turn>,
}

/// A state that a GPU was in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Turn {
    /// The state.
    pub state: HealthState,
    /// Why.
    pub reason: String,
    /// Since when, milliseconds since 1970.
    pub since_wall_ms: u64,
}

impl Health {
    /// A GPU of which nothing bad is known.
    #[must_use]
    pub fn healthy(now: Now) -> Self {
        Self {
            state: HealthState::Healthy,
            reason: String::new(),
            since_wall_ms: now.wall_ms,
            quiet_ms: Some(0),
            again_mono_ms: now.mono_ms,
            history: Vec::new(),
        }
    }

    /// The health after one look at the GPU: `trouble` is what the backend found wrong with it.
    #[must_use]
    pub fn after_look(&self, present: bool, trouble: Option<&str>, quiet_ms: u64, now: Now) -> Self {
        if !present {
            return self.turned(HealthState::Vanished, "NVML no longer lists it", now);
        }
        if let Some(trouble) = trouble {
            return self.turned(HealthState::Unhealthy, trouble, now).quiet_for(Some(quiet_ms), now);
        }
        let quiet = self.quiet_ms.is_some() && now.mono_ms >= self.again_mono_ms;
        match self.state {
            HealthState::Healthy => self.clone(),
            _ if quiet => self.healed("", now),
            // It was unhealthy when it went, and going does not heal.
            HealthState::Vanished => {
                self.turned(HealthState::Unhealthy, "it came back before its quiet time was over", now)
            }
            HealthState::Degraded | HealthState::Unhealthy => self.clone(),
        }
    }

    /// The health after a reading was triaged. A worse state is never made better by a lesser
    /// reading, but every bad sign begins the quiet time anew.
    #[must_use]
    pub fn after_triage(&self, answer: &TriageAnswer, now: Now) -> Self {
        let state = match answer.severity {
            Severity::Ignore => return self.clone(),
            Severity::Degraded => HealthState::Degraded,
            Severity::Unhealthy => HealthState::Unhealthy,
        };
        let quiet_ms = answer.again_after_s.map(|s| u64::from(s) * 1000);
        if self.state > state {
            return self.clone().quiet_for(quiet_ms, now);
        }
        self.turned(state, &answer.reason, now).quiet_for(quiet_ms, now)
    }

    /// Healthy by a passed look, or by an operator's word.
    #[must_use]
    pub fn healed(&self, reason: &str, now: Now) -> Self {
        Self {
            quiet_ms: Some(0),
            again_mono_ms: now.mono_ms,
            ..self.turned(HealthState::Healthy, reason, now)
        }
    }

    /// Whether this is why it is in its state, or was a reason before while it was in it: what two signs
    /// say by turns, look after look, is one story.
    fn says(&self, reason: &str) -> bool {
        let same_state = self.history.iter().rev().take_while(|turn| turn.state == self.state);
        self.reason == reason || same_state.into_iter().any(|turn| turn.reason == reason)
    }

    /// The same with the quiet time begun anew: the longer of two; never over, if either says so.
    fn quiet_for(self, quiet_ms: Option<u64>, now: Now) -> Self {
        let both = self.quiet_ms.zip(quiet_ms);
        let again = now.mono_ms.saturating_add(quiet_ms.unwrap_or(0));
        Self {
            quiet_ms: both.map(|(old, new)| old.max(new)),
            again_mono_ms: self.again_mono_ms.max(again),
            ..self
        }
    }

    /// In another state, or in the same for another reason.
    fn turned(&self, state: HealthState, reason: &str, now: Now) -> Self {
        let reason = &reason[..reason.floor_char_boundary(REASON_BYTES_MAX)];
        // What a library says is shown on terminals, too.
        let reason = reason.replace(char::is_control, " ");
        if self.state == state && self.says(&reason) {
            return self.clone();
        }
        let mut history = self.history.clone();
        history.push(Turn {
            state: self.state,
            reason: self.reason.clone(),
            since_wall_ms: self.since_wall_ms,
        });
        let excess = history.len().saturating_sub(HEALTH_HISTORY_MAX);
        history.drain(..excess);
        let since_wall_ms = if self.state == state { self.since_wall_ms } else { now.wall_ms };
        Self { state, reason, since_wall_ms, history, ..*self }
    }
}

/// What a reading means if no policy says otherwise.
#[must_use]
pub fn baseline_triage(reading: &Reading, ignored_xids: &[u64], quiet_ms: u64) -> TriageAnswer {
    let ignored = reading.source == XID && ignored_xids.contains(&reading.code);
    let harmless = reading.source == ROWS && reading.code == ROWS_PENDING;
    let severity = match (ignored, harmless) {
        (true, _) => Severity::Ignore,
        (false, true) => Severity::Degraded,
        (false, false) => Severity::Unhealthy,
    };
    let reason = match reading.source.as_str() {
        XID => format!("XID {}: {}", reading.code, reading.detail),
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
    fn a_row_that_waits_degrades_and_one_past_repair_does_not_work() {
        let sign = |code| Reading {
            part: crate::names::PartId::parse("GPU-0").unwrap(),
            source: ROWS.into(),
            code,
            detail: "rows".into(),
        };
        let judged = |code| baseline_triage(&sign(code), &APPLICATION_XIDS, 60_000).severity;
        assert_eq!(judged(ROWS_PENDING), Severity::Degraded);
        assert_eq!(judged(crate::gpu::ROWS_FAILED), Severity::Unhealthy);
    }

    #[test]
    fn a_sign_that_is_told_again_begins_the_quiet_time_anew() {
        let (mut health, sign) = (Health::healthy(at(0)), unhealthy(Some(10)));
        for ms in (0..60_000).step_by(5_000) {
            health = health.after_look(true, None, 0, at(ms)).after_triage(&sign, at(ms));
            assert_eq!(health.state, HealthState::Unhealthy, "{ms}");
        }
        assert_eq!(health.history.len(), 1, "told again is no other state");
        assert_eq!(health.after_look(true, None, 0, at(65_000)).state, HealthState::Healthy);
    }

    #[test]
    fn two_signs_by_turns_do_not_fill_the_history() {
        let answer = |reason: &str| TriageAnswer { reason: reason.into(), ..unhealthy(Some(10)) };
        let mut health = Health::healthy(at(0));
        for ms in 0..100 {
            health = health.after_triage(&answer("asks for a reset"), at(ms));
            health = health.after_triage(&answer("past repair"), at(ms));
        }
        let reasons: Vec<_> = health.history.iter().map(|turn| turn.reason.as_str()).collect();
        assert_eq!((reasons, health.reason.as_str()), (vec!["", "asks for a reset"], "past repair"));
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
    fn an_operators_word_heals_until_the_next_bad_sign() {
        let sick = Health::healthy(at(0)).after_triage(&unhealthy(None), at(0));
        let healed = sick.healed("marked healthy by ada", at(5));
        assert_eq!(healed.after_look(true, None, 5, at(6)), healed);
        let again = healed.after_look(true, Some("lost"), 5, at(7));
        assert_eq!(again.state, HealthState::Unhealthy);
        assert_eq!(again.after_look(true, None, 5, at(12)).state, HealthState::Healthy, "no longer for ever");
        let states: Vec<_> = again.history.iter().map(|t| (t.state, t.reason.as_str())).collect();
        assert_eq!(
            states,
            [
                (HealthState::Healthy, ""),
                (HealthState::Unhealthy, "xid"),
                (HealthState::Healthy, "marked healthy by ada")
            ]
        );
    }

    #[test]
    fn the_history_and_its_reasons_have_an_end() {
        let mut health = Health::healthy(at(0));
        for i in 0..100 {
            health = health.after_look(true, Some(&format!("{i} {}", "\u{e4}".repeat(400))), 5, at(i));
        }
        assert_eq!(health.history.len(), HEALTH_HISTORY_MAX);
        assert!(health.history.iter().all(|t| t.reason.len() <= REASON_BYTES_MAX));
        assert_eq!(health.since_wall_ms, 0, "unhealthy all the time");
    }

    #[test]
    fn a_healthy_gpu_that_comes_back_is_healthy() {
        let gone = Health::healthy(at(0)).after_look(false, None, 5, at(3));
        assert_eq!(gone.after_look(true, None, 5, at(4)).state, HealthState::Healthy);
    }
}
