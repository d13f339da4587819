//! The shipped policies' crates, called as the daemon calls their components.

use berth_kernel::policy::hooks::Answer;
use berth_policy_sdk::testing::{Random, logged};
use berth_policy_sdk::{Context, Hooks, Policy, entry};

use super::questions::{self, Question};
use super::words::{Words, triage, verdict};

/// A policy's crate.
pub(crate) struct Native {
    pub(crate) name: &'static str,
    pub(crate) hooks: fn() -> Hooks,
    pub(crate) ask: fn(&Context, &Question, &Words) -> Option<Answer>,
    pub(crate) parameters: fn(&mut Random) -> String,
}

/// All that ship.
pub(crate) static NATIVE: [Native; 9] = [
    native::<berth_policy_exclusive::Exclusive>("exclusive", questions::exclusive),
    native::<berth_policy_timeslice::Timeslice>("timeslice", questions::timeslice),
    native::<berth_policy_mixed::Mixed>("mixed", questions::mixed),
    native::<berth_policy_binpack::Binpack>("binpack", questions::resources),
    native::<berth_policy_spread::Spread>("spread", questions::spread),
    native::<berth_policy_topology::Topology>("topology", questions::topology),
    native::<berth_policy_memory::Memory>("memory", questions::memory),
    native::<berth_policy_quota::Quota>("quota", questions::quota),
    native::<berth_policy_triage_xid::TriageXid>("triage-xid", questions::triage_xid),
];

const fn native<P: Policy>(name: &'static str, parameters: fn(&mut Random) -> String) -> Native {
    Native { name, hooks: || P::describe().hooks, ask: ask::<P>, parameters }
}

fn ask<P: Policy>(context: &Context, question: &Question, words: &Words) -> Option<Answer> {
    // What is logged is for the daemon's log.
    let (answer, _) = logged(|| match question {
        Question::Offer => entry::offer::<P>(context).map(|answer| words.offer(&answer)),
        Question::Place(request) => {
            entry::place::<P>(context, request).map(|answer| words.placement(&answer))
        }
        Question::Admit(request) => entry::admit::<P>(context, request).map(verdict),
        Question::Triage(reading) => entry::triage::<P>(context, reading).map(triage),
    });
    answer
}
