//! Jobs of the policy thread, with their results.

use crate::keeper::{Applied, CommandError, CommandResult, Snapshot};
use crate::stack::Baseline;
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::grants::prepare::ClaimToPrepare;
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::ids::names::DeviceId;
use berth_kernel::node::change::Change;
use berth_kernel::node::command::{Attempt, NewStack};
use berth_kernel::node::ports::InstallError;
use berth_kernel::node::rules::Rules;
use berth_kernel::policy::decider::Decider;
use berth_kernel::policy::hooks::{AdmitRequest, PlaceRequest, Placement};
use berth_kernel::policy::stack::{Stack, StackEntry};
use std::sync::Arc;
use tokio::sync::oneshot;

/// Jobs that the kubelet waits for.
pub(crate) enum KubeletJob {
    Allocate {
        request: AdmitRequest,
        attempt: Attempt,
        reply: oneshot::Sender<Result<Granted, CommandError>>,
    },
    /// The requests' answers are replaced by those of the stack.
    Prepare {
        claim: ClaimToPrepare,
        reply: oneshot::Sender<Result<Prepared, CommandError>>,
    },
    Place {
        request: PlaceRequest,
        reply: oneshot::Sender<(Placement, Decider)>,
    },
}

/// All other jobs.
pub(crate) enum OtherJob {
    Triage(Reading),
    Offer {
        reply: oneshot::Sender<CommandResult>,
    },
    /// See [`KernelHandle::order`](crate::KernelHandle::order).
    Order {
        request: PlaceRequest,
        reply: oneshot::Sender<Vec<DeviceId>>,
    },
    Activate {
        stack: NewStack,
        expected: Option<u64>,
        reply: oneshot::Sender<Result<Snapshot, ActivateError>>,
    },
    Reconfigure {
        new: Box<Reconfiguration>,
        reply: oneshot::Sender<Result<Snapshot, ActivateError>>,
    },
    Unsuspend {
        index: usize,
        revision: u64,
        reply: oneshot::Sender<Result<bool, CommandError>>,
    },
}

/// New settings of a running core. The devices that are held stay listed until they are free (I10), as after a start
/// with these settings.
#[derive(Clone, Debug)]
pub struct Reconfiguration {
    /// The kernel's rules.
    pub rules: Rules,
    /// The answers if all policies pass.
    pub baseline: Baseline,
    /// The stack of the configuration file.
    pub file_stack: FileStack,
    /// The stack that replaces the active one; `None`: the active one stays.
    pub stack: Option<NewStack>,
    /// The revision of the active stack for which the caller decided this; at another one nothing is changed.
    pub revision: u64,
}

/// The stack of the configuration file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileStack {
    /// Its entries with resolved versions; `berth policy reset` activates them.
    pub entries: Vec<StackEntry>,
    /// Why it cannot be used, if so.
    pub error: Option<String>,
}

impl FileStack {
    /// Whether another stack than this one is active because the API or the fleet decides. A file without a stack leaves the
    /// choice to them.
    #[must_use]
    pub fn is_overridden_by(&self, active: &Stack) -> bool {
        !active.is_of_file() && (!self.entries.is_empty() || self.error.is_some())
    }
}

/// A grant, and the ledger that holds it.
#[derive(Clone, Debug)]
pub struct Granted {
    /// The allocation.
    pub allocation: Allocation,
    /// The ledger after the grant.
    pub snapshot: Snapshot,
}

impl Granted {
    /// The grant among the changes of an Allocate that was applied.
    pub(crate) fn of(applied: Applied) -> Option<Self> {
        let allocation = applied.entry.changes.iter().find_map(|change| match change {
            Change::Granted(allocation) => Some(allocation.clone()),
            _ => None,
        })?;
        Some(Self { allocation, snapshot: applied.snapshot })
    }
}

/// The allocations of a claim, and the ledger that holds them.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The allocations, one for each request.
    pub allocations: Vec<Arc<Allocation>>,
    /// The ledger after the command.
    pub snapshot: Snapshot,
}

impl Prepared {
    /// What a claim holds after it was prepared.
    pub(crate) fn of(applied: Applied, claim_uid: &str) -> Self {
        let live = applied.snapshot.live.values().filter(|allocation| allocation.is_of_claim(claim_uid));
        Self { allocations: live.cloned().collect(), snapshot: applied.snapshot }
    }
}

/// Error of an activation. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ActivateError {
    /// One of its policies failed on this node.
    #[error("policy {policy} fails on this node, so the stack was not activated: {fault}")]
    Fails {
        /// The policy's label.
        policy: String,
        /// The fault.
        fault: String,
        /// Whether the machine may have caused the fault rather than the policy, so that a retry may succeed.
        passing: bool,
    },
    /// One of its policies cannot be made callable.
    #[error("{0}; the stack was not activated")]
    Unprepared(Unprepared),
    /// The stack was that of the configuration file, which was read again meanwhile and has another one now.
    #[error("the configuration file was read again meanwhile, and it has another stack now")]
    FileChanged,
    /// The keeper refused the activation, or failed.
    #[error("{0}")]
    Command(CommandError),
}

impl ActivateError {
    /// Whether a retry may succeed: the machine was slow, or the store failed.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Fails { passing, .. } => *passing,
            Self::Unprepared(error) => error.is_passing(),
            Self::FileChanged => true,
            Self::Command(error) => {
                matches!(error, CommandError::Store(_) | CommandError::Busy | CommandError::Late(_))
            }
        }
    }
}

/// Error of a policy that cannot be made callable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("policy {policy} cannot be compiled or loaded on this node: {error}")]
pub struct Unprepared {
    /// The policy's label.
    pub policy: String,
    /// The cause.
    pub error: InstallError,
}

impl Unprepared {
    /// Whether a retry may succeed: the machine is busy or lacks a resource.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        matches!(self.error, InstallError::Busy | InstallError::Failed { .. })
    }
}
