//! The bodies of the REST API, one file per noun, with their conversions. Kernel types are not serializable.

mod action;
mod activation;
mod allocation;
mod decision;
mod drain;
mod event;
mod gpu;
mod node;
mod policy;
mod problem;
mod process;
mod shape;
mod stack;
mod text;
mod trial;
mod tried;
mod values;

pub use action::{Action, Operation};
pub use activation::gone;
pub use activation::{Activation, ActivationList, Rollback, Word};
pub use allocation::{
    Allocation, AllocationLimits, AllocationList, AllocationState, Decision, End, EndReason, EnforcedBy,
    Holder, Limits, PartUse, SharedUse,
};
pub use berth_kernel::date::rfc3339;
pub use berth_kernel::policy::MODULE_BYTES_MAX;
pub use decision::{
    CallResult, DecisionCall, DecisionReading, DecisionRecord, DecisionRecordList, DecisionRequest,
    JournalState, Outcome, parameters,
};
pub use drain::{
    AtDeadline, Cordon, Drain, DrainHolder, DrainHolderState, DrainOrder, DrainProgress, DrainState, Mark,
    MarkHealthy, MarkKind,
};
pub use event::{Event, EventKind};
pub use gpu::{
    Consumes, Device, DeviceState, Gpu, GpuList, GpuSummary, Health, HealthState, HealthTurn, Link, LinkPath,
    Mig, OfferLine, Part, ResourceUse,
};
pub use node::{Alive, Check, Counts, Node, Ready, ResourceState, StepState};
pub use policy::{Hook, Policy, PolicyDetail, PolicyList};
pub use problem::{Kind, Problem};
pub use process::{
    Bypass, BypassList, BypassReason, Process, ProcessList, ProcessPod, ProcessSight, ProcessUse,
    ReachingPod, Right, SightState,
};
pub use shape::Shape;
pub use stack::{
    FaultKind, Faults, FileStack, HookRecord, NewStack, NewStackEntry, OnFault, Permissions, Record, Stack,
    StackEntry, StackSource,
};
pub use trial::{Candidate, Comparison, Difference, Explanation, Replay, Shadow, ShadowList};
pub use tried::{NewTrial, Trial, TrialCall, TrialOffer, TrialOutcome, TrialRequest, TrialResource};
