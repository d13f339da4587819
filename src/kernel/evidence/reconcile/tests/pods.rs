//! Reconcile passes with a source that has all pods by UID: the API server.

use super::*;
use crate::evidence::pods::tests::pod_without_containers;
use crate::evidence::pods::{Pod, PodsSource, PodsView, Stage};
use std::collections::VecDeque;
use std::sync::Arc;

/// A view of the API server with these pods alive and deleted.
pub(super) fn pods(alive: &[&str], deleted: &[&str]) -> Option<Arc<PodsView>> {
    let pod = |uid: &str| Pod {
        namespace: "ns".into(),
        created_wall_ms: START,
        ..pod_without_containers(uid, Stage::Admitted)
    };
    Some(Arc::new(PodsView {
        source: PodsSource::ApiServer,
        current: true,
        listed_mono_ms: START,
        pods: alive.iter().map(|uid| ((*uid).to_owned(), Arc::new(pod(uid)))).collect(),
        deleted: deleted.iter().map(|uid| (*uid).to_owned()).collect::<VecDeque<_>>(),
        finished: VecDeque::new(),
    }))
}

#[test]
fn the_api_server_names_the_pod_of_a_uid() {
    let mut ledger = node();
    ledger.pods = pods(&["u"], &[]);
    grant(&mut ledger, 1, &[0], 0);
    reconcile(&mut ledger, &view(10, vec![entry("u", "init", &[0], Some(1))], vec![]), 10);
    let holder = ledger.live[&id(1)].holder.clone();
    assert_eq!(holder.pod.as_deref(), Some("pod-u"), "`List` does not show init containers");
    assert_eq!(holder.namespace.as_deref(), Some("ns"));
}

#[test]
fn a_finished_pod_ends_in_one_pass_and_a_force_deleted_one_in_two() {
    for finished in [true, false] {
        let mut ledger = node();
        ledger.pods = pods(&["u"], &[]);
        grant(&mut ledger, 1, &[0], 0);
        let held = |when| view(when, vec![entry("u", "c", &[0], Some(1))], vec![hold("pod-u", "c", &[0])]);
        reconcile(&mut ledger, &held(10), 10);
        let mut over = PodsView::clone(&pods(&[], &[]).unwrap());
        over.record_removal("u".into(), finished);
        ledger.pods = Some(Arc::new(over));
        assert!(
            reconcile(&mut ledger, &held(1_000), 1_000).ended.is_empty(),
            "the kubelet has not released the device"
        );
        let stale = ReconcileView { fresh: false, ..view(1_500, vec![], vec![]) };
        assert!(
            reconcile(&mut ledger, &stale, 1_500).ended.is_empty(),
            "the checkpoint is older than the pass"
        );
        let released = [(id(1), EndReason::Released)];
        let plan = reconcile(&mut ledger, &view(2_000, vec![], vec![]), 2_000);
        assert_eq!(plan.ended, if finished { &released[..] } else { &[] });
        if !finished {
            // Its containers may still run for a while.
            assert!(reconcile(&mut ledger, &view(6_000, vec![], vec![]), 6_000).ended.is_empty());
            assert_eq!(reconcile(&mut ledger, &view(7_000, vec![], vec![]), 7_000).ended, released);
        }
    }
}

#[test]
fn a_pod_that_the_api_server_shows_alive_keeps_its_allocation() {
    let mut ledger = node();
    ledger.pods = pods(&["u"], &[]);
    grant(&mut ledger, 1, &[0], 0);
    reconcile(&mut ledger, &view(10, vec![entry("u", "c", &[0], Some(1))], vec![]), 10);
    for when in [100_000, 110_000, 120_000] {
        assert!(reconcile(&mut ledger, &view(when, vec![], vec![]), when).ended.is_empty());
    }
    // A disconnected source no longer shows the pod alive.
    let disconnected = PodsView { current: false, ..PodsView::clone(ledger.pods.as_ref().unwrap()) };
    ledger.pods = Some(Arc::new(disconnected));
    assert!(reconcile(&mut ledger, &view(130_000, vec![], vec![]), 130_000).ended.is_empty());
    let plan = reconcile(&mut ledger, &view(136_000, vec![], vec![]), 136_000);
    assert_eq!(plan.ended, [(id(1), EndReason::Released)]);
}

#[test]
fn without_a_checkpoint_only_a_deletion_at_the_api_server_ends_an_allocation_in_two_passes() {
    for (deleted, ends) in [(vec!["u"], true), (vec![], false)] {
        let mut ledger = node();
        grant(&mut ledger, 1, &[0], 0);
        reconcile(&mut ledger, &view(10, vec![entry("u", "c", &[0], Some(1))], vec![]), 10);
        let unreadable =
            |when| ReconcileView { checkpoint: None, fresh: false, ..view(when, vec![], vec![]) };
        ledger.pods = if deleted.is_empty() { None } else { pods(&[], &deleted) };
        assert!(reconcile(&mut ledger, &unreadable(1_000), 1_000).ended.is_empty(), "settling");
        assert!(reconcile(&mut ledger, &unreadable(100_000), 100_000).ended.is_empty(), "the first of two");
        let no_list = ReconcileView { list: None, ..unreadable(106_000) };
        assert!(reconcile(&mut ledger, &no_list, 106_000).ended.is_empty(), "the kubelet does not answer");
        let plan = reconcile(&mut ledger, &unreadable(107_000), 107_000);
        // The reason marks that a later checkpoint may show it again.
        let expected = if ends { vec![(id(1), EndReason::PodGone)] } else { vec![] };
        assert_eq!(plan.ended, expected);
    }
}

#[test]
fn a_hold_ends_once_the_api_server_shows_the_fate_of_every_pod() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    grant(&mut ledger, 2, &[1], 0);
    let both = vec![entry("u", "c", &[0], Some(1)), entry("v", "c", &[1], Some(2))];
    reconcile(&mut ledger, &view(10, both, vec![hold("pod-u", "c", &[0]), hold("pod-v", "c", &[1])]), 10);
    let empty = |when| {
        let kubelet = Some(KubeletAge { created_wall_ms: 60_000, created_mono_ms: START + 60_000 });
        ReconcileView { kubelet, ..view(when, vec![], vec![]) }
    };
    for when in [100_000, 110_000] {
        assert!(reconcile(&mut ledger, &empty(when), when).ended.is_empty());
    }
    assert!(ledger.ends_withheld.is_some());
    ledger.pods = pods(&["u"], &["v"]);
    let plan = reconcile(&mut ledger, &empty(120_000), 120_000);
    assert_eq!(plan.ended, [(id(2), EndReason::Released)]);
    assert!(ledger.ends_withheld.is_none());
    assert!(ledger.live.contains_key(&id(1)));
}

#[test]
fn a_uid_is_learned_by_name_only_if_the_checkpoint_cannot_be_read() {
    let mut ledger = node();
    ledger.pods = pods(&["u"], &[]);
    grant(&mut ledger, 1, &[0], 5);
    let listed = vec![hold("pod-u", "c", &[0])];
    reconcile(&mut ledger, &view(10, vec![], listed.clone()), 10);
    assert_eq!(ledger.live[&id(1)].holder.pod_uid, None, "the checkpoint can be read and will have the UID");
    reconcile(&mut ledger, &ReconcileView { checkpoint: None, ..view(20, vec![], listed) }, 20);
    assert_eq!(ledger.live[&id(1)].holder.pod_uid.as_deref(), Some("u"));
}
