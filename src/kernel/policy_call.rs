//! One call of a policy.

use super::ledger::Ledger;
use super::names::Digest;
use super::policy::Question;
use super::time::Now;
use std::sync::Arc;

/// One question to one policy.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The policy version.
    pub digest: &'a Digest,
    /// The entry's parameters, JSON.
    pub parameters: &'a str,
    /// The state of the node.
    pub node: &'a Arc<Ledger>,
    /// The time from which ages are computed; a policy has no clock.
    pub now: Now,
    /// The question.
    pub question: Question<'a>,
    /// Longest wall time of the call, milliseconds; the adapter has a constant limit of fuel.
    pub wall_ms_max: u64,
}
