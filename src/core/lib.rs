//! The state of a running daemon, above the kernel: the one writer of the ledger ([`keeper`]), the
//! thread that asks the policies ([`admission`]), and what both count.

pub mod admission;
pub mod figures;
pub mod keeper;
pub mod metrics;
pub mod policy_transitions;
pub mod spans;
pub mod transition_log;
pub mod trust;
