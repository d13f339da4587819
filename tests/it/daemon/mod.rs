//! The daemon as a process: starts, logs, disturbances.

pub(crate) mod disturbances;
pub(crate) mod log;
pub(crate) mod policies;
pub(crate) mod process;
pub(crate) mod reports;
pub(crate) mod signed;
pub(crate) mod start;
