//! The kernel: the state of a node's GPUs and the rules that every change obeys.
//!
//! Pure: the standard library only, no I/O, no clock, no logging, no wire types. In reading order:
//!
//! - [`names`], [`pci`], [`time`], [`gpu`], [`gpu_selector`]: identifiers, clocks and hardware
//! - [`offer`], [`allocation`], [`policy`], [`trust`], [`stack`], [`drain`], [`health`], [`judgement`], [`breaker`]:
//!   the types of the rules
//! - [`process`], [`attribution`], [`part_use`]: processes on the GPUs, their allocations and their usage
//! - [`gpu_holders`], [`capacity`]: who holds each GPU, and why devices are not free
//! - [`part_state`], [`ledger`], [`history`]: the state; [`change`], [`record`], [`restore`]: how it
//!   changes, is stored and is read back
//! - [`command`], [`revision`], [`decide`], [`refusal`]: commands, their conditions and their outcomes; the longer rules are
//!   in [`allocate`], [`offering`], [`scan`], [`reconcile`], [`tick`] and `policy_versions`, their settings in [`rules`]
//! - [`decision`], [`compare`], [`describe`]: policy decisions, their comparison with another policy's
//!   answers, and both as text
//! - [`evict`]: pods to evict from a drained GPU; [`running`]: sources that show a pod running
//! - [`listing`], [`placement`], [`pods`]: device lists for the kubelet, preferred devices, and the node's pods

pub mod allocate;
pub mod allocation;
pub mod attribution;
pub mod breaker;
pub mod capacity;
pub mod change;
pub mod command;
pub mod compare;
pub mod contested;
pub mod date;
pub mod decide;
pub mod decider;
pub mod decision;
pub mod describe;
pub mod device_access;
pub mod device_nodes;
pub mod drain;
pub mod drain_progress;
pub mod evict;
pub mod eviction;
pub mod gpu;
pub mod gpu_holders;
pub mod gpu_selector;
pub mod health;
pub mod history;
pub mod judgement;
pub mod ledger;
pub mod listing;
pub mod mig;
pub mod names;
pub mod offer;
pub mod offering;
pub mod part_state;
pub mod part_use;
pub mod pci;
pub mod placement;
pub mod pod_candidates;
pub mod pods;
pub mod policy;
pub mod policy_call;
mod policy_versions;
pub mod ports;
pub mod process;
pub mod process_scan;
pub mod reconcile;
pub mod record;
pub mod refusal;
pub mod reserved_environment;
pub mod restore;
pub mod revision;
pub mod rules;
pub mod running;
pub mod scan;
pub mod sighting;
pub mod stack;
pub mod steps;
pub mod stuck;
pub mod tick;
pub mod time;
pub mod transitions;
pub mod trust;
pub mod trust_check;

#[cfg(test)]
mod histories;
#[cfg(test)]
mod invariants;
#[cfg(test)]
mod test_node;

// Other crates compile `test_node` for their tests, by this crate's name.
#[cfg(test)]
extern crate self as berth_kernel;
