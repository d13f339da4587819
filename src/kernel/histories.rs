//! Random histories of a node, for [`super::invariants`].
//!
//! Beside the kernel runs a small model of the kubelet: which pod really holds what. What the
//! sources show is drawn from the model, at times stale, partial or missing, never invented.

mod ends;
mod sources;
mod stacks;
mod world;

pub(super) use world::Held;

use super::command::Command;
use super::names::{AllocationId, DeviceId};
use super::offer::PartOffer;
use proptest::prelude::*;
use world::{MIG, PARTS, World, gpu, part_id, resource, shape};

#[derive(Clone, Debug)]
enum Op {
    /// A pod asks for some of what is listed healthy and free of a resource.
    Start {
        resource: usize,
        count: usize,
        pick: usize,
    },
    /// The kubelet asks again for what a pod holds already.
    Reissue {
        which: usize,
    },
    /// A pod ends.
    Stop {
        which: usize,
    },
    /// An Allocate that nobody sane sends.
    Odd {
        resource: usize,
        device: usize,
    },
    /// A client that is no kubelet asks for the same devices so many times.
    Foreign {
        which: usize,
        times: usize,
    },
    Round {
        list: bool,
        checkpoint: bool,
        fresh: bool,
    },
    RestartKubelet,
    Wait {
        ms: u64,
    },
    Cordon(usize),
    /// An order to drain, with eviction or not.
    Drain(usize, bool),
    StopDrain(usize),
    Heal(usize),
    Uncordon(usize),
    Xid {
        gpu: usize,
        again_s: Option<u32>,
    },
    /// Which parts the next look shows.
    Look {
        mask: usize,
    },
    Forget(usize),
    Offer {
        shape: usize,
    },
    /// The daemon is killed and starts again; meanwhile another plugin may have granted a GPU.
    Crash {
        foreign: Option<usize>,
    },
    /// An operator ends an allocation.
    End {
        which: usize,
    },
    /// An operator activates a stack of so many entries.
    Activate {
        entries: usize,
    },
    /// Whoever knows all pods by UID shows them.
    Pods(Showing),
    /// The kubelet writes its pods' status to the API server.
    Status,
    /// A pod's object goes: of one that ended, or by force of any.
    Delete {
        which: usize,
        force: bool,
    },
    /// The kubelet forgets what a pod holds that lives on.
    Forgets {
        which: usize,
    },
    /// A pod is asked to leave a GPU that is emptied.
    Evict {
        which: usize,
        outcome: usize,
    },
    /// A look at who is on the GPUs.
    Processes {
        host: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Showing {
    List,
    Watch,
    Silent,
    TooMany,
    /// The kubelet's Pods API.
    Kubelets,
    /// A view of before, once more.
    Again,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0usize..3, 1usize..4, any::<usize>()).prop_map(|(resource, count, pick)| Op::Start { resource, count, pick }),
        2 => any::<usize>().prop_map(|which| Op::Reissue { which }),
        4 => any::<usize>().prop_map(|which| Op::Stop { which }),
        1 => (0usize..3, any::<usize>()).prop_map(|(resource, device)| Op::Odd { resource, device }),
        2 => (any::<usize>(), 1usize..12).prop_map(|(which, times)| Op::Foreign { which, times }),
        8 => (prop::bool::weighted(0.8), prop::bool::weighted(0.8), prop::bool::weighted(0.8)).prop_map(|(list, checkpoint, fresh)| Op::Round { list, checkpoint, fresh }),
        1 => Just(Op::RestartKubelet),
        8 => prop_oneof![Just(100u64), Just(6_000), Just(31_000), Just(61_000)].prop_map(|ms| Op::Wait { ms }),
        1 => (0usize..3).prop_map(Op::Cordon),
        1 => (0usize..3, any::<bool>()).prop_map(|(gpu, evict)| Op::Drain(gpu, evict)),
        1 => (0usize..3).prop_map(Op::StopDrain),
        1 => (0usize..3).prop_map(Op::Heal),
        2 => (0usize..3).prop_map(Op::Uncordon),
        1 => (0usize..3, prop::option::of(1u32..60)).prop_map(|(gpu, again_s)| Op::Xid { gpu, again_s }),
        3 => prop_oneof![3 => Just((1 << PARTS) - 1), 1 => 0usize..1 << PARTS].prop_map(|mask| Op::Look { mask }),
        1 => (0usize..3).prop_map(Op::Forget),
        3 => (0usize..6).prop_map(|shape| Op::Offer { shape }),
        2 => prop::option::of(any::<usize>()).prop_map(|foreign| Op::Crash { foreign }),
        1 => any::<usize>().prop_map(|which| Op::End { which }),
        2 => (0usize..5).prop_map(|entries| Op::Activate { entries }),
        6 => prop_oneof![
            4 => Just(Showing::List), 3 => Just(Showing::Watch), 1 => Just(Showing::Silent),
            1 => Just(Showing::TooMany), 1 => Just(Showing::Kubelets), 1 => Just(Showing::Again),
        ].prop_map(Op::Pods),
        2 => Just(Op::Status),
        2 => (any::<usize>(), prop::bool::weighted(0.25)).prop_map(|(which, force)| Op::Delete { which, force }),
        1 => any::<usize>().prop_map(|which| Op::Forgets { which }),
        2 => (any::<usize>(), 0usize..4).prop_map(|(which, outcome)| Op::Evict { which, outcome }),
        2 => prop::bool::weighted(0.3).prop_map(|host| Op::Processes { host }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn every_step_of_a_random_history_keeps_the_invariants(
        history in prop_oneof![Just(0usize), Just(1), Just(3), Just(1000)],
        ops in prop::collection::vec(op(), 1..80),
    ) {
        let mut world = World::new(history);
        for op in &ops {
            world.step(op);
        }
        // In the end every pod goes, and two rounds see it.
        world.pods.clear();
        world.stale.clear();
        world.sources.forgotten.clear();
        world.step(&Op::Status);
        world.step(&Op::Pods(Showing::List));
        for _ in 0..3 {
            world.step(&Op::Wait { ms: 31_000 });
            world.step(&Op::Round { list: true, checkpoint: true, fresh: true });
        }
        let held_back = world.ledger.hold.is_some();
        prop_assert!(held_back || world.ledger.live.is_empty(), "left behind: {:?}", world.ledger.live);
    }
}

#[test]
fn a_mig_instance_that_was_destroyed_leaves_once_nobody_holds_it() {
    let mut world = World::new(1000);
    world
        .turn(&Command::Offer(vec![(PartOffer { part: part_id(MIG), lines: shape(0) }, "test".into())]))
        .unwrap();
    let gpus_alone = Op::Look { mask: (1 << MIG) - 1 };
    let held = DeviceId::whole(&part_id(MIG));
    let allocation = world.allocate(&resource(0), vec![held.clone()]).unwrap();
    world.step(&gpus_alone);
    world.step(&Op::Wait { ms: 61_000 });
    assert!(world.ledger.device(&resource(0), &held).is_some(), "a pod holds it");
    world.turn(&Command::End { id: allocation, force: true }).unwrap();
    world.step(&Op::Wait { ms: 31_000 });
    assert!(world.ledger.device(&resource(0), &held).is_some(), "not unheld for long enough");
    world.step(&Op::Wait { ms: 31_000 });
    assert!(!world.ledger.parts.contains_key(&part_id(MIG)));
    // A GPU that went stays listed until an operator forgets it.
    world.step(&Op::Look { mask: 0b0011 });
    world.step(&Op::Wait { ms: 61_000 });
    assert!(world.ledger.parts.contains_key(&gpu(2)));
}

/// While the checkpoint cannot be read the API server's word ends what was taken over, and the file
/// shows it still when it can be read again.
#[test]
fn what_ended_while_the_checkpoint_could_not_be_read_is_not_taken_over_again() {
    const KEPT: usize = 64;
    let mut world = World::new(KEPT);
    world.step(&Op::Offer { shape: 0 });
    let held = Held {
        uid: "be-fore".into(),
        resource: resource(0),
        devices: vec![DeviceId::whole(&gpu(0))],
        allocation: None,
    };
    world.pods.push(held);
    world.file.clone_from(&world.pods);
    world.step(&Op::Crash { foreign: None });
    assert_eq!(world.ledger.live.len(), 1, "taken over");
    // It goes, and the API server lists no such pod.
    world.pods.clear();
    for _ in 0..3 {
        world.step(&Op::Wait { ms: 31_000 });
        world.step(&Op::Pods(Showing::List));
        world.step(&Op::Round { list: true, checkpoint: false, fresh: false });
    }
    assert!(world.ledger.live.is_empty(), "{:?}", world.ledger.live);
    for _ in 0..2 * KEPT {
        world.allocate(&resource(0), vec![DeviceId::whole(&gpu(2))]).unwrap();
        world.step(&Op::End { which: 0 });
    }
    assert_eq!(world.ledger.ended.len(), KEPT);
    world.step(&Op::Crash { foreign: None });
    assert!(world.ledger.live.is_empty(), "{:?}", world.ledger.live);
}

/// The kubelet's checkpoint goes on showing what an operator ended while its pod runs.
#[test]
fn what_an_operator_ended_is_not_taken_over_again_however_much_was_pruned_since() {
    const KEPT: usize = 64;
    // Another plugin's answer has no id, one of an earlier store of ours has that store's.
    for allocation in [None, Some(AllocationId { store: 6, number: 3 })] {
        let mut world = World::new(KEPT);
        world.step(&Op::Offer { shape: 0 });
        world.pods.push(Held {
            uid: "before".into(),
            resource: resource(0),
            devices: vec![DeviceId::whole(&gpu(0))],
            allocation,
        });
        world.file.clone_from(&world.pods);
        world.step(&Op::Crash { foreign: None });
        assert_eq!(world.ledger.live.len(), 1, "taken over");
        world.step(&Op::Crash { foreign: None });
        world.step(&Op::End { which: 0 });
        for _ in 0..2 * KEPT {
            world.allocate(&resource(0), vec![DeviceId::whole(&gpu(2))]).unwrap();
            world.step(&Op::End { which: 0 });
        }
        assert_eq!(world.ledger.ended.len(), KEPT);
        world.step(&Op::Crash { foreign: None });
        assert!(world.ledger.live.is_empty(), "{:?}", world.ledger.live);
    }
}

#[test]
fn of_many_activations_the_newest_are_kept_over_a_crash() {
    let mut world = World::new(64);
    for i in 0..40 {
        world.step(&Op::Activate { entries: i % 4 });
    }
    world.step(&Op::Crash { foreign: None });
    let past = &world.ledger.past_stacks;
    assert_eq!(past.len(), super::stack::ACTIVATIONS_MAX - 1);
    for (revision, stack) in past.iter() {
        let entries = usize::try_from(revision - 1).unwrap() % 4;
        assert_eq!((stack.revision, stack.entries.len()), (*revision, entries));
        assert_eq!((stack.by.as_str(), stack.why.as_str()), ("me", "a step"));
    }
    assert_eq!(world.ledger.stack.revision, 40);
}
