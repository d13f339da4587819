//! The API server: pods, evictions, labels.

pub(crate) mod evict;
pub(crate) mod evict_faults;
pub(crate) mod faults;
pub(crate) mod labels;
pub(crate) mod load;
pub(crate) mod pods_source;
mod rollouts;
