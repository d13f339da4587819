//! An operator's `end`, held against what the sources show.

use super::pods::pods;
use super::*;
use crate::command::{Command, Rules};
use crate::decide::decide;
use crate::pods::PodsView;
use crate::refusal::Refusal;
use crate::running::RunningSource;
use std::sync::Arc;

/// Why allocation 1 may not end at `when`; empty if it may.
fn running_sources(ledger: &Ledger, when: u64) -> Vec<RunningSource> {
    let end = |force| decide(ledger, &Rules::default(), &Command::End { id: id(1), force }, at(when));
    assert_eq!(end(true).refusal, None, "by force it always may");
    match end(false).refusal {
        None => Vec::new(),
        Some(Refusal::StillRunning { running_sources, .. }) => running_sources,
        Some(other) => panic!("{other}"),
    }
}

fn held(when: u64) -> RoundView {
    view(when, vec![entry("u", "c", &[0], Some(1))], vec![hold("p", "c", &[0])])
}

#[test]
fn each_source_of_the_kubelet_keeps_an_allocation_from_ending() {
    let empty = |when| view(when, vec![], vec![]);
    type Case = (fn(u64) -> RoundView, &'static [RunningSource]);
    let table: [Case; 3] = [
        (held, &[RunningSource::Checkpoint, RunningSource::List]),
        (|when| RoundView { checkpoint: Some(vec![]), ..held(when) }, &[RunningSource::List]),
        (
            |when| RoundView { list: view(when, vec![], vec![]).list, ..held(when) },
            &[RunningSource::Checkpoint],
        ),
    ];
    for (round, shown) in table {
        let mut ledger = node();
        grant(&mut ledger, 1, &[0], 0);
        take(&mut ledger, &held(10), 10);
        take(&mut ledger, &round(40_000), 40_000);
        assert_eq!(running_sources(&ledger, 40_001), shown);
        take(&mut ledger, &empty(41_000), 41_000);
        assert_eq!(running_sources(&ledger, 41_001), [], "by the newest reading");
    }
}

#[test]
fn a_source_that_cannot_be_read_counts_as_it_was_last_read() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    take(&mut ledger, &held(40_000), 40_000);
    let unread = RoundView { list: None, checkpoint: None, ..held(41_000) };
    take(&mut ledger, &unread, 41_000);
    assert_eq!(running_sources(&ledger, 41_001), [RunningSource::Checkpoint, RunningSource::List]);
    take(&mut ledger, &RoundView { list: None, ..view(42_000, vec![], vec![]) }, 42_000);
    assert_eq!(running_sources(&ledger, 42_001), [RunningSource::List]);
}

#[test]
fn what_was_just_granted_or_never_looked_for_does_not_end() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    assert_eq!(
        running_sources(&ledger, 5_000),
        [RunningSource::NotRead, RunningSource::JustGranted { age_ms: 5_000 }]
    );
    assert_eq!(running_sources(&ledger, 30_000), [RunningSource::NotRead]);
    let before = RoundView { began_mono_ms: START, ..view(0, vec![], vec![]) };
    take(&mut ledger, &before, 30_001);
    assert_eq!(
        running_sources(&ledger, 30_001),
        [RunningSource::NotRead],
        "a round of before the grant says nothing"
    );
    take(&mut ledger, &RoundView { list: None, checkpoint: None, ..view(31_000, vec![], vec![]) }, 31_000);
    assert_eq!(running_sources(&ledger, 31_001), [RunningSource::NotRead], "neither account was read");
    take(&mut ledger, &RoundView { checkpoint: None, ..view(32_000, vec![], vec![]) }, 32_000);
    assert_eq!(
        running_sources(&ledger, 32_001),
        [RunningSource::NotRead],
        "List names no container that only starts"
    );
    take(&mut ledger, &view(33_000, vec![], vec![]), 33_000);
    assert_eq!(running_sources(&ledger, 33_001), []);
}

#[test]
fn who_knows_all_pods_by_uid_has_a_word_too() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    take(&mut ledger, &held(10), 10);
    ledger.pods = pods(&["u"], &[]);
    take(&mut ledger, &view(40_000, vec![], vec![]), 40_000);
    assert_eq!(
        running_sources(&ledger, 40_001),
        [RunningSource::Pods(super::super::pods::PodsSource::ApiServer)]
    );
    let silent = PodsView { current: false, ..PodsView::clone(ledger.pods.as_ref().unwrap()) };
    ledger.pods = Some(Arc::new(silent));
    assert_eq!(running_sources(&ledger, 40_001), [], "a source that is silent vouches for no pod");
    // A pod that finished has no container left, though the kubelet still lists it; one that was deleted by force may.
    for (finished, shown) in [(true, &[][..]), (false, &[RunningSource::Checkpoint, RunningSource::List])] {
        let mut over = PodsView::clone(&pods(&[], &[]).unwrap());
        over.left("u".into(), finished);
        ledger.pods = Some(Arc::new(over));
        take(&mut ledger, &held(41_000), 41_000);
        assert_eq!(running_sources(&ledger, 41_001), shown, "finished: {finished}");
    }
}

#[test]
fn a_refused_end_names_the_pod_and_each_source_and_an_ended_one_says_so() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    take(&mut ledger, &held(40_000), 40_000);
    let end = |ledger: &Ledger, number, force| {
        decide(ledger, &Rules::default(), &Command::End { id: id(number), force }, at(41_000))
    };
    let refused = end(&ledger, 1, false);
    assert!(refused.entry.changes.is_empty(), "nothing changes");
    let words = refused.refusal.unwrap().to_string();
    for part in ["00000000-1", "pod ns/p, container c", "checkpoint shows it", "(List) shows its pod"] {
        assert!(words.contains(part), "{part}: {words}");
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
