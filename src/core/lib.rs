//! The state of a running daemon, above the kernel: the single writer of the ledger ([`keeper`]), the
//! thread that calls the policies ([`admission`]), and the counters of both.

pub mod admission;
pub mod counters;
pub mod keeper;
pub mod metrics;
pub mod policy_transitions;
pub mod spans;
pub mod transition_log;
pub mod trust;
