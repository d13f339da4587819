//! What is asked of policies, what they answer, and what they may not.

use super::allocation::Limits;
use super::gpu::Reading;
use super::ledger::Ledger;
use super::names::{DeviceId, Digest, Resource};
use super::offer::PartOffer;
use super::time::Now;
use std::fmt;
use std::sync::Arc;

/// Most entries of a stack: at 60 us a call the median walk stays under 1 ms.
pub const STACK_ENTRIES_MAX: usize = 16;
/// Longest parameters of one entry, bytes of JSON: an entry is one record of at most 16 KiB, and
/// escaping can double a text.
pub const PARAMETERS_BYTES_MAX: usize = 6 * 1024;
/// Longest parameter schema of a policy, bytes of JSON, for the same reason.
pub const SCHEMA_BYTES_MAX: usize = 6 * 1024;
/// Most versions of policies kept on a node.
pub const VERSIONS_MAX: usize = 256;
/// Longest reason that is kept of a policy, bytes.
pub const REASON_BYTES_MAX: usize = 1024;
/// Most environment entries of one grant.
pub const ENVIRONMENT_MAX: usize = 16;
/// Longest environment value, bytes.
pub const ENVIRONMENT_VALUE_BYTES_MAX: usize = 1024;
/// Longest environment of one grant, bytes of all keys and values together: as JSON at most twice
/// that, so that its record stays under the 16 KiB that one write keeps safe.
pub const ENVIRONMENT_BYTES_MAX: usize = 6 * 1024;
/// Longest environment key, bytes.
pub const ENVIRONMENT_KEY_BYTES_MAX: usize = 64;

/// One hook of the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hook {
    /// Says what the policy is.
    Describe,
    /// What each part is offered as.
    Offer,
    /// Which devices to prefer.
    Place,
    /// Whether a request may have its devices.
    Admit,
    /// What a reading means for a GPU's health.
    Triage,
}

impl Hook {
    /// The hook of this name.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let all = [Self::Describe, Self::Offer, Self::Place, Self::Admit, Self::Triage];
        all.into_iter().find(|hook| hook.as_str() == text)
    }

    /// As the contract writes it.
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

/// One version of a policy that this node knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyVersion {
    /// By its own word, a DNS label.
    pub name: String,
    /// By its own word, a semantic version.
    pub version: String,
    /// By its own word, one sentence.
    pub summary: String,
    /// Hooks that it wants to be asked.
    pub hooks: Vec<Hook>,
    /// JSON schema of its parameters.
    pub parameters_schema: String,
    /// sha256 of the component's bytes.
    pub digest: Digest,
    /// sha256 of the compiled artifact of this machine; a file that differs is never loaded. Of a
    /// version that was not compiled here yet, that of the component.
    pub artifact: Digest,
    /// Size of the component in bytes.
    pub bytes: u64,
    /// Whether it came with the daemon.
    pub shipped: bool,
    /// When it was first seen, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// How it came here.
    pub origin: super::trust::Origin,
}

impl PolicyVersion {
    /// `name@` and the first twelve digits of the digest.
    #[must_use]
    pub fn label(&self) -> String {
        format!("{}@{}", self.name, self.digest.short())
    }
}

/// One question to one policy.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Which version is asked.
    pub digest: &'a Digest,
    /// The entry's parameters, JSON.
    pub parameters: &'a str,
    /// The node as it stands.
    pub node: &'a Arc<Ledger>,
    /// For ages; a policy sees no clock.
    pub now: Now,
    /// What is asked.
    pub question: Question<'a>,
    /// Wall time that the call may take, milliseconds; the fuel is the adapter's constant.
    pub wall_ms_max: u64,
}

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub enum Question<'a> {
    /// What is each part offered as?
    Offer,
    /// Which of the available devices?
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
    /// Devices to choose from, the required ones among them. Each once.
    pub available: Vec<DeviceId>,
    /// Devices that the answer must hold.
    pub required: Vec<DeviceId>,
    /// How many devices the answer should hold.
    pub size: usize,
}

/// The kubelet's Allocate for one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdmitRequest {
    /// The resource.
    pub resource: Resource,
    /// The devices asked for, sorted, each once, at least one.
    pub devices: Vec<DeviceId>,
}

/// A policy's answer. `None` in place of an answer is `pass`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// To [`Question::Offer`].
    Offer(OfferAnswer),
    /// To [`Question::Place`].
    Place(Placement),
    /// To [`Question::Admit`]: yes, on these terms.
    Allow(Terms),
    /// To [`Question::Admit`]: no, and why.
    Deny(String),
    /// To [`Question::Triage`].
    Triage(TriageAnswer),
}

/// Offers for some parts; a part not named is passed on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfferAnswer {
    /// By part.
    pub parts: Vec<PartOffer>,
    /// Ask again after so many seconds even if nothing changes.
    pub again_after_s: Option<u32>,
}

/// Devices chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The devices.
    pub devices: Vec<DeviceId>,
    /// Why these.
    pub reason: String,
}

/// The terms of a grant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Environment for the container.
    pub environment: Vec<(String, String)>,
    /// What it is told it may use.
    pub limits: Limits,
    /// Why.
    pub reason: String,
}

/// What a reading means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TriageAnswer {
    /// How bad.
    pub severity: Severity,
    /// Why.
    pub reason: String,
    /// Seconds until the GPU is looked at again; `None`: only an operator's word heals.
    pub again_after_s: Option<u32>,
}

/// How bad a reading is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// No matter of the GPU.
    Ignore,
    /// Still granted, but shown.
    Degraded,
    /// Nothing new is granted.
    Unhealthy,
}

impl Severity {
    /// The severity of this name.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Ignore, Self::Degraded, Self::Unhealthy].into_iter().find(|severity| severity.as_str() == text)
    }

    /// As the API and the contract write it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ignore => "ignore",
            Self::Degraded => "degraded",
            Self::Unhealthy => "unhealthy",
        }
    }
}

/// What went wrong in a policy call. Faults never reach a pod as anything but the entry's
/// `onFault` rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Which kind.
    pub kind: FaultKind,
    /// What a reader should see first, first: the guest's own sentence where it ended itself with
    /// one, else the host's words; then the guest's last log lines where it left any.
    pub detail: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            // Its words begin with that one.
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
    /// Ran into the wall-clock backstop.
    Time,
    /// Asked for more memory, table or stack than it may have, and trapped.
    Memory,
    /// Trapped for any other reason, a panic among them.
    Trap,
    /// Ended itself with a word about its parameters.
    Parameters,
    /// Answered something outside what was offered, free, permitted or well formed.
    Answer,
    /// Could not be called at all: no such version, a broken artifact.
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

    /// As the API and metrics write it.
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

    /// Whether the policy itself is to blame: such faults in a row suspend its entry. A slow
    /// machine is not its fault.
    #[must_use]
    pub fn counts(self) -> bool {
        matches!(self, Self::Fuel | Self::Memory | Self::Trap | Self::Parameters | Self::Answer)
    }
}
