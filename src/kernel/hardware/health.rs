//! One health state per GPU, from scans and from triaged readings.

use crate::hardware::gpu::{RECOVERED, RECOVERY, Reading, ScanError};
use crate::hardware::judgement::{Judgement, REASON_BYTES_MAX, TriagedReading, add, shown};
use crate::hardware::triage::{Severity, TriageAnswer, needs_reset};
use crate::ids::time::Now;
use crate::policy::decider::Decider;

/// The health state of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HealthState {
    /// It is granted.
    Healthy,
    /// It is granted, but has a fault.
    Degraded,
    /// Nothing new is granted, and its devices are listed Unhealthy.
    Unhealthy,
    /// It is no longer present.
    Vanished,
}

impl HealthState {
    /// Its value in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
            Self::Unhealthy => "unhealthy",
            Self::Vanished => "vanished",
        }
    }

    /// The state of a GPU with a reading of this severity; `None` if the reading has no effect.
    #[must_use]
    pub fn after(severity: Severity) -> Option<Self> {
        match severity {
            Severity::Ignore => None,
            Severity::Degraded => Some(Self::Degraded),
            Severity::Unhealthy => Some(Self::Unhealthy),
        }
    }

    /// Whether containers on it can be expected to work.
    #[must_use]
    pub fn is_usable(self) -> bool {
        matches!(self, Self::Healthy | Self::Degraded)
    }
}

/// Most earlier states in the history of one GPU.
pub const HEALTH_HISTORY_MAX: usize = 16;

/// The health of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// The state.
    pub state: HealthState,
    /// The reason; empty if there is none.
    pub reason: String,
    /// Since when, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// How long there must be no bad reading before a successful scan makes the GPU healthy again,
    /// milliseconds; `None` if only an operator can mark it healthy.
    pub quiet_ms: Option<u64>,
    /// Whether a reset that the driver shows ends the wait for an operator: only errors that need a reset caused it.
    pub until_reset: bool,
    /// The end of the quiet time, monotonic milliseconds. It starts again with the daemon.
    pub quiet_until_mono_ms: u64,
    /// The previous states, oldest first; at most [`HEALTH_HISTORY_MAX`].
    pub history: Vec<PastHealth>,
    /// The judgements that led to the state, so that those of a policy can be made again without it.
    pub judgements: Vec<Judgement>,
}

/// A previous state of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PastHealth {
    /// The state.
    pub state: HealthState,
    /// The reason.
    pub reason: String,
    /// Since when, milliseconds since 1970.
    pub since_wall_ms: u64,
}

impl Health {
    /// The health of a new GPU.
    #[must_use]
    pub fn healthy(now: Now) -> Self {
        Self {
            state: HealthState::Healthy,
            reason: String::new(),
            since_wall_ms: now.wall_ms,
            quiet_ms: Some(0),
            until_reset: false,
            quiet_until_mono_ms: now.mono_ms,
            history: Vec::new(),
            judgements: Vec::new(),
        }
    }

    /// The health before a scan that found these signs of the GPU. The policies judge them only after the scan, so the
    /// quiet time of a sign that made the GPU degraded or unhealthy starts again here: the scan would heal the GPU
    /// otherwise.
    #[must_use]
    pub fn with_signs<'s>(&self, mut signs: impl Iterator<Item = &'s Reading>, now: Now) -> Self {
        let mut before = self.clone();
        if now.mono_ms < self.quiet_until_mono_ms {
            return before;
        }
        let lasting = signs.find_map(|sign| self.judgements.iter().position(|one| one.is_of_sign(sign)));
        let Some(one) = lasting.and_then(|index| before.judgements.get_mut(index)) else { return before };
        one.at_mono_ms = now.mono_ms;
        let quiet_ms = one.quiet_ms;
        before.with_quiet_time(quiet_ms, now)
    }

    /// The health after one scan of the GPU; `error` is why it cannot be used, or why it was not found.
    #[must_use]
    pub fn after_scan(&self, present: bool, error: Option<&ScanError>, quiet_ms: u64, now: Now) -> Self {
        if !present {
            let reason = error.map_or("NVML no longer lists it", |error| &error.reason);
            return self.with_state(HealthState::Vanished, reason, now);
        }
        if let Some(error) = error {
            let quiet_ms = if error.heals_at_once { 0 } else { quiet_ms };
            return self
                .with_state(HealthState::Unhealthy, &error.reason, now)
                .with_quiet_time(Some(quiet_ms), now)
                .with_judgement(Judgement::of_scan(&error.reason, Some(quiet_ms), now));
        }
        let quiet_time_over = self.quiet_ms.is_some() && now.mono_ms >= self.quiet_until_mono_ms;
        match self.state {
            HealthState::Healthy => self.clone(),
            _ if quiet_time_over => self.healed(now),
            // A GPU that vanished while unhealthy comes back unhealthy.
            HealthState::Vanished => {
                self.with_state(HealthState::Unhealthy, "it came back before its quiet time was over", now)
            }
            HealthState::Degraded | HealthState::Unhealthy => self.clone(),
        }
    }

    /// The state after a triaged reading. A less severe reading never improves the state, but every bad
    /// reading restarts the quiet time.
    fn after_triage(&self, answer: &TriageAnswer, now: Now) -> Self {
        let Some(state) = HealthState::after(answer.severity) else { return self.clone() };
        let quiet_ms = answer.quiet_ms();
        if self.state > state {
            return self.clone().with_quiet_time(quiet_ms, now);
        }
        self.with_state(state, &answer.reason, now).with_quiet_time(quiet_ms, now)
    }

    /// The health after a reading and its triage: a less severe reading never improves the state, every bad one
    /// restarts the quiet time, and a reset ends the wait for one. `revision` is the revision of the stack that judged
    /// the reading.
    #[must_use]
    pub fn after_reading(&self, triaged: &TriagedReading, revision: u64, now: Now) -> Self {
        let TriagedReading { reading, answer, .. } = triaged;
        let mut before = self.clone();
        if (reading.source.as_str(), reading.code) == (RECOVERY, RECOVERED) {
            before.judgements.retain(|judgement| !judgement.needs_reset());
            // A reset never makes a GPU unhealthy, whatever a policy answers.
            return match self.until_reset {
                // The next good scan makes it healthy, once the quiet times of other readings are over.
                true => Self { quiet_ms: Some(0), until_reset: false, ..before },
                false => before,
            };
        }
        if answer.severity == Severity::Ignore {
            // A sign that a later stack ignores must not start the quiet time again with each scan that shows it.
            before
                .judgements
                .retain(|judgement| judgement.quiet_ms.is_none() || !judgement.is_of_sign(reading));
        }
        let waits_already = self.quiet_ms.is_none();
        let after = before.after_triage(answer, now);
        let until_reset = match (answer.severity, answer.again_after_s) {
            (Severity::Ignore, _) | (_, Some(_)) => self.until_reset,
            (_, None) => needs_reset(reading) && (self.until_reset || !waits_already),
        };
        let judgement = Judgement::of_reading(triaged, revision, now.mono_ms);
        let after = judgement.into_iter().fold(after, Self::with_judgement);
        Self { until_reset, ..after }
    }

    /// The health with these judgements instead, some of which another stack made again. `answers`: whether the last
    /// scan found the GPU and had no error; otherwise its state follows with the next good scan.
    #[must_use]
    pub fn judged_again(&self, judgements: Vec<Judgement>, answers: bool, now: Now) -> Self {
        if judgements == self.judgements {
            return self.clone();
        }
        // A judgement whose quiet time is over is not kept: a restart of the daemon would start its quiet time again.
        let kept = |one: Judgement| {
            let stays = one.severity == Severity::Ignore || one.is_valid(now);
            if stays { Some(one) } else { one.healed() }
        };
        let next = Self { judgements: judgements.into_iter().filter_map(kept).collect(), ..self.clone() };
        let valid: Vec<&Judgement> = next.judgements.iter().filter(|one| one.is_valid(now)).collect();
        let Some(worst) = valid.iter().max_by_key(|one| (one.severity, one.at_mono_ms)) else {
            return match self.state {
                HealthState::Degraded | HealthState::Unhealthy if answers => next.healed(now),
                _ => Self { quiet_ms: Some(0), until_reset: false, quiet_until_mono_ms: now.mono_ms, ..next },
            };
        };
        let endless: Vec<&&Judgement> = valid.iter().filter(|one| one.quiet_ms.is_none()).collect();
        let until_reset = !endless.is_empty() && endless.iter().all(|one| one.needs_reset());
        let longest = valid.iter().filter_map(|one| one.quiet_ms).max();
        let quiet_ms = if endless.is_empty() { longest } else { None };
        let quiet_until_mono_ms =
            valid.iter().map(|one| one.quiet_until_mono_ms()).max().unwrap_or(now.mono_ms);
        let is_current = valid.iter().any(|one| one.reason == self.reason);
        let after = match HealthState::after(worst.severity).filter(|_| answers) {
            Some(state) if is_current => next.with_state(state, &worst.reason, now),
            // The reason may be one that the GPU already had; the present one is of a judgement that is gone.
            Some(state) => next.turned(state, worst.reason.clone(), now),
            None => next.clone(),
        };
        Self { quiet_ms, until_reset, quiet_until_mono_ms, ..after }
    }

    /// The newest judgement of a GPU that is unhealthy because of policies alone; `None` if the GPU is not unhealthy,
    /// or if Berth's own triage, `own`, judges it unhealthy, too, or would without the policies.
    #[must_use]
    pub fn unhealthy_by_policy(
        &self,
        own: impl Fn(&Reading) -> TriageAnswer,
        now: Now,
    ) -> Option<&Judgement> {
        let is_unhealthy = |one: &Judgement| one.severity == Severity::Unhealthy && one.is_valid(now);
        let of_policy =
            |one: &Judgement| one.reading.clone().filter(|_| matches!(one.by, Decider::Policy(_)));
        let is_without_policies = |one: &Judgement| match of_policy(one) {
            Some(reading) => {
                let answer = own(&reading);
                let own = TriagedReading { reading, answer, by: Decider::Baseline };
                Judgement::of_reading(&own, 0, one.at_mono_ms).is_some_and(|own| is_unhealthy(&own))
            }
            None => is_unhealthy(one),
        };
        if self.state != HealthState::Unhealthy || self.judgements.iter().any(is_without_policies) {
            return None;
        }
        self.judgements.iter().rfind(|one| is_unhealthy(one))
    }

    /// The health after an operator marked the GPU healthy.
    #[must_use]
    pub fn marked_healthy(&self, reason: &str, now: Now) -> Self {
        Self {
            quiet_ms: Some(0),
            until_reset: false,
            quiet_until_mono_ms: now.mono_ms,
            judgements: Vec::new(),
            ..self.with_state(HealthState::Healthy, reason, now)
        }
    }

    /// The health once no judgement counts against the GPU.
    fn healed(&self, now: Now) -> Self {
        let judgements = self.judgements.iter().filter_map(Judgement::healed).collect();
        Self { judgements, ..self.marked_healthy("", now) }
    }

    fn with_judgement(mut self, judgement: Judgement) -> Self {
        add(&mut self.judgements, judgement);
        self
    }

    /// Whether this is the reason of the current state, or was one since the GPU entered it: two signs that
    /// alternate with every scan must not fill the history.
    fn has_had_reason(&self, reason: &str) -> bool {
        let same_state = self.history.iter().rev().take_while(|turn| turn.state == self.state);
        self.reason == reason || same_state.into_iter().any(|turn| turn.reason == reason)
    }

    /// Restarts the quiet time with the longer of the two durations; without end if either has none.
    fn with_quiet_time(self, quiet_ms: Option<u64>, now: Now) -> Self {
        let both = self.quiet_ms.zip(quiet_ms);
        let again = now.mono_ms.saturating_add(quiet_ms.unwrap_or(0));
        Self {
            quiet_ms: both.map(|(old, new)| old.max(new)),
            quiet_until_mono_ms: self.quiet_until_mono_ms.max(again),
            ..self
        }
    }

    /// The health in another state, or in the same state with another reason.
    fn with_state(&self, state: HealthState, reason: &str, now: Now) -> Self {
        let reason = shown(reason, REASON_BYTES_MAX);
        if self.state == state && self.has_had_reason(&reason) {
            return self.clone();
        }
        self.turned(state, reason, now)
    }

    /// The health in another state or with another reason, with the present ones in its history.
    fn turned(&self, state: HealthState, reason: String, now: Now) -> Self {
        let mut history = self.history.clone();
        history.push(PastHealth {
            state: self.state,
            reason: self.reason.clone(),
            since_wall_ms: self.since_wall_ms,
        });
        let excess = history.len().saturating_sub(HEALTH_HISTORY_MAX);
        history.drain(..excess);
        let since_wall_ms = if self.state == state { self.since_wall_ms } else { now.wall_ms };
        Self { state, reason, since_wall_ms, history, judgements: self.judgements.clone(), ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::gpu::XID;
    use crate::hardware::triage::{XidRules, baseline_triage};

    fn at(mono_ms: u64) -> Now {
        Now { wall_ms: mono_ms, mono_ms }
    }

    fn unhealthy(again_after_s: Option<u32>) -> TriageAnswer {
        TriageAnswer { severity: Severity::Unhealthy, reason: "xid".into(), again_after_s }
    }

    fn triaged(reading: &Reading, answer: TriageAnswer, by: &str) -> TriagedReading {
        TriagedReading { reading: reading.clone(), answer, by: by.into() }
    }

    #[test]
    fn what_needs_a_reset_waits_for_one_or_for_an_operator() {
        let reading = |source: &str, code| Reading {
            part: crate::ids::names::PartId::parse("GPU-0").unwrap(),
            source: source.into(),
            code,
            detail: String::new(),
        };
        let after = |health: &Health, reading: &Reading, ms| {
            let answer = baseline_triage(reading, &XidRules::default(), 10_000);
            let triaged = triaged(reading, answer, "baseline");
            health.after_reading(&triaged, 1, at(ms)).after_scan(true, None, 10_000, at(ms))
        };
        let double_bit = after(&Health::healthy(at(0)), &reading(XID, 48), 0);
        assert_eq!((double_bit.state, double_bit.quiet_ms), (HealthState::Unhealthy, None));
        let later = double_bit.after_scan(true, None, 10_000, at(1_000_000));
        assert_eq!(later.state, HealthState::Unhealthy, "no time ends it");
        let was_reset = after(&later, &reading(RECOVERY, RECOVERED), 1_000_000);
        assert_eq!(was_reset.state, HealthState::Healthy);
        // A sign that is still there keeps it out for its quiet time after the reset.
        let required = after(&double_bit, &reading(RECOVERY, 1), 5_000);
        let recovered = after(&required, &reading(RECOVERY, RECOVERED), 6_000);
        assert_eq!(recovered.state, HealthState::Unhealthy);
        assert_eq!(recovered.after_scan(true, None, 10_000, at(15_000)).state, HealthState::Healthy);
        // What a policy leaves to an operator is not ended by a reset, whatever came before or after it.
        let manual = reading(XID, 54);
        let answer =
            TriageAnswer { again_after_s: None, ..baseline_triage(&manual, &XidRules::default(), 0) };
        let again = baseline_triage(&reading(XID, 48), &XidRules::default(), 0);
        let fault = double_bit.after_reading(&triaged(&manual, answer, "p@1"), 1, at(1)).after_reading(
            &triaged(&reading(XID, 48), again, "baseline"),
            1,
            at(2),
        );
        assert_eq!(after(&fault, &reading(RECOVERY, RECOVERED), 3).state, HealthState::Unhealthy);
        // No reset is waited for: one changes nothing.
        let lost = Health::healthy(at(0)).after_scan(true, Some(&"lost".into()), 10_000, at(0));
        assert_eq!(after(&lost, &reading(RECOVERY, RECOVERED), 1).state, HealthState::Unhealthy);
        // A policy that judges every reading of the source does not judge the reset.
        let recovered = reading(RECOVERY, RECOVERED);
        let answer = TriageAnswer {
            again_after_s: None,
            ..baseline_triage(&reading(RECOVERY, 1), &XidRules::default(), 0)
        };
        let healthy = Health::healthy(at(0));
        assert_eq!(healthy.after_reading(&triaged(&recovered, answer, "p@1"), 1, at(1)), healthy);
    }

    #[test]
    fn a_repeated_sign_restarts_the_quiet_time() {
        let (mut health, sign) = (Health::healthy(at(0)), unhealthy(Some(10)));
        for ms in (0..60_000).step_by(5_000) {
            health = health.after_scan(true, None, 0, at(ms)).after_triage(&sign, at(ms));
            assert_eq!(health.state, HealthState::Unhealthy, "{ms}");
        }
        assert_eq!(health.history.len(), 1, "a repeated sign adds no state");
        assert_eq!(health.after_scan(true, None, 0, at(65_000)).state, HealthState::Healthy);
    }

    #[test]
    fn alternating_signs_do_not_fill_the_history() {
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
    fn a_scan_after_the_quiet_time_makes_healthy() {
        let faulty = Health::healthy(at(0)).after_triage(&unhealthy(Some(10)), at(0));
        assert_eq!(faulty.after_scan(true, None, 0, at(9_999)).state, HealthState::Unhealthy);
        assert_eq!(faulty.after_scan(true, None, 0, at(10_000)).state, HealthState::Healthy);
    }

    #[test]
    fn a_gpu_that_was_not_ready_is_healthy_at_the_first_good_scan() {
        let hung = ScanError::not_ready("a call hangs");
        let waiting = Health::healthy(at(0)).after_scan(true, Some(&hung), 300_000, at(1));
        assert_eq!(waiting.state, HealthState::Unhealthy);
        assert_eq!(waiting.after_scan(true, None, 300_000, at(2)).state, HealthState::Healthy);
        // A quiet time that runs is not shortened.
        let faulty = Health::healthy(at(0)).after_triage(&unhealthy(Some(10)), at(0));
        let both = faulty.after_scan(true, Some(&hung), 300_000, at(1));
        assert_eq!(both.after_scan(true, None, 300_000, at(9_999)).state, HealthState::Unhealthy);
        assert_eq!(both.after_scan(true, None, 300_000, at(10_000)).state, HealthState::Healthy);
    }

    #[test]
    fn a_policy_can_leave_recovery_to_an_operator() {
        let faulty = Health::healthy(at(0)).after_triage(&unhealthy(None), at(0));
        let again = faulty.after_triage(&unhealthy(Some(1)), at(1));
        let lost = again.after_scan(true, Some(&"lost".into()), 5, at(2));
        let gone = lost.after_scan(false, None, 5, at(3));
        assert_eq!(gone.state, HealthState::Vanished);
        assert_eq!(gone.after_scan(true, None, 5, at(1_000_000)).state, HealthState::Unhealthy);
    }

    #[test]
    fn an_operator_marks_a_gpu_healthy_until_the_next_bad_reading() {
        let faulty = Health::healthy(at(0)).after_triage(&unhealthy(None), at(0));
        let marked_healthy = faulty.marked_healthy("marked healthy by ada", at(5));
        assert_eq!(marked_healthy.after_scan(true, None, 5, at(6)), marked_healthy);
        let again = marked_healthy.after_scan(true, Some(&"lost".into()), 5, at(7));
        assert_eq!(again.state, HealthState::Unhealthy);
        assert_eq!(
            again.after_scan(true, None, 5, at(12)).state,
            HealthState::Healthy,
            "the policy's permanent state is over"
        );
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
    fn the_history_and_its_reasons_are_bounded() {
        let mut health = Health::healthy(at(0));
        for i in 0..100 {
            health = health.after_scan(true, Some(&format!("{i} {}", "\u{e4}".repeat(400)).into()), 5, at(i));
        }
        assert_eq!(health.history.len(), HEALTH_HISTORY_MAX);
        assert!(health.history.iter().all(|t| t.reason.len() <= REASON_BYTES_MAX));
        assert_eq!(health.since_wall_ms, 0, "unhealthy since then");
    }

    #[test]
    fn a_healthy_gpu_that_comes_back_is_healthy() {
        let gone = Health::healthy(at(0)).after_scan(false, None, 5, at(3));
        assert_eq!(gone.after_scan(true, None, 5, at(4)).state, HealthState::Healthy);
    }
}
