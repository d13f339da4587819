//! Questions to policies, their answers, and the limits on both.

use crate::grants::allocation::Limits;
use crate::grants::claim::ClaimRequest;
use crate::hardware::gpu::Reading;
use crate::hardware::triage::TriageAnswer;
use crate::ids::names::{DeviceId, Resource};
use crate::sharing::offer::PartOffer;
use std::fmt;
use std::sync::Arc;

/// Largest module of a policy, bytes. The largest measured, Python's, has 18.4 MB; those of compiled languages have
/// less than 1 MB.
pub const MODULE_BYTES_MAX: usize = 32 << 20;
/// Most entries of a stack: at 60 us a call the median evaluation stays under 1 ms.
pub const STACK_ENTRIES_MAX: usize = 16;
/// Longest parameters of one entry, bytes of JSON: an entry is one record of at most 16 KiB, and
/// escaping can double a text's length.
pub const PARAMETERS_BYTES_MAX: usize = 6 * 1024;
/// Longest parameter schema of a policy, bytes of JSON, for the same reason.
pub const SCHEMA_BYTES_MAX: usize = 6 * 1024;
/// Most policy versions on a node.
pub const VERSIONS_MAX: usize = 256;
/// Longest stored reason of a policy's answer, bytes.
pub const REASON_BYTES_MAX: usize = 1024;
/// Most environment entries of one grant.
pub const ENVIRONMENT_MAX: usize = 16;
/// Longest environment value, bytes.
pub const ENVIRONMENT_VALUE_BYTES_MAX: usize = 1024;
/// Longest environment of one grant, bytes of all keys and values together. JSON at most doubles it, so
/// that its record stays under the 16 KiB that one write stores atomically.
pub const ENVIRONMENT_BYTES_MAX: usize = 6 * 1024;
/// Longest environment key, bytes.
pub const ENVIRONMENT_KEY_BYTES_MAX: usize = 64;

/// One hook of the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hook {
    /// Describes the policy.
    Describe,
    /// Decides the offer of each part.
    Offer,
    /// Chooses the preferred devices.
    Place,
    /// Allows or denies an Allocate.
    Admit,
    /// Judges what a reading means for a GPU's health.
    Triage,
}

impl Hook {
    /// The hook of this name.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let all = [Self::Describe, Self::Offer, Self::Place, Self::Admit, Self::Triage];
        all.into_iter().find(|hook| hook.as_str() == text)
    }

    /// Its name in the contract.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Describe => "describe",
            Self::Offer => "offer",
            Self::Place => "place",
            Self::Admit => "admit",
            Self::Triage => "triage",
        }
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A question to a policy.
#[derive(Clone, Copy, Debug)]
pub enum Question<'a> {
    /// Which offer does each part have?
    Offer,
    /// Which of the available devices are preferred?
    Place(&'a PlaceRequest),
    /// May these devices be granted?
    Admit(&'a AdmitRequest),
    /// What does this reading mean?
    Triage(&'a Reading),
}

impl Question<'_> {
    /// The hook that answers it.
    #[must_use]
    pub fn hook(&self) -> Hook {
        match self {
            Self::Offer => Hook::Offer,
            Self::Place(_) => Hook::Place,
            Self::Admit(_) => Hook::Admit,
            Self::Triage(_) => Hook::Triage,
        }
    }
}

/// The kubelet's GetPreferredAllocation for one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaceRequest {
    /// The resource.
    pub resource: Resource,
    /// Devices to choose from, including the required ones. Without duplicates.
    pub available: Vec<DeviceId>,
    /// Devices that the answer must contain.
    pub required: Vec<DeviceId>,
    /// Number of devices that the answer should contain.
    pub size: usize,
}

/// The kubelet's Allocate for one container, or one request of a claim that it wants prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdmitRequest {
    /// The resource.
    pub resource: Resource,
    /// The requested devices, at least one, sorted and without duplicates.
    pub devices: Vec<DeviceId>,
    /// The request of the claim; `None` for an Allocate, which does not name the pod that it is for.
    pub claim: Option<Arc<ClaimRequest>>,
}

/// A policy's answer. `pass` is `None` instead of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To [`Question::Offer`].
    Offer(OfferAnswer),
    /// To [`Question::Place`].
    Place(Placement),
    /// To [`Question::Admit`]: allowed on these terms.
    Allow(Terms),
    /// To [`Question::Admit`]: denied for this reason.
    Deny(String),
    /// To [`Question::Triage`].
    Triage(TriageAnswer),
}

/// Offers for some parts; for other parts the answer is `pass`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfferAnswer {
    /// The offers.
    pub parts: Vec<PartOffer>,
    /// Seconds until the next call even if nothing changes.
    pub again_after_s: Option<u32>,
}

/// A choice of devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The devices.
    pub devices: Vec<DeviceId>,
    /// Why these were chosen.
    pub reason: String,
}

/// The terms of a grant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Environment for the container.
    pub environment: Vec<(String, String)>,
    /// Limits that are stated to the container.
    pub limits: Limits,
    /// Why.
    pub reason: String,
}

/// The failure of a policy call. It affects pods only through the entry's `onFault` rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Its kind.
    pub kind: FaultKind,
    /// The guest's own message if it exited with one, otherwise the host's; then the guest's last log
    /// lines, if any.
    pub detail: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            // The detail begins with the kind.
            FaultKind::Parameters => f.write_str(&self.detail),
            kind => write!(f, "{} ({})", self.detail, kind.as_str()),
        }
    }
}

/// The kinds of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FaultKind {
    /// Used up its fuel.
    Fuel,
    /// Exceeded the limit of wall time.
    Time,
    /// Trapped because it exceeded its limit of memory, tables or stack.
    Memory,
    /// Trapped for any other reason, such as a panic.
    Trap,
    /// Exited with a message about its parameters.
    Parameters,
    /// The answer is malformed, or names what is not offered, free or permitted.
    Answer,
    /// Could not be called: an unknown version or a broken artifact.
    Missing,
}

impl FaultKind {
    /// The kind of this name.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let all =
            [Self::Fuel, Self::Time, Self::Memory, Self::Trap, Self::Parameters, Self::Answer, Self::Missing];
        all.into_iter().find(|kind| kind.as_str() == text)
    }

    /// Its name in the API and in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fuel => "fuel",
            Self::Time => "time",
            Self::Memory => "memory",
            Self::Trap => "trap",
            Self::Parameters => "parameters",
            Self::Answer => "answer",
            Self::Missing => "missing",
        }
    }

    /// Whether the policy caused the fault: consecutive faults of this kind suspend its entry. `Time` may be
    /// caused by a slow machine.
    #[must_use]
    pub fn is_policy_fault(self) -> bool {
        matches!(self, Self::Fuel | Self::Memory | Self::Trap | Self::Parameters | Self::Answer)
    }
}
