//! What policies were asked and said, in lines for whoever writes one.

use crate::kernel::ledger::Ledger;
use crate::kernel::names::Digest;
use crate::kernel::policy::{Answer, Call, Fault, FaultKind, Hook, PolicyVersion};
use crate::kernel::time::Now;
use crate::kernel::words;
use crate::ports::{InstallError, Policies};
use std::sync::{Arc, Mutex, PoisonError};

/// Lines that the call that is under way has logged.
pub(super) type Heard = Arc<Mutex<Vec<String>>>;

/// One question to one policy, and what it said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// `name@` and the beginning of the digest.
    pub policy: String,
    /// What was asked.
    pub hook: Hook,
    /// What it answered; `None` is `pass`. Whether the daemon takes it is another matter.
    pub answer: Result<Option<Answer>, Fault>,
    /// What it logged.
    pub said: Vec<String>,
}

impl Told {
    /// In lines: who answered what, and below it what it logged. GPUs go by their index on `node`.
    #[must_use]
    pub fn lines(&self, node: &Ledger) -> Vec<String> {
        let answer = match &self.answer {
            Ok(None) => "pass".into(),
            Ok(Some(answer)) => words::answer(answer, node),
            Err(fault) => format!("fault: {fault}"),
        };
        let log = self.said.iter().map(|line| format!("  log: {line}"));
        std::iter::once(format!("{} {}: {answer}", self.policy, self.hook)).chain(log).collect()
    }
}

/// The lines of one step. Offers are asked whenever the node moves, and once more until it rests: what a
/// policy offers again, word for word, is told once.
pub(super) fn once(told: &[Told], node: &Ledger) -> Vec<String> {
    let is_told = |place: usize| {
        let this = &told[place];
        let before =
            told[..place].iter().rfind(|other| other.hook == this.hook && other.policy == this.policy);
        this.hook == Hook::Offer && before == Some(this)
    };
    let news = (0..told.len()).filter(|place| !is_told(*place));
    news.flat_map(|place| told[place].lines(node)).collect()
}

/// Policies that are listened to.
pub(super) struct Listened<'p> {
    pub(super) policies: &'p dyn Policies,
    pub(super) heard: Heard,
    pub(super) told: Mutex<Vec<Told>>,
}

impl Listened<'_> {
    /// What was told since the last time.
    pub(super) fn take(&self) -> Vec<Told> {
        std::mem::take(&mut *self.told.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn heard(&self) -> Vec<String> {
        std::mem::take(&mut *self.heard.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Policies for Listened<'_> {
    fn install(&self, module: &[u8], now: Now) -> Result<PolicyVersion, InstallError> {
        self.policies.install(module, now)
    }

    fn shipped(&self, now: Now) -> Vec<PolicyVersion> {
        self.policies.shipped(now)
    }

    fn restore(&self, version: &PolicyVersion) -> Result<PolicyVersion, InstallError> {
        self.policies.restore(version)
    }

    fn module(&self, digest: &Digest) -> Result<Vec<u8>, InstallError> {
        self.policies.module(digest)
    }

    fn remove(&self, digest: &Digest) {
        self.policies.remove(digest);
    }

    fn ask(&self, call: Call<'_>) -> Result<Option<Answer>, Fault> {
        self.heard();
        let answer = self.policies.ask(call);
        let label = call.node.policies.get(call.digest).map_or_else(String::new, |v| v.label());
        let hook = call.question.hook();
        let mut said = self.heard();
        if answer.as_ref().is_err_and(|fault| fault.kind == FaultKind::Parameters) {
            // The fault says it, and better.
            said.pop();
        }
        let told = Told { policy: label, hook, answer: answer.clone(), said };
        self.told.lock().unwrap_or_else(PoisonError::into_inner).push(told);
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::policy::OfferAnswer;

    #[test]
    fn an_offer_that_is_made_again_is_told_once_and_another_is_told() {
        let offer = |again_after_s| Told {
            policy: "a@1".into(),
            hook: Hook::Offer,
            answer: Ok(Some(Answer::Offer(OfferAnswer { again_after_s, ..OfferAnswer::default() }))),
            said: Vec::new(),
        };
        let other = |told: Told| Told { policy: "b@2".into(), ..told };
        let place = Told { policy: "a@1".into(), hook: Hook::Place, answer: Ok(None), said: Vec::new() };
        let story = [
            place.clone(),
            place,
            offer(None),
            other(offer(None)),
            offer(None),
            other(offer(None)),
            offer(Some(3)),
            offer(None),
        ];
        let lines = once(&story, &Ledger::default());
        let first = "a@1 offer: no GPU named";
        assert_eq!(
            lines,
            [
                "a@1 place: pass",
                "a@1 place: pass",
                first,
                "b@2 offer: no GPU named",
                "a@1 offer: again after 3 s",
                first
            ]
        );
    }
}
