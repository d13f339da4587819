//! What the container runtime shows, besides the kubelet's sources.

use super::*;
use crate::evidence::pods::tests::pod_without_containers;
use crate::evidence::pods::{PodsSource, PodsView, Stage};
use crate::evidence::runtime::tests::{container, view as runtime_view};
use crate::evidence::runtime::{RuntimeView, Tie, see_containers};

/// The runtime shows these allocations in containers of pod `u`.
fn show(ledger: &mut Ledger, ids: &[u64], when: u64) {
    let containers: Vec<_> = ids.iter().map(|n| (id(*n), container("u", "c", Tie::Annotation))).collect();
    see(ledger, &runtime_view(&containers), when);
}

fn see(ledger: &mut Ledger, view: &RuntimeView, when: u64) {
    let changes = see_containers(ledger, view, at(when));
    ledger.apply(&Entry { at: at(when), changes });
}

fn ends(ledger: &mut Ledger, when: u64) -> Vec<(AllocationId, EndReason)> {
    reconcile(ledger, &view(when, vec![], vec![]), when).ended
}

#[test]
fn a_container_that_exists_keeps_its_allocation_although_no_other_source_shows_its_pod() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    show(&mut ledger, &[1], 10);
    // The pod was deleted by force.
    let mut pods = PodsView::empty(PodsSource::ApiServer);
    (pods.current, pods.listed_mono_ms) = (true, START + 20);
    pods.record_removal("u".into(), false);
    ledger.apply(&Entry { at: at(20), changes: vec![Change::PodsSeen(Arc::new(pods))] });
    for when in [60_000, 70_000, 80_000] {
        assert!(ends(&mut ledger, when).is_empty());
    }
    show(&mut ledger, &[], 80_001);
    assert_eq!(ends(&mut ledger, 80_002), [(id(1), EndReason::Released)]);
}

#[test]
fn one_pass_ends_an_allocation_whose_container_and_sandbox_ended() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    show(&mut ledger, &[1], 10);
    show(&mut ledger, &[], 500);
    let held = view(501, vec![entry("u", "c", &[0], Some(1))], vec![]);
    assert!(reconcile(&mut ledger, &held, 501).ended.is_empty(), "the checkpoint still shows it");
    assert_eq!(ends(&mut ledger, 502), [(id(1), EndReason::Released)]);
}

#[test]
fn one_pass_is_not_enough_while_the_runtime_or_the_kubelet_may_not_show_everything() {
    let seen = |ids: &[u64]| {
        let containers: Vec<_> = ids.iter().map(|n| (id(*n), container("u", "c", Tie::Annotation))).collect();
        runtime_view(&containers)
    };
    let gone = seen(&[]);
    let cases = [
        ("the guard has lost the runtime", RuntimeView { is_whole: false, ..gone.clone() }),
        ("another run of the guard has not seen it", RuntimeView { guard_run: 2, ..gone }),
        ("the sandbox runs", RuntimeView { containers: BTreeMap::new(), ..seen(&[1]) }),
    ];
    for (case, last) in cases {
        let mut ledger = node();
        grant(&mut ledger, 1, &[0], 0);
        show(&mut ledger, &[1], 10);
        see(&mut ledger, &last, 500);
        assert!(ends(&mut ledger, 40_000).is_empty(), "{case}");
        assert_eq!(ends(&mut ledger, 45_000).len(), 1, "{case}: two passes end it, as without a runtime");
    }
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    show(&mut ledger, &[1], 10);
    show(&mut ledger, &[], 500);
    let mut restarted = view(20_000, vec![], vec![]);
    restarted.kubelet = Some(KubeletAge { created_wall_ms: 9, created_mono_ms: START + 1_000 });
    assert!(reconcile(&mut ledger, &restarted, 20_000).ended.is_empty(), "the kubelet has just started");
    restarted.began_mono_ms = START + 31_000;
    assert_eq!(reconcile(&mut ledger, &restarted, 31_000).ended.len(), 1);
}

#[test]
fn a_pod_that_is_alive_at_the_api_server_keeps_an_allocation_whose_container_ended() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    show(&mut ledger, &[1], 10);
    let mut pods = PodsView::empty(PodsSource::ApiServer);
    (pods.current, pods.listed_mono_ms) = (true, START + 20);
    pods.pods.insert("u".into(), Arc::new(pod_without_containers("u", Stage::Admitted)));
    ledger.apply(&Entry { at: at(20), changes: vec![Change::PodsSeen(Arc::new(pods))] });
    show(&mut ledger, &[], 500);
    for when in [501, 40_000, 50_000] {
        assert!(ends(&mut ledger, when).is_empty());
    }
}

#[test]
fn another_pod_on_the_devices_does_not_end_an_allocation_whose_container_exists() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    show(&mut ledger, &[1], 10);
    grant(&mut ledger, 2, &[0], 1_000);
    let of_other = |when| view(when, vec![entry("other", "c", &[0], Some(2))], vec![hold("q", "c", &[0])]);
    for when in [40_000, 50_000] {
        assert!(reconcile(&mut ledger, &of_other(when), when).ended.is_empty());
    }
    show(&mut ledger, &[], 50_001);
    let ended = reconcile(&mut ledger, &of_other(50_002), 50_002).ended;
    assert_eq!(ended, [(id(1), EndReason::Superseded)]);
}

#[test]
fn newer_records_of_the_same_pod_end_an_older_one_although_its_container_exists() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    show(&mut ledger, &[1], 10);
    // The kubelet lost its state, and requested the devices of the running pod again.
    grant(&mut ledger, 2, &[0], 1_000);
    let again = |when| view(when, vec![entry("u", "c", &[0], Some(2))], vec![hold("pod-u", "c", &[0])]);
    reconcile(&mut ledger, &again(40_000), 40_000);
    let ended = reconcile(&mut ledger, &again(50_000), 50_000).ended;
    assert_eq!(ended, [(id(1), EndReason::Superseded)]);
}

#[test]
fn the_end_of_the_newer_record_does_not_end_an_older_one_whose_container_exists() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    show(&mut ledger, &[1], 10);
    // The kubelet gave the device to another pod, too, and an operator ended that pod's allocation.
    grant(&mut ledger, 2, &[0], 1_000);
    let ended = Change::Ended { id: id(2), reason: EndReason::Operator };
    ledger.apply(&Entry { at: at(2_000), changes: vec![ended] });
    for when in [40_000, 50_000, 60_000] {
        let of_other = view(when, vec![entry("other", "c", &[0], Some(2))], vec![hold("q", "c", &[0])]);
        assert_eq!(reconcile(&mut ledger, &of_other, when).ended, []);
    }
}
