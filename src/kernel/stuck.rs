//! Why allocations of finished pods cannot end at present: a required source cannot be read, or the sources
//! contradict each other. An operator is warned of it, since the GPUs of such pods stay allocated.

use super::time::Now;
use std::sync::Arc;

/// Why the kubelet's sources cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceError {
    /// The source and its error.
    pub reason: String,
    /// Since when, both clocks.
    pub since: Now,
}

/// Evidence without which allocations cannot end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// Since when, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// The missing evidence, and why it is missing.
    pub cause: Arc<str>,
    /// Number of live allocations that would not end if their pods did.
    pub allocations: usize,
}

impl Stuck {
    /// One sentence for people; `since` is the formatted time.
    #[must_use]
    pub fn describe(&self, since: &str) -> String {
        let Self { cause, allocations, .. } = self;
        let count = if *allocations == 1 { "1 allocation" } else { &format!("{allocations} allocations") };
        format!("since {since}: {cause}; {count} cannot end, so the GPUs of finished pods stay allocated")
    }
}
