use super::*;
use crate::drain::eviction::EvictionOutcome;
use crate::drain::eviction_plan::{self, EvictionStatus};
use crate::drain::marks::Author;
use crate::evidence::attribution::{Attribution, Reason, attribute_process};
use crate::evidence::kubelet_view::{KubeletAge, PodList, ReconcileView};
use crate::evidence::pods::tests::pod_without_containers;
use crate::evidence::pods::{Pod, PodsSource, PodsView, Stage};
use crate::evidence::running::running_sources;
use crate::grants::gpu_holders::{gpu_holders, pod_uses};
use crate::hardware::device_access::DeviceAccess;
use crate::ids::names::{AllocationId, GpuId};
use crate::node::command::{Attempt, Command};
use crate::node::record::records;
use crate::node::restore::restore;
use crate::node::test_node::{Node, gpu_id, of_pod, part, process};
use crate::sharing::offer::{Consumes, OfferLine, PartOffer};
use crate::sharing::via::Via;

fn whole() -> Resource {
    Resource::nvidia_gpu()
}

fn instance() -> Resource {
    Resource::parse("nvidia.com/mig-1g.10gb").unwrap()
}

/// As if its GPUs had been moved.
fn set_api(node: &mut Node, api: KubeletApi) {
    node.ledger.gpus.values_mut().for_each(|state| Arc::make_mut(state).via = Via::new(api));
}

/// GPU-0 is offered whole, and MIG-a and MIG-b as instances.
fn node() -> Node {
    let mut node = Node::new();
    node.decide(&Command::SetDeviceAccess(DeviceAccess { by_cdi: true, ..DeviceAccess::default() })).unwrap();
    set_api(&mut node, KubeletApi::Dra);
    let line = |resource| OfferLine { resource, count: 1, consumes: Consumes::Whole };
    let offer = |name: &str, resource| PartOffer { part: part(name), lines: vec![line(resource)] };
    let offers = [offer("GPU-0", whole()), offer("MIG-a", instance()), offer("MIG-b", instance())];
    node.decide(&Command::Offer(offers.map(|offer| (offer, "test".into())).into())).unwrap();
    node
}

fn request(name: &str, resource: Resource, parts: &[&str]) -> RequestToPrepare {
    let devices = parts.iter().map(|name| DeviceId::whole(&part(name))).collect();
    RequestToPrepare {
        name: name.into(),
        devices: AdmitRequest { resource, devices, claim: None },
        answer: StackAnswer::NotCalled,
    }
}

fn claim(uid: &str, requests: &[RequestToPrepare]) -> ClaimToPrepare {
    ClaimToPrepare {
        pod_claim_name: None,
        claim: Claim { uid: uid.into(), namespace: "ns".into(), name: format!("claim-{uid}") },
        pods: vec![ClaimPod { uid: format!("pod-of-{uid}"), name: "main".into() }],
        requests: requests.to_vec(),
    }
}

fn prepared(node: &mut Node, claim: &ClaimToPrepare) -> Result<Vec<AllocationId>, Refusal> {
    node.decide(&Command::Prepare { claim: claim.clone(), evaluated: None })?;
    Ok(allocations_of(&node.ledger, &claim.claim.uid).iter().map(|a| a.id).collect())
}

fn unprepared(node: &mut Node, uid: &str) -> Entry {
    node.decide(&Command::Unprepare { claim: uid.into() }).unwrap()
}

fn allocate(node: &mut Node, name: &str) -> Result<Entry, Refusal> {
    node.decide(&Command::Allocate {
        request: request("", whole(), &[name]).devices,
        answer: StackAnswer::NotCalled,
        evaluated: None,
        attempt: Attempt::Last { asked_mono_ms: 0 },
    })
}

#[test]
fn a_claim_is_prepared_once_and_unprepared_once() {
    let mut node = node();
    let wanted = claim("a", &[request("gpu", whole(), &["GPU-0"]), request("mig", instance(), &["MIG-a"])]);
    let ids = prepared(&mut node, &wanted).unwrap();
    assert_eq!(ids.len(), 2);
    let allocation = &node.ledger.live[&ids[0]];
    assert_eq!(allocation.origin.claim().unwrap().request, "gpu");
    assert_eq!(allocation.holder.pod.as_deref(), Some("main"));
    // The kubelet prepares again after its restart, and for another pod of the claim.
    let generation = node.ledger.generation;
    assert_eq!(prepared(&mut node, &wanted).unwrap(), ids);
    assert_eq!(node.ledger.generation, generation, "nothing changed");
    let mut second = wanted.clone();
    second.pods.insert(0, ClaimPod { uid: "pod-2".into(), name: "second".into() });
    assert_eq!(prepared(&mut node, &second).unwrap(), ids);
    assert_eq!(node.ledger.live[&ids[1]].holder.pod.as_deref(), Some("second"));
    assert_eq!(unprepared(&mut node, "a").changes.len(), 2);
    assert!(node.ledger.live.is_empty());
    assert_eq!(unprepared(&mut node, "a").changes, [], "no claim, or one that has ended");
    let past = node.ledger.ended.get(ids[0]).unwrap();
    assert_eq!(past.end().reason, EndReason::Released);
    assert_eq!(past.origin.claim().unwrap().claim, wanted.claim);
}

#[test]
fn all_requests_of_a_claim_are_granted_or_none() {
    let mut node = node();
    prepared(&mut node, &claim("a", &[request("mig", instance(), &["MIG-b"])])).unwrap();
    let wanted = claim("b", &[request("gpu", whole(), &["GPU-0"]), request("mig", instance(), &["MIG-b"])]);
    let refusal = prepared(&mut node, &wanted).unwrap_err();
    assert!(matches!(refusal, Refusal::Held { .. }), "{refusal}");
    assert_eq!(node.ledger.live.len(), 1);
    // Two requests of one claim for one device.
    let twice = claim("c", &[request("x", whole(), &["GPU-0"]), request("y", whole(), &["GPU-0"])]);
    assert!(matches!(prepared(&mut node, &twice), Err(Refusal::Held { .. })));
    assert_eq!(node.ledger.live.len(), 1);
}

/// The scheduler allocated the claim again, with another device.
#[test]
fn other_devices_of_a_claim_end_what_it_had_or_nothing_does() {
    let mut node = node();
    let [old] = prepared(&mut node, &claim("a", &[request("mig", instance(), &["MIG-a"])])).unwrap()[..]
    else {
        panic!("one request")
    };
    let held = claim("b", &[request("mig", instance(), &["MIG-b"])]);
    prepared(&mut node, &held).unwrap();
    let wanted = claim("a", &[request("mig", instance(), &["MIG-b"])]);
    assert!(prepared(&mut node, &wanted).is_err());
    assert!(node.ledger.live.contains_key(&old), "it keeps what it had");
    unprepared(&mut node, "b");
    let [new] = prepared(&mut node, &wanted).unwrap()[..] else { panic!("one request") };
    assert_ne!(new, old);
    assert_eq!(node.ledger.ended.get(old).unwrap().end().reason, EndReason::Superseded);
}

#[test]
fn neither_api_is_granted_what_the_other_holds() {
    let mut node = node();
    let wanted = claim("a", &[request("gpu", whole(), &["GPU-0"])]);
    assert!(matches!(allocate(&mut node, "GPU-0"), Err(Refusal::OtherApi { via: "dra", .. })));
    set_api(&mut node, KubeletApi::DevicePlugin);
    assert!(matches!(prepared(&mut node, &wanted), Err(Refusal::OtherApi { via: "devicePlugin", .. })));
    allocate(&mut node, "GPU-0").unwrap();
    // An adoption can leave a container's allocation on a GPU that is granted through DRA.
    set_api(&mut node, KubeletApi::Dra);
    assert!(matches!(prepared(&mut node, &wanted), Err(Refusal::Held { .. })));
    let id = *node.ledger.live.keys().next().unwrap();
    node.decide(&Command::End { id, force: true }).unwrap();
    prepared(&mut node, &wanted).unwrap();
    set_api(&mut node, KubeletApi::DevicePlugin);
    assert!(matches!(allocate(&mut node, "GPU-0"), Err(Refusal::Held { .. })));
    assert_eq!(node.ledger.live.len(), 1);
}

#[test]
fn a_cordon_does_not_refuse_what_was_promised_and_a_drain_does() {
    let mut node = node();
    let author = Author::api("me".into(), String::new());
    let gpu: GpuId = gpu_id("GPU-0");
    node.decide(&Command::Cordon { gpu: gpu.clone(), author: author.clone() }).unwrap();
    let wanted = claim("a", &[request("gpu", whole(), &["GPU-0"])]);
    prepared(&mut node, &wanted).unwrap();
    unprepared(&mut node, "a");
    let order = crate::drain::marks::Order::default();
    node.decide(&Command::Drain { gpu, author, order }).unwrap();
    assert!(matches!(prepared(&mut node, &wanted), Err(Refusal::Cordoned { .. })));
}

#[test]
fn reconcile_passes_neither_end_a_claim_nor_count_it() {
    let mut node = node();
    prepared(&mut node, &claim("a", &[request("gpu", whole(), &["GPU-0"])])).unwrap();
    let id = *node.ledger.live.keys().next().unwrap();
    for _ in 0..4 {
        node.now.mono_ms += 60_000;
        node.decide(&Command::Reconcile(ReconcileView {
            began_mono_ms: node.now.mono_ms,
            kubelet: Some(KubeletAge { created_wall_ms: 5, created_mono_ms: 5 }),
            list: Some(PodList::default()),
            checkpoint: Some(Vec::new()),
            fresh: true,
            ..ReconcileView::default()
        }))
        .unwrap();
    }
    assert!(node.ledger.live.contains_key(&id));
    assert_eq!((&node.ledger.ends_withheld, &node.ledger.blocked_ends), (&None, &None));
    assert!(node.ledger.sightings.contains_key(&id));
    assert_eq!(running_sources(&node.ledger, &node.ledger.live[&id], node.now), []);
}

#[test]
fn a_stored_claim_is_restored_with_its_devices_held() {
    let mut node = node();
    let wanted = claim("a", &[request("gpu", whole(), &["GPU-0"])]);
    let ids = prepared(&mut node, &wanted).unwrap();
    let restored = restore(records(&node.ledger), node.now);
    assert_eq!(restored.live, node.ledger.live);
    assert_eq!(restored.holders_of(&whole(), &DeviceId::whole(&part("GPU-0"))), ids);
}

/// Earlier releases of Berth recorded the request's name without that of the subrequest.
#[test]
fn a_record_without_the_subrequest_is_of_the_same_request() {
    let mut node = node();
    let named = |name: &str| claim("a", &[request(name, whole(), &["GPU-0"])]);
    let ids = prepared(&mut node, &named("gpu")).unwrap();
    assert_eq!(prepared(&mut node, &named("gpu/big")).unwrap(), ids);
    // The scheduler allocated the claim again, for another subrequest.
    unprepared(&mut node, "a");
    let ids = prepared(&mut node, &named("gpu/big")).unwrap();
    assert_ne!(prepared(&mut node, &named("gpu/small")).unwrap(), ids);
}

/// A claim for GPU-0 that is reserved for these pods.
fn reserved(pods: &[&str]) -> ClaimToPrepare {
    let pods = pods.iter().map(|name| ClaimPod { uid: (*name).into(), name: (*name).into() });
    ClaimToPrepare { pods: pods.collect(), ..claim("a", &[request("gpu", whole(), &["GPU-0"])]) }
}

/// The API server shows these pods, whose specs name the claim `claim-a`.
fn show(node: &mut Node, pods: &[&str]) {
    let pod = |uid: &&str| {
        let pod = Pod {
            name: (*uid).into(),
            namespace: "ns".into(),
            named_claims: vec!["claim-a".into()],
            ..pod_without_containers(uid, Stage::Admitted)
        };
        ((*uid).to_owned(), Arc::new(pod))
    };
    let pods = pods.iter().map(pod).collect();
    let view = PodsView { current: true, listed_mono_ms: 1, pods, ..PodsView::empty(PodsSource::ApiServer) };
    node.decide(&Command::Pods(view)).unwrap();
}

#[test]
fn the_pods_of_a_claim_are_outdated_until_those_that_run_are_recorded() {
    let mut node = node();
    prepared(&mut node, &reserved(&["one"])).unwrap();
    let outdated = |node: &Node| -> Vec<BTreeSet<String>> {
        claims_with_outdated_pods(&node.ledger).into_values().collect()
    };
    assert!(outdated(&node).is_empty(), "no source shows pods");
    for (running, recorded, are_outdated) in [
        (vec!["one"], vec!["one"], false),
        (vec!["one", "two"], vec!["one"], true),
        (vec!["one", "two"], vec!["one", "two"], false),
        (vec!["two"], vec!["one", "two"], true),
        (vec![], vec!["one", "two"], false),
        (
            vec!["1", "2", "3", "4", "5", "6", "7", "8", "9"],
            vec!["1", "2", "3", "4", "5", "6", "7", "8"],
            false,
        ),
        (vec!["2", "3", "4", "5", "6", "7", "8", "9"], vec!["1", "2", "3", "4", "5", "6", "7", "8"], true),
    ] {
        show(&mut node, &running);
        let pods = reserved(&recorded).pods;
        node.decide(&Command::RecordClaimPods { claim: "a".into(), pods }).unwrap();
        let running: BTreeSet<String> = running.into_iter().map(str::to_owned).collect();
        let expected = if are_outdated { vec![running] } else { Vec::new() };
        assert_eq!(outdated(&node), expected, "{recorded:?}");
    }
    let pods = reserved(&["1", "2", "3", "4", "5", "6", "7", "8", "9"]).pods;
    node.decide(&Command::RecordClaimPods { claim: "a".into(), pods: pods.clone() }).unwrap();
    assert_eq!(allocations_of(&node.ledger, "a")[0].origin.claim().unwrap().pods, pods[..CLAIM_PODS_MAX]);
}

/// Of the pods that share a claim only the first ones are recorded.
#[test]
fn a_process_of_a_pod_that_is_not_recorded_may_use_the_claim() {
    let mut node = node();
    let names = ["1", "2", "3", "4", "5", "6", "7", "8", "9"];
    for (pods, expected) in [(8, true), (7, false)] {
        node.decide(&Command::Unprepare { claim: "a".into() }).unwrap();
        let [id] = prepared(&mut node, &reserved(&names[..pods])).unwrap()[..] else { panic!("one request") };
        let attribution =
            attribute_process(&node.ledger, &gpu_id("GPU-0"), &process(1, "GPU-0", of_pod("9", "main")));
        assert_eq!(attribution == Attribution::Possibly(vec![id]), expected, "{attribution:?}");
    }
}

/// Two pods share a claim: a drain evicts and shows both, each has its own processes, and `end` without force is refused while
/// one of them runs.
#[test]
fn all_pods_of_a_claim_hold_its_devices() {
    let mut node = node();
    let [id] = prepared(&mut node, &reserved(&["one", "two"])).unwrap()[..] else { panic!("one request") };
    show(&mut node, &["one", "two"]);
    node.look(&[("GPU-0", process(1, "GPU-0", of_pod("two", "main")))]);
    let holders = &gpu_holders(&node.ledger)[&gpu_id("GPU-0")].pods;
    assert!(holders.iter().map(|holder| holder.name.pod.as_str()).eq(["one", "two"]), "{holders:?}");
    let uses = pod_uses(&node.ledger);
    assert!(uses[&gpu_id("GPU-0")].keys().map(|name| name.pod.as_str()).eq(["two"]), "{uses:?}");
    let author = Author::api("me".into(), String::new());
    let order = crate::drain::marks::Order { evict: true, ..Default::default() };
    node.decide(&Command::Drain { gpu: gpu_id("GPU-0"), author, order }).unwrap();
    let due = eviction_plan::due_requests(&node.ledger, node.now);
    let names: Vec<&str> = due.iter().map(|request| request.pod.name.as_str()).collect();
    assert_eq!(names, ["one", "two"]);
    let budget = EvictionOutcome::Budget("one must run".into());
    node.decide(&Command::RecordEviction { ask: due[1].clone(), outcome: budget }).unwrap();
    let status = |node: &Node| -> Vec<(String, EvictionStatus)> {
        let holders = eviction_plan::holders(&node.ledger, &gpu_id("GPU-0")).into_iter();
        holders.map(|holder| (holder.pod.unwrap(), holder.status)).collect()
    };
    let two = ("two".to_owned(), EvictionStatus::Budget { message: "one must run".into() });
    assert_eq!(status(&node), [("one".to_owned(), EvictionStatus::NotRequested), two.clone()]);
    show(&mut node, &["two"]);
    assert_eq!(status(&node)[1], two);
    assert_ne!(status(&node)[0].1, EvictionStatus::NotRequested, "the first pod is shown no more");
    assert!(node.decide(&Command::End { id, force: false }).is_err(), "the second pod runs");
    unprepared(&mut node, "a");
    let left = attribute_process(&node.ledger, &gpu_id("GPU-0"), &process(1, "GPU-0", of_pod("two", "main")));
    assert_eq!(left, Attribution::Unexplained(Reason::Leftover { allocation: id }));
}

/// The allocation of a claim for this device of another store.
fn of_lost_store(name: &str) -> Allocation {
    let mut lost = node();
    lost.ledger.store = 77;
    let resource = if name.starts_with("MIG") { instance() } else { whole() };
    let id = prepared(&mut lost, &claim("a", &[request("gpu", resource, &[name])])).unwrap()[0];
    Allocation::clone(&lost.ledger.live[&id])
}

fn adopted(node: &mut Node, found: &[Allocation]) -> usize {
    node.decide(&Command::AdoptClaims(found.to_vec())).unwrap();
    allocations_of(&node.ledger, "a").len()
}

#[test]
fn a_claim_of_a_lost_store_is_adopted_once_and_its_gpu_is_granted_through_dra() {
    let found = [of_lost_store("GPU-0")];
    let mut node = node();
    set_api(&mut node, KubeletApi::DevicePlugin);
    assert_eq!(adopted(&mut node, &found), 1);
    assert_eq!(node.ledger.gpus[&gpu_id("GPU-0")].via.api, KubeletApi::Dra);
    assert!(matches!(allocate(&mut node, "GPU-0"), Err(Refusal::OtherApi { .. })));
    assert_eq!(
        prepared(&mut node, &claim("a", &[request("gpu", whole(), &["GPU-0"])])).unwrap(),
        [found[0].id]
    );
    unprepared(&mut node, "a");
    assert_eq!(adopted(&mut node, &found), 0, "it has ended");
}

#[test]
fn a_claim_is_not_adopted_where_another_allocation_is() {
    let mut node = node();
    set_api(&mut node, KubeletApi::DevicePlugin);
    allocate(&mut node, "GPU-0").unwrap();
    assert_eq!(adopted(&mut node, &[of_lost_store("GPU-0")]), 0, "a container of the device plugin holds it");
    // A whole device of the GPU and one of its instances exclude each other.
    let mut on_gpu = of_lost_store("MIG-a");
    on_gpu.id.number += 1;
    on_gpu.devices = vec![DeviceId::whole(&part("GPU-1"))];
    on_gpu.resource = whole();
    let has_gpu = node.ledger.part(&part("GPU-1")).is_some();
    assert!(has_gpu, "the parent of MIG-a is a part of its own");
    assert_eq!(adopted(&mut node, &[of_lost_store("MIG-a"), on_gpu]), 1);
}
