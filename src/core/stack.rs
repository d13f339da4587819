//! The stack: evaluated entry by entry, with statistics of its policies' calls, and tried before it is activated.

mod baseline;
mod call_counters;
mod call_recorder;
mod call_stats;
mod dry_run;
pub(crate) mod evaluate;
pub(crate) mod fault_log;
mod faults;
mod offers;
pub(crate) mod policy_stats;
#[cfg(test)]
mod tests;

pub use baseline::Baseline;
pub use call_counters::{CallCounters, PolicyCounters, VERSIONS_COUNTED_MAX};
pub use call_recorder::{CallRecorder, RecordedCall};
pub use call_stats::{CallStats, LATENCY_BOUNDS_US, Latencies};
pub use dry_run::{DryRun, TIME_FACTOR};
pub use evaluate::{CALL_MS_MAX, Evaluation, STACK_TIME_MAX};
pub use faults::{EntryStats, FAULTS_TO_SUSPEND, Faults, PolicyStatus, PolicyStatuses};
pub use offers::{OfferNotes, Offers};
