//! What each part of the node is offered as: the stack is asked part by part, and what it passes is the
//! baseline's.

use super::Door;
use super::baseline::BASELINE;
use super::stack::{Asked, STACK_TIME_MAX, Walk};
use super::thread::Worker;
use berth_kernel::mig;
use berth_kernel::names::{PartId, Resource};
use berth_kernel::offer::{Consumes, OfferLine, PartOffer};
use berth_kernel::offering::check_offer;
use berth_kernel::part_state::PartState;
use berth_kernel::policy::{Answer, Fault, OfferAnswer, Question};
use berth_kernel::stack::StackEntry;
use std::collections::BTreeSet;
use std::time::Instant;

/// After a fault a policy is asked again for its offers so soon, seconds.
const RETRY_S: u32 = 1;
/// What a line begins with by which a policy warns the operator while it is asked for its offers.
const WARNING: &str = "warning: ";
/// Most warnings of a stack that are kept, of a KiB each at most; the rest is counted.
const WARNINGS_MAX: usize = 16;

/// Result of evaluating the stack's offers.
#[derive(Debug, Default)]
pub struct Offers {
    /// One offer for each part that is present, with who made it.
    pub parts: Vec<(PartOffer, String)>,
    /// The soonest moment that a policy wants to be asked again, seconds from now.
    pub again_after_s: Option<u32>,
    /// Faults met on the way, by label.
    pub faults: Vec<(String, Fault)>,
    /// What operators are shown about them.
    pub notes: Notes,
}

/// What operators are shown about the offers in force.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// About MIG.
    pub mig: mig::Words,
    /// What policies warn of, such as a GPU that their parameters name and the node has not.
    pub warnings: Vec<String>,
}

impl Notes {
    /// Why less may be offered than the caller of an activation expects.
    #[must_use]
    pub fn of_activation(&self) -> Vec<String> {
        self.mig.refusal.iter().chain(&self.warnings).cloned().collect()
    }

    fn warn(&mut self, policy: &str, lines: &[String]) {
        let warned = lines.iter().filter_map(|line| line.strip_prefix(WARNING));
        self.warnings.extend(warned.map(|line| format!("policy {policy}: {line}")));
    }

    fn cut(&mut self) {
        let more = self.warnings.len().saturating_sub(WARNINGS_MAX);
        if more > 0 {
            self.warnings.truncate(WARNINGS_MAX);
            self.warnings.push(format!("{more} more warnings of policies"));
        }
    }
}

impl Walk<'_> {
    /// What each part is offered as: for each part the first answer counts.
    pub fn offers(mut self) -> Offers {
        let mut open: BTreeSet<&PartId> =
            self.node.parts.iter().filter(|(_, p)| p.present).map(|(id, _)| id).collect();
        let mut offers = Offers::default();
        let deadline = Instant::now() + STACK_TIME_MAX * self.leisure;
        for (place, entry) in self.stack.entries.iter().enumerate() {
            let (asked, lines) =
                self.ask_with_log(place, entry, Question::Offer, deadline, |walk, answer| {
                    walk.check_offers(entry, answer)
                });
            let answer = match asked {
                Asked::Answer(Answer::Offer(answer)) => answer,
                Asked::Answer(_) | Asked::Pass => continue,
                Asked::Suspended => {
                    self.keep_offers(entry, &mut open, &mut offers);
                    continue;
                }
                Asked::Fault(fault) => {
                    self.keep_offers(entry, &mut open, &mut offers);
                    offers.again_after_s = Some(offers.again_after_s.map_or(RETRY_S, |s| s.min(RETRY_S)));
                    offers.faults.push((entry.label(), fault));
                    continue;
                }
            };
            offers.notes.warn(&entry.label(), &lines);
            offers.again_after_s = [offers.again_after_s, answer.again_after_s].into_iter().flatten().min();
            for offer in answer.parts {
                if open.remove(&offer.part) {
                    offers.parts.push((offer, entry.label()));
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
            (PartOffer { part: id.clone(), lines }, BASELINE.to_owned())
        }));
        offers.notes.mig = plan.words;
        self.withhold_ambiguous(&mut offers);
        offers.notes.cut();
        offers
    }

    /// A policy's bug, or a slow moment of the machine, must not reshape the node: what the entry
    /// offers now, it goes on offering.
    fn keep_offers(&self, entry: &StackEntry, open: &mut BTreeSet<&PartId>, offers: &mut Offers) {
        let label = entry.label();
        for part in self.node.parts.values().filter(|p| p.present && p.offered_by == label) {
            let kept = PartOffer { part: part.part.id.clone(), lines: part.lines.clone() };
            if self.check_offer(entry, part, &kept).is_ok() && open.remove(&part.part.id) {
                offers.parts.push((kept, label.clone()));
            }
        }
    }

    /// Takes off all offers the names by which a pod could not tell what it gets.
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
        let all: Vec<String> = refusal.take().into_iter().chain(ambiguous.into_values()).collect();
        *refusal = Some(all.join("; "));
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
        check_offer(part, offer, Some(&entry.permissions), self.overcommit_percent).map_err(|r| r.to_string())
    }
}

impl Worker {
    /// Keeps what operators are shown about the offers in force, and logs what of it is new.
    pub(super) fn keep_notes(&self, notes: Notes) {
        let mut kept = self.account.notes.lock();
        if notes.mig.refusal != kept.mig.refusal {
            match &notes.mig.refusal {
                Some(refusal) => tracing::error!("{refusal}"),
                None => tracing::info!("MIG instances can be offered again"),
            }
        }
        for note in notes.mig.notes.iter().filter(|note| !kept.mig.notes.contains(note)) {
            tracing::warn!("{note}");
        }
        for warning in notes.warnings.iter().filter(|warning| !kept.warnings.contains(warning)) {
            tracing::warn!("{warning}");
        }
        *kept = notes;
    }
}

impl Door {
    /// What operators are shown about the offers in force; nothing before the first.
    #[must_use]
    pub fn offer_notes(&self) -> Notes {
        self.account.notes.lock().clone()
    }
}
