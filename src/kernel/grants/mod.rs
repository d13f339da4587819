//! Allocations: the devices that one container holds, from the request to the history of ended ones.

pub mod allocate;
pub mod allocation;
pub mod annotation;
pub mod bypass;
pub mod contested;
pub mod gpu_holders;
pub mod history;
pub mod pod_candidates;
