//! Checks before a start: of a configuration file, of this node, and of CDI specifications; the conversion of NVIDIA's
//! file; and the dry run of a configuration's stack, which a reload makes, too.

pub mod cdi;
pub mod config;
mod dry_run;
pub mod node;
pub mod nvidia;

pub use dry_run::{Findings, SkippedChecks, dry_run, policy_settings, start_stack, test_stack};
