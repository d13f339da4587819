//! Compares the history with a list of whole allocations.

use super::*;
use crate::grants::allocation::{Decision, EndReason, GrantOrigin, Holder};
use crate::ids::names::{PartId, Resource};
use crate::policy::decider::Decider;
use proptest::prelude::*;

fn allocation(number: u64, shape: u8) -> Allocation {
    let text = |bit: u8, text: &str| (shape & bit != 0).then(|| text.to_owned());
    let part = PartId::parse(&format!("GPU-{}", shape % 3)).unwrap();
    Allocation {
        id: AllocationId { store: 1, number },
        resource: Resource::parse(if shape & 1 == 0 { "nvidia.com/gpu" } else { "nvidia.com/gpu.shared" })
            .unwrap(),
        devices: (0..u32::from(shape % 4)).map(|n| DeviceId::share(&part, n)).collect(),
        granted_wall_ms: number,
        origin: GrantOrigin::DevicePlugin,
        holder: Holder {
            namespace: text(2, "default"),
            pod: text(4, &format!("pod-{number}")),
            pod_uid: text(8, &format!("uid-{number}")),
            container: text(16, "main"),
        },
        overlapped: shape & 32 != 0,
        decision: Decision {
            by: vec![if shape & 64 == 0 { Decider::Adopted } else { "mixed@0123456789ab".into() }],
            reason: text(128, "\"the\" emptiest\n").unwrap_or_default(),
            ..Decision::default()
        },
        ended: None,
    }
}

fn end(number: u64, reason: EndReason) -> End {
    End { reason, wall_ms: 1000 + number }
}

#[derive(Clone, Debug)]
enum Op {
    End { shape: u8, times: u64, operator: bool },
    Prune { allocations: usize, bytes: usize },
    Remove { which: usize },
    Restore,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (any::<u8>(), 1u64..60, any::<bool>())
            .prop_map(|(shape, times, operator)| Op::End { shape, times, operator }),
        2 => (0usize..300, prop_oneof![3 => Just(usize::MAX), 1 => 0usize..40_000])
            .prop_map(|(allocations, bytes)| Op::Prune { allocations, bytes }),
        1 => any::<usize>().prop_map(|which| Op::Remove { which }),
        1 => Just(Op::Restore),
    ]
}

/// The expected contents of the history, oldest first.
type Expected = Vec<(Allocation, End)>;

fn check(history: &History, expected: &Expected) {
    assert_eq!((history.len(), history.is_empty()), (expected.len(), expected.is_empty()));
    let shown: Vec<Allocation> = history.iter().map(|past| past.allocation()).collect();
    let allocations: Vec<Allocation> =
        expected.iter().map(|(a, end)| Allocation { ended: Some(end.clone()), ..a.clone() }).collect();
    assert_eq!(shown, allocations);
    assert_eq!(history.bytes(), expected.iter().map(|(a, _)| weight(a)).sum::<usize>());
    assert_eq!(history.back().map(|p| p.id), expected.last().map(|(a, _)| a.id));
}

fn prune(history: &mut History, expected: &mut Expected, limit: HistoryLimit) {
    loop {
        let ids = history.to_prune(limit, None);
        if ids.is_empty() {
            break;
        }
        assert!(ids.len() <= PRUNED_AT_ONCE);
        ids.iter().for_each(|id| history.remove(*id));
        expected.retain(|(a, _)| !ids.contains(&a.id));
    }
    assert!(history.len() <= limit.allocations);
    assert!(history.bytes() <= limit.bytes);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_history_has_ended_allocations_until_they_are_pruned(ops in prop::collection::vec(op(), 1..40)) {
        let (mut history, mut expected) = (History::default(), Expected::new());
        let mut number = 0;
        for op in ops {
            let before = (history.clone(), expected.clone());
            match op {
                Op::End { shape, times, operator } => {
                    let reason = if operator { EndReason::Operator } else { EndReason::Released };
                    for number in number..number + times {
                        history.push(&allocation(number, shape), end(number, reason));
                        expected.push((allocation(number, shape), end(number, reason)));
                    }
                    number += times;
                }
                Op::Prune { allocations, bytes } => {
                    prune(&mut history, &mut expected, HistoryLimit { allocations, bytes });
                }
                Op::Remove { which } if !expected.is_empty() => {
                    let (gone, _) = expected.remove(which % expected.len());
                    prop_assert!(history.get(gone.id).is_some());
                    history.remove(gone.id);
                    prop_assert!(history.get(gone.id).is_none());
                }
                Op::Remove { .. } => {}
                Op::Restore => {
                    let mut shuffled = expected.clone();
                    shuffled.reverse();
                    let restored = History::restored(shuffled);
                    prop_assert!(restored == history);
                    history = restored;
                }
            }
            check(&history, &expected);
            // An older snapshot stays unchanged.
            check(&before.0, &before.1);
        }
    }
}

#[test]
fn allocations_that_a_checkpoint_may_show_again_are_pruned_last() {
    let mut history = History::default();
    // Only the first is adopted and ended by an operator.
    history.push(&allocation(1, 0), end(1, EndReason::Operator));
    history.push(&allocation(2, 0), end(2, EndReason::Released));
    history.push(&allocation(3, 64), end(3, EndReason::Operator));
    assert_eq!(history.iter().map(|p| p.may_be_shown_again()).collect::<Vec<_>>(), [true, false, false]);
    let left = |allocations| {
        let limit = HistoryLimit { allocations, ..HistoryLimit::default() };
        let pruned = history.to_prune(limit, None);
        let left = history.iter().map(|p| p.id.number);
        left.filter(|n| pruned.iter().all(|p| p.number != *n)).collect::<Vec<_>>()
    };
    assert_eq!(left(2), [1, 3]);
    assert_eq!(left(1), [1]);
    assert!(left(0).is_empty(), "the limit holds for them too");
}

#[test]
fn ending_allocations_prune_as_many_as_they_add() {
    let mut history = History::default();
    for number in 0..100 {
        history.push(&allocation(number, 7), end(number, EndReason::Released));
    }
    let limit = HistoryLimit { allocations: 100, ..HistoryLimit::default() };
    let coming = [allocation(200, 7), allocation(201, 7)];
    let pruned: Vec<u64> = history.to_prune(limit, &coming).iter().map(|id| id.number).collect();
    assert_eq!(pruned, [0, 1]);
    // The limit in bytes, exceeded by one.
    let limit = HistoryLimit { allocations: 1000, bytes: history.bytes() + weight(&coming[0]) - 1 };
    assert_eq!(history.to_prune(limit, &coming[..1]).len(), 1);
}

#[test]
fn equal_values_are_stored_once() {
    let alike = |number| Allocation { devices: allocation(0, 3).devices, ..allocation(number, 0b1_0111) };
    let shares = |history: &History| {
        let (first, last) = (history.iter().next().unwrap(), history.back().unwrap());
        Arc::ptr_eq(&first.common, &last.common) && Arc::ptr_eq(&first.devices, &last.devices)
    };
    let mut history = History::default();
    for number in 0..10 * CHUNK as u64 {
        history.push(&alike(number), end(number, EndReason::Released));
    }
    assert!(shares(&history));
    let all = (0..1000).map(|n| (alike(n), end(n, EndReason::Released))).collect();
    assert!(shares(&History::restored(all)));
}
