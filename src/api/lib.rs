//! The bodies of the REST API, one file per noun, with their conversions. Kernel types are not serializable.

mod access;
mod allocation;
mod comparison;
mod configuration;
mod decision;
mod drain;
mod event;
mod gpu;
mod health;
mod history;
mod node;
mod policy;
mod problem;
mod process;
mod shape;
mod stack;
mod trial;
mod values;
mod via;

pub use access::{Access, AccessRight};
pub use allocation::{
    Allocation, AllocationClaim, AllocationLimits, AllocationList, AllocationState, Decision, End, EndReason,
    EnforcedBy, GpuLimit, Holder, LimitState, Limits, PartUse, SharedUse,
};
pub use berth_kernel::ids::time::rfc3339;
pub use berth_kernel::policy::hooks::MODULE_BYTES_MAX;
pub use comparison::{Candidate, Comparison, Difference, Explanation, Replay, Shadow, ShadowList};
pub use configuration::{
    ConfigurationError, ConfigurationState, SettingChange, SettingEffect, SettingProblem,
};
pub use decision::{
    CallResult, DecisionCall, DecisionReading, DecisionRecord, DecisionRecordList, DecisionRequest,
    JournalState, Outcome,
};
pub use drain::{
    AtDeadline, Cordon, Drain, DrainHolder, DrainHolderState, DrainOrder, DrainPreview, DrainProgress,
    DrainState, Mark, MarkHealthy, MarkKind, PodOwner, deletion_command,
};
pub use event::{Event, EventHistory, EventKind};
pub use gpu::{
    Consumes, Device, DeviceState, Gpu, GpuList, GpuSummary, Health, HealthTurn, Link, LinkPath, Mig,
    OfferLine, Part, ResourceUse, TopHolder, UnidentifiedGpu,
};
pub use health::HealthState;
pub use history::{GpuHistory, GpuSample, PodHistory, PodSample};
pub use node::{
    Alive, BypassAction, Check, Counts, DeviceListStrategy, Dra, DriverRelease, Fleet, FleetStack, GpuLimits,
    Guard, Node, NotFree, NotFreeState, Ready, ReleaseOrder, ResourceState, StepState,
};
pub use policy::{Hook, Policy, PolicyDetail, PolicyList, parameters};
pub use problem::{Action, Kind, Operation, Problem};
pub use process::{
    Bypass, BypassList, BypassOutcome, BypassReason, ContainerBypass, Process, ProcessList, ProcessPod,
    ProcessSight, ProcessUse, ReachingPod, Right, SightState,
};
pub use shape::Shape;
pub use stack::{
    Activation, ActivationList, ChangeNote, FaultKind, Faults, FileStack, HookRecord, NewStack,
    NewStackEntry, OnFault, Permissions, Record, Rollback, Stack, StackChange, StackEntry, StackPreview,
    StackReset, StackSource, TrialOffer, TrialResource, gone,
};
pub use trial::{NewTrial, Trial, TrialCall, TrialOutcome, TrialRequest};
pub use via::{KubeletApi, Via, ViaOrder, ViaState};

/// The text, or `None` if it is empty.
#[must_use]
pub fn non_empty(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}
