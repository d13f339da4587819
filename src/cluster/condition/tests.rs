use super::*;
use berth_kernel::drain::marks::{Mark, MarkKind, Marks, Order};
use berth_kernel::evidence::sighting::BlockedEnds;
use berth_kernel::hardware::gpu::Part;
use berth_kernel::hardware::health::Health;
use berth_kernel::ids::names::GpuId;
use berth_kernel::ids::time::Now;
use berth_kernel::sharing::part_state::PartState;
use std::sync::Arc;

/// 2026-01-01T00:00:00Z.
const NEW_YEAR_MS: u64 = 1_767_225_600_000;

/// A node with this number of healthy GPUs.
fn node(gpus: u32) -> Ledger {
    let mut ledger = Ledger::default();
    for index in 0..gpus {
        let id = gpu(index);
        let part = Part::whole_gpu(id.clone(), index);
        ledger.parts.insert(id.as_part().clone(), Arc::new(PartState::new(part, 0)));
        let now = Now { wall_ms: NEW_YEAR_MS, mono_ms: 0 };
        ledger.gpus.insert(id, Arc::new(GpuState::new(Health::healthy(now), now)));
    }
    ledger
}

fn gpu(index: u32) -> GpuId {
    GpuId::parse(&format!("GPU-{index:02}")).unwrap()
}

fn with(ledger: &mut Ledger, index: u32, change: impl FnOnce(&mut GpuState)) {
    change(Arc::make_mut(ledger.gpus.get_mut(&gpu(index)).unwrap()));
}

fn mark(why: &str) -> Mark {
    Mark::cordon("ada", why, NEW_YEAR_MS)
}

fn drain() -> Mark {
    Mark { kind: MarkKind::Drain(Order::default()), ..mark("") }
}

fn set_health(state: &mut GpuState, health: HealthState, reason: &str) {
    state.health.state = health;
    state.health.reason = reason.into();
}

#[test]
fn the_message_has_each_unavailable_gpu_with_time_and_reason() {
    type Case = (fn(&mut Ledger), bool, &'static str, &'static str);
    let table: [Case; 9] = [
        (|_| {}, false, "GPUsAvailable", "all 2 GPUs are available"),
        (
            |l| with(l, 1, |g| set_health(g, HealthState::Degraded, "row remapping pending")),
            false,
            "GPUsAvailable",
            "all 2 GPUs are available",
        ),
        (
            |l| with(l, 1, |g| g.marks = mark("fan").into()),
            true,
            "GPUCordoned",
            "GPU 1 (GPU-01) is cordoned since 2026-01-01T00:00:00Z by ada (fan)",
        ),
        (
            |l| with(l, 0, |g| g.marks = drain().into()),
            true,
            "GPUDraining",
            "GPU 0 (GPU-00) is being drained since 2026-01-01T00:00:00Z by ada",
        ),
        (
            |l| with(l, 0, |g| set_health(g, HealthState::Unhealthy, "XID 79")),
            true,
            "GPUUnhealthy",
            "GPU 0 (GPU-00) is unhealthy since 2026-01-01T00:00:00Z: XID 79",
        ),
        (
            |l| {
                with(l, 0, |g| set_health(g, HealthState::Unhealthy, "XID 79"));
                l.excluded = Arc::new([gpu(0)].into());
            },
            false,
            "GPUsAvailable",
            "all 2 GPUs are available",
        ),
        (
            |l| {
                with(l, 0, |g| {
                    set_health(g, HealthState::Vanished, "");
                    g.marks = Marks { drained_wall_ms: Some(NEW_YEAR_MS), ..drain().into() };
                });
            },
            true,
            "GPUVanished",
            "GPU 0 (GPU-00) is gone since 2026-01-01T00:00:00Z, and is drained since 2026-01-01T00:00:00Z by ada",
        ),
        (
            |l| Arc::make_mut(l.parts.get_mut(gpu(1).as_part()).unwrap()).present = false,
            true,
            "GPUVanished",
            "GPU 1 (GPU-01) was not found since the daemon started",
        ),
        (
            |l| {
                with(l, 1, |g| g.marks = mark("").into());
                with(l, 0, |g| set_health(g, HealthState::Unhealthy, ""));
            },
            true,
            "GPUsUnavailable",
            "GPU 0 (GPU-00) is unhealthy since 2026-01-01T00:00:00Z; GPU 1 (GPU-01) is cordoned since 2026-01-01T00:00:00Z by ada",
        ),
    ];
    for (change, is_unavailable, reason, message) in table {
        let mut ledger = node(2);
        change(&mut ledger);
        assert_eq!(
            availability(&ledger),
            Availability { is_available: !is_unavailable, reason, message: message.into() }
        );
    }
    let mut late = node(1);
    let cause = "the checkpoint cannot be read".into();
    late.blocked_ends = Some(Arc::new(BlockedEnds { since_wall_ms: NEW_YEAR_MS, cause, allocations: 152 }));
    let found = availability(&late);
    assert_eq!((found.is_available, found.reason), (false, "AllocationsStuck"));
    assert!(found.message.contains("since 2026-01-01T00:00:00Z: the checkpoint"), "{}", found.message);
    late.blocked_ends = Some(Arc::new(BlockedEnds {
        allocations: 153,
        ..BlockedEnds::clone(late.blocked_ends.as_deref().unwrap())
    }));
    assert_eq!(availability(&late), found, "unchanged, so that not each grant writes to the node");
    assert_eq!(availability(&node(1)).message, "the GPU is available");
    assert!(availability(&node(0)).is_available);
}

#[test]
fn many_gpus_are_named_up_to_the_limit_and_counted() {
    let mut ledger = node(16);
    for index in 0..16 {
        with(&mut ledger, index, |g| g.marks = mark(&"x".repeat(60)).into());
    }
    let message = availability(&ledger).message;
    assert!(message.len() <= MESSAGE_BYTES_MAX);
    let named = message.matches("is cordoned").count();
    assert!(named >= 6, "{message}");
    assert!(message.ends_with(&format!("; and {} more", 16 - named)), "{message}");
    with(&mut ledger, 0, |g| g.marks = mark(&"\u{e4}".repeat(512)).into());
    assert!(availability(&ledger).message.len() <= MESSAGE_BYTES_MAX, "one long reason alone");
}
