//! Random histories of a node that check [`crate::node::invariants`].
//!
//! A small model of the kubelet tracks which pod really holds which devices. The sources' views are taken
//! from the model: they may be stale, partial or missing, but never wrong.

mod claims;
mod containers;
mod ends;
pub(crate) mod held;
mod op;
mod sources;
mod stacks;
mod world;

use crate::hardware::triage::Severity;
use crate::ids::names::{AllocationId, DeviceId};
use crate::node::command::Command;
use crate::sharing::offer::PartOffer;
use crate::sharing::via::KubeletApi;
use held::Held;
use op::{Op, PodsUpdate, RuntimeUpdate};
use proptest::prelude::*;
use world::{MIG, PARTS, World, gpu, part_id, resource, shape};

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0usize..3, 1usize..4, any::<usize>(), prop::bool::weighted(0.3)).prop_map(|(resource, count, pick, init)| Op::Start { resource, count, pick, init }),
        3 => any::<usize>().prop_map(|which| Op::StartMain { which }),
        2 => any::<usize>().prop_map(|which| Op::StartWithoutGpu { which }),
        1 => any::<usize>().prop_map(|which| Op::StartOnHeld { which }),
        2 => any::<usize>().prop_map(|which| Op::Reissue { which }),
        4 => any::<usize>().prop_map(|which| Op::Stop { which }),
        1 => (0usize..3, any::<usize>()).prop_map(|(resource, device)| Op::ArbitraryAllocate { resource, device }),
        2 => (0usize..3, any::<usize>(), 1usize..5, prop::bool::weighted(0.3)).prop_map(|(resource, device, times, fails)| Op::Deny { resource, device, times, fails }),
        2 => (any::<usize>(), 1usize..12).prop_map(|(which, times)| Op::ForeignClient { which, times }),
        8 => (prop::bool::weighted(0.8), prop::bool::weighted(0.8), prop::bool::weighted(0.8)).prop_map(|(list, checkpoint, fresh)| Op::Reconcile { list, checkpoint, fresh }),
        1 => Just(Op::RestartKubelet),
        8 => prop_oneof![Just(100u64), Just(6_000), Just(31_000), Just(61_000)].prop_map(|ms| Op::Wait { ms }),
        1 => (0usize..3).prop_map(Op::Cordon),
        1 => (0usize..3, any::<bool>()).prop_map(|(gpu, evict)| Op::Drain(gpu, evict)),
        1 => (0usize..3).prop_map(Op::StopDrain),
        1 => (0usize..3).prop_map(Op::MarkHealthy),
        2 => (0usize..3).prop_map(Op::Uncordon),
        3 => (0usize..3, any::<bool>()).prop_map(|(gpu, dra)| Op::SetVia { gpu, dra }),
        4 => (0usize..3).prop_map(Op::FinishMove),
        2 => xid(),
        3 => prop_oneof![3 => Just((1 << PARTS) - 1), 1 => 0usize..1 << PARTS].prop_map(|mask| Op::Scan { mask }),
        1 => (0usize..3).prop_map(Op::Forget),
        3 => (0usize..6).prop_map(|shape| Op::Offer { shape }),
        2 => prop::option::of(any::<usize>()).prop_map(|foreign| Op::Crash { foreign }),
        1 => any::<usize>().prop_map(|which| Op::End { which }),
        2 => (0usize..5).prop_map(|entries| Op::Activate { entries }),
        6 => prop_oneof![
            4 => Just(PodsUpdate::List), 3 => Just(PodsUpdate::Watch), 1 => Just(PodsUpdate::Silent),
            1 => Just(PodsUpdate::TooMany), 1 => Just(PodsUpdate::KubeletApi), 1 => Just(PodsUpdate::Repeated),
        ].prop_map(Op::Pods),
        2 => Just(Op::WriteStatus),
        2 => (any::<usize>(), prop::bool::weighted(0.25)).prop_map(|(which, force)| Op::Delete { which, force }),
        1 => any::<usize>().prop_map(|which| Op::LoseFromCheckpoint { which }),
        2 => (any::<usize>(), 0usize..4).prop_map(|(which, outcome)| Op::Evict { which, outcome }),
        2 => any::<usize>().prop_map(|which| Op::Linger { which }),
        1 => Just(Op::EndLingering),
        8 => prop_oneof![
            6 => prop_oneof![Just(0usize), any::<usize>()].prop_map(|exited| RuntimeUpdate::Whole { exited }),
            1 => Just(RuntimeUpdate::Away), 1 => Just(RuntimeUpdate::GuardRestarted),
        ].prop_map(Op::Runtime),
        4 => (any::<usize>(), 0usize..3, any::<usize>(), 1usize..3).prop_map(|(which, resource, device, count)| Op::Prepare { which, resource, device, count }),
        1 => (any::<usize>(), 0usize..10).prop_map(|(which, pods)| Op::ReserveClaim { which, pods }),
        2 => any::<usize>().prop_map(|which| Op::Unprepare { which }),
        2 => prop::bool::weighted(0.3).prop_map(|host| Op::ScanProcesses { host }),
        2 => prop_oneof![3 => Just((1 << PARTS) - 1), 1 => 0usize..1 << PARTS].prop_map(|mask| Op::NameParts { mask }),
    ]
}

fn xid() -> impl Strategy<Value = Op> {
    let code = prop_oneof![Just(13u64), Just(48), Just(79), 200u64..210];
    let severity = prop_oneof![Just(Severity::Ignore), Just(Severity::Degraded), Just(Severity::Unhealthy)];
    (0usize..3, code, prop::option::of(1u32..60), any::<bool>(), severity).prop_map(
        |(gpu, code, again_s, by_policy, severity)| Op::Xid { gpu, code, again_s, by_policy, severity },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_step_of_a_random_history_keeps_the_invariants(
        history in prop_oneof![Just(0usize), Just(1), Just(3), Just(1000)],
        via in prop_oneof![2 => Just(KubeletApi::DevicePlugin), 1 => Just(KubeletApi::Dra)],
        ops in prop::collection::vec(op(), 1..80),
    ) {
        let mut world = World::with(history, via);
        for op in &ops {
            world.step(op);
        }
        // What runs is held, and nothing else is.
        settle(&mut world);
        let left = world.held_by_stopped_pods();
        prop_assert!(world.ledger.ends_withheld.is_some() || left.is_empty(), "left behind while others run: {left:?}");
        // In the end, all pods with devices stop, and those without run on.
        world.pods.clear();
        world.stale.clear();
        world.sources.lost_from_checkpoint.clear();
        world.sources.lingering.clear();
        settle(&mut world);
        let left = world.not_of_running_names();
        prop_assert!(world.ledger.ends_withheld.is_some() || left.is_empty(), "left behind: {left:?}");
    }
}

/// All sources show the present, until every end has been seen by two reconcile passes.
fn settle(world: &mut World) {
    world.step(&Op::WriteStatus);
    world.step(&Op::Pods(PodsUpdate::List));
    world.step(&Op::Runtime(RuntimeUpdate::Whole { exited: 0 }));
    for _ in 0..3 {
        world.step(&Op::Wait { ms: 31_000 });
        world.step(&Op::Reconcile { list: true, checkpoint: true, fresh: true });
    }
}

#[test]
fn a_destroyed_mig_instance_is_forgotten_once_it_is_no_longer_held() {
    let mut world = World::new(1000);
    world
        .apply(&Command::Offer(vec![(PartOffer { part: part_id(MIG), lines: shape(0) }, "test".into())]))
        .unwrap();
    let gpus_only = Op::Scan { mask: (1 << MIG) - 1 };
    let held = DeviceId::whole(&part_id(MIG));
    let allocation = world.allocate(&resource(0), vec![held.clone()]).unwrap();
    world.step(&gpus_only);
    world.step(&Op::Wait { ms: 61_000 });
    assert!(world.ledger.device(&resource(0), &held).is_some(), "a pod holds it");
    world.apply(&Command::End { id: allocation, force: true }).unwrap();
    world.step(&Op::Wait { ms: 31_000 });
    assert!(world.ledger.device(&resource(0), &held).is_some(), "not unheld for long enough");
    world.step(&Op::Wait { ms: 31_000 });
    assert!(!world.ledger.parts.contains_key(&part_id(MIG)));
    // A vanished GPU stays listed until an operator forgets it.
    world.step(&Op::Scan { mask: 0b0011 });
    world.step(&Op::Wait { ms: 61_000 });
    assert!(world.ledger.parts.contains_key(gpu(2).as_part()));
}

/// While the checkpoint cannot be read, the API server's view ends an adopted allocation, and the checkpoint
/// still shows it once it can be read again.
#[test]
fn allocations_that_ended_without_a_readable_checkpoint_are_not_adopted_again() {
    const KEPT: usize = 64;
    let mut world = World::new(KEPT);
    world.step(&Op::Offer { shape: 0 });
    let held = Held {
        uid: "be-fore".into(),
        name: "be-fore".into(),
        container: "main",
        resource: resource(0),
        devices: vec![DeviceId::whole(gpu(0).as_part())],
        allocation: None,
    };
    world.pods.push(held);
    world.checkpoint.clone_from(&world.pods);
    world.step(&Op::Crash { foreign: None });
    assert_eq!(world.ledger.live.len(), 1, "adopted");
    // The pod stops, and the API server does not list it.
    world.pods.clear();
    for _ in 0..3 {
        world.step(&Op::Wait { ms: 31_000 });
        world.step(&Op::Pods(PodsUpdate::List));
        world.step(&Op::Reconcile { list: true, checkpoint: false, fresh: false });
    }
    assert!(world.ledger.live.is_empty(), "{:?}", world.ledger.live);
    nothing_is_adopted_after_pruning(&mut world, KEPT);
}

/// Prunes a history that keeps `kept` allocations, and crashes.
fn nothing_is_adopted_after_pruning(world: &mut World, kept: usize) {
    for _ in 0..2 * kept {
        world.allocate(&resource(0), vec![DeviceId::whole(gpu(2).as_part())]).unwrap();
        world.step(&Op::End { which: 0 });
    }
    assert_eq!(world.ledger.ended.len(), kept);
    world.step(&Op::Crash { foreign: None });
    assert!(world.ledger.live.is_empty(), "{:?}", world.ledger.live);
}

/// The kubelet's checkpoint still shows an allocation that an operator ended while its pod runs.
#[test]
fn allocations_that_an_operator_ended_are_not_adopted_again_after_pruning() {
    const KEPT: usize = 64;
    // Another plugin's answer has no id; an answer from an earlier store of this plugin has that store's id.
    for allocation in [None, Some(AllocationId { store: 6, number: 3 })] {
        let mut world = World::new(KEPT);
        world.step(&Op::Offer { shape: 0 });
        world.pods.push(Held {
            uid: "before".into(),
            name: "before".into(),
            container: "main",
            resource: resource(0),
            devices: vec![DeviceId::whole(gpu(0).as_part())],
            allocation,
        });
        world.checkpoint.clone_from(&world.pods);
        world.step(&Op::Crash { foreign: None });
        assert_eq!(world.ledger.live.len(), 1, "adopted");
        world.step(&Op::Crash { foreign: None });
        world.step(&Op::End { which: 0 });
        nothing_is_adopted_after_pruning(&mut world, KEPT);
    }
}

#[test]
fn the_newest_activations_survive_a_crash() {
    let mut world = World::new(64);
    for i in 0..40 {
        world.step(&Op::Activate { entries: i % 4 });
    }
    world.step(&Op::Crash { foreign: None });
    let past = &world.ledger.past_stacks;
    assert_eq!(past.len(), crate::policy::stack::ACTIVATIONS_MAX - 1);
    for (revision, stack) in past.iter() {
        let entries = usize::try_from(revision - 1).unwrap() % 4;
        assert_eq!((stack.revision, stack.entries.len()), (*revision, entries));
        assert_eq!((stack.by.as_str(), stack.why.as_str()), ("me", "a step"));
    }
    assert_eq!(world.ledger.stack.revision, 40);
}
