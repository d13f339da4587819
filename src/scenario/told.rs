//! What policies were asked and said, in lines for whoever writes one.

use crate::kernel::ledger::Ledger;
use crate::kernel::names::{DeviceId, Digest};
use crate::kernel::offer::{Consumes, PartOffer};
use crate::kernel::policy::{Answer, Call, Fault, Hook, PolicyVersion, Severity};
use crate::kernel::time::Now;
use crate::ports::{InstallError, Policies};
use std::collections::BTreeMap;
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
            Ok(Some(answer)) => in_words(answer, node),
            Err(fault) => format!("fault: {fault}"),
        };
        let log = self.said.iter().map(|line| format!("  log: {line}"));
        std::iter::once(format!("{} {}: {answer}", self.policy, self.hook)).chain(log).collect()
    }
}

fn in_words(answer: &Answer, node: &Ledger) -> String {
    match answer {
        Answer::Offer(offer) => {
            let mut alike: BTreeMap<String, Vec<String>> = BTreeMap::new();
            for part in &offer.parts {
                alike.entry(lines_of(part)).or_default().push(gpu(node, &part.part));
            }
            let mut text: Vec<_> =
                alike.iter().map(|(what, of)| format!("{}: {what}", of.join(" "))).collect();
            text.extend(offer.again_after_s.map(|s| format!("again after {s} s")));
            if text.is_empty() { "no GPU named".into() } else { text.join("; ") }
        }
        Answer::Place(placement) => {
            let devices: Vec<_> = placement.devices.iter().map(|id| device(node, id)).collect();
            format!("{} ({})", devices.join(", "), placement.reason)
        }
        Answer::Allow(terms) => {
            let mut text = vec!["allow".to_owned()];
            text.extend(terms.limits.memory_mib.map(|mib| format!("{mib} MiB")));
            text.extend(terms.limits.compute_percent.map(|percent| format!("{percent} % of compute")));
            text.extend(terms.environment.iter().map(|(key, value)| format!("{key}={value}")));
            let reason = if terms.reason.is_empty() { String::new() } else { format!(" ({})", terms.reason) };
            text.join(", ") + &reason
        }
        Answer::Deny(reason) => format!("deny ({reason})"),
        Answer::Triage(triage) => {
            let again = triage
                .again_after_s
                .map_or("only an operator's word heals".into(), |s| format!("again after {s} s"));
            format!("{}, {again} ({})", severity(triage.severity), triage.reason)
        }
    }
}

fn lines_of(offer: &PartOffer) -> String {
    let line = |line: &crate::kernel::offer::OfferLine| match line.consumes {
        Consumes::Whole => format!("{} x {} (whole)", line.count, line.resource),
        Consumes::Slice { memory_mib, compute_percent } => {
            format!("{} x {} ({memory_mib} MiB, {compute_percent} %)", line.count, line.resource)
        }
    };
    let lines: Vec<_> = offer.lines.iter().map(line).collect();
    if lines.is_empty() { "nothing".into() } else { lines.join(", ") }
}

/// `GPU 3`, or `GPU 3 (1g.10gb)` for an instance of it.
fn gpu(node: &Ledger, id: &crate::kernel::names::PartId) -> String {
    match node.part(id).map(|state| &state.part) {
        None => id.to_string(),
        Some(part) => match &part.mig {
            None => format!("GPU {}", part.gpu_index),
            Some(mig) => format!("GPU {} ({})", part.gpu_index, mig.profile),
        },
    }
}

fn device(node: &Ledger, id: &DeviceId) -> String {
    let share = id.share.map_or(String::new(), |n| format!(" share {n}"));
    gpu(node, &id.part) + &share
}

/// As the contract writes it.
pub(super) fn severity(severity: Severity) -> &'static str {
    match severity {
        Severity::Ignore => "ignore",
        Severity::Degraded => "degraded",
        Severity::Unhealthy => "unhealthy",
    }
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
        let told = Told { policy: label, hook, answer: answer.clone(), said: self.heard() };
        self.told.lock().unwrap_or_else(PoisonError::into_inner).push(told);
        answer
    }
}
