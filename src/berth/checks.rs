//! Checks before a start: of a configuration file, and of this node; and of CDI specifications.

pub(crate) mod cdi;
pub(crate) mod config;
pub(crate) mod node;
