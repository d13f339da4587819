//! The same where a source knows all pods by UID: the API server.

use super::*;
use crate::pods::{Pod, PodsSource, PodsView, Stage};
use std::collections::VecDeque;
use std::sync::Arc;

/// What the API server shows: these pods are alive, those were deleted.
pub(super) fn pods(alive: &[&str], deleted: &[&str]) -> Option<Arc<PodsView>> {
    let pod = |uid: &str| Pod {
        uid: uid.into(),
        namespace: "ns".into(),
        name: format!("pod-{uid}"),
        labels: Vec::new(),
        is_static: false,
        of_daemon_set: false,
        stage: Stage::Admitted,
        leaving_since_wall_ms: None,
        created_wall_ms: START,
        containers: Vec::new(),
        bypass: None,
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
    take(&mut ledger, &view(10, vec![entry("u", "init", &[0], Some(1))], vec![]), 10);
    let holder = ledger.live[&id(1)].holder.clone();
    assert_eq!(holder.pod.as_deref(), Some("pod-u"), "`List` does not show init containers");
    assert_eq!(holder.namespace.as_deref(), Some("ns"));
}

#[test]
fn a_pod_that_finished_ends_with_one_round_and_one_deleted_by_force_with_two() {
    for finished in [true, false] {
        let mut ledger = node();
        ledger.pods = pods(&["u"], &[]);
        grant(&mut ledger, 1, &[0], 0);
        let held = |when| view(when, vec![entry("u", "c", &[0], Some(1))], vec![hold("pod-u", "c", &[0])]);
        take(&mut ledger, &held(10), 10);
        let mut over = PodsView::clone(&pods(&[], &[]).unwrap());
        over.left("u".into(), finished);
        ledger.pods = Some(Arc::new(over));
        assert!(take(&mut ledger, &held(1_000), 1_000).ended.is_empty(), "the kubelet has not let go");
        let stale = RoundView { fresh: false, ..view(1_500, vec![], vec![]) };
        assert!(take(&mut ledger, &stale, 1_500).ended.is_empty(), "nor by a file of before");
        let released = [(id(1), EndReason::Released)];
        let plan = take(&mut ledger, &view(2_000, vec![], vec![]), 2_000);
        assert_eq!(plan.ended, if finished { &released[..] } else { &[] });
        if !finished {
            // Its containers may run on for a while.
            assert!(take(&mut ledger, &view(6_000, vec![], vec![]), 6_000).ended.is_empty());
            assert_eq!(take(&mut ledger, &view(7_000, vec![], vec![]), 7_000).ended, released);
        }
    }
}

#[test]
fn a_pod_that_the_api_server_shows_alive_keeps_what_the_kubelet_forgot() {
    let mut ledger = node();
    ledger.pods = pods(&["u"], &[]);
    grant(&mut ledger, 1, &[0], 0);
    take(&mut ledger, &view(10, vec![entry("u", "c", &[0], Some(1))], vec![]), 10);
    for when in [100_000, 110_000, 120_000] {
        assert!(take(&mut ledger, &view(when, vec![], vec![]), when).ended.is_empty());
    }
    // Silent from now on, it vouches for nobody.
    let silent = PodsView { current: false, ..PodsView::clone(ledger.pods.as_ref().unwrap()) };
    ledger.pods = Some(Arc::new(silent));
    assert!(take(&mut ledger, &view(130_000, vec![], vec![]), 130_000).ended.is_empty());
    let plan = take(&mut ledger, &view(136_000, vec![], vec![]), 136_000);
    assert_eq!(plan.ended, [(id(1), EndReason::Released)]);
}

#[test]
fn without_a_checkpoint_the_api_servers_word_ends_by_two_rounds_and_nothing_else_does() {
    for (deleted, ends) in [(vec!["u"], true), (vec![], false)] {
        let mut ledger = node();
        grant(&mut ledger, 1, &[0], 0);
        take(&mut ledger, &view(10, vec![entry("u", "c", &[0], Some(1))], vec![]), 10);
        let blind = |when| RoundView { checkpoint: None, fresh: false, ..view(when, vec![], vec![]) };
        ledger.pods = if deleted.is_empty() { None } else { pods(&[], &deleted) };
        assert!(take(&mut ledger, &blind(1_000), 1_000).ended.is_empty(), "settling");
        assert!(take(&mut ledger, &blind(100_000), 100_000).ended.is_empty(), "the first of two");
        let no_list = RoundView { list: None, ..blind(106_000) };
        assert!(take(&mut ledger, &no_list, 106_000).ended.is_empty(), "the kubelet is away");
        let plan = take(&mut ledger, &blind(107_000), 107_000);
        // A checkpoint that can be read again may show it once more: the history must know.
        let expected = if ends { vec![(id(1), EndReason::PodGone)] } else { vec![] };
        assert_eq!(plan.ended, expected);
    }
}

#[test]
fn a_hold_ends_when_the_api_server_knows_every_pod_of_it() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    grant(&mut ledger, 2, &[1], 0);
    let both = vec![entry("u", "c", &[0], Some(1)), entry("v", "c", &[1], Some(2))];
    take(&mut ledger, &view(10, both, vec![hold("pod-u", "c", &[0]), hold("pod-v", "c", &[1])]), 10);
    let empty = |when| {
        let kubelet = Some(KubeletAge { created_wall_ms: 60_000, created_mono_ms: START + 60_000 });
        RoundView { kubelet, ..view(when, vec![], vec![]) }
    };
    for when in [100_000, 110_000] {
        assert!(take(&mut ledger, &empty(when), when).ended.is_empty());
    }
    assert!(ledger.hold.is_some());
    ledger.pods = pods(&["u"], &["v"]);
    let plan = take(&mut ledger, &empty(120_000), 120_000);
    assert_eq!(plan.ended, [(id(2), EndReason::Released)]);
    assert!(ledger.hold.is_none());
    assert!(ledger.live.contains_key(&id(1)));
}

#[test]
fn a_uid_is_lent_by_name_only_where_the_checkpoint_cannot_be_read() {
    let mut ledger = node();
    ledger.pods = pods(&["u"], &[]);
    grant(&mut ledger, 1, &[0], 5);
    let listed = vec![hold("pod-u", "c", &[0])];
    take(&mut ledger, &view(10, vec![], listed.clone()), 10);
    assert_eq!(ledger.live[&id(1)].holder.pod_uid, None, "the checkpoint will tell");
    take(&mut ledger, &RoundView { checkpoint: None, ..view(20, vec![], listed) }, 20);
    assert_eq!(ledger.live[&id(1)].holder.pod_uid.as_deref(), Some("u"));
}
