//! What ends an allocation, and what does not.

use super::*;

#[test]
fn two_rounds_five_seconds_apart_end_what_is_gone() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    take(&mut ledger, &view(10, vec![entry("u", "c", &[0], Some(1))], vec![hold("p", "c", &[0])]), 10);
    let gone = |when| view(when, vec![], vec![]);
    assert!(take(&mut ledger, &gone(29_999), 29_999).ended.is_empty(), "sooner than 30 s after our reply");
    assert!(take(&mut ledger, &gone(30_000), 30_000).ended.is_empty(), "the first round that misses it");
    assert!(take(&mut ledger, &gone(34_999), 34_999).ended.is_empty(), "too close to the first");
    assert_eq!(take(&mut ledger, &gone(35_000), 35_000).ended, [(id(1), EndReason::Released)]);
    assert!(ledger.live.is_empty() && ledger.ended.len() == 1);
}

#[test]
fn one_sight_between_two_misses_begins_anew() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    let seen = |when| view(when, vec![entry("u", "c", &[0], Some(1))], vec![hold("p", "c", &[0])]);
    take(&mut ledger, &seen(1), 1);
    take(&mut ledger, &view(40_000, vec![], vec![]), 40_000);
    take(&mut ledger, &seen(44_000), 44_000);
    assert!(take(&mut ledger, &view(46_000, vec![], vec![]), 46_000).ended.is_empty());
    assert_eq!(take(&mut ledger, &view(51_000, vec![], vec![]), 51_000).ended.len(), 1);
}

#[test]
fn a_source_that_could_not_be_asked_ends_nothing() {
    let incomplete: [fn(&mut RoundView); 5] = [
        |v| v.list = None,
        |v| v.checkpoint = None,
        |v| v.fresh = false,
        |v| v.kubelet = None,
        |v| v.kubelet = Some(KubeletAge { created_wall_ms: 5, created_mono_ms: START + 90_000 }),
    ];
    for (case, spoil) in incomplete.iter().enumerate() {
        let mut ledger = node();
        grant(&mut ledger, 1, &[0], 0);
        for when in [60_000, 70_000, 80_000, 100_000] {
            let mut view = view(when, vec![], vec![]);
            spoil(&mut view);
            assert!(take(&mut ledger, &view, when).ended.is_empty(), "case {case}");
        }
    }
}

#[test]
fn a_pod_in_list_keeps_its_allocation_though_the_checkpoint_lost_it() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    take(&mut ledger, &view(10, vec![entry("u", "c", &[0], Some(1))], vec![hold("p", "c", &[0])]), 10);
    for when in [40_000, 50_000, 60_000] {
        let mut view = view(when, vec![], vec![]);
        view.list.as_mut().unwrap().pods.insert(("ns".into(), "p".into()));
        assert!(take(&mut ledger, &view, when).ended.is_empty());
    }
}

#[test]
fn what_no_source_ever_showed_never_started() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    take(&mut ledger, &view(30_000, vec![], vec![]), 30_000);
    assert_eq!(
        take(&mut ledger, &view(35_000, vec![], vec![]), 35_000).ended,
        [(id(1), EndReason::NeverStarted)]
    );
}

#[test]
fn an_older_allocation_under_another_pod_is_superseded_at_once() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    take(&mut ledger, &view(10, vec![entry("u1", "c", &[0], Some(1))], vec![hold("p1", "c", &[0])]), 10);
    grant(&mut ledger, 2, &[0], 20);
    let shown = view(30, vec![entry("u2", "c", &[0], Some(2))], vec![hold("p2", "c", &[0])]);
    assert_eq!(take(&mut ledger, &shown, 30).ended, [(id(1), EndReason::Superseded)]);
    assert_eq!(ledger.live[&id(2)].holder.pod.as_deref(), Some("p2"));
}

#[test]
fn a_reissue_whose_first_answer_was_lost_supersedes_it_after_two_rounds() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    grant(&mut ledger, 2, &[0], 10);
    let shown = |when| view(when, vec![entry("u", "c", &[0], Some(2))], vec![hold("p", "c", &[0])]);
    assert!(take(&mut ledger, &shown(31_000), 31_000).ended.is_empty());
    assert_eq!(take(&mut ledger, &shown(36_000), 36_000).ended, [(id(1), EndReason::Superseded)]);
}

#[test]
fn all_gone_across_a_kubelet_restart_is_held() {
    let mut ledger = node();
    let running = |when| {
        let held = vec![hold("p", "c", &[0]), hold("q", "c", &[1])];
        view(when, vec![entry("u", "c", &[0], Some(1)), entry("v", "c", &[1], Some(2))], held)
    };
    grant(&mut ledger, 1, &[0], 0);
    grant(&mut ledger, 2, &[1], 0);
    take(&mut ledger, &running(10), 10);
    let empty = |when| {
        let kubelet = Some(KubeletAge { created_wall_ms: 60_000, created_mono_ms: START + 60_000 });
        RoundView { kubelet, ..view(when, vec![], vec![]) }
    };
    for when in [100_000, 110_000, 120_000] {
        assert!(take(&mut ledger, &empty(when), when).ended.is_empty());
    }
    assert!(ledger.hold.is_some());
    // One of them shows up again: the other is really gone.
    let one = |when| RoundView {
        kubelet: empty(0).kubelet,
        ..view(when, vec![entry("u", "c", &[0], Some(1))], vec![hold("p", "c", &[0])])
    };
    take(&mut ledger, &one(130_000), 130_000);
    take(&mut ledger, &one(136_000), 136_000);
    assert!(ledger.hold.is_none());
    assert_eq!(ledger.live.keys().copied().collect::<Vec<_>>(), [id(1)]);
}

#[test]
fn a_single_allocation_may_go_with_a_kubelet_restart() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    take(&mut ledger, &view(10, vec![entry("u", "c", &[0], Some(1))], vec![hold("p", "c", &[0])]), 10);
    let empty = |when| {
        let kubelet = Some(KubeletAge { created_wall_ms: 60_000, created_mono_ms: START + 60_000 });
        RoundView { kubelet, ..view(when, vec![], vec![]) }
    };
    take(&mut ledger, &empty(100_000), 100_000);
    assert_eq!(take(&mut ledger, &empty(105_000), 105_000).ended, [(id(1), EndReason::Released)]);
}
