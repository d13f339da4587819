//! Rounds as a table: what is live, what the sources show, what follows.

use super::allocation::{Allocation, Decision, EndReason, Holder};
use super::change::{Change, Entry};
use super::gpu::Part;
use super::ledger::Ledger;
use super::names::{AllocationId, DeviceId, PartId, Resource};
use super::offer::{Consumes, OfferLine, PartOffer};
use super::offering::reoffer;
use super::pods::{Pod, PodsSource, PodsView, Stage};
use super::reconcile::{Checkpointed, KubeletAge, ListedHold, Plan, PodList, RoundView, plan};
use super::time::{Now, Timing};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

const START: u64 = 1_000_000;

fn at(ms: u64) -> Now {
    Now { wall_ms: START + ms, mono_ms: START + ms }
}

fn resource() -> Resource {
    Resource::parse("nvidia.com/gpu").unwrap()
}

fn device(i: usize) -> DeviceId {
    DeviceId::whole(&PartId::parse(&format!("GPU-{i}")).unwrap())
}

fn id(number: u64) -> AllocationId {
    AllocationId { store: 0, number }
}

/// Four whole GPUs.
fn node() -> Ledger {
    let mut ledger = Ledger::default();
    for i in 0..4 {
        let part = Part {
            id: device(i).part,
            parent: None,
            vendor: "nvidia".into(),
            model: String::new(),
            gpu_index: 0,
            minor: None,
            memory_mib: 1,
            pci_bus: String::new(),
            numa_node: None,
            mig_enabled: false,
            mig: None,
            attributes: BTreeMap::new(),
        };
        ledger.apply(&Entry { at: at(0), changes: vec![Change::PartFound(part)] });
        let lines = vec![OfferLine { resource: resource(), count: 1, consumes: Consumes::Whole }];
        let offer = PartOffer { part: device(i).part, lines };
        let change = reoffer(ledger.part(&offer.part).unwrap(), &offer, "test", at(0)).unwrap().unwrap();
        ledger.apply(&Entry { at: at(0), changes: vec![change] });
    }
    ledger
}

fn grant(ledger: &mut Ledger, number: u64, devices: &[usize], when: u64) {
    let allocation = Allocation {
        id: id(number),
        resource: resource(),
        devices: devices.iter().map(|i| device(*i)).collect(),
        granted_wall_ms: START + when,
        holder: Holder::default(),
        overlapped: false,
        decision: Decision::default(),
        ended: None,
    };
    ledger.apply(&Entry { at: at(when), changes: vec![Change::Granted(allocation)] });
}

fn entry(uid: &str, container: &str, devices: &[usize], allocation: Option<u64>) -> Checkpointed {
    Checkpointed {
        pod_uid: uid.into(),
        container: container.into(),
        resource: resource(),
        devices: devices.iter().map(|i| device(*i)).collect(),
        allocation: allocation.map(id),
    }
}

fn hold(pod: &str, container: &str, devices: &[usize]) -> ListedHold {
    ListedHold {
        namespace: "ns".into(),
        pod: pod.into(),
        container: container.into(),
        resource: resource(),
        devices: devices.iter().map(|i| device(*i)).collect(),
    }
}

/// A complete round that begins at `when`, on a kubelet of old.
fn view(when: u64, checkpoint: Vec<Checkpointed>, held: Vec<ListedHold>) -> RoundView {
    RoundView {
        began_mono_ms: START + when,
        kubelet: Some(KubeletAge { created_wall_ms: 5, created_mono_ms: 5 }),
        list: Some(PodList {
            pods: held.iter().map(|h| (h.namespace.clone(), h.pod.clone())).collect(),
            held,
        }),
        checkpoint: Some(checkpoint),
        fresh: true,
        adopt: false,
    }
}

fn take(ledger: &mut Ledger, view: &RoundView, when: u64) -> Plan {
    let plan = plan(ledger, view, &Timing::default(), at(when));
    let changes = super::round::observe(ledger, view, &super::command::Rules::default(), at(when));
    ledger.apply(&Entry { at: at(when), changes });
    plan
}

#[test]
fn a_holder_is_put_together_from_both_sources() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    take(&mut ledger, &view(10, vec![], vec![hold("p", "c", &[0])]), 10);
    assert_eq!(ledger.live[&id(1)].holder.pod.as_deref(), Some("p"));
    assert_eq!(ledger.live[&id(1)].holder.pod_uid, None);
    take(&mut ledger, &view(20, vec![entry("u", "c", &[0], Some(1))], vec![hold("p", "c", &[0])]), 20);
    let holder = &ledger.live[&id(1)].holder;
    assert_eq!((holder.pod_uid.as_deref(), holder.container.as_deref()), (Some("u"), Some("c")));
}

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
fn init_and_app_container_of_one_pod_settle_and_share_a_name() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0, 1], 0);
    grant(&mut ledger, 2, &[0], 100);
    assert!(ledger.live[&id(1)].overlapped);
    let both = vec![entry("u", "init", &[0, 1], Some(1)), entry("u", "app", &[0], Some(2))];
    // List shows no init containers.
    let shown = view(200, both, vec![hold("p", "app", &[0])]);
    take(&mut ledger, &shown, 200);
    take(&mut ledger, &shown, 300);
    assert!(!ledger.live[&id(1)].overlapped, "the same pod holds both");
    assert_eq!(ledger.live[&id(1)].holder.pod.as_deref(), Some("p"), "named by its pod's app container");
    assert_eq!(ledger.live[&id(1)].holder.container.as_deref(), Some("init"));
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

#[test]
fn what_pods_hold_is_adopted_with_names_of_another_plugin_too() {
    let mut ledger = node();
    let share = DeviceId::share(&device(3).part, 2);
    let mut shared = entry("w", "c", &[], None);
    shared.devices = vec![share.clone()];
    shared.resource = Resource::parse("nvidia.com/gpu.shared").unwrap();
    let mut first = view(
        10,
        vec![entry("u", "c", &[0, 1], None), shared.clone(), entry("x", "c", &[9], None)],
        vec![hold("p", "c", &[0, 1])],
    );
    first.adopt = true;
    take(&mut ledger, &first, 10);
    assert_eq!(ledger.live.len(), 3, "a GPU that is away is held all the same");
    assert!(ledger.device(&shared.resource, &share).unwrap().held());
    first.began_mono_ms += 10;
    take(&mut ledger, &first, 20);
    assert_eq!(ledger.live.len(), 3, "adopted once");
    let adopted = ledger.live.values().find(|a| a.devices.len() == 2).unwrap();
    assert_eq!((adopted.holder.pod.as_deref(), adopted.holder.pod_uid.as_deref()), (Some("p"), Some("u")));
    // And it ends like any other.
    take(&mut ledger, &view(40_000, vec![], vec![]), 40_000);
    take(&mut ledger, &view(46_000, vec![], vec![]), 46_000);
    assert!(ledger.live.is_empty());
}

#[test]
fn what_this_store_granted_and_ended_is_not_adopted_again() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    take(&mut ledger, &view(40_000, vec![], vec![]), 40_000);
    take(&mut ledger, &view(46_000, vec![], vec![]), 46_000);
    assert!(ledger.live.is_empty());
    // A file from before the end, and beside it what another plugin granted while we were away.
    let mut late = view(50_000, vec![entry("u", "c", &[0], Some(1)), entry("v", "c", &[1], None)], vec![]);
    late.adopt = true;
    take(&mut ledger, &late, 50_000);
    let adopted: Vec<_> = ledger.live.values().map(|a| a.holder.pod_uid.as_deref()).collect();
    assert_eq!(adopted, [Some("v")]);
}

#[test]
fn a_holding_that_lost_a_gpu_is_adopted_with_the_others() {
    let mut ledger = node();
    let mut first = view(10, vec![entry("u", "c", &[0, 9], None)], vec![]);
    first.adopt = true;
    take(&mut ledger, &first, 10);
    assert_eq!(ledger.live.len(), 1);
    assert!(ledger.device(&resource(), &device(0)).unwrap().held());
    // The lost one comes back: it is held, and neither it nor a share of it is to be had.
    let back = Part { id: device(9).part, ..ledger.part(&device(0).part).unwrap().part.clone() };
    ledger.apply(&Entry { at: at(20), changes: vec![Change::PartFound(back)] });
    let shared = Resource::parse("nvidia.com/gpu.shared").unwrap();
    let line = |resource, consumes| OfferLine { resource, count: 1, consumes };
    let slice = Consumes::Slice { memory_mib: 0, compute_percent: 0 };
    let lines = vec![line(resource(), Consumes::Whole), line(shared.clone(), slice)];
    let offer = PartOffer { part: device(9).part, lines };
    let change = reoffer(ledger.part(&offer.part).unwrap(), &offer, "test", at(30)).unwrap().unwrap();
    ledger.apply(&Entry { at: at(30), changes: vec![change] });
    assert!(ledger.device(&resource(), &device(9)).unwrap().held());
    let listed = super::listing::listing(&ledger, &shared, 100);
    assert!(listed.iter().all(|l| !l.healthy), "{listed:?}");
}

#[test]
fn a_list_of_before_the_grant_names_nobody() {
    let mut ledger = node();
    let old = view(5, vec![], vec![hold("gone", "c", &[0])]);
    grant(&mut ledger, 1, &[0], 10);
    take(&mut ledger, &old, 20);
    assert!(ledger.live[&id(1)].holder.is_unknown(), "that pod held the device before");
    take(&mut ledger, &view(30, vec![], vec![hold("new", "c", &[0])]), 30);
    assert_eq!(ledger.live[&id(1)].holder.pod.as_deref(), Some("new"));
}

#[test]
fn a_container_of_the_same_name_lends_no_pod_to_an_older_allocation() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    // The checkpoint has shown the first pod, `List` never did before it was gone.
    take(
        &mut ledger,
        &RoundView { fresh: false, ..view(1_000, vec![entry("u1", "main", &[0], Some(1))], vec![]) },
        1_000,
    );
    grant(&mut ledger, 2, &[0], 2_000);
    let stale = vec![entry("u1", "main", &[0], Some(1))];
    take(
        &mut ledger,
        &RoundView { fresh: false, ..view(3_000, stale, vec![hold("b", "main", &[0])]) },
        3_000,
    );
    assert_eq!(ledger.live[&id(1)].holder.pod, None);
    assert_eq!(ledger.live[&id(2)].holder.pod.as_deref(), Some("b"));
    let plan = take(
        &mut ledger,
        &view(4_000, vec![entry("u2", "main", &[0], Some(2))], vec![hold("b", "main", &[0])]),
        4_000,
    );
    assert_eq!(plan.ended, [(id(1), EndReason::Superseded)]);
}

#[test]
fn what_another_plugin_granted_over_a_stale_record_is_adopted_and_the_record_gives_way() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    take(&mut ledger, &view(10, vec![entry("old", "c", &[0], Some(1))], vec![]), 10);
    // The old pod went while nobody looked, and another plugin gave its GPU and one more away.
    let theirs = || vec![entry("new", "c", &[0, 1], None)];
    let mut first = view(50_000, theirs(), vec![]);
    first.adopt = true;
    take(&mut ledger, &first, 50_000);
    assert!(ledger.device(&resource(), &device(1)).unwrap().held());
    assert!(ledger.live[&id(1)].overlapped);
    take(&mut ledger, &view(60_000, theirs(), vec![hold("new", "c", &[0, 1])]), 60_000);
    let left: Vec<_> = ledger.live.values().map(|a| a.holder.pod_uid.as_deref()).collect();
    assert_eq!(left, [Some("new")]);
}

/// What the API server shows: these pods are alive, those were deleted.
fn pods(alive: &[&str], deleted: &[&str]) -> Option<Arc<PodsView>> {
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
