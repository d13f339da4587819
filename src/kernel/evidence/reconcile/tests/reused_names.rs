//! A pod's name is not its identity: the next pod of a StatefulSet has the name of the last one.

use super::pods::pods;
use super::*;
use crate::evidence::pods::{PodsView, Stage};
use std::sync::Arc;

/// The first pod, `p` of UID `u1`, held GPU 0 and has ended; `later` is the view of each later pass. Returns when the
/// allocation ended.
fn ends_at(ledger: &mut Ledger, later: impl Fn(u64) -> ReconcileView) -> Option<u64> {
    (2..40).map(|n| n * 5_000).find(|when| !reconcile(ledger, &later(*when), *when).ended.is_empty())
}

fn first_pod() -> Ledger {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    reconcile(&mut ledger, &view(10, vec![entry("u1", "c", &[0], Some(1))], vec![hold("p", "c", &[0])]), 10);
    ledger
}

/// A view in which a pod `p` exists that holds nothing.
fn without_devices(when: u64) -> ReconcileView {
    let mut view = view(when, vec![], vec![]);
    view.list.as_mut().unwrap().pods.insert(("ns".into(), "p".into()));
    view
}

fn restarted(view: ReconcileView) -> ReconcileView {
    let kubelet = KubeletAge { created_wall_ms: START + 700, created_mono_ms: START + 700 };
    ReconcileView { kubelet: Some(kubelet), ..view }
}

#[test]
fn a_later_pod_of_the_name_on_another_gpu_keeps_nothing() {
    let mut ledger = first_pod();
    grant(&mut ledger, 2, &[1], 1_000);
    let later = |when| view(when, vec![entry("u2", "c", &[1], Some(2))], vec![hold("p", "c", &[1])]);
    assert_eq!(ends_at(&mut ledger, later), Some(35_000));
    assert_eq!(ledger.live.keys().copied().collect::<Vec<_>>(), [id(2)]);
}

#[test]
fn a_later_pod_of_the_name_on_another_gpu_keeps_nothing_across_restarts_of_daemon_and_kubelet() {
    let mut ledger = first_pod();
    grant(&mut ledger, 2, &[1], 1_000);
    // The daemon's memory of passes is lost.
    ledger.sightings = Arc::default();
    let later = |when| {
        restarted(view(when, vec![entry("u2", "other", &[1], Some(2))], vec![hold("p", "other", &[1])]))
    };
    assert_eq!(
        ends_at(&mut ledger, later),
        Some(45_000),
        "30 s after the daemon's start, which is the first pass"
    );
}

#[test]
fn a_later_pod_of_the_name_without_devices_keeps_nothing() {
    assert_eq!(ends_at(&mut first_pod(), without_devices), Some(35_000));
}

#[test]
fn a_later_pod_of_the_name_without_devices_keeps_nothing_across_restarts() {
    // The daemon's memory of passes is lost, and the kubelet is the one that requested the devices.
    let mut ledger = first_pod();
    ledger.sightings = Arc::default();
    assert!(ends_at(&mut ledger, without_devices).is_some());
    // The kubelet restarts after the pod has ended and before a pass shows this. It restores the entry of another pod,
    // so it would have restored this one's, too.
    let mut ledger = first_pod();
    grant(&mut ledger, 2, &[1], 0);
    let both = vec![entry("u1", "c", &[0], Some(1)), entry("u2", "c", &[1], Some(2))];
    reconcile(&mut ledger, &view(500, both, vec![hold("p", "c", &[0]), hold("q", "c", &[1])]), 500);
    let later = |when| {
        let mut view = restarted(without_devices(when));
        view.checkpoint = Some(vec![entry("u2", "c", &[1], Some(2))]);
        view.list.as_mut().unwrap().held.push(hold("q", "c", &[1]));
        view
    };
    assert!(ends_at(&mut ledger, later).is_some());
    assert_eq!(ledger.live.keys().copied().collect::<Vec<_>>(), [id(2)]);
}

#[test]
fn a_container_that_outlives_its_pod_keeps_its_devices_while_the_checkpoint_cannot_be_read() {
    let mut ledger = first_pod();
    let mut pods = PodsView::clone(&pods(&["u2"], &["u1"]).unwrap());
    Arc::make_mut(pods.pods.get_mut("u2").unwrap()).name = "p".into();
    ledger.pods = Some(Arc::new(pods));
    let hung = |when| ReconcileView { checkpoint: None, ..view(when, vec![], vec![hold("p", "c", &[0])]) };
    assert_eq!(ends_at(&mut ledger, hung), None);
}

#[test]
fn a_listed_pod_keeps_its_allocation_if_a_restart_may_have_made_the_kubelet_lose_it() {
    assert_eq!(ends_at(&mut first_pod(), |when| restarted(without_devices(when))), None);
    // The API server shows the name under another UID.
    let mut ledger = first_pod();
    let mut view = PodsView::clone(&pods(&["u2"], &["u1"]).unwrap());
    Arc::make_mut(view.pods.get_mut("u2").unwrap()).name = "p".into();
    ledger.pods = Some(Arc::new(view.clone()));
    assert!(ends_at(&mut ledger, |when| restarted(without_devices(when))).is_some());
    // It does not while it is disconnected.
    let mut ledger = first_pod();
    ledger.pods = Some(Arc::new(PodsView { current: false, ..view }));
    assert_eq!(ends_at(&mut ledger, |when| restarted(without_devices(when))), None);
}

#[test]
fn a_finished_pod_that_the_kubelet_still_lists_keeps_nothing() {
    let mut ledger = first_pod();
    let mut view = PodsView::clone(&pods(&["u1"], &[]).unwrap());
    Arc::make_mut(view.pods.get_mut("u1").unwrap()).stage = Stage::Finished;
    ledger.pods = Some(Arc::new(view));
    assert_eq!(
        ends_at(&mut ledger, |when| restarted(without_devices(when))),
        Some(10_000),
        "one pass is enough"
    );
}

#[test]
fn two_pods_on_one_device_are_contested_and_each_has_its_own_name() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    reconcile(&mut ledger, &view(10, vec![entry("u1", "c", &[0], Some(1))], vec![hold("a", "c", &[0])]), 10);
    grant(&mut ledger, 2, &[0], 20);
    // The kubelet has not recorded the second grant yet.
    let early = ReconcileView {
        fresh: false,
        ..view(30, vec![entry("u1", "c", &[0], Some(1))], vec![hold("a", "c", &[0])])
    };
    reconcile(&mut ledger, &early, 30);
    assert!(
        ledger.live[&id(2)].holder.is_unknown(),
        "the container is the other pod's: {:?}",
        ledger.live[&id(2)]
    );
    let both = vec![entry("u1", "c", &[0], Some(1)), entry("u2", "c", &[0], Some(2))];
    let shown = |when| view(when, both.clone(), vec![hold("a", "c", &[0]), hold("b", "c", &[0])]);
    for when in [40, 40_000, 50_000, 60_000] {
        assert_eq!(reconcile(&mut ledger, &shown(when), when).ended, []);
    }
    let names = |n| ledger.live[&id(n)].holder.pod.clone();
    assert_eq!((names(1).as_deref(), names(2).as_deref()), (Some("a"), Some("b")));
    assert!([1, 2].iter().all(|n| ledger.sightings[&id(*n)].contested));
    // One of the two ends.
    let one = |when| view(when, vec![entry("u2", "c", &[0], Some(2))], vec![hold("b", "c", &[0])]);
    reconcile(&mut ledger, &one(70_000), 70_000);
    assert_eq!(ledger.live.keys().copied().collect::<Vec<_>>(), [id(2)]);
    assert!(!ledger.sightings[&id(2)].contested);
}

#[test]
fn the_pods_source_corrects_a_wrong_name() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    reconcile(
        &mut ledger,
        &view(10, vec![entry("u", "c", &[0], Some(1))], vec![hold("wrong", "c", &[0])]),
        10,
    );
    assert_eq!(ledger.live[&id(1)].holder.pod.as_deref(), Some("wrong"));
    ledger.pods = pods(&["u"], &[]);
    reconcile(
        &mut ledger,
        &view(20, vec![entry("u", "c", &[0], Some(1))], vec![hold("wrong", "c", &[0])]),
        20,
    );
    assert_eq!(ledger.live[&id(1)].holder.pod.as_deref(), Some("pod-u"), "a UID has one name for good");
}
