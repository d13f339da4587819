//! Cordons and drains of single GPUs, and the pods to evict from them.

pub mod eviction;
pub mod eviction_plan;
pub mod marks;
pub mod progress;
