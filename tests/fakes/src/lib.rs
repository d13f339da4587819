//! What tests, the demo and the harness share: clients of the daemon, and the daemon as a child process.

pub mod api;
pub mod plugin;
pub mod program;
pub mod serving;
