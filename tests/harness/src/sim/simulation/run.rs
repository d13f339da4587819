//! One run from its events to its end.

use super::ends::Cause;
use super::event::Mood;
use super::event::{Containers, Event, Look, Showing};
use super::policies::KINDS;
use super::violation::Violation;
use super::world::World;
use berth_kernel::drain::marks::Owners;
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::hardware::gpu::Part;
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::ids::names::{GpuId, PartId};
use berth_kernel::node::command::{Command, NewStack};
use berth_kernel::sharing::listing::listing;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// What a run came to.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// The first invariant that broke, and after how many events.
    pub(crate) broken: Option<(Violation, usize)>,
    pub(crate) grants: u64,
}

/// Runs the events in the world of a seed, then lets everything come to rest. `tell` hears of each
/// event before it happens.
pub(crate) fn run(seed: u64, events: &[Event], mut tell: impl FnMut(usize, &Event, &World)) -> Outcome {
    let mut done = 0;
    let mut grants = 0;
    let ran = catch_unwind(AssertUnwindSafe(|| {
        let mut world = World::new(seed);
        for event in events {
            if let Some(violation) = world.checks.violations.first() {
                return Some(violation.clone());
            }
            tell(done, event, &world);
            done += 1;
            world.step(event);
        }
        if world.checks.violations.is_empty() {
            rest(&mut world);
        }
        grants = world.granted;
        world.checks.violations.first().cloned()
    }));
    let broken = ran.unwrap_or_else(|thrown| {
        let said = thrown.downcast_ref::<String>().cloned();
        let said = said.or_else(|| thrown.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        Some(Violation::new("panic", said.unwrap_or_else(|| "without a word".into())))
    });
    Outcome { broken: broken.map(|violation| (violation, done)), grants }
}

/// In the end all faults are gone, and rounds see which pods have ended while others run, some under the same names;
/// then all pods end: nothing may be left behind, and every GPU can be had again.
fn rest(world: &mut World) {
    world.step(&Event::Disk { fault: None });
    world.around.disk.set_crash(None);
    world.step(&Event::DaemonStarts);
    for policy in 0..KINDS {
        world.step(&Event::Mood { policy, mood: Mood::Honest });
    }
    world.step(&Event::Evidence { lost: None });
    world.machine.mend();
    if world.kubelet.running {
        world.step(&Event::KubeletReady);
    } else {
        world.step(&Event::KubeletStarts { ready: true });
    }
    world.kubelet.record_slow();
    see_ends(world);
    if world.ledger().ends_withheld.is_none() {
        let has_ended = |uid: &String| !world.kubelet.is_uid_alive(uid);
        // Without a source of all pods nothing tells an ended pod from a pod of its name whose init container alone holds
        // devices: `List` shows the name without devices, as after a loss of the kubelet's checkpoint.
        let may_be_successor = |a: &Allocation| {
            !world.sources && a.holder.pod.as_ref().is_some_and(|name| world.kubelet.has_hidden_pod(name))
        };
        // A claim's allocation ends as the kubelet unprepares it.
        let held = |a: &&Arc<Allocation>| {
            a.origin.claim().is_none()
                && a.holder.pod_uid.as_ref().is_some_and(has_ended)
                && !may_be_successor(a)
        };
        let left: Vec<_> = world.ledger().live.values().filter(held).map(|a| a.id).collect();
        if !left.is_empty() {
            let what = format!("the pods of {left:?} have ended, others run, and they are still live");
            world.checks.violations.push(Violation::new("I6", what));
        }
    }
    world.step(&Event::KubeletStarts { ready: true });
    world.kubelet.end_all();
    world.all_leave();
    world.step(&Event::Crash { at: super::event::CrashAt::Now });
    world.step(&Event::DaemonStarts);
    world.activate(
        NewStack {
            origin: berth_kernel::policy::stack::StackOrigin::Api,
            failed: None,
            by: "me".into(),
            why: String::new(),
            entries: Vec::new(),
        },
        false,
    );
    let gpus: Vec<GpuId> = world.ledger().gpus.keys().cloned().collect();
    for gpu in gpus {
        world.turn(&Command::Uncordon { gpu, owners: Owners::All }, Cause::Nothing);
    }
    world.end_claims();
    world.step(&Event::GpuLook);
    let gpus: Vec<GpuId> = world.ledger().gpus.keys().cloned().collect();
    for gpu in gpus {
        // Some policies leave it to an operator to say that a GPU works again, and a restart does not.
        world.turn(&Command::MarkHealthy { gpu, by: "me".into(), why: String::new() }, Cause::Nothing);
    }
    see_ends(world);
    if world.ledger().ends_withheld.is_some() {
        let live: Vec<_> = world.ledger().live.keys().copied().collect();
        for id in live {
            world.turn(&Command::End { id, force: true }, Cause::Operator(id));
        }
    }
    if !world.ledger().live.is_empty() {
        let left: Vec<_> = world.ledger().live.keys().collect();
        let what = format!("all pods are gone and {left:?} are still live");
        world.checks.violations.push(Violation::new("end", what));
    }
    world.finish_moves();
    for ms in [301_000, 61_000, 61_000, 61_000] {
        world.step(&Event::Wait { ms });
        world.step(&Event::GpuLook);
        world.step(&Event::Offer);
    }
    let ledger = world.ledger();
    let free = |id: &PartId| {
        ledger.resources().iter().any(|r| listing(ledger, r).iter().any(|l| l.id.part == *id && l.healthy))
    };
    // A machine always has a GPU outside of MIG mode, which `single` takes beside no instance.
    let alike = !world.machine.parts().iter().any(|p| p.mig_enabled);
    let wanted = |p: &&Part| match world.around.baseline.mig {
        MigStrategy::None => p.is_whole_gpu(),
        MigStrategy::Mixed => !p.mig_enabled,
        MigStrategy::Single => alike,
    };
    let lost = world.machine.parts().iter().filter(wanted).find(|p| !free(&p.id));
    if let Some(part) = lost {
        let what = format!("{} is there, idle and healthy, and cannot be had", part.id);
        world.checks.violations.push(Violation::new("end", what));
    }
}

/// All sources show the present, until two rounds have seen every end.
fn see_ends(world: &mut World) {
    if world.sources {
        world.step(&Event::Status);
        world.step(&Event::Pods { how: Showing::List, later: false });
    }
    if world.guarded {
        world.end_left_containers();
        world.step(&Event::Containers(Containers::Whole { exited: 0 }));
    }
    for _ in 0..3 {
        world.step(&Event::Wait { ms: 31_000 });
        world.step(&Event::Round(Look { list: true, write: true, read: true }));
    }
}
