//! Evaluates the offers of the node's parts: the first policy that answers for a part offers it, else the
//! baseline does.

use super::evaluate::{CallResult, Evaluation};
use berth_kernel::hardware::mig;
use berth_kernel::ids::names::{PartId, Resource};
use berth_kernel::policy::decider::Decider;
use berth_kernel::policy::hooks::{Answer, Fault, Hook, OfferAnswer, Question};
use berth_kernel::policy::stack::StackEntry;
use berth_kernel::sharing::offer::{Consumes, OfferLine, PartOffer};
use berth_kernel::sharing::part_state::PartState;
use berth_kernel::sharing::reoffer::check_offer;
use std::collections::BTreeSet;

/// Delay of the next evaluation of offers after a fault, seconds.
const RETRY_S: u32 = 1;
/// Prefix of log lines of `offer` calls that are warnings for the operator.
const WARNING: &str = "warning: ";
/// Most warnings of a stack that are shown, of at most a KiB each; further ones are counted.
const WARNINGS_MAX: usize = 16;

/// Result of an evaluation of offers.
#[derive(Debug, Default)]
pub struct Offers {
    /// One offer for each present part, with the label of the policy that made it.
    pub parts: Vec<(PartOffer, Decider)>,
    /// Time of the next evaluation that a policy requested, seconds from now; the earliest request counts.
    pub again_after_s: Option<u32>,
    /// Faults of policies, by label.
    pub faults: Vec<(String, Fault)>,
    /// Messages for operators about the offers.
    pub notes: OfferNotes,
}

/// Messages for operators about offers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfferNotes {
    /// Messages about MIG.
    pub mig: mig::PlanMessages,
    /// Warnings of policies, such as about a GPU in their parameters that the node does not have.
    pub warnings: Vec<String>,
}

impl OfferNotes {
    /// Reasons why an activated stack may offer less than its operator expects.
    #[must_use]
    pub fn reasons(&self) -> Vec<String> {
        self.mig.refusal.iter().chain(&self.warnings).cloned().collect()
    }

    fn add_warnings(&mut self, policy: &str, lines: &[String]) {
        let warnings = lines.iter().filter_map(|line| line.strip_prefix(WARNING));
        self.warnings.extend(warnings.map(|line| format!("policy {policy}: {line}")));
    }

    fn limit_warnings(&mut self) {
        let more = self.warnings.len().saturating_sub(WARNINGS_MAX);
        if more > 0 {
            self.warnings.truncate(WARNINGS_MAX);
            self.warnings.push(format!("{more} more warnings of policies"));
        }
    }
}

impl Evaluation<'_> {
    /// Evaluates the offer of each part: for each part the first answer counts.
    pub fn offers(mut self) -> Offers {
        let present = || self.node.parts.iter().filter(|(_, p)| p.present);
        let mut open: BTreeSet<&PartId> =
            present().filter(|(_, p)| !self.node.is_excluded(p)).map(|(id, _)| id).collect();
        let mut offers = Offers::default();
        // Before any policy: an excluded GPU is offered under no stack.
        let excluded = present().filter(|(_, p)| self.node.is_excluded(p));
        offers.parts.extend(
            excluded.map(|(id, _)| (PartOffer { part: id.clone(), lines: Vec::new() }, Decider::Baseline)),
        );
        let mut time = self.start(Hook::Offer);
        for (index, entry) in self.stack.entries.iter().enumerate() {
            let (result, lines) =
                self.call_with_log(index, entry, Question::Offer, &mut time, |evaluation, answer| {
                    evaluation.check_offers(entry, answer)
                });
            // Also of a policy that passes: that it offers nothing may be what it warns of.
            offers.notes.add_warnings(&entry.label(), &lines);
            let answer = match result {
                CallResult::Answer(Answer::Offer(answer)) => answer,
                CallResult::Answer(_) | CallResult::Pass => continue,
                CallResult::Suspended => {
                    self.keep_offers(entry, &mut open, &mut offers);
                    continue;
                }
                CallResult::Fault(fault) => {
                    self.keep_offers(entry, &mut open, &mut offers);
                    offers.again_after_s = Some(offers.again_after_s.map_or(RETRY_S, |s| s.min(RETRY_S)));
                    offers.faults.push((entry.label(), fault));
                    continue;
                }
            };
            offers.again_after_s = [offers.again_after_s, answer.again_after_s].into_iter().flatten().min();
            for offer in answer.parts {
                if open.remove(&offer.part) {
                    offers.parts.push((offer, entry.decider()));
                }
            }
        }
        let plan = self.baseline.plan(self.node, |id| open.contains(id));
        let line = |resource: &Resource| OfferLine {
            resource: resource.clone(),
            count: 1,
            consumes: Consumes::Whole,
        };
        offers.parts.extend(open.into_iter().map(|id| {
            let lines = plan.resource(id).map(line).into_iter().collect();
            (PartOffer { part: id.clone(), lines }, Decider::Baseline)
        }));
        offers.notes.mig = plan.messages;
        self.withhold_ambiguous(&mut offers);
        offers.notes.limit_warnings();
        offers
    }

    /// Keeps the current offers of an entry that is suspended or failed: neither a policy's bug nor a slow machine
    /// must change the node's offers.
    fn keep_offers(&self, entry: &StackEntry, open: &mut BTreeSet<&PartId>, offers: &mut Offers) {
        let decider = entry.decider();
        let offered = |p: &PartState| p.present && p.offered_by.as_ref() == Some(&decider);
        for part in self.node.parts.values().filter(|p| offered(p)) {
            let kept = PartOffer { part: part.part.id.clone(), lines: part.lines.clone() };
            if self.check_offer(entry, part, &kept).is_ok() && open.remove(&part.part.id) {
                offers.parts.push((kept, decider.clone()));
            }
        }
    }

    /// Removes ambiguous resource names from all offers: names that stand for several kinds of parts.
    fn withhold_ambiguous(&self, offers: &mut Offers) {
        let lines =
            offers.parts.iter().filter_map(|(offer, _)| Some((self.node.part(&offer.part)?, &offer.lines)));
        let named = lines.flat_map(|(part, lines)| lines.iter().map(|line| (&part.part, &line.resource)));
        let ambiguous = mig::ambiguous_names(self.baseline.mig, named);
        if ambiguous.is_empty() {
            return;
        }
        for (offer, _) in &mut offers.parts {
            offer.lines.retain(|line| !ambiguous.contains_key(&line.resource));
        }
        let refusal = &mut offers.notes.mig.refusal;
        let reasons: Vec<String> = refusal.take().into_iter().chain(ambiguous.into_values()).collect();
        *refusal = Some(reasons.join("; "));
    }

    fn check_offers(&self, entry: &StackEntry, answer: &Answer) -> Result<(), String> {
        let Answer::Offer(OfferAnswer { parts, .. }) = answer else {
            return Err("not an offer".into());
        };
        let mut seen = BTreeSet::new();
        for offer in parts {
            if !seen.insert(&offer.part) {
                return Err(format!("two offers for {}", offer.part));
            }
            let part = self.node.part(&offer.part).ok_or_else(|| format!("no part {}", offer.part))?;
            self.check_offer(entry, part, offer)?;
        }
        Ok(())
    }

    fn check_offer(&self, entry: &StackEntry, part: &PartState, offer: &PartOffer) -> Result<(), String> {
        if !offer.lines.is_empty() && !mig::may_offer(self.baseline.mig, &part.part) {
            return Err(format!("{} is in MIG mode: offer its instances", offer.part));
        }
        let overcommit_percent = self.node.rules.overcommit_percent;
        check_offer(part, offer, Some(&entry.permissions), overcommit_percent).map_err(|r| r.to_string())
    }
}
