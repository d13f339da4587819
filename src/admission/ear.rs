//! Hears what policies log while they are asked.

use crate::kernel::decision::Cost;
use crate::kernel::names::Digest;
use crate::kernel::policy::{Answer, Call, Fault, PolicyVersion};
use crate::kernel::time::Now;
use crate::ports::{Aloud, InstallError, Policies};
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// Policies that are asked by way of it.
pub(super) struct Ear<'p> {
    policies: &'p dyn Policies,
    heard: Mutex<VecDeque<(Digest, Vec<String>)>>,
}

impl<'p> Ear<'p> {
    pub(super) fn new(policies: &'p dyn Policies) -> Self {
        Self { policies, heard: Mutex::default() }
    }

    /// What each call logged, with who was asked, in order.
    pub(super) fn heard(self) -> VecDeque<(Digest, Vec<String>)> {
        self.heard.into_inner().unwrap_or_else(PoisonError::into_inner)
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
        let digest = call.digest.clone();
        let aloud = self.policies.ask_aloud(call);
        let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        heard.push_back((digest, aloud.said.clone()));
        aloud
    }
}
