//! The text of a transition, as logs and events show it.

use super::Transition;
use crate::drain::eviction::{EvictionMethod, EvictionOutcome, EvictionRecord};
use crate::drain::marks::{AtDeadline, Drain, Mark, Order};
use crate::evidence::pods::PodBypass;
use crate::evidence::runtime::{BypassOutcome, ContainerBypass};
use crate::grants::allocation::Allocation;
use crate::grants::contested::Contested;
use crate::hardware::health::{Health, HealthState};
use crate::ids::names::GpuId;
use crate::ids::time::rfc3339_seconds;
use crate::node::ledger::Ledger;
use crate::policy::decider::{self, Decider};
use crate::policy::describe;
use crate::policy::stack::{Stack, StackEntry};
use crate::policy::version::PolicyVersion;
use crate::sharing::part_state::PartState;
use crate::sharing::via::Via;

/// How a text names GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuName {
    /// `GPU 3`, where the UUID is shown beside the text.
    Index,
    /// `GPU 3 (GPU-8a56a4bc-...)`.
    IndexAndUuid,
}

impl GpuName {
    /// The name of this GPU; its UUID where the ledger does not have it, or another GPU has its index now.
    #[must_use]
    pub fn of(self, ledger: &Ledger, gpu: &GpuId) -> String {
        self.with_index(ledger.index_of(gpu), gpu)
    }

    fn with_index(self, index: Option<u32>, gpu: &GpuId) -> String {
        match (index, self) {
            (None, _) => gpu.to_string(),
            (Some(index), Self::Index) => format!("GPU {index}"),
            (Some(index), Self::IndexAndUuid) => format!("GPU {index} ({gpu})"),
        }
    }
}

impl Transition {
    /// One sentence without a full stop. `ledger` is the later one of the two.
    #[must_use]
    pub fn describe(&self, ledger: &Ledger, name: GpuName) -> String {
        match self {
            Self::PartFound(part) => {
                let (gpu, part) = (describe::gpu(ledger, &part.part.id), &part.part);
                format!("{gpu} was found: {}, {} MiB", part.model, part.memory_mib)
            }
            Self::OffersChanged(part) => describe_offers(ledger, part),
            Self::HealthChanged { gpu, before, now } => describe_health(&name.of(ledger, gpu), before, now),
            Self::DrainChanged { gpu, before, now } => describe_drain(&name.of(ledger, gpu), before, now),
            Self::ViaChanged { gpu, before, now } => describe_via(&name.of(ledger, gpu), before, now),
            Self::DrainBlocked { gpu, pod, reason } => {
                format!("{} cannot be drained yet: pod {pod} {reason}", name.of(ledger, gpu))
            }
            Self::GpuForgotten { gpu, index } => {
                format!("{} was removed from the list", name.with_index(*index, gpu))
            }
            Self::Granted(allocation) => {
                let by = decider::join(&allocation.decision.by);
                let by = if by.is_empty() { String::new() } else { format!(" by {by}") };
                format!("{} granted{by}: {}", allocation.id, describe_devices(allocation))
            }
            Self::HolderLearned(allocation) => {
                format!("{} is held by {}", allocation.id, describe_holder(allocation))
            }
            Self::Ended(allocation) => {
                let reason = allocation.ended.as_ref().map_or("ended", |end| end.reason.as_str());
                format!("{} ended ({reason}): {}", allocation.id, describe_devices(allocation))
            }
            Self::Contested(Contested { allocation, device, other }) => format!(
                "{} has two pods on device {device} of {}: the kubelet gave it to {} ({}) and to {} ({}); delete one of them",
                name.of(ledger, &ledger.gpu_id_of(&device.part)),
                allocation.resource,
                describe_holder(allocation),
                allocation.id,
                describe_holder(other),
                other.id
            ),
            Self::LimitFailed(allocation, limit) => format!(
                "{} of {} is not limited to its {} MiB of memory on {}: {}",
                allocation.id,
                describe_holder(allocation),
                limit.granted_mib,
                name.of(ledger, &limit.gpu),
                limit.why.as_deref().unwrap_or("the guard gives no cause")
            ),
            Self::LimitChanged(allocation, limit) => format!(
                "the memory limit of {} of {} on {} was changed by something other than the guard, which has set it to {} MiB again",
                allocation.id,
                describe_holder(allocation),
                name.of(ledger, &limit.gpu),
                limit.granted_mib
            ),
            Self::GrantForged(allocation, container) => format!(
                "container {}/{}/{} names allocation {}, which was granted to {}: its pod sets the variable or \
                 annotation of a grant itself",
                container.namespace,
                container.pod,
                container.name,
                allocation.id,
                describe_holder(allocation)
            ),
            Self::ContainerBypass(bypass) => describe_container_bypass(bypass),
            Self::GuardChanged(true) => "the guard shows the containers of this node".into(),
            Self::GuardChanged(false) => {
                "the guard does not show the containers of this node at present (`berth node show` has the cause)".into()
            }
            Self::Eviction(eviction) => describe_eviction(&name.of(ledger, &eviction.request.gpu), eviction),
            Self::EndsWithheldChanged(Some(reason)) => format!("no allocation ends at present: {reason}"),
            Self::EndsWithheldChanged(None) => "allocations end by themselves again".into(),
            Self::StrategyChanged(Some(why)) => format!("no device is offered: {why}"),
            Self::StrategyChanged(None) => "devices can be passed to containers again".into(),
            Self::NodesChanged(Some(what)) => what.to_string(),
            Self::NodesChanged(None) => "all device nodes that containers need exist".into(),
            Self::ResourceWithdrawn(resource, Some(pause_ms)) => format!(
                "requests for {resource} were denied repeatedly: its free devices are withdrawn, at first for {} s; \
                 then one device is listed, and the others after a request succeeds or after a time without a new \
                 withdrawal (`berth decision list` shows the denials)",
                pause_ms / 1000
            ),
            Self::ResourceWithdrawn(resource, None) => {
                format!("the free devices of {resource} are listed again")
            }
            Self::PolicyAdded(version) => describe_added(version),
            Self::PolicyDeleted(version) => format!("{} was deleted", version.label()),
            Self::StackActivated(stack) => describe_stack(stack),
            Self::BypassStarted(bypass) => {
                let process = &bypass.process;
                // A process chooses its own name, which may contain line breaks.
                let named =
                    process.identity.name.as_deref().map(|name| format!(" ({})", name.escape_debug()));
                let pod = process.identity.owner.pod().map(|pod| format!(" of pod {}", pod.uid));
                format!(
                    "{} is used without an allocation by process {}{}{}: {}",
                    name.of(ledger, &bypass.gpu),
                    process.pid,
                    named.unwrap_or_default(),
                    pod.unwrap_or_default(),
                    bypass.reason.describe()
                )
            }
            Self::BypassEnded(bypass) => {
                let (pid, gpu) = (bypass.process.pid, name.of(ledger, &bypass.gpu));
                format!("process {pid} no longer uses {gpu} without an allocation")
            }
            Self::BypassPossible(pod) => {
                let how = pod.bypass.as_ref().map(PodBypass::describe).unwrap_or_default();
                format!("pod {}/{} can use GPUs without an allocation: {how}", pod.namespace, pod.name)
            }
        }
    }
}

fn describe_offers(ledger: &Ledger, part: &PartState) -> String {
    let by = part.offered_by.as_ref().map_or("no policy", Decider::as_str);
    format!("{} is offered as {} by {by}", describe::gpu(ledger, &part.part.id), describe::lines(&part.lines))
}

fn describe_health(name: &str, before: &Health, now: &Health) -> String {
    let reason = if now.reason.is_empty() { String::new() } else { format!(": {}", now.reason) };
    let state = match (before.state, now.state) {
        (old, new) if old == new => format!("is {}", new.as_str()),
        (_, HealthState::Vanished) => "is gone".to_owned(),
        (HealthState::Vanished, HealthState::Healthy) => "is back, and healthy".to_owned(),
        (HealthState::Vanished, now) => format!("is back, but {}", now.as_str()),
        // A reason of the new state is an operator's, and is shown in place of the old error.
        (_, HealthState::Healthy) if before.reason.is_empty() || !now.reason.is_empty() => {
            "is healthy again".to_owned()
        }
        (_, HealthState::Healthy) => {
            format!("is healthy again; it was {}: {}", before.state.as_str(), before.reason)
        }
        (_, HealthState::Unhealthy) => "is unhealthy".to_owned(),
        (_, HealthState::Degraded) => "is degraded, and still granted".to_owned(),
    };
    format!("{name} {state}{reason}")
}

fn describe_drain(name: &str, before: &Drain, now: &Drain) -> String {
    let by = now.mark().map(Mark::by_and_reason).unwrap_or_default();
    match (before, now) {
        (_, Drain::Active) => format!("{name} may be granted again"),
        (Drain::Draining(..) | Drain::Drained(_), Drain::Cordoned(_)) => {
            format!("{name} is no longer drained, but cordoned {by}")
        }
        (_, Drain::Cordoned(_)) => format!("{name} is cordoned {by}"),
        (Drain::Drained(_), Drain::Draining(..)) => format!("{name} was drained, but is held again"),
        (_, Drain::Draining(_, order)) => format!("{name} is being drained {by}{}", order.conditions()),
        (_, Drain::Drained(_)) => format!("{name} is drained: no allocation is left on it"),
    }
}

fn describe_via(name: &str, before: &Via, now: &Via) -> String {
    let reason = if now.why.is_empty() { String::new() } else { format!(" ({})", now.why) };
    match (before.api == now.api, now.moving) {
        (true, true) => {
            format!("{name} is being moved from {} to {} by {}{reason}", now.api, now.api.other(), now.by)
        }
        (true, false) => {
            format!("{name} stays with {}: its move was cancelled by {}{reason}", now.api, now.by)
        }
        (false, _) => format!("{name} is granted through {} now", now.api),
    }
}

impl Mark {
    /// The author and the reason: `by ada (fan)`.
    #[must_use]
    pub fn by_and_reason(&self) -> String {
        let reason = self.reason();
        if reason.is_empty() { format!("by {}", self.by) } else { format!("by {} ({reason})", self.by) }
    }
}

impl Order {
    /// Eviction and deadline, as a text to append; empty for a plain drain.
    #[must_use]
    pub fn conditions(&self) -> String {
        let mut text = if self.evict { "; its pods are evicted" } else { "" }.to_owned();
        if let Some(deadline) = self.deadline_wall_ms {
            text += &format!("; until {}", rfc3339_seconds(deadline));
            text += match self.at_deadline {
                AtDeadline::Wait => "",
                AtDeadline::Delete => ", then they are deleted",
                AtDeadline::GiveUp => ", then the drain is given up",
            };
        }
        text
    }
}

/// `namespace/pod/container`, as far as it is known.
fn describe_holder(allocation: &Allocation) -> String {
    let holder = &allocation.holder;
    if holder.is_unknown() {
        return "a pod that is not known yet".into();
    }
    let names = [&holder.namespace, &holder.pod, &holder.container];
    names.map(|name| name.as_deref().unwrap_or("?")).join("/")
}

/// `2 x nvidia.com/gpu of default/trainer-0/main`.
fn describe_devices(allocation: &Allocation) -> String {
    let devices = format!("{} x {}", allocation.devices.len(), allocation.resource);
    if allocation.holder.is_unknown() {
        devices
    } else {
        format!("{devices} of {}", describe_holder(allocation))
    }
}

fn describe_container_bypass(bypass: &ContainerBypass) -> String {
    let done = match bypass.outcome {
        BypassOutcome::Failed => {
            "can use GPUs that were not allocated to it, and the guard could not stop that"
        }
        BypassOutcome::Stripped => {
            "could use GPUs that were not allocated to it, and the guard restricted it"
        }
        BypassOutcome::Denied => {
            "was refused by the guard, since it could use GPUs that were not allocated to it"
        }
    };
    let why = bypass.why.as_ref().map_or_else(String::new, |why| format!(" ({why})"));
    format!(
        "container {}/{}/{} {done}: {}{why}",
        bypass.namespace, bypass.pod, bypass.container, bypass.detail
    )
}

fn describe_eviction(name: &str, eviction: &EvictionRecord) -> String {
    let outcome = match (&eviction.outcome, eviction.request.method) {
        (EvictionOutcome::Accepted, EvictionMethod::Evict) => "was evicted".to_owned(),
        (EvictionOutcome::Accepted, EvictionMethod::Delete) => "was deleted at the deadline".to_owned(),
        (EvictionOutcome::Gone, _) => "no longer exists".to_owned(),
        (EvictionOutcome::Budget(message), _) => format!("waits for its disruption budget: {message}"),
        (EvictionOutcome::Failed(message), _) => format!("could not be evicted: {message}"),
    };
    let pod = &eviction.request.pod;
    format!("{name} is being drained: pod {}/{} {outcome}", pod.namespace, pod.name)
}

fn describe_added(version: &PolicyVersion) -> String {
    let by = match (version.shipped, &version.origin.by) {
        (true, _) => "came with the daemon".to_owned(),
        (false, by) if by.is_empty() => "was uploaded".to_owned(),
        (false, by) => format!("was uploaded by {by}"),
    };
    format!("{} {} {by} ({} bytes)", version.label(), version.version, version.bytes)
}

fn describe_stack(stack: &Stack) -> String {
    let labels: Vec<_> = stack.entries.iter().map(StackEntry::label).collect();
    let entries = if labels.is_empty() { "the baseline alone".into() } else { labels.join(", ") };
    let reason = if stack.why.is_empty() { String::new() } else { format!(" ({})", stack.why) };
    format!("stack {} was activated by {}{reason}: {entries}", stack.revision, stack.by)
}
