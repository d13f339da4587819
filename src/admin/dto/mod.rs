//! What goes over the wire: one file a noun. Wire types end here; the kernel's types are not
//! serializable.

mod allocation;
mod gpu;
mod node;
mod policy;
mod stack;
mod time;

pub use allocation::{Allocation, AllocationList, AllocationState, Decision, End, Holder, Limits};
pub use gpu::{
    Consumes, Cordon, Device, DeviceState, Drain, Gpu, GpuList, GpuSummary, Health, Link, Mig, OfferLine,
    Part, ResourceUse,
};
pub use node::{Alive, Check, Counts, Node, Ready, ResourceState, StepState};
pub use policy::{Policy, PolicyDetail, PolicyList};
pub use stack::{
    Faults, FileStack, NewStack, NewStackEntry, OnFault, Permissions, Record, Stack, StackEntry,
};
pub(super) use time::rfc3339;
