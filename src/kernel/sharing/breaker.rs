//! Circuit breaker: a resource whose requests are denied repeatedly is withdrawn for a while, so that a
//! controller that recreates refused pods does not flood the node.
//!
//! A withdrawal affects all tenants, and a policy may deny a request because of who sent it. Its denials of the pods of
//! one namespace therefore never open the breaker, and those of pods that no source shows open it for the shortest
//! pause only.

use crate::ids::time::{Now, Timing};
use std::collections::BTreeSet;

/// Denials within the window that open the breaker. A policy's denials of known pods count once for each namespace.
pub const DENIALS_TO_OPEN: u32 = 3;

/// Whose request was denied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Denial {
    /// Any pod's request would be denied: a policy failed, a built-in rule denies it, or a device is held.
    OfAnyone,
    /// A policy denied the request for a pod in one of these namespaces. The set is not empty.
    OfNamespaces(BTreeSet<String>),
    /// A policy denied a request, and no source shows which pods it may be for.
    OfUnknown,
}

/// The breaker of one resource. A resource without recent denials has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Breaker {
    /// Its phase.
    pub phase: Phase,
    /// Denials since the window began, except those of known namespaces.
    pub denials: u32,
    /// The namespaces whose pods policies may have denied since the window began: one set for each denial that is
    /// counted. No two sets share a namespace, so that their number is that of different namespaces with a denial.
    pub namespaces: Vec<BTreeSet<String>>,
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
    /// One free device is listed: the next request decides, unless a policy denies it for pods of known namespaces.
    HalfOpen,
}

/// The breaker after one more denial.
#[must_use]
pub fn after_denial(breaker: Option<&Breaker>, denial: &Denial, timing: &Timing, now: Now) -> Breaker {
    let pause_ms = breaker.map_or(0, |b| b.pause_ms);
    let fresh = Breaker {
        phase: Phase::Closed,
        denials: 0,
        namespaces: Vec::new(),
        window_mono_ms: now.mono_ms,
        pause_ms,
    };
    let mut next = match breaker {
        // The kubelet may still send requests that it decided on before the withdrawal reached it.
        Some(b) if matches!(b.phase, Phase::Open { .. }) => return b.clone(),
        Some(b) if b.phase == Phase::HalfOpen || !now.passed(b.window_mono_ms, timing.breaker_window_ms) => {
            b.clone()
        }
        Some(_) | None => fresh.clone(),
    };
    let counted = match denial {
        Denial::OfAnyone | Denial::OfUnknown => {
            next.denials = next.denials.saturating_add(1);
            next.denials
        }
        Denial::OfNamespaces(namespaces) => {
            let counted = &mut next.namespaces;
            if let Some(wider) = counted.iter_mut().find(|counted| counted.is_superset(namespaces)) {
                // The denied pod is in one of these fewer namespaces, so that more later denials are of other ones.
                wider.clone_from(namespaces);
            } else if counted.iter().all(|counted| counted.is_disjoint(namespaces)) {
                // Otherwise the pod may be of a namespace that is counted already.
                counted.push(namespaces.clone());
            }
            u32::try_from(next.namespaces.len()).unwrap_or(u32::MAX)
        }
    };
    let reopens = next.phase == Phase::HalfOpen && !matches!(denial, Denial::OfNamespaces(_));
    if !reopens && counted < DENIALS_TO_OPEN {
        return next;
    }
    let pause_ms = match (denial, next.pause_ms) {
        (Denial::OfAnyone, 1..) => next.pause_ms.saturating_mul(2).min(timing.breaker_pause_max_ms),
        _ => timing.breaker_pause_ms,
    };
    let until_mono_ms = now.mono_ms.saturating_add(pause_ms);
    Breaker { phase: Phase::Open { until_mono_ms }, pause_ms, window_mono_ms: next.window_mono_ms, ..fresh }
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
        // No request arrived, perhaps because pods need more than the one listed device. All devices are listed again,
        // and the next denial opens the breaker again, unless it is a policy's of pods of known namespaces.
        Phase::HalfOpen => Some(Breaker {
            phase: Phase::Closed,
            denials: DENIALS_TO_OPEN - 1,
            namespaces: Vec::new(),
            window_mono_ms: now.mono_ms,
            pause_ms: breaker.pause_ms,
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
        let mut b = after_denial(None, &Denial::OfAnyone, &t, at(0));
        b = after_denial(Some(&b), &Denial::OfAnyone, &t, at(1_000));
        assert_eq!(b.phase, Phase::Closed);
        b = after_denial(Some(&b), &Denial::OfAnyone, &t, at(2_000));
        assert_eq!(b.phase, Phase::Open { until_mono_ms: 12_000 });
        let mut now = 12_000;
        for pause in [20_000, 40_000, 80_000, 160_000, 300_000, 300_000] {
            assert_eq!(after_tick(&b, &t, at(now - 1)), None);
            b = after_tick(&b, &t, at(now)).unwrap().unwrap();
            assert_eq!(b.phase, Phase::HalfOpen);
            b = after_denial(Some(&b), &Denial::OfAnyone, &t, at(now));
            assert_eq!(b.phase, Phase::Open { until_mono_ms: now + pause });
            now += pause;
        }
    }

    #[test]
    fn a_half_open_breaker_closes_where_no_pod_requests_a_single_device() {
        let t = Timing::default();
        let mut b =
            (0..3).fold(None, |b, i| Some(after_denial(b.as_ref(), &Denial::OfAnyone, &t, at(i)))).unwrap();
        b = after_tick(&b, &t, at(20_000)).unwrap().unwrap();
        assert_eq!(after_tick(&b, &t, at(79_999)), None);
        b = after_tick(&b, &t, at(80_000)).unwrap().unwrap();
        assert_eq!(b.phase, Phase::Closed);
        let again = after_denial(Some(&b), &Denial::OfAnyone, &t, at(81_000));
        assert_eq!(again.phase, Phase::Open { until_mono_ms: 101_000 }, "opens again for twice as long");
        assert_eq!(after_tick(&b, &t, at(140_000)), Some(None), "removed after a window without denials");
    }

    #[test]
    fn slow_denials_never_open_it() {
        let t = Timing::default();
        let mut b = after_denial(None, &Denial::OfAnyone, &t, at(0));
        for i in 1..20 {
            b = after_denial(Some(&b), &Denial::OfAnyone, &t, at(i * 61_000));
            assert_eq!((b.phase, b.denials), (Phase::Closed, 1));
        }
        assert_eq!(after_tick(&b, &t, at(19 * 61_000 + 60_000)), Some(None));
    }

    fn of(namespaces: &[&str]) -> Denial {
        Denial::OfNamespaces(namespaces.iter().map(ToString::to_string).collect())
    }

    fn after(breaker: Option<&Breaker>, denials: &[Denial], from: u64) -> Breaker {
        let t = Timing::default();
        let each = denials.iter().zip(from..);
        each.fold(breaker.cloned(), |b, (denial, ms)| Some(after_denial(b.as_ref(), denial, &t, at(ms))))
            .unwrap()
    }

    #[test]
    fn a_policys_denials_of_fewer_than_three_namespaces_never_open_it() {
        let two: Vec<_> = (0..100).map(|i| of(&[["a", "b"][i % 2]])).collect();
        assert_eq!(after(None, &two, 0).phase, Phase::Closed);
        // Each of these may be of the same namespace.
        let one = [of(&["a", "b"]), of(&["b", "c"]), of(&["b"]), of(&["a", "b", "c"])];
        assert_eq!(after(None, &one, 0).phase, Phase::Closed);
        let one = [of(&["a", "z"]), of(&["b", "z"]), of(&["z"])];
        assert_eq!(after(None, &one, 0).phase, Phase::Closed);
        // Not even while it is half-open, or after failures.
        let t = Timing::default();
        let failed = after(None, &[Denial::OfAnyone, Denial::OfAnyone], 0);
        assert_eq!(after(Some(&failed), &two, 10).phase, Phase::Closed);
        let open = after(Some(&failed), &[Denial::OfAnyone], 10);
        let half_open = after_tick(&open, &t, at(20_000)).unwrap().unwrap();
        assert_eq!(after(Some(&half_open), &two, 20_000).phase, Phase::HalfOpen);
        let closed = after_tick(&half_open, &t, at(90_000)).unwrap().unwrap();
        assert_eq!(after(Some(&closed), &two, 90_000).phase, Phase::Closed);
        // A policy that denies everyone's pods is like one that fails.
        let mut all = vec![of(&["a"]), of(&["b"]), of(&["c"])];
        assert_eq!(after(None, &all, 0).phase, Phase::Open { until_mono_ms: 10_002 });
        // A first denial whose pod may be in any of the three namespaces does not hide the later ones.
        all.insert(0, of(&["a", "b", "c"]));
        assert_eq!(after(None, &all, 0).phase, Phase::Open { until_mono_ms: 10_003 });
    }

    #[test]
    fn the_pause_does_not_grow_for_denials_that_may_be_caused_by_who_asks() {
        let t = Timing::default();
        let three = [Denial::OfUnknown, Denial::OfUnknown, Denial::OfUnknown];
        let mut b = after(None, &three, 0);
        for _ in 0..10 {
            let Phase::Open { until_mono_ms } = b.phase else { panic!("{b:?}") };
            assert_eq!(b.pause_ms, t.breaker_pause_ms);
            b = after_tick(&b, &t, at(until_mono_ms)).unwrap().unwrap();
            assert_eq!(b.phase, Phase::HalfOpen);
            b = after(Some(&b), &[Denial::OfUnknown], until_mono_ms);
        }
    }
}
