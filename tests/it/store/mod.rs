//! The store on disk, and what is recorded when disk or process fail.

pub(crate) mod contract;
pub(crate) mod crash;
pub(crate) mod disk_full;
pub(crate) mod simulation;
pub(crate) mod size;
pub(crate) mod sled_store;
pub(crate) mod state;
