//! Checks before a start: of a configuration file, and of this node.

pub(crate) mod config;
pub(crate) mod node;
