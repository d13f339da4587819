//! An allocation's holder, combined from `List` and the checkpoint.

use super::*;

#[test]
fn a_holder_is_combined_from_both_sources() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    reconcile(&mut ledger, &view(10, vec![], vec![hold("p", "c", &[0])]), 10);
    assert_eq!(ledger.live[&id(1)].holder.pod.as_deref(), Some("p"));
    assert_eq!(ledger.live[&id(1)].holder.pod_uid, None);
    reconcile(&mut ledger, &view(20, vec![entry("u", "c", &[0], Some(1))], vec![hold("p", "c", &[0])]), 20);
    let holder = &ledger.live[&id(1)].holder;
    assert_eq!((holder.pod_uid.as_deref(), holder.container.as_deref()), (Some("u"), Some("c")));
}

#[test]
fn overlapping_allocations_of_one_pods_containers_settle_and_share_its_name() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0, 1], 0);
    grant(&mut ledger, 2, &[0], 100);
    assert!(ledger.live[&id(1)].overlapped);
    let both = vec![entry("u", "init", &[0, 1], Some(1)), entry("u", "app", &[0], Some(2))];
    // `List` has no init containers.
    let shown = view(200, both, vec![hold("p", "app", &[0])]);
    reconcile(&mut ledger, &shown, 200);
    reconcile(&mut ledger, &shown, 300);
    assert!(!ledger.live[&id(1)].overlapped, "the same pod holds both");
    assert_eq!(ledger.live[&id(1)].holder.pod.as_deref(), Some("p"), "named by its pod's app container");
    assert_eq!(ledger.live[&id(1)].holder.container.as_deref(), Some("init"));
}

#[test]
fn a_list_from_before_the_grant_gives_no_holder() {
    let mut ledger = node();
    let old = view(5, vec![], vec![hold("gone", "c", &[0])]);
    grant(&mut ledger, 1, &[0], 10);
    reconcile(&mut ledger, &old, 20);
    assert!(ledger.live[&id(1)].holder.is_unknown(), "that pod held the device before");
    reconcile(&mut ledger, &view(30, vec![], vec![hold("new", "c", &[0])]), 30);
    assert_eq!(ledger.live[&id(1)].holder.pod.as_deref(), Some("new"));
}

#[test]
fn a_newer_container_of_the_same_name_gives_no_pod_to_an_older_allocation() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    // The checkpoint showed the first pod, but `List` never did before the pod was gone.
    reconcile(
        &mut ledger,
        &ReconcileView { fresh: false, ..view(1_000, vec![entry("u1", "main", &[0], Some(1))], vec![]) },
        1_000,
    );
    grant(&mut ledger, 2, &[0], 2_000);
    let stale = vec![entry("u1", "main", &[0], Some(1))];
    reconcile(
        &mut ledger,
        &ReconcileView { fresh: false, ..view(3_000, stale, vec![hold("b", "main", &[0])]) },
        3_000,
    );
    assert_eq!(ledger.live[&id(1)].holder.pod, None);
    assert_eq!(ledger.live[&id(2)].holder.pod.as_deref(), Some("b"));
    let plan = reconcile(
        &mut ledger,
        &view(4_000, vec![entry("u2", "main", &[0], Some(2))], vec![hold("b", "main", &[0])]),
        4_000,
    );
    assert_eq!(plan.ended, [(id(1), EndReason::Superseded)]);
}

#[test]
fn an_entry_with_some_of_an_allocations_devices_is_of_no_init_container() {
    let mut ledger = node();
    ledger.excluded = Arc::new([GpuId::of_whole(&device(1).part)].into());
    grant(&mut ledger, 1, &[0, 1], 0);
    let mut is_shown = |devices: &[usize], when| {
        reconcile(&mut ledger, &view(when, vec![entry("u", "main", devices, Some(1))], vec![]), when);
        ledger.sightings[&id(1)].init_container_mono_ms.is_some()
    };
    // The kubelet has lost the entry of the pod's other container.
    assert!(!is_shown(&[0], 10));
    assert!(is_shown(&[0, 1], 20));
}
