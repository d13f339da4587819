//! Adoption of holdings that this store did not grant.

use super::*;
use crate::ids::names::GpuId;
use crate::sharing::listing::listing;

#[test]
fn holdings_of_pods_are_adopted_once_and_end_like_grants() {
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
    reconcile(&mut ledger, &first, 10);
    assert_eq!(ledger.live.len(), 3, "a holding of an absent GPU is adopted, too");
    assert!(ledger.device(&shared.resource, &share).unwrap().held());
    first.began_mono_ms += 10;
    reconcile(&mut ledger, &first, 20);
    assert_eq!(ledger.live.len(), 3, "adopted once");
    let adopted = ledger.live.values().find(|a| a.devices.len() == 2).unwrap();
    assert_eq!((adopted.holder.pod.as_deref(), adopted.holder.pod_uid.as_deref()), (Some("p"), Some("u")));
    // Adopted allocations end like any other.
    reconcile(&mut ledger, &view(40_000, vec![], vec![]), 40_000);
    reconcile(&mut ledger, &view(46_000, vec![], vec![]), 46_000);
    assert!(ledger.live.is_empty());
}

#[test]
fn an_ended_allocation_of_this_store_is_not_adopted_again() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    reconcile(&mut ledger, &view(40_000, vec![], vec![]), 40_000);
    reconcile(&mut ledger, &view(46_000, vec![], vec![]), 46_000);
    assert!(ledger.live.is_empty());
    // A checkpoint from before the end that also has a grant of another plugin.
    let mut late = view(50_000, vec![entry("u", "c", &[0], Some(1)), entry("v", "c", &[1], None)], vec![]);
    late.adopt = true;
    reconcile(&mut ledger, &late, 50_000);
    let adopted: Vec<_> = ledger.live.values().map(|a| a.holder.pod_uid.as_deref()).collect();
    assert_eq!(adopted, [Some("v")]);
}

#[test]
fn a_holding_with_an_absent_gpu_is_adopted() {
    let mut ledger = node();
    let mut first = view(10, vec![entry("u", "c", &[0, 9], None)], vec![]);
    first.adopt = true;
    reconcile(&mut ledger, &first, 10);
    assert_eq!(ledger.live.len(), 1);
    assert!(ledger.device(&resource(), &device(0)).unwrap().held());
    // The absent GPU returns: it is held, and neither it nor a share of it can be granted.
    let returned = Part {
        id: device(9).part,
        gpu: GpuId::of_whole(&device(9).part),
        ..ledger.part(&device(0).part).unwrap().part.clone()
    };
    ledger.apply(&Entry { at: at(20), changes: vec![Change::PartFound(returned)] });
    let shared = Resource::parse("nvidia.com/gpu.shared").unwrap();
    let line = |resource, consumes| OfferLine { resource, count: 1, consumes };
    let slice = Consumes::Slice { memory_mib: 0, compute_percent: 0 };
    let lines = vec![line(resource(), Consumes::Whole), line(shared.clone(), slice)];
    let offer = PartOffer { part: device(9).part, lines };
    let change = reoffer(ledger.part(&offer.part).unwrap(), &offer, &"test".into(), at(30)).unwrap().unwrap();
    ledger.apply(&Entry { at: at(30), changes: vec![change] });
    assert!(ledger.device(&resource(), &device(9)).unwrap().held());
    let listed = listing(&ledger, &shared);
    assert!(listed.iter().all(|l| !l.healthy), "{listed:?}");
}

#[test]
fn a_holding_of_another_plugin_is_adopted_and_supersedes_a_stale_record() {
    let mut ledger = node();
    grant(&mut ledger, 1, &[0], 0);
    reconcile(&mut ledger, &view(10, vec![entry("old", "c", &[0], Some(1))], vec![]), 10);
    // While the daemon was stopped, the old pod ended and another plugin granted its GPU and one more.
    let other_plugins = || vec![entry("new", "c", &[0, 1], None)];
    let mut first = view(50_000, other_plugins(), vec![]);
    first.adopt = true;
    reconcile(&mut ledger, &first, 50_000);
    assert!(ledger.device(&resource(), &device(1)).unwrap().held());
    assert!(ledger.live[&id(1)].overlapped);
    reconcile(&mut ledger, &view(60_000, other_plugins(), vec![hold("new", "c", &[0, 1])]), 60_000);
    let left: Vec<_> = ledger.live.values().map(|a| a.holder.pod_uid.as_deref()).collect();
    assert_eq!(left, [Some("new")]);
}
