//! Allocations: the devices that one container, or one request of a claim, holds, from the request to the history of
//! ended ones.

pub mod allocate;
pub mod allocation;
pub mod annotation;
pub mod bypass;
pub mod claim;
pub mod contested;
pub mod gpu_holders;
pub mod history;
pub mod pod_candidates;
pub mod prepare;
