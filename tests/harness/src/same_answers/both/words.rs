//! Answers of the policies' crates, as types of the kernel.

use berth_kernel::grants::allocation::Limits;
use berth_kernel::hardware::triage::{Severity, TriageAnswer};
use berth_kernel::ids::names::{DeviceId, PartId, Resource};
use berth_kernel::policy::hooks::{Answer, OfferAnswer, Placement, Terms};
use berth_kernel::sharing::offer::{Consumes, OfferLine, PartOffer};
use berth_policy_sdk as sdk;

/// The objects that the indices of a node refer to.
pub struct Words {
    /// The parts, by their index in a question.
    pub parts: Vec<PartId>,
    /// The devices, by their index in a question.
    pub devices: Vec<DeviceId>,
}

impl Words {
    /// Of a node without other names: every device that is not a whole part has its index as its
    /// number.
    #[must_use]
    pub fn of(node: &sdk::Node) -> Self {
        let id = |part: &sdk::Part| PartId::parse(&part.id).expect("an id such as the daemon has");
        let parts: Vec<_> = node.parts.iter().map(id).collect();
        let device = |(n, device): (u32, &sdk::Device)| DeviceId {
            part: parts[device.part as usize].clone(),
            share: (device.consumes != sdk::Consumes::Whole).then_some(n),
        };
        let devices = (0..).zip(&node.devices).map(device).collect();
        Self { parts, devices }
    }

    /// For each device its number on its part; none for a whole device.
    #[must_use]
    pub fn shares(&self) -> Vec<Option<u32>> {
        self.devices.iter().map(|device| device.share).collect()
    }

    /// The answer to `offer`, in the kernel's types.
    #[must_use]
    pub fn offer(&self, answer: &sdk::OfferAnswer) -> Answer {
        let part = |offer: &sdk::PartOffer| PartOffer {
            part: self.parts[offer.part as usize].clone(),
            lines: offer.lines.iter().map(line).collect(),
        };
        Answer::Offer(OfferAnswer {
            parts: answer.parts.iter().map(part).collect(),
            again_after_s: answer.again_after_seconds,
        })
    }

    /// The answer to `place`, in the kernel's types.
    #[must_use]
    pub fn placement(&self, placement: &sdk::Placement) -> Answer {
        Answer::Place(Placement {
            devices: placement.devices.iter().map(|n| self.devices[*n as usize].clone()).collect(),
            reason: placement.reason.clone(),
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

/// The answer to `admit`, in the kernel's types.
#[must_use]
pub fn verdict(verdict: sdk::Verdict) -> Answer {
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

/// The answer to `triage`, in the kernel's types.
#[must_use]
pub fn triage(answer: sdk::TriageAnswer) -> Answer {
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
