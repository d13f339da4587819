//! What can be checked before a start: a configuration file, and this node.

pub(crate) mod config;
pub(crate) mod node;
