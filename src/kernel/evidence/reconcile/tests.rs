//! Reconcile passes: the live allocations, what the sources show, and the effects.

mod adoption;
mod containers;
mod ends;
mod holders;
mod pods;
mod reused_names;
mod running;

use super::*;
use crate::evidence::kubelet_view::{KubeletAge, ListedHolding, PodList};
use crate::hardware::gpu::Part;
use crate::ids::names::{GpuId, PartId};
use crate::sharing::offer::{Consumes, OfferLine, PartOffer};
use crate::sharing::reoffer::reoffer;

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
        let part = Part::whole_gpu(GpuId::of_whole(&device(i).part), 0);
        ledger.apply(&Entry { at: at(0), changes: vec![Change::PartFound(part)] });
        let lines = vec![OfferLine { resource: resource(), count: 1, consumes: Consumes::Whole }];
        let offer = PartOffer { part: device(i).part, lines };
        let change =
            reoffer(ledger.part(&offer.part).unwrap(), &offer, &"test".into(), at(0)).unwrap().unwrap();
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
        origin: GrantOrigin::DevicePlugin,
        holder: Holder::default(),
        overlapped: false,
        decision: Decision::default(),
        ended: None,
    };
    ledger.apply(&Entry { at: at(when), changes: vec![Change::Granted(allocation)] });
}

fn entry(uid: &str, container: &str, devices: &[usize], allocation: Option<u64>) -> CheckpointEntry {
    CheckpointEntry {
        pod_uid: uid.into(),
        container: container.into(),
        resource: resource(),
        devices: devices.iter().map(|i| device(*i)).collect(),
        allocation: allocation.map(id),
    }
}

fn hold(pod: &str, container: &str, devices: &[usize]) -> ListedHolding {
    ListedHolding {
        namespace: "ns".into(),
        pod: pod.into(),
        container: container.into(),
        resource: resource(),
        devices: devices.iter().map(|i| device(*i)).collect(),
    }
}

/// The complete view of a pass that begins at `when`, with a kubelet that started long before.
fn view(when: u64, checkpoint: Vec<CheckpointEntry>, held: Vec<ListedHolding>) -> ReconcileView {
    ReconcileView {
        began_mono_ms: START + when,
        kubelet: Some(KubeletAge { created_wall_ms: 5, created_mono_ms: 5 }),
        list: Some(PodList {
            pods: held.iter().map(|h| (h.namespace.clone(), h.pod.clone())).collect(),
            held,
        }),
        checkpoint: Some(checkpoint),
        fresh: true,
        source_error: None,
        adopt: false,
    }
}

fn reconcile(ledger: &mut Ledger, view: &ReconcileView, when: u64) -> Plan {
    let plan = plan(ledger, view, &Timing::default(), at(when));
    let changes = changes(ledger, view, at(when));
    ledger.apply(&Entry { at: at(when), changes });
    plan
}
