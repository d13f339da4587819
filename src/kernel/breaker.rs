//! Circuit breaker: a resource whose requests are denied repeatedly is withdrawn for a while, so that a
//! controller that recreates refused pods does not flood the node.

use super::time::{Now, Timing};

/// Denials within the window that open the breaker.
pub const DENIALS_TO_OPEN: u32 = 3;

/// The breaker of one resource. A resource without recent denials has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breaker {
    /// Its phase.
    pub phase: Phase,
    /// Denials since the window began.
    pub denials: u32,
    /// When the window began, monotonic milliseconds.
    pub window_mono_ms: u64,
    /// The newest pause, milliseconds; 0 before the first.
    pub pause_ms: u64,
}

/// The phase of a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Denials are counted; nothing is withdrawn.
    Closed,
    /// All free devices are withdrawn.
    Open {
        /// When it becomes half-open, monotonic milliseconds.
        until_mono_ms: u64,
    },
    /// One free device is listed: the next request decides.
    HalfOpen,
}

/// The breaker after one more denial.
#[must_use]
pub fn after_denial(breaker: Option<&Breaker>, timing: &Timing, now: Now) -> Breaker {
    let fresh = Breaker { phase: Phase::Closed, denials: 0, window_mono_ms: now.mono_ms, pause_ms: 0 };
    let mut next = match breaker {
        Some(b) if b.phase == Phase::Closed && now.passed(b.window_mono_ms, timing.breaker_window_ms) => {
            Breaker { pause_ms: b.pause_ms, ..fresh }
        }
        Some(b) => b.clone(),
        None => fresh,
    };
    next.denials = next.denials.saturating_add(1);
    let opens = match next.phase {
        Phase::Closed => next.denials >= DENIALS_TO_OPEN,
        Phase::HalfOpen => true,
        // The kubelet may still send requests that it decided on before the withdrawal reached it.
        Phase::Open { .. } => false,
    };
    if opens {
        next.pause_ms = match next.pause_ms {
            0 => timing.breaker_pause_ms,
            last => last.saturating_mul(2).min(timing.breaker_pause_max_ms),
        };
        next.phase = Phase::Open { until_mono_ms: now.mono_ms.saturating_add(next.pause_ms) };
        next.denials = 0;
    }
    next
}

/// When time changes the breaker next, monotonic milliseconds.
#[must_use]
pub fn next_change(breaker: &Breaker, timing: &Timing) -> u64 {
    match breaker.phase {
        Phase::Open { until_mono_ms } => until_mono_ms,
        Phase::HalfOpen | Phase::Closed => breaker.window_mono_ms.saturating_add(timing.breaker_window_ms),
    }
}

/// The breaker's next state if time changes it: `Some(None)` removes it.
#[must_use]
pub fn after_tick(breaker: &Breaker, timing: &Timing, now: Now) -> Option<Option<Breaker>> {
    if now.mono_ms < next_change(breaker, timing) {
        return None;
    }
    Some(match breaker.phase {
        Phase::Open { .. } => {
            Some(Breaker { phase: Phase::HalfOpen, window_mono_ms: now.mono_ms, ..breaker.clone() })
        }
        // No request arrived, perhaps because pods need more than the one listed device. All devices
        // are listed again, and the next denial opens the breaker again, for longer.
        Phase::HalfOpen => Some(Breaker {
            phase: Phase::Closed,
            denials: DENIALS_TO_OPEN - 1,
            window_mono_ms: now.mono_ms,
            ..breaker.clone()
        }),
        Phase::Closed => None,
    })
}

#[cfg(test)]
mod storm;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(mono_ms: u64) -> Now {
        Now { wall_ms: 0, mono_ms }
    }

    #[test]
    fn three_denials_in_a_minute_open_it_and_each_failed_retry_doubles_the_pause() {
        let t = Timing::default();
        let mut b = after_denial(None, &t, at(0));
        b = after_denial(Some(&b), &t, at(1_000));
        assert_eq!(b.phase, Phase::Closed);
        b = after_denial(Some(&b), &t, at(2_000));
        assert_eq!(b.phase, Phase::Open { until_mono_ms: 12_000 });
        let mut now = 12_000;
        for pause in [20_000, 40_000, 80_000, 160_000, 300_000, 300_000] {
            assert_eq!(after_tick(&b, &t, at(now - 1)), None);
            b = after_tick(&b, &t, at(now)).unwrap().unwrap();
            assert_eq!(b.phase, Phase::HalfOpen);
            b = after_denial(Some(&b), &t, at(now));
            assert_eq!(b.phase, Phase::Open { until_mono_ms: now + pause });
            now += pause;
        }
    }

    #[test]
    fn a_half_open_breaker_closes_where_no_pod_requests_a_single_device() {
        let t = Timing::default();
        let mut b = (0..3).fold(None, |b, i| Some(after_denial(b.as_ref(), &t, at(i)))).unwrap();
        b = after_tick(&b, &t, at(20_000)).unwrap().unwrap();
        assert_eq!(after_tick(&b, &t, at(79_999)), None);
        b = after_tick(&b, &t, at(80_000)).unwrap().unwrap();
        assert_eq!(b.phase, Phase::Closed);
        let again = after_denial(Some(&b), &t, at(81_000));
        assert_eq!(again.phase, Phase::Open { until_mono_ms: 101_000 }, "opens again for twice as long");
        assert_eq!(after_tick(&b, &t, at(140_000)), Some(None), "removed after a window without denials");
    }

    #[test]
    fn slow_denials_never_open_it() {
        let t = Timing::default();
        let mut b = after_denial(None, &t, at(0));
        for i in 1..20 {
            b = after_denial(Some(&b), &t, at(i * 61_000));
            assert_eq!((b.phase, b.denials), (Phase::Closed, 1));
        }
        assert_eq!(after_tick(&b, &t, at(19 * 61_000 + 60_000)), Some(None));
    }
}
