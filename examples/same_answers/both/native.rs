//! The shipped policies' crates, called as the daemon calls their components, and their answers in the
//! kernel's words.

use berth::kernel::allocation::Limits;
use berth::kernel::names::{DeviceId, PartId, Resource};
use berth::kernel::offer::{Consumes, OfferLine, PartOffer};
use berth::kernel::policy::{Answer, OfferAnswer, Placement, Severity, Terms, TriageAnswer};
use berth_policy_sdk::testing::{Random, logged};
use berth_policy_sdk::{self as sdk, Context, Hooks, Policy, entry};

use super::questions::{self, Question};

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
        Question::Place(request) => entry::place::<P>(context, request).map(|answer| words.placement(answer)),
        Question::Admit(request) => entry::admit::<P>(context, request).map(verdict),
        Question::Triage(reading) => entry::triage::<P>(context, reading).map(triage),
    });
    answer
}

/// What the indices of a node stand for.
pub(crate) struct Words {
    parts: Vec<PartId>,
    devices: Vec<u32>,
    /// By device its number on its part; none for one that is all of it.
    pub(crate) shares: Vec<Option<u32>>,
}

impl Words {
    pub(crate) fn of(node: &sdk::Node) -> Self {
        let id = |part: &sdk::Part| PartId::parse(&part.id).expect("an id such as the daemon has");
        let share = |(n, device): (u32, &sdk::Device)| (device.consumes != sdk::Consumes::Whole).then_some(n);
        Self {
            parts: node.parts.iter().map(id).collect(),
            devices: node.devices.iter().map(|device| device.part).collect(),
            shares: (0..).zip(&node.devices).map(share).collect(),
        }
    }

    fn part(&self, index: u32) -> PartId {
        self.parts[index as usize].clone()
    }

    fn offer(&self, answer: &sdk::OfferAnswer) -> Answer {
        let part = |offer: &sdk::PartOffer| PartOffer {
            part: self.part(offer.part),
            lines: offer.lines.iter().map(line).collect(),
        };
        Answer::Offer(OfferAnswer {
            parts: answer.parts.iter().map(part).collect(),
            again_after_s: answer.again_after_seconds,
        })
    }

    fn placement(&self, placement: sdk::Placement) -> Answer {
        let id = |index: &u32| DeviceId {
            part: self.part(self.devices[*index as usize]),
            share: self.shares[*index as usize],
        };
        Answer::Place(Placement {
            devices: placement.devices.iter().map(id).collect(),
            reason: placement.reason,
        })
    }
}

fn line(line: &sdk::OfferLine) -> OfferLine {
    OfferLine {
        resource: Resource::parse(&line.resource).expect("a resource name"),
        count: line.count,
        consumes: match line.consumes {
            sdk::Consumes::Whole => Consumes::Whole,
            sdk::Consumes::Slice(slice) => {
                Consumes::Slice { memory_mib: slice.memory_mib, compute_percent: slice.compute_percent }
            }
        },
    }
}

fn verdict(verdict: sdk::Verdict) -> Answer {
    match verdict {
        sdk::Verdict::Deny(why) => Answer::Deny(why),
        sdk::Verdict::Allow(terms) => Answer::Allow(Terms {
            environment: terms.environment.into_iter().map(|entry| (entry.key, entry.value)).collect(),
            limits: Limits {
                memory_mib: terms.limits.memory_mib,
                compute_percent: terms.limits.compute_percent,
            },
            reason: terms.reason,
        }),
    }
}

fn triage(answer: sdk::TriageAnswer) -> Answer {
    Answer::Triage(TriageAnswer {
        severity: match answer.severity {
            sdk::Severity::Ignore => Severity::Ignore,
            sdk::Severity::Degraded => Severity::Degraded,
            sdk::Severity::Unhealthy => Severity::Unhealthy,
        },
        reason: answer.reason,
        again_after_s: answer.again_after_seconds,
    })
}
