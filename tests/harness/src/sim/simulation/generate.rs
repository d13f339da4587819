//! From a seed to a run: what happens, and how often.

use super::claims::has_claims;
use super::containers::has_guard;
use super::event::{
    Containers, CrashAt, DiskFault, Driver, Event, Fate, Look, Lost, Mood, Showing, StackLine,
};
use super::policies::KINDS;
use super::rng::Rng;
use super::views::has_sources;

/// Events of one run.
const EVENTS: u32 = 240;

/// The events of a seed.
pub(crate) fn events(seed: u64) -> Vec<Event> {
    let mut rng = Rng::new(seed);
    // Runs differ in what goes wrong how much: a run in which everything fails never gets far.
    let storm = Storm { disk: rng.of(&[0, 2, 6]), crash: rng.of(&[0, 1, 3]), gpus: rng.of(&[1, 4, 8]) };
    let length = EVENTS / 2 + rng.below(EVENTS);
    let mut events: Vec<Event> = (0..length).map(|_| one(&mut rng, &storm)).collect();
    if has_sources(seed) {
        // With draws of their own, between the others.
        let mut rng = Rng::new(seed.rotate_left(32) ^ 0x5eed);
        let between = |event| std::iter::once(event).chain(rng.chance(40).then(|| sources(&mut rng)));
        events = events.into_iter().flat_map(between).collect();
    }
    if has_guard(seed) {
        let mut rng = Rng::new(seed.rotate_left(8) ^ 0x90a2d);
        let between = |event| std::iter::once(event).chain(rng.chance(40).then(|| containers(&mut rng)));
        events = events.into_iter().flat_map(between).collect();
    }
    if loses_evidence(seed) {
        let mut rng = Rng::new(seed.rotate_left(16) ^ 0xe71d);
        let between = |event| std::iter::once(event).chain(rng.chance(20).then(|| evidence(&mut rng)));
        events = events.into_iter().flat_map(between).collect();
    }
    if reuses_names(seed) {
        let mut rng = Rng::new(seed.rotate_left(48) ^ 0x9a3e);
        let between = |event| std::iter::once(event).chain(rng.chance(20).then(|| names(&mut rng, seed)));
        events = events.into_iter().flat_map(between).collect();
    }
    if has_claims(seed) {
        let mut rng = Rng::new(seed.rotate_left(24) ^ 0xc1a13);
        let between = |event| std::iter::once(event).chain(rng.chance(40).then(|| claims(&mut rng)));
        events = events.into_iter().flat_map(between).collect();
    }
    events
}

/// What the scheduler and the kubelet do with claims, and the operator with the APIs of GPUs.
fn claims(rng: &mut Rng) -> Event {
    let (which, gpu) = (rng.below(64), rng.below(8));
    match rng.below(16) {
        0..=4 => Event::Claim {
            count: rng.of(&[1, 1, 1, 2, 2, 3]),
            pick: which,
            contested: rng.chance(15),
            stale: rng.chance(15),
        },
        5..=6 => Event::PrepareAgain { which, more: rng.chance(40), stale: rng.chance(20) },
        7..=9 => Event::Unprepare { which },
        10..=11 => Event::Via { gpu, dra: rng.chance(60) },
        _ => Event::FinishMove { gpu },
    }
}

/// What a guard shows, and what only it can.
fn containers(rng: &mut Rng) -> Event {
    let exited = u64::from(rng.below(u32::MAX));
    let which = rng.below(64);
    match rng.below(18) {
        16 => Event::LimitDrifts { which, to_mib: None },
        17 => Event::LimitDrifts { which, to_mib: Some(u64::from(rng.below(40_000))) },
        0..=7 => Event::Containers(Containers::Whole { exited: 0 }),
        8..=10 => Event::Containers(Containers::Whole { exited }),
        11 => Event::Containers(Containers::Away),
        12 => Event::Containers(Containers::GuardRestarted),
        13..=14 => Event::LeaveContainers { which },
        _ => Event::EndLeftContainers,
    }
}

/// Whether a run has pods under the names of ended ones, and devices that the kubelet gives to two pods.
fn reuses_names(seed: u64) -> bool {
    !seed.is_multiple_of(5)
}

/// What only such runs have. Without a source of pods nothing tells a pod without devices from an earlier one whose
/// devices the kubelet has lost.
fn names(rng: &mut Rng, seed: u64) -> Event {
    let which = rng.below(64);
    match rng.below(8) {
        0 => Event::Twice { which },
        1..=2 if has_sources(seed) => Event::Successor { which, devices: false },
        _ => Event::Successor { which, devices: true },
    }
}

/// Whether a run has clients that are no kubelet, calls for several containers, and evidence that is lost.
fn loses_evidence(seed: u64) -> bool {
    !seed.is_multiple_of(3)
}

/// What only such runs have.
fn evidence(rng: &mut Rng) -> Event {
    match rng.below(12) {
        0..=5 => Event::Foreign { which: rng.below(64), held: rng.chance(70), times: 1 + rng.below(12) },
        6..=8 => Event::Pair { resource: rng.below(4), count: 2 + rng.below(2), pick: rng.below(64) },
        9 => Event::Evidence { lost: None },
        _ => Event::Evidence {
            lost: Some(rng.of(&[Lost::List, Lost::Checkpoint, Lost::Checkpoint, Lost::Stale])),
        },
    }
}

/// What the source of all pods does, and what only such runs have.
fn sources(rng: &mut Rng) -> Event {
    let which = rng.below(64);
    match rng.below(32) {
        0..=3 => Event::Status,
        4..=6 => Event::DeletePod { which, force: rng.chance(25) },
        7..=10 => Event::Pods { how: Showing::List, later: rng.chance(30) },
        11..=15 => Event::Pods { how: Showing::Watch, later: rng.chance(30) },
        16 => Event::Pods { how: rng.of(&[Showing::Silent, Showing::TooMany]), later: rng.chance(30) },
        17..=18 => Event::Pods {
            how: rng.of(&[Showing::KubeletPods, Showing::KubeletPods, Showing::KubeletSilent]),
            later: rng.chance(30),
        },
        19..=21 => Event::PodsArrive { which, keep: rng.chance(40) },
        22 => Event::KubeletForgets { which },
        23..=24 => Event::Evict { which, refusal: rng.below(6), stale: rng.chance(20) },
        25..=26 => Event::EvictAnswered { keep: rng.chance(30) },
        27 => Event::HostProcess { part: rng.below(8), on: rng.chance(40) },
        28 => Event::Tells { part: rng.below(8), on: rng.chance(70) },
        29 => Event::LeaveBehind { which },
        30 => Event::GpuLook,
        _ => Event::Drain { gpu: rng.below(8), evict: true, deadline: rng.chance(20) },
    }
}

/// Weights that differ from run to run.
struct Storm {
    disk: u32,
    crash: u32,
    gpus: u32,
}

/// Draws an event of one kind.
type Draw = fn(&mut Rng) -> Event;

fn one(rng: &mut Rng, storm: &Storm) -> Event {
    let groups: [(u32, Draw); 8] = [
        (36, pods),
        (22, rounds),
        (22, time),
        (4, kubelet),
        (storm.gpus * 2, gpus),
        (10, operator),
        (storm.disk, disk),
        (storm.crash, crash),
    ];
    let mut left = rng.below(groups.iter().map(|(weight, _)| weight).sum());
    for (weight, draw) in groups {
        if left < weight {
            return draw(rng);
        }
        left -= weight;
    }
    Event::Stream
}

fn pods(rng: &mut Rng) -> Event {
    match rng.below(20) {
        0..=8 => Event::Start {
            resource: rng.below(4),
            count: rng.of(&[1, 1, 1, 2, 2, 3]),
            pick: rng.below(64),
            fate: rng.of(&[Fate::Runs, Fate::Runs, Fate::Runs, Fate::Slow, Fate::Dropped, Fate::Failed]),
            stale: rng.chance(15),
            init: rng.chance(30),
        },
        9..=10 => Event::App { which: rng.below(64), subset: rng.chance(25) },
        11 => Event::Reissue { which: rng.below(64), stale: rng.chance(20) },
        12..=13 => Event::Record,
        14..=17 => Event::Stop { which: rng.below(64) },
        18 => Event::Odd {
            resource: rng.below(4),
            part: rng.below(8),
            share: rng.below(8),
            twice: rng.chance(30),
        },
        _ => Event::Stream,
    }
}

fn rounds(rng: &mut Rng) -> Event {
    let look = Look { list: rng.chance(85), write: rng.chance(85), read: rng.chance(90) };
    match rng.below(12) {
        0..=4 => Event::Round(look),
        5..=6 => Event::RoundBegins { list: look.list },
        7..=8 => Event::RoundReads { write: look.write, read: look.read },
        9..=10 => Event::RoundArrives { which: rng.below(8), keep: rng.chance(40) },
        _ => Event::Glance { list: look.list, read: look.read },
    }
}

fn time(rng: &mut Rng) -> Event {
    match rng.below(20) {
        0 => Event::ClockJump { ms: rng.of(&[-86_400_000, -3_000, 1_000, 3_600_000]) },
        1..=5 => Event::Wait { ms: 1 + u64::from(rng.below(999)) },
        6..=12 => Event::Wait { ms: rng.of(&[1_000, 2_500, 4_999, 5_000, 6_000]) },
        13..=17 => Event::Wait { ms: rng.of(&[10_000, 15_000, 29_999, 30_000, 31_000]) },
        _ => Event::Wait { ms: rng.of(&[59_999, 60_000, 61_000, 300_000]) },
    }
}

fn kubelet(rng: &mut Rng) -> Event {
    match rng.below(8) {
        0 => Event::KubeletStops,
        1..=3 => Event::KubeletStarts { ready: rng.chance(60) },
        _ => Event::KubeletReady,
    }
}

fn gpus(rng: &mut Rng) -> Event {
    let part = rng.below(8);
    match rng.below(18) {
        16 => Event::Driver(rng.of(&[Driver::Hung, Driver::Released, Driver::Fabric, Driver::Replaced])),
        17 => Event::Driver(Driver::Ready),
        0..=1 => Event::Vanish { part },
        2..=4 => Event::Return { part },
        5 => Event::Trouble { part, on: true },
        6 => Event::Trouble { part, on: false },
        7..=10 => Event::GpuLook,
        11 => Event::GpuLookBegins,
        12 => Event::GpuLookArrives { which: rng.below(4), keep: rng.chance(30) },
        _ => Event::Xid { part, code: rng.of(&[13, 31, 48, 79, 79, 94, 95]) },
    }
}

fn operator(rng: &mut Rng) -> Event {
    let policy = rng.below(KINDS);
    match rng.below(30) {
        26..=27 => Event::Drain { gpu: rng.below(8), evict: rng.chance(40), deadline: rng.chance(40) },
        28 => Event::StopDrain { gpu: rng.below(8) },
        29 => Event::Heal { gpu: rng.below(8) },
        0..=1 => Event::Cordon { gpu: rng.below(8), why: rng.chance(40) },
        2..=4 => Event::Uncordon { gpu: rng.below(8) },
        5 => Event::Forget { gpu: rng.below(8) },
        6 => Event::End { which: rng.below(64) },
        7..=9 => Event::Upload { policy },
        10 => Event::Delete { policy },
        11..=14 => {
            let lines = rng.below(4);
            let line = |rng: &mut Rng| StackLine {
                policy: rng.below(KINDS),
                permissions: rng.below(4),
                deny_on_fault: rng.chance(30),
            };
            Event::Activate { policies: (0..lines).map(|_| line(rng)).collect(), expected: rng.chance(50) }
        }
        15..=18 => Event::Mood { policy, mood: mood(rng) },
        _ => Event::Offer,
    }
}

fn mood(rng: &mut Rng) -> Mood {
    match rng.below(12) {
        0..=4 => Mood::Honest,
        5..=7 => Mood::Lie(rng.below(32)),
        _ => {
            rng.of(&[Mood::Pass, Mood::Deny, Mood::Trap, Mood::Fuel, Mood::Time, Mood::Memory, Mood::Missing])
        }
    }
}

fn disk(rng: &mut Rng) -> Event {
    let fault = rng.of(&[
        None,
        None,
        None,
        Some(DiskFault::BeforeWrite),
        Some(DiskFault::AfterWrite),
        Some(DiskFault::Gone),
    ]);
    Event::Disk { fault }
}

fn crash(rng: &mut Rng) -> Event {
    match rng.below(3) {
        0 => Event::DaemonStarts,
        _ => Event::Crash {
            at: rng.of(&[CrashAt::Now, CrashAt::BeforeAppend, CrashAt::AfterAppend, CrashAt::Load]),
        },
    }
}
