//! The configuration: files, flags, variables, changes while the daemon runs.

pub(crate) mod choice;
pub(crate) mod files;
pub(crate) mod nvidia_settings;
pub(crate) mod reload;
