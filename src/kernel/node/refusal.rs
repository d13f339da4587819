//! Every refusal of the kernel, in one closed list.

use crate::drain::marks::{MARKS_MAX, MARKS_TEXT_BYTES_MAX};
use crate::evidence::sighting::RunningSource;
use crate::grants::allocation::{EndReason, Holder};
use crate::ids::names::{AllocationId, DeviceId, Digest, GpuId, PartId, Resource};
use crate::policy::hooks::FaultKind;
use crate::sharing::via::WaitsFor;
use std::fmt;
use std::sync::Arc;

/// Why the kernel refused a command. Not an error of the daemon. The fields are the facts that the
/// message (`Display`) names.
#[allow(missing_docs)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No such device under this resource.
    UnknownDevice { resource: Resource, device: DeviceId },
    /// The device is of an older offer and not held: it is retiring.
    NotOffered { resource: Resource, device: DeviceId },
    /// Another resource holds the part; a reconcile pass may end that holding.
    Held { device: DeviceId, by: AllocationId, resource: Resource },
    /// The devices together take more than the part has.
    DoesNotFit { part: PartId, counter: &'static str, wanted: u64, left: u64 },
    /// The GPU is granted through the kubelet's other API, or is to be; in which state it is.
    OtherApi { gpu: GpuId, via: &'static str },
    /// An operator cordoned the GPU.
    Cordoned { gpu: GpuId, by: String, why: String },
    /// The GPU is unhealthy.
    Unhealthy { gpu: GpuId, reason: String },
    /// The GPU is no longer on this node.
    Vanished { gpu: GpuId },
    /// No device list strategy can work on this node, so a container would not get its GPU.
    NoDeviceStrategy { why: Arc<str> },
    /// Containers get their GPUs by CDI, and no specification names this part.
    NoCdiName { part: PartId },
    /// The device has a memory limit, and `enforce.memory` is `require` where no limit can be enforced.
    NotEnforced { part: PartId, why: Arc<str> },
    /// A policy denied the request.
    Denied { policy: String, reason: String },
    /// A policy failed, and its entry's `onFault` is `deny`.
    Faulted { policy: String, kind: FaultKind, detail: String },
    /// The state changed during the policy call, so that its answer no longer applies.
    Moved,
    /// The node has the maximum of live allocations.
    LedgerFull { limit: usize },
    /// The GPU cannot be moved to the kubelet's other API yet.
    CannotMoveYet { gpu: GpuId, waits_for: WaitsFor },
    /// The API of the GPU, or the order to move it, was changed since the caller read it.
    ViaChanged { gpu: GpuId },
    /// The GPU has the maximum of marks, or of text in them.
    TooManyMarks { gpu: GpuId },
    /// No GPU with this id.
    UnknownGpu { gpu: GpuId },
    /// The GPU is present but does not answer, so it cannot be known to work.
    NoAnswer { gpu: GpuId, error: String },
    /// The GPU did not vanish.
    StillThere { gpu: GpuId },
    /// The GPU vanished, but a pod still holds it.
    StillHeld { gpu: GpuId, by: AllocationId },
    /// The GPU vanished, or was last held, too recently for its ids to leave the kubelet's list.
    TooSoon { gpu: GpuId, wait_ms: u64 },
    /// No live allocation with this id.
    UnknownAllocation { id: AllocationId },
    /// The allocation has ended already.
    AlreadyEnded { id: AllocationId, reason: EndReason },
    /// A source shows the allocation's pod running.
    StillRunning { id: AllocationId, holder: Box<Holder>, running_sources: Vec<RunningSource> },
    /// The stack was changed since the caller read it.
    StackChanged { revision: u64 },
    /// The marks of the GPU were changed since the caller read them.
    MarksChanged { gpu: GpuId },
    /// The policy version has been signed, uploaded or activated since the caller read it.
    PolicyChanged { digest: Digest },
    /// The policy version is in the active stack.
    PolicyInUse { digest: Digest },
    /// The policy version is used by the shadow with this number.
    PolicyShadows { digest: Digest, shadow: u64 },
    /// No such version on this node.
    UnknownPolicy { digest: Digest },
    /// The version is built into the daemon and cannot be deleted.
    PolicyShipped { digest: Digest },
    /// No trusted key signed these policies of the stack (labels).
    Untrusted { policies: Vec<String> },
    /// The node has the maximum of policy versions.
    TooManyVersions { limit: usize },
    /// An offer breaks this rule.
    BadOffer { part: PartId, why: String },
}

impl Refusal {
    /// Whether a reconcile pass may change the answer: the holder may have ended meanwhile or, if the device is not
    /// granted to new pods, may be an init container of the requesting pod.
    #[must_use]
    pub fn reconcile_may_resolve(&self) -> bool {
        match self {
            Self::Held { .. }
            | Self::NotOffered { .. }
            | Self::DoesNotFit { .. }
            | Self::OtherApi { .. }
            | Self::Cordoned { .. }
            | Self::Unhealthy { .. }
            | Self::Vanished { .. }
            | Self::NoCdiName { .. } => true,
            Self::UnknownDevice { .. }
            | Self::NoDeviceStrategy { .. }
            | Self::NotEnforced { .. }
            | Self::Denied { .. }
            | Self::Faulted { .. }
            | Self::Moved
            | Self::LedgerFull { .. }
            | Self::CannotMoveYet { .. }
            | Self::ViaChanged { .. }
            | Self::TooManyMarks { .. }
            | Self::UnknownGpu { .. }
            | Self::NoAnswer { .. }
            | Self::StillThere { .. }
            | Self::StillHeld { .. }
            | Self::TooSoon { .. }
            | Self::UnknownAllocation { .. }
            | Self::AlreadyEnded { .. }
            | Self::StillRunning { .. }
            | Self::StackChanged { .. }
            | Self::MarksChanged { .. }
            | Self::PolicyChanged { .. }
            | Self::PolicyInUse { .. }
            | Self::PolicyShadows { .. }
            | Self::UnknownPolicy { .. }
            | Self::PolicyShipped { .. }
            | Self::Untrusted { .. }
            | Self::TooManyVersions { .. }
            | Self::BadOffer { .. } => false,
        }
    }

    /// Its keyword in the API and in metrics.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::UnknownDevice { .. } => "unknownDevice",
            Self::NotOffered { .. } => "notOffered",
            Self::Held { .. } => "held",
            Self::DoesNotFit { .. } => "doesNotFit",
            Self::OtherApi { .. } => "otherApi",
            Self::Cordoned { .. } => "cordoned",
            Self::Unhealthy { .. } => "unhealthy",
            Self::Vanished { .. } => "vanished",
            Self::NoDeviceStrategy { .. } => "noDeviceStrategy",
            Self::NoCdiName { .. } => "noCdiName",
            Self::NotEnforced { .. } => "notEnforced",
            Self::Denied { .. } => "denied",
            Self::Faulted { .. } => "faulted",
            Self::Moved => "moved",
            Self::LedgerFull { .. } => "ledgerFull",
            Self::CannotMoveYet { .. } => "cannotMoveYet",
            Self::ViaChanged { .. } => "viaChanged",
            Self::TooManyMarks { .. } => "tooManyMarks",
            Self::UnknownGpu { .. } => "unknownGpu",
            Self::NoAnswer { .. } => "noAnswer",
            Self::StillThere { .. } => "stillThere",
            Self::StillHeld { .. } => "stillHeld",
            Self::TooSoon { .. } => "tooSoon",
            Self::UnknownAllocation { .. } => "unknownAllocation",
            Self::AlreadyEnded { .. } => "alreadyEnded",
            Self::StillRunning { .. } => "stillRunning",
            Self::StackChanged { .. } => "stackChanged",
            Self::MarksChanged { .. } => "marksChanged",
            Self::PolicyChanged { .. } => "policyChanged",
            Self::PolicyInUse { .. } => "policyInUse",
            Self::PolicyShadows { .. } => "policyShadows",
            Self::UnknownPolicy { .. } => "unknownPolicy",
            Self::PolicyShipped { .. } => "policyShipped",
            Self::Untrusted { .. } => "untrusted",
            Self::TooManyVersions { .. } => "tooManyVersions",
            Self::BadOffer { .. } => "badOffer",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownDevice { resource, device } => {
                write!(f, "no device {device} under {resource}: it was never listed by this daemon")
            }
            Self::NotOffered { resource, device } => {
                write!(f, "device {device} is no longer offered under {resource}")
            }
            Self::Held { device, by, resource } => {
                write!(
                    f,
                    "{device} cannot be granted: allocation {by} under {resource} holds its GPU (see `berth allocation show {by}`)"
                )
            }
            Self::DoesNotFit { part, counter, wanted, left } => {
                write!(f, "{part} has {left} {counter} left, and {wanted} are requested")
            }
            Self::OtherApi { gpu, via } => write!(
                f,
                "nothing new is granted on GPU {gpu} through this API of the kubelet: its state is {via} (see \
                 `berth gpu via {gpu}`)"
            ),
            Self::Cordoned { gpu, by, why } => {
                write!(f, "GPU {gpu} is cordoned by {by}")?;
                if why.is_empty() { Ok(()) } else { write!(f, " ({why})") }
            }
            Self::Unhealthy { gpu, reason } => write!(f, "GPU {gpu} is unhealthy: {reason}"),
            Self::Vanished { gpu } => write!(f, "GPU {gpu} is no longer on this node"),
            Self::NoDeviceStrategy { why } => write!(f, "{why}"),
            Self::NoCdiName { part } => write!(f, "no CDI specification names {part} yet"),
            Self::NotEnforced { part, why } => {
                write!(
                    f,
                    "`enforce.memory` is `require`, and no memory limit can be enforced on {part}: {why}"
                )
            }
            Self::Denied { policy, reason } => write!(f, "policy {policy} denies: {reason}"),
            Self::Faulted { policy, kind, detail } => {
                write!(f, "policy {policy} failed and its onFault is deny: {detail} ({})", kind.as_str())
            }
            Self::Moved => write!(f, "the node's state changed during the policy call"),
            Self::LedgerFull { limit } => {
                write!(f, "the node has {limit} live allocations, the maximum")
            }
            Self::CannotMoveYet { gpu, waits_for } => {
                write!(f, "GPU {gpu} cannot be moved yet: {waits_for}")
            }
            Self::ViaChanged { gpu } => {
                write!(f, "the API of GPU {gpu} was changed since it was read: read it again and retry")
            }
            Self::TooManyMarks { gpu } => write!(
                f,
                "GPU {gpu} already has the maximum of {MARKS_MAX} marks (or of {MARKS_TEXT_BYTES_MAX} bytes of \
                 reasons): remove a mark first"
            ),
            Self::UnknownGpu { gpu } => write!(f, "no GPU {gpu} on this node"),
            Self::NoAnswer { gpu, error } => {
                let error = error.replace(char::is_control, " ");
                write!(f, "GPU {gpu} does not answer at present, so it cannot be marked healthy: {error}")
            }
            Self::StillThere { gpu } => {
                write!(f, "GPU {gpu} is on this node: only a vanished GPU can be forgotten")
            }
            Self::StillHeld { gpu, by } => {
                write!(f, "GPU {gpu} vanished, but allocation {by} still names it")
            }
            Self::TooSoon { gpu, wait_ms } => {
                write!(
                    f,
                    "GPU {gpu} vanished or was held less than {} s ago: its ids must stay listed that long",
                    wait_ms / 1000
                )
            }
            Self::UnknownAllocation { id } => write!(f, "there is no allocation {id}"),
            Self::AlreadyEnded { id, reason } => {
                write!(f, "allocation {id} has already ended ({})", reason.as_str())
            }
            Self::StillRunning { id, holder, running_sources } => {
                let shown: Vec<_> = running_sources.iter().map(ToString::to_string).collect();
                write!(f, "allocation {id} is still in use by {}: {}", pod(holder), shown.join("; "))
            }
            Self::StackChanged { revision } => {
                write!(f, "the stack is now at revision {revision}: read it again and retry")
            }
            Self::MarksChanged { gpu } => {
                write!(
                    f,
                    "the drain state of GPU {gpu} was changed since it was read: read it again and retry"
                )
            }
            Self::PolicyChanged { digest } => {
                write!(f, "policy {} has changed since it was read: read it again and retry", digest.short())
            }
            Self::PolicyInUse { digest } => {
                write!(
                    f,
                    "policy {} is in the active stack, or in the one to which that can be rolled back: activate another stack first",
                    digest.short()
                )
            }
            Self::PolicyShadows { digest, shadow } => {
                write!(f, "policy {} is used by shadow {shadow}: end the shadow first", digest.short())
            }
            Self::UnknownPolicy { digest } => {
                write!(f, "no policy with digest {digest} on this node")
            }
            Self::PolicyShipped { digest } => {
                write!(f, "policy {} is built into the daemon and cannot be deleted", digest.short())
            }
            Self::Untrusted { policies } => {
                let policies = policies.join(", ");
                write!(f, "not signed by a key that this node trusts: {policies}")
            }
            Self::TooManyVersions { limit } => {
                write!(f, "the node has {limit} policy versions, the maximum: delete one first")
            }
            Self::BadOffer { part, why } => write!(f, "{part} cannot be offered: {why}"),
        }
    }
}

/// A holder as far as it is known.
fn pod(holder: &Holder) -> String {
    let container = holder.container.as_ref().map_or_else(String::new, |c| format!(", container {c}"));
    match (&holder.namespace, &holder.pod, &holder.pod_uid) {
        (Some(namespace), Some(pod), _) => format!("pod {namespace}/{pod}{container}"),
        (_, _, Some(uid)) => format!("the pod with UID {uid}{container}"),
        _ => format!("a pod that is not known yet{container}"),
    }
}

impl std::error::Error for Refusal {}
