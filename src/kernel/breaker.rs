//! A resource whose requests are denied over and over is withdrawn for a while, so that a
//! controller that recreates refused pods does not flood the node.

use super::time::{Now, Timing};

/// Denials in the window that open the breaker.
pub const DENIALS_TO_OPEN: u32 = 3;

/// The breaker of one resource. At rest there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breaker {
    /// Where it stands.
    pub phase: Phase,
    /// Denials since the window began.
    pub denials: u32,
    /// When the window began, monotonic milliseconds.
    pub window_mono_ms: u64,
    /// The pause that was last taken; 0 before the first.
    pub pause_ms: u64,
}

/// Where a breaker stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Counting; nothing withdrawn.
    Closed,
    /// All free devices withdrawn until then, monotonic milliseconds.
    Open {
        /// Until when.
        until_mono_ms: u64,
    },
    /// One free device is listed: the next request decides.
    HalfOpen,
}

/// The breaker after one more denial.
#[must_use]
pub fn denied(breaker: Option<&Breaker>, timing: &Timing, now: Now) -> Breaker {
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
        // The kubelet may still send what it decided before it saw the withdrawal.
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

/// The breaker as time passes: `Some` if it moved.
#[must_use]
pub fn ticked(breaker: &Breaker, timing: &Timing, now: Now) -> Option<Option<Breaker>> {
    match breaker.phase {
        Phase::Open { until_mono_ms } if now.mono_ms >= until_mono_ms => {
            Some(Some(Breaker { phase: Phase::HalfOpen, window_mono_ms: now.mono_ms, ..breaker.clone() }))
        }
        // Nobody came: perhaps whoever asks wants more than the one device that is listed. All are
        // listed again, and the next denial opens it anew, for longer.
        Phase::HalfOpen if now.passed(breaker.window_mono_ms, timing.breaker_window_ms) => {
            Some(Some(Breaker {
                phase: Phase::Closed,
                denials: DENIALS_TO_OPEN - 1,
                window_mono_ms: now.mono_ms,
                ..breaker.clone()
            }))
        }
        Phase::Closed if now.passed(breaker.window_mono_ms, timing.breaker_window_ms) => Some(None),
        Phase::Open { .. } | Phase::HalfOpen | Phase::Closed => None,
    }
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
    fn three_denials_in_a_minute_open_it_and_each_failed_try_doubles_the_pause() {
        let t = Timing::default();
        let mut b = denied(None, &t, at(0));
        b = denied(Some(&b), &t, at(1_000));
        assert_eq!(b.phase, Phase::Closed);
        b = denied(Some(&b), &t, at(2_000));
        assert_eq!(b.phase, Phase::Open { until_mono_ms: 12_000 });
        let mut now = 12_000;
        for pause in [20_000, 40_000, 80_000, 160_000, 300_000, 300_000] {
            assert_eq!(ticked(&b, &t, at(now - 1)), None);
            b = ticked(&b, &t, at(now)).unwrap().unwrap();
            assert_eq!(b.phase, Phase::HalfOpen);
            b = denied(Some(&b), &t, at(now));
            assert_eq!(b.phase, Phase::Open { until_mono_ms: now + pause });
            now += pause;
        }
    }

    #[test]
    fn half_open_ends_by_itself_where_nobody_wants_a_single_device() {
        let t = Timing::default();
        let mut b = (0..3).fold(None, |b, i| Some(denied(b.as_ref(), &t, at(i)))).unwrap();
        b = ticked(&b, &t, at(20_000)).unwrap().unwrap();
        assert_eq!(ticked(&b, &t, at(79_999)), None);
        b = ticked(&b, &t, at(80_000)).unwrap().unwrap();
        assert_eq!(b.phase, Phase::Closed);
        let again = denied(Some(&b), &t, at(81_000));
        assert_eq!(again.phase, Phase::Open { until_mono_ms: 101_000 }, "at once, and twice as long");
        assert_eq!(ticked(&b, &t, at(140_000)), Some(None), "at rest after a quiet window");
    }

    #[test]
    fn slow_denials_never_open_it() {
        let t = Timing::default();
        let mut b = denied(None, &t, at(0));
        for i in 1..20 {
            b = denied(Some(&b), &t, at(i * 61_000));
            assert_eq!((b.phase, b.denials), (Phase::Closed, 1));
        }
        assert_eq!(ticked(&b, &t, at(19 * 61_000 + 60_000)), Some(None));
    }
}
