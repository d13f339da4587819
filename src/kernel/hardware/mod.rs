//! The GPUs of the node: what they are, which processes use them, and whether they work.

pub mod device_access;
pub mod device_nodes;
pub mod gpu;
pub mod gpu_selector;
pub mod health;
pub mod judgement;
pub mod mig;
pub mod process;
pub mod triage;
