//! Hears what policies are asked and say.

use berth_kernel::decision::Cost;
use berth_kernel::names::Digest;
use berth_kernel::policy::{Answer, Call, Fault, Hook, PolicyVersion};
use berth_kernel::ports::{Aloud, InstallError, Policies};
use berth_kernel::time::Now;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// One question to one policy, and what it said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heard {
    /// Which version.
    pub digest: Digest,
    /// Its label; empty if the node does not know it.
    pub policy: String,
    /// What was asked.
    pub hook: Hook,
    /// What it answered; `None` is `pass`. Whether the daemon takes it is another matter.
    pub answer: Result<Option<Answer>, Fault>,
    /// What it logged.
    pub said: Vec<String>,
}

/// Policies that are asked by way of it.
pub struct Ear<'p> {
    policies: &'p dyn Policies,
    heard: Mutex<VecDeque<Heard>>,
}

impl<'p> Ear<'p> {
    /// Nothing was heard yet.
    #[must_use]
    pub fn new(policies: &'p dyn Policies) -> Self {
        Self { policies, heard: Mutex::default() }
    }

    /// What was heard since the last time, in order.
    #[must_use]
    pub fn take(&self) -> VecDeque<Heard> {
        std::mem::take(&mut *self.heard.lock())
    }
}

impl Policies for Ear<'_> {
    fn install(&self, module: &[u8], now: Now) -> Result<PolicyVersion, InstallError> {
        self.policies.install(module, now)
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
        self.ask_aloud(call).told
    }

    fn ask_at_cost(&self, call: Call<'_>) -> (Result<Option<Answer>, Fault>, Cost) {
        let Aloud { told, cost, .. } = self.ask_aloud(call);
        (told, cost)
    }

    fn ask_aloud(&self, call: Call<'_>) -> Aloud {
        let (digest, hook) = (call.digest.clone(), call.question.hook());
        let policy = call.node.policies.get(&digest).map_or_else(String::new, |version| version.label());
        let aloud = self.policies.ask_aloud(call);
        let (answer, said) = (aloud.told.clone(), aloud.said.clone());
        let heard = Heard { digest, policy, hook, answer, said };
        self.heard.lock().push_back(heard);
        aloud
    }
}
