//! Shared by tests, the demo and the harness: clients of the daemon, and the daemon as a child process.

pub mod api;
pub mod plugin;
pub mod program;
pub mod serving;
