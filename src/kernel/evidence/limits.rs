//! Limits of a container's memory on a GPU, which the driver enforces. The guard sets them on the container's cgroup
//! before the container's first instruction, and reads them back.
//!
//! A limit counts as enforced only by what was read back from that container's cgroup, and only for
//! [`READING_AGE_MAX_MS`] (I12): what a guard showed before it ended, or before NVML stopped answering, expires.

use crate::evidence::part_use::limits_of;
use crate::evidence::runtime::{RuntimeContainer, RuntimeView};
use crate::grants::allocation::Allocation;
use crate::ids::names::{GpuId, PartId};
use crate::ids::time::Now;
use crate::node::ledger::Ledger;
use crate::sharing::offer::Consumes;
use crate::sharing::part_state::{Device, PartState};
use crate::sharing::via::KubeletApi;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How long a reading shows that a limit is in force, milliseconds: twice the interval at which the guard reads.
pub const READING_AGE_MAX_MS: u64 = 60_000;
/// How far a limit may be below the granted one, MiB: the driver rounds to pages of 2 MiB.
const ROUNDING_MIB: u64 = 2;

/// Whether memory limits are set by the driver (`enforce.memory`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Enforcement {
    /// Where the guard, the driver and the node can.
    #[default]
    Auto,
    /// As `Auto`, and nothing that has a memory limit is granted where they cannot.
    Require,
    /// Nowhere.
    Off,
}

impl Enforcement {
    /// Its value in the configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Require => "require",
            Self::Off => "off",
        }
    }
}

/// On which GPUs the guard can limit memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimitSupport {
    /// The GPUs that it tried, each with the reason why it cannot; `None` if a limit that it set was read back.
    pub gpus: BTreeMap<GpuId, Option<Arc<str>>>,
    /// Why the guard can limit memory on no GPU; `None` if it has tried each one.
    pub why: Option<Arc<str>>,
    /// Whether the guard refuses containers whose limits cannot be set.
    pub is_required: bool,
    /// The folder of the files by which the guard knows what claims were granted; `None` for a guard that does not know claims.
    pub claim_grants: Option<Arc<str>>,
}

/// A container's limit on one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The GPU.
    pub gpu: GpuId,
    /// What all of the container's allocations together may use of it, MiB.
    pub granted_mib: u64,
    /// Whether it was set.
    pub state: LimitState,
    /// How often the guard found that the limit had changed.
    pub times_changed: u32,
    /// Why it is not set, or cannot be read.
    pub why: Option<Arc<str>>,
    /// What was last read back; `None` if nothing was.
    pub reading: Option<LimitReading>,
}

/// Whether a limit was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitState {
    /// Not yet: the container has not started, NVML has not answered, or limits do not work on the GPU.
    Pending,
    /// Before the container's first instruction.
    Set,
    /// While the container ran.
    Late,
    /// It could not be set, or does not stay.
    Failed,
}

/// What NVML reports of a container's cgroup on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitReading {
    /// MiB that its processes may allocate.
    pub limit_mib: u64,
    /// MiB that they have allocated.
    pub used_mib: u64,
    /// When the guard read it, milliseconds since 1970.
    pub wall_ms: u64,
    /// When it is [`READING_AGE_MAX_MS`] old, monotonic milliseconds.
    pub expires_mono_ms: u64,
    /// Whether it is that old, so that it shows nothing any more.
    pub is_stale: bool,
}

impl MemoryLimit {
    /// The limit that NVML reported, MiB, if it was read back within the last minute and is the granted one.
    #[must_use]
    pub fn in_force_mib(&self) -> Option<u64> {
        let is_set = matches!(self.state, LimitState::Set | LimitState::Late);
        let recent = self.reading.filter(|reading| is_set && !reading.is_stale);
        recent
            .map(|reading| reading.limit_mib)
            .filter(|limit_mib| matches_granted(*limit_mib, self.granted_mib))
    }
}

/// Whether a limit of `limit_mib`, as NVML reports it, is that of `granted_mib` after the driver has rounded it.
#[must_use]
pub fn matches_granted(limit_mib: u64, granted_mib: u64) -> bool {
    limit_mib <= granted_mib && limit_mib.saturating_add(ROUNDING_MIB) >= granted_mib
}

impl Ledger {
    /// The limits of an allocation's container; empty if the guard shows no container of it.
    #[must_use]
    pub fn memory_limits_of(&self, allocation: &Allocation) -> &[MemoryLimit] {
        self.container_of(allocation).map_or(&[], |container| &container.limits)
    }

    /// Whether the driver limits the memory of an allocation's containers on this part as the ledger has granted it (I12).
    /// Containers that use a claim at the same time each have a limit of their own, so together they are limited only if
    /// the sum is granted.
    #[must_use]
    pub fn is_memory_limited(&self, allocation: &Allocation, part: &PartId) -> bool {
        let Some(view) = self.runtime.as_deref().filter(|_| allocation.ended.is_none()) else { return false };
        let containers: Vec<_> = view.annotated_containers_of(allocation).collect();
        let is_limited_to_grants = |containers: &[&RuntimeContainer]| {
            let in_force_mib = containers.iter().map(|container| {
                let limit = container.limits.iter().find(|limit| limit.gpu.as_part() == part);
                limit.and_then(MemoryLimit::in_force_mib)
            });
            let sum_mib: Option<u64> = in_force_mib.sum();
            sum_mib.is_some_and(|mib| mib <= self.granted_memory_mib(view, containers, part))
        };
        // The containers of a claim count together. Of several containers with a grant of the device plugin all but one are
        // about to end, so each counts alone.
        let mut groups = containers.chunks(if allocation.origin.claim().is_some() { usize::MAX } else { 1 });
        !containers.is_empty() && groups.all(is_limited_to_grants)
    }

    /// MiB that the allocations of these containers may use of a part together.
    fn granted_memory_mib(&self, view: &RuntimeView, containers: &[&RuntimeContainer], part: &PartId) -> u64 {
        let is_one = |one: &Arc<RuntimeContainer>| containers.iter().any(|container| container.id == one.id);
        let named = view.containers.iter().filter(|(_, all)| all.iter().any(is_one));
        let allocations = named.filter_map(|(id, _)| self.live.get(id)).filter(|a| a.parts().contains(&part));
        allocations
            .map(|a| limits_of(self, a, part).memory_mib.unwrap_or(u64::MAX))
            .fold(0, u64::saturating_add)
    }

    /// Why the memory limit of this device cannot be enforced at present, so that it is not granted under `enforce.memory:
    /// require`; `None` if it may be granted.
    #[must_use]
    pub fn why_not_enforceable(&self, part: &PartState, device: &Device) -> Option<Arc<str>> {
        let has_limit = matches!(device.consumes, Consumes::Slice { memory_mib: 1.., .. });
        (self.rules.enforcement == Enforcement::Require && has_limit)
            .then(|| self.why_not_limitable(part))
            .flatten()
    }

    /// Why the guard cannot limit memory on this part at present; `None` if it can.
    #[must_use]
    pub fn why_not_limitable(&self, part: &PartState) -> Option<Arc<str>> {
        if !part.part.is_whole_gpu() {
            return Some("the driver sets no memory limits on MIG instances".into());
        }
        let Some(view) = self.runtime.as_deref().filter(|view| view.is_whole) else {
            return Some("the guard does not show the containers of this node; see `berth node show`".into());
        };
        let support = &view.limit_support;
        if self.rules.enforcement == Enforcement::Require && !support.is_required {
            let why = "the guard was started with another `enforce.memory` than `require`: set `require` in its \
                       configuration, too, and restart it";
            return Some(why.into());
        }
        let is_claimed = self.gpu_of(part).is_some_and(|gpu| gpu.via.api == KubeletApi::Dra);
        if is_claimed && support.claim_grants != self.rules.claim_grants {
            let why = "the guard does not know the claims of this daemon: it is of an older release, or its configuration has another \
                       `kubeletRootDir` or `dra.driver`. Give both the same, and restart the guard";
            return Some(why.into());
        }
        match (support.gpus.get(&part.part.gpu), &support.why) {
            (Some(None), _) => None,
            (Some(Some(why)), _) | (None, Some(why)) => Some(Arc::clone(why)),
            (None, None) => {
                let why = "the guard has not tried to set a memory limit on this GPU yet. If this lasts longer than a minute, \
                           NVML did not list the GPU when the guard opened NVML: restart the guard";
                Some(why.into())
            }
        }
    }
}

/// This view with the time at which each reading expires. A reading that is already known keeps its time. That of a new one
/// follows from its `wall_ms`, since the guard and this process use the same wall clock.
pub(crate) fn with_expiry(known: Option<&RuntimeView>, view: &RuntimeView, now: Now) -> RuntimeView {
    let before = |id: &str, of: &MemoryLimit| {
        let mut containers = known?.containers.values().flatten();
        let container = containers.find(|container| container.id == id)?;
        let limit = container.limits.iter().find(|limit| limit.gpu == of.gpu)?;
        limit.reading.filter(|reading| Some(reading.wall_ms) == of.reading.map(|new| new.wall_ms))
    };
    with_readings(view, |container, limit| {
        let known = before(&container.id, limit);
        limit.reading.map(|reading| {
            let left_ms = READING_AGE_MAX_MS.saturating_sub(now.wall_ms.saturating_sub(reading.wall_ms));
            let expires_mono_ms = known.map_or(now.mono_ms + left_ms, |known| known.expires_mono_ms);
            let is_stale = known.map_or(left_ms == 0, |known| known.is_stale);
            LimitReading { expires_mono_ms, is_stale, ..reading }
        })
    })
}

/// The view in which all expired readings are marked as stale; `None` if no further reading has expired.
pub(crate) fn with_stale_readings(ledger: &Ledger, now: Now) -> Option<RuntimeView> {
    next_expiry(ledger).filter(|at| now.mono_ms >= *at)?;
    let view = ledger.runtime.as_deref()?;
    Some(with_readings(view, |_, limit| {
        limit
            .reading
            .map(|reading| LimitReading { is_stale: now.passed(reading.expires_mono_ms, 0), ..reading })
    }))
}

/// When the first reading becomes stale, monotonic milliseconds.
pub(crate) fn next_expiry(ledger: &Ledger) -> Option<u64> {
    let containers = ledger.runtime.iter().flat_map(|view| view.containers.values().flatten());
    let readings = containers.flat_map(|container| &container.limits).filter_map(|limit| limit.reading);
    let recent = readings.filter(|reading| !reading.is_stale);
    recent.map(|reading| reading.expires_mono_ms).min()
}

fn with_readings(
    view: &RuntimeView,
    change: impl Fn(&RuntimeContainer, &MemoryLimit) -> Option<LimitReading>,
) -> RuntimeView {
    let mut view = view.clone();
    for container in view.containers.values_mut().flatten() {
        let changed =
            |limit: &MemoryLimit| MemoryLimit { reading: change(container, limit), ..limit.clone() };
        let limits: Vec<_> = container.limits.iter().map(changed).collect();
        if limits != container.limits {
            Arc::make_mut(container).limits = limits;
        }
    }
    view
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evidence::part_use::{EnforcedBy, limits};
    use crate::evidence::runtime::Tie;
    use crate::evidence::runtime::tests::{container, view};
    use crate::grants::allocation::GrantOrigin;
    use crate::grants::claim::{Claim, ClaimPod, ClaimRequest};
    use crate::ids::names::AllocationId;
    use crate::node::command::Command;
    use crate::node::rules::Rules;
    use crate::node::test_node::{Node, gpu_id, part, shared};
    use crate::node::tick::next_tick;
    use crate::sharing::via::Via;
    use std::collections::BTreeSet;

    /// When a test's node starts.
    const READ_WALL_MS: u64 = 1_000_000;

    fn limit(gpu: &str, granted_mib: u64, limit_mib: impl Into<Option<u64>>) -> MemoryLimit {
        let reading = |limit_mib| LimitReading {
            limit_mib,
            used_mib: 7,
            wall_ms: READ_WALL_MS,
            expires_mono_ms: 0,
            is_stale: false,
        };
        MemoryLimit {
            gpu: gpu_id(gpu),
            granted_mib,
            state: LimitState::Set,
            times_changed: 0,
            why: None,
            reading: limit_mib.into().map(reading),
        }
    }

    /// The view of one container with these limits.
    fn limited(id: AllocationId, limits: Vec<MemoryLimit>) -> RuntimeView {
        let shown = container("uid-1", "main", Tie::Annotation);
        view(&[(id, Arc::new(RuntimeContainer { limits, ..RuntimeContainer::clone(&shown) }))])
    }

    /// A share of `GPU-0` of 4096 MiB.
    fn share(node: &mut Node) -> AllocationId {
        let id = node.grant("GPU-0", Some(0), "uid-1", "main");
        let state = Arc::make_mut(node.ledger.parts.get_mut(&part("GPU-0")).unwrap());
        let slice = Consumes::Slice { memory_mib: 4096, compute_percent: 0 };
        state.devices.get_mut(&(shared(), Some(0))).unwrap().consumes = slice;
        id
    }

    fn enforced(node: &Node, id: AllocationId) -> EnforcedBy {
        limits(&node.ledger, &node.ledger.live[&id], false).unwrap().1
    }

    #[test]
    fn only_the_limit_that_was_granted_and_read_back_on_that_gpu_is_in_force() {
        for (shown, expected) in [
            (limit("GPU-0", 4096, 4096), EnforcedBy::MemoryLimits),
            (limit("GPU-0", 4097, 4096), EnforcedBy::MemoryLimits),
            // The guard was given another limit than the ledger has granted.
            (limit("GPU-0", 8192, 8192), EnforcedBy::None),
            (limit("GPU-0", 4096, None), EnforcedBy::None),
            (limit("GPU-0", 4096, 4098), EnforcedBy::None),
            (limit("GPU-0", 4096, 4094), EnforcedBy::MemoryLimits),
            (limit("GPU-0", 4096, 4093), EnforcedBy::None),
            (limit("GPU-1", 4096, 4096), EnforcedBy::None),
            (MemoryLimit { state: LimitState::Late, ..limit("GPU-0", 4096, 4096) }, EnforcedBy::MemoryLimits),
            (MemoryLimit { state: LimitState::Failed, ..limit("GPU-0", 4096, 4096) }, EnforcedBy::None),
            (MemoryLimit { state: LimitState::Pending, ..limit("GPU-0", 4096, 4096) }, EnforcedBy::None),
        ] {
            let mut node = Node::new();
            let id = share(&mut node);
            node.decide(&Command::SeeContainers(limited(id, vec![shown.clone()]))).unwrap();
            assert_eq!(enforced(&node, id), expected, "{shown:?}");
            // What another pod's container claims does not count.
            let mut node = Node::new();
            let id = share(&mut node);
            let mut claims = limited(id, vec![shown]);
            Arc::make_mut(&mut claims.containers.get_mut(&id).unwrap()[0]).pod_uid = "uid-2".into();
            node.decide(&Command::SeeContainers(claims)).unwrap();
            assert_eq!(enforced(&node, id), EnforcedBy::None);
        }
    }

    #[test]
    fn a_container_that_names_the_allocation_itself_does_not_count_and_all_of_its_own_do() {
        let mut node = Node::new();
        let id = share(&mut node);
        let with = |name: &str, tie, limits| {
            Arc::new(RuntimeContainer { limits, ..RuntimeContainer::clone(&container("uid-1", name, tie)) })
        };
        let in_force = || vec![limit("GPU-0", 4096, 4096)];
        let of = |containers: Vec<Arc<RuntimeContainer>>| {
            let mut shown = view(&[]);
            shown.containers.insert(id, containers);
            shown
        };
        for (containers, expected) in [
            (vec![with("a-sidecar", Tie::Environment, in_force())], EnforcedBy::None),
            (
                vec![
                    with("a-sidecar", Tie::Environment, in_force()),
                    with("main", Tie::Annotation, Vec::new()),
                ],
                EnforcedBy::None,
            ),
            (
                vec![
                    with("a-sidecar", Tie::Environment, Vec::new()),
                    with("main", Tie::Annotation, in_force()),
                ],
                EnforcedBy::MemoryLimits,
            ),
            (
                vec![with("main", Tie::Annotation, Vec::new()), with("main", Tie::Annotation, in_force())],
                EnforcedBy::None,
            ),
        ] {
            node.decide(&Command::SeeContainers(of(containers.clone()))).unwrap();
            assert_eq!(enforced(&node, id), expected, "{containers:?}");
        }
    }

    /// Two containers that use a claim at the same time can use twice what it was granted.
    #[test]
    fn containers_of_a_claim_are_limited_if_all_of_them_together_are() {
        let mut node = Node::new();
        let id = share(&mut node);
        let request = ClaimRequest {
            claim: Claim { uid: "c-1".into(), namespace: "team".into(), name: "half".into() },
            pod_claim_name: None,
            request: "gpu".into(),
            pods: vec![ClaimPod { uid: "uid-1".into(), name: "pod-uid-1".into() }],
        };
        let live = Arc::make_mut(&mut node.ledger.live).get_mut(&id).unwrap();
        Arc::make_mut(live).origin = GrantOrigin::Claim(Arc::new(request));
        let of = |uids: &[&str]| {
            let containers = uids.iter().map(|uid| {
                let container = container(uid, "main", Tie::Annotation);
                let limits = vec![limit("GPU-0", 4096, 4096)];
                Arc::new(RuntimeContainer { limits, ..RuntimeContainer::clone(&container) })
            });
            let containers = containers.collect();
            RuntimeView { containers: [(id, containers)].into(), ..view(&[]) }
        };
        for (uids, expected) in [
            (&["uid-1"][..], EnforcedBy::MemoryLimits),
            // The kubelet prepared the claim for the first pod, and the ledger does not have the second one.
            (&["uid-2"], EnforcedBy::MemoryLimits),
            (&["uid-2", "uid-1"], EnforcedBy::None),
        ] {
            node.decide(&Command::SeeContainers(of(uids))).unwrap();
            assert_eq!(enforced(&node, id), expected, "{uids:?}");
            let holder = &node.ledger.live[&id].holder;
            assert_eq!(holder.pod_uid.as_deref(), Some("uid-1"), "that of the first pod");
        }
    }

    #[test]
    fn a_reading_counts_until_it_is_a_minute_old() {
        let mut node = Node::new();
        let id = share(&mut node);
        let view = limited(id, vec![limit("GPU-0", 4096, 4096)]);
        node.decide(&Command::SeeContainers(view.clone())).unwrap();
        let due = node.now.mono_ms + READING_AGE_MAX_MS;
        assert_eq!(next_tick(&node.ledger, node.now), Some(due));
        node.pass(59);
        // The same reading once more, and the guard away: neither makes it newer or ends it.
        node.decide(&Command::SeeContainers(RuntimeView { is_whole: false, ..view.clone() })).unwrap();
        node.decide(&Command::Tick).unwrap();
        assert_eq!(enforced(&node, id), EnforcedBy::MemoryLimits);
        assert_eq!(next_tick(&node.ledger, node.now), Some(due));
        node.pass(1);
        node.decide(&Command::Tick).unwrap();
        assert_eq!(enforced(&node, id), EnforcedBy::None);
        assert!(node.ledger.memory_limits_of(&node.ledger.live[&id])[0].reading.unwrap().is_stale);
        assert_eq!(next_tick(&node.ledger, node.now), None);
        // The guard has read nothing since, and another view arrives.
        node.decide(&Command::SeeContainers(RuntimeView { pods: BTreeSet::from(["new".into()]), ..view }))
            .unwrap();
        assert_eq!(enforced(&node, id), EnforcedBy::None);
        assert_eq!(next_tick(&node.ledger, node.now), None);
        let mut newer = limit("GPU-0", 4096, 4096);
        newer.reading.as_mut().unwrap().wall_ms = node.now.wall_ms;
        node.decide(&Command::SeeContainers(limited(id, vec![newer]))).unwrap();
        assert_eq!(enforced(&node, id), EnforcedBy::MemoryLimits);
    }

    #[test]
    fn a_restart_of_the_daemon_makes_no_reading_newer() {
        let mut node = Node::new();
        let id = share(&mut node);
        node.now = Now { wall_ms: READ_WALL_MS + 40_000, mono_ms: 1 };
        node.decide(&Command::SeeContainers(limited(id, vec![limit("GPU-0", 4096, 4096)]))).unwrap();
        assert_eq!(enforced(&node, id), EnforcedBy::MemoryLimits);
        assert_eq!(next_tick(&node.ledger, node.now), Some(20_001));
        let mut node = Node::new();
        let id = share(&mut node);
        node.now = Now { wall_ms: READ_WALL_MS + 60_000, mono_ms: 1 };
        node.decide(&Command::SeeContainers(limited(id, vec![limit("GPU-0", 4096, 4096)]))).unwrap();
        assert_eq!(enforced(&node, id), EnforcedBy::None, "it was too old when it arrived");
        assert_eq!(next_tick(&node.ledger, node.now), None);
    }

    #[test]
    fn require_withdraws_devices_whose_limit_cannot_be_enforced() {
        let mut node = Node::new();
        let _ = share(&mut node);
        let why = |node: &Node, gpu: &str, share| {
            let part = node.ledger.part(&part(gpu)).unwrap();
            node.ledger
                .why_not_enforceable(part, part.device(&shared(), share).unwrap())
                .map(|why| why.to_string())
        };
        assert_eq!(why(&node, "GPU-0", Some(0)), None, "auto");
        let rules = Rules { enforcement: Enforcement::Require, ..Rules::default() };
        node.ledger.rules = Arc::new(rules);
        assert!(why(&node, "GPU-0", Some(0)).unwrap().contains("guard does not show"));
        let mut whole = view(&[]);
        node.decide(&Command::SeeContainers(whole.clone())).unwrap();
        assert!(
            why(&node, "GPU-0", Some(0)).unwrap().contains("and restart it"),
            "it was started with another setting"
        );
        whole.limit_support.is_required = true;
        node.decide(&Command::SeeContainers(whole.clone())).unwrap();
        assert!(why(&node, "GPU-0", Some(0)).unwrap().contains("has not tried"));
        whole.limit_support.gpus.insert(gpu_id("GPU-0"), Some("an old driver".into()));
        node.decide(&Command::SeeContainers(whole.clone())).unwrap();
        assert_eq!(why(&node, "GPU-0", Some(0)).as_deref(), Some("an old driver"));
        whole.limit_support.gpus.insert(gpu_id("GPU-0"), None);
        node.decide(&Command::SeeContainers(whole.clone())).unwrap();
        assert_eq!(why(&node, "GPU-0", Some(0)), None);
        node.ledger.with_gpu(&gpu_id("GPU-0"), |gpu| gpu.via = Via::new(KubeletApi::Dra));
        assert_eq!(why(&node, "GPU-0", Some(0)), None, "the guard knows the claims of this daemon");
        Arc::make_mut(&mut node.ledger.rules).claim_grants = Some("/k/plugins/gpu.nvidia.com/grants".into());
        assert!(why(&node, "GPU-0", Some(0)).unwrap().contains("does not know the claims"));
        node.ledger.with_gpu(&gpu_id("GPU-0"), |gpu| gpu.via = Via::default());
        node.decide(&Command::SeeContainers(RuntimeView { is_whole: false, ..whole })).unwrap();
        assert!(why(&node, "GPU-0", Some(0)).is_some(), "the guard is away");
        let _ = node.grant("GPU-0", None, "uid-2", "main");
        assert_eq!(why(&node, "GPU-0", None), None, "a whole GPU has no limit");
    }
}
