//! An operator's `end` is checked against what the sources show.

use super::pods::pods;
use super::*;
use crate::evidence::pods::PodsView;
use crate::evidence::sighting::RunningSource;
use crate::node::command::Command;
use crate::node::decide::decide;
use crate::node::refusal::Refusal;
use std::sync::Arc;

/// The sources because of which allocation 1 may not end at `when`.
fn running_sources(ledger: &Ledger, when: u64) -> Vec<RunningSource> {
    let end = |force| decide(ledger, &Command::End { id: id(1), force }, at(when));
    assert_eq!(end(true).refusal, None, "force always ends it");
    match end(false).refusal {
        None => Vec::new(),
        Some(Refusal::StillRunning { running_sources, .. }) => running_sources,
        Some(other) => panic!("{other}"),
    }
}

fn held(when: u64) -> ReconcileView {
    view(when, vec![entry("u", "c", &[0], Some(1))], vec![hold("pod-u", "c", &[0])])
}

#[test]
fn each_source_of_the_kubelet_keeps_an_allocation_from_ending() {
    let empty = |when| view(when, vec![], vec![]);
    type Case = (fn(u64) -> ReconcileView, &'static [RunningSource]);
    let table: [Case; 3] = [
        (held, &[RunningSource::Checkpoint, RunningSource::List]),
        (|when| ReconcileView { checkpoint: Some(vec![]), ..held(when) }, &[RunningSource::List]),
        (
            |when| ReconcileView { list: view(when, vec![], vec![]).list, ..held(when) },
            &[RunningSource::Checkpoint],
        ),
    ];
    for (view_at, shown) in table {
        let mut ledger = node();
        grant(&mut ledger, 1, &[0], 0);
        reconcile(&mut ledger, &held(10), 10);
        reconcile(&mut ledger, &view_at(40_000), 40_000);
        assert_eq!(running_sources(&ledger, 40_001), shown);
        reconcile(&mut ledger, &empty(41_000), 41_000);
        assert_eq!(running_sources(&ledger, 41_001), [], "only the newest reading counts");
    }
}

#[test]
fn a_source_that_cannot_be_read_counts_as_it_was_last_read() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    reconcile(&mut ledger, &held(40_000), 40_000);
    let unread = ReconcileView { list: None, checkpoint: None, ..held(41_000) };
    reconcile(&mut ledger, &unread, 41_000);
    assert_eq!(running_sources(&ledger, 41_001), [RunningSource::Checkpoint, RunningSource::List]);
    reconcile(&mut ledger, &ReconcileView { list: None, ..view(42_000, vec![], vec![]) }, 42_000);
    assert_eq!(running_sources(&ledger, 42_001), [RunningSource::List]);
}

#[test]
fn a_new_or_never_reconciled_allocation_does_not_end() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    assert_eq!(
        running_sources(&ledger, 5_000),
        [RunningSource::NotRead, RunningSource::JustGranted { age_ms: 5_000 }]
    );
    assert_eq!(running_sources(&ledger, 30_000), [RunningSource::NotRead]);
    let before = ReconcileView { began_mono_ms: START, ..view(0, vec![], vec![]) };
    reconcile(&mut ledger, &before, 30_001);
    assert_eq!(
        running_sources(&ledger, 30_001),
        [RunningSource::NotRead],
        "a pass from before the grant proves nothing"
    );
    reconcile(
        &mut ledger,
        &ReconcileView { list: None, checkpoint: None, ..view(31_000, vec![], vec![]) },
        31_000,
    );
    assert_eq!(running_sources(&ledger, 31_001), [RunningSource::NotRead], "neither source was read");
    reconcile(&mut ledger, &ReconcileView { checkpoint: None, ..view(32_000, vec![], vec![]) }, 32_000);
    assert_eq!(
        running_sources(&ledger, 32_001),
        [RunningSource::NotRead],
        "List does not name a container that is starting"
    );
    reconcile(&mut ledger, &view(33_000, vec![], vec![]), 33_000);
    assert_eq!(running_sources(&ledger, 33_001), []);
}

#[test]
fn a_pod_that_the_api_server_shows_alive_keeps_an_allocation_from_ending() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    reconcile(&mut ledger, &held(10), 10);
    ledger.pods = pods(&["u"], &[]);
    reconcile(&mut ledger, &view(40_000, vec![], vec![]), 40_000);
    assert_eq!(
        running_sources(&ledger, 40_001),
        [RunningSource::Pods(crate::evidence::pods::PodsSource::ApiServer)]
    );
    let disconnected = PodsView { current: false, ..PodsView::clone(ledger.pods.as_ref().unwrap()) };
    ledger.pods = Some(Arc::new(disconnected));
    assert_eq!(running_sources(&ledger, 40_001), [], "a disconnected source shows no pod alive");
    // A finished pod has no containers left, although the kubelet still lists it; a force-deleted one may.
    for (finished, shown) in [(true, &[][..]), (false, &[RunningSource::Checkpoint, RunningSource::List])] {
        let mut over = PodsView::clone(&pods(&[], &[]).unwrap());
        over.record_removal("u".into(), finished);
        ledger.pods = Some(Arc::new(over));
        reconcile(&mut ledger, &held(41_000), 41_000);
        assert_eq!(running_sources(&ledger, 41_001), shown, "finished: {finished}");
    }
}

#[test]
fn a_refused_end_names_the_pod_and_each_source_or_the_earlier_end() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    reconcile(&mut ledger, &held(40_000), 40_000);
    let end =
        |ledger: &Ledger, number, force| decide(ledger, &Command::End { id: id(number), force }, at(41_000));
    let refused = end(&ledger, 1, false);
    assert!(refused.entry.changes.is_empty(), "nothing changes");
    let message = refused.refusal.unwrap().to_string();
    for part in ["00000000-1", "pod ns/pod-u, container c", "checkpoint shows it", "(List) shows its pod"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let ended = end(&ledger, 1, true);
    assert!(ended.refusal.is_none());
    ledger.apply(&ended.entry);
    for force in [false, true] {
        let again = end(&ledger, 1, force).refusal;
        assert_eq!(again, Some(Refusal::AlreadyEnded { id: id(1), reason: EndReason::Operator }));
    }
    assert_eq!(end(&ledger, 9, true).refusal, Some(Refusal::UnknownAllocation { id: id(9) }));
}
