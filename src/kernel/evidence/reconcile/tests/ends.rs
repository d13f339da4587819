//! The conditions under which an allocation ends.

use super::*;

#[test]
fn two_passes_five_seconds_apart_end_a_missing_allocation() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    reconcile(&mut ledger, &view(10, vec![entry("u", "c", &[0], Some(1))], vec![hold("p", "c", &[0])]), 10);
    let empty = |when| view(when, vec![], vec![]);
    assert!(
        reconcile(&mut ledger, &empty(29_999), 29_999).ended.is_empty(),
        "less than 30 s after the reply"
    );
    assert!(reconcile(&mut ledger, &empty(30_000), 30_000).ended.is_empty(), "the first pass that misses it");
    assert!(reconcile(&mut ledger, &empty(34_999), 34_999).ended.is_empty(), "less than 5 s after the first");
    assert_eq!(reconcile(&mut ledger, &empty(35_000), 35_000).ended, [(id(1), EndReason::Released)]);
    assert!(ledger.live.is_empty() && ledger.ended.len() == 1);
}

#[test]
fn a_sighting_between_two_misses_resets_the_count() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    let seen = |when| view(when, vec![entry("u", "c", &[0], Some(1))], vec![hold("p", "c", &[0])]);
    reconcile(&mut ledger, &seen(1), 1);
    reconcile(&mut ledger, &view(40_000, vec![], vec![]), 40_000);
    reconcile(&mut ledger, &seen(44_000), 44_000);
    assert!(reconcile(&mut ledger, &view(46_000, vec![], vec![]), 46_000).ended.is_empty());
    assert_eq!(reconcile(&mut ledger, &view(51_000, vec![], vec![]), 51_000).ended.len(), 1);
}

#[test]
fn no_allocation_ends_while_a_source_cannot_be_read() {
    let incomplete: [fn(&mut ReconcileView); 5] = [
        |v| v.list = None,
        |v| v.checkpoint = None,
        |v| v.fresh = false,
        |v| v.kubelet = None,
        |v| v.kubelet = Some(KubeletAge { created_wall_ms: 5, created_mono_ms: START + 90_000 }),
    ];
    for (case, make_incomplete) in incomplete.iter().enumerate() {
        let mut ledger = node();
        grant(&mut ledger, 1, &[0], 0);
        for when in [60_000, 70_000, 80_000, 100_000] {
            let mut view = view(when, vec![], vec![]);
            make_incomplete(&mut view);
            assert!(reconcile(&mut ledger, &view, when).ended.is_empty(), "case {case}");
        }
    }
}

#[test]
fn a_listed_container_with_its_devices_keeps_an_allocation_although_the_checkpoint_lacks_it() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    reconcile(&mut ledger, &view(10, vec![entry("u", "c", &[0], Some(1))], vec![hold("p", "c", &[0])]), 10);
    for when in [40_000, 50_000, 60_000] {
        assert!(
            reconcile(&mut ledger, &view(when, vec![], vec![hold("p", "c", &[0])]), when).ended.is_empty()
        );
    }
}

#[test]
fn an_allocation_that_no_source_showed_ends_as_never_started() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    reconcile(&mut ledger, &view(30_000, vec![], vec![]), 30_000);
    assert_eq!(
        reconcile(&mut ledger, &view(35_000, vec![], vec![]), 35_000).ended,
        [(id(1), EndReason::NeverStarted)]
    );
}

#[test]
fn an_older_allocation_under_another_pod_is_superseded_at_once() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    reconcile(&mut ledger, &view(10, vec![entry("u1", "c", &[0], Some(1))], vec![hold("p1", "c", &[0])]), 10);
    grant(&mut ledger, 2, &[0], 20);
    let shown = view(30, vec![entry("u2", "c", &[0], Some(2))], vec![hold("p2", "c", &[0])]);
    assert_eq!(reconcile(&mut ledger, &shown, 30).ended, [(id(1), EndReason::Superseded)]);
    assert_eq!(ledger.live[&id(2)].holder.pod.as_deref(), Some("p2"));
}

#[test]
fn a_repeated_allocate_supersedes_an_older_one_after_two_passes_whether_or_not_its_pod_was_known() {
    for is_known in [false, true] {
        let mut ledger = node();
        grant(&mut ledger, 1, &[0], 0);
        let shown =
            |when, number| view(when, vec![entry("u", "c", &[0], Some(number))], vec![hold("p", "c", &[0])]);
        if is_known {
            reconcile(&mut ledger, &shown(5, 1), 5);
            assert_eq!(ledger.live[&id(1)].holder.pod.as_deref(), Some("p"));
        }
        grant(&mut ledger, 2, &[0], 10);
        assert!(reconcile(&mut ledger, &shown(31_000, 2), 31_000).ended.is_empty());
        // A pass between the two that count also shows the pod.
        let quick = ReconcileView { fresh: false, ..shown(33_000, 2) };
        assert!(reconcile(&mut ledger, &quick, 33_000).ended.is_empty());
        let ended = reconcile(&mut ledger, &shown(36_000, 2), 36_000).ended;
        assert_eq!(ended, [(id(1), EndReason::Superseded)], "known: {is_known}");
    }
}

#[test]
fn ends_are_withheld_if_all_allocations_vanish_across_a_kubelet_restart() {
    let mut ledger = node();
    let running = |when| {
        let held = vec![hold("p", "c", &[0]), hold("q", "c", &[1])];
        view(when, vec![entry("u", "c", &[0], Some(1)), entry("v", "c", &[1], Some(2))], held)
    };
    grant(&mut ledger, 1, &[0], 0);
    grant(&mut ledger, 2, &[1], 0);
    reconcile(&mut ledger, &running(10), 10);
    let empty = |when| {
        let kubelet = Some(KubeletAge { created_wall_ms: 60_000, created_mono_ms: START + 60_000 });
        ReconcileView { kubelet, ..view(when, vec![], vec![]) }
    };
    for when in [100_000, 110_000, 120_000] {
        assert!(reconcile(&mut ledger, &empty(when), when).ended.is_empty());
    }
    assert!(ledger.ends_withheld.is_some());
    // One of them is seen again, so the other has ended.
    let first_only = |when| ReconcileView {
        kubelet: empty(0).kubelet,
        ..view(when, vec![entry("u", "c", &[0], Some(1))], vec![hold("p", "c", &[0])])
    };
    reconcile(&mut ledger, &first_only(130_000), 130_000);
    reconcile(&mut ledger, &first_only(136_000), 136_000);
    assert!(ledger.ends_withheld.is_none());
    assert_eq!(ledger.live.keys().copied().collect::<Vec<_>>(), [id(1)]);
}

#[test]
fn a_single_allocation_may_end_across_a_kubelet_restart() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    reconcile(&mut ledger, &view(10, vec![entry("u", "c", &[0], Some(1))], vec![hold("p", "c", &[0])]), 10);
    let empty = |when| {
        let kubelet = Some(KubeletAge { created_wall_ms: 60_000, created_mono_ms: START + 60_000 });
        ReconcileView { kubelet, ..view(when, vec![], vec![]) }
    };
    reconcile(&mut ledger, &empty(100_000), 100_000);
    assert_eq!(reconcile(&mut ledger, &empty(105_000), 105_000).ended, [(id(1), EndReason::Released)]);
}
