//! What policies were asked and said, in lines for whoever writes one.

use crate::kernel::ledger::Ledger;
use crate::kernel::names::Digest;
use crate::kernel::policy::{Answer, Call, Fault, Hook, PolicyVersion};
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
